"""A pytest plugin for Linux: CPU seconds of each case and file, children included, which a busy machine hardly changes.

``python -m pytest -p tests.cpu_time [--numprocesses 3] ...`` prints the files and the most expensive cases at the end.
"""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_TICK = os.sysconf("SC_CLK_TCK")
_last: float | None = None


def _stat(pid: str) -> tuple[int, float]:
    """Return a process's parent and the CPU seconds of itself and of the children it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), sum(map(int, fields[11:15])) / _TICK


def tree_seconds() -> float:
    """Return the CPU seconds of this process, its live descendants and all that these have waited for."""
    processes: dict[int, tuple[int, float]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            processes[int(pid)] = _stat(pid)
        except OSError:  # it ended just now
            continue
    children = collections.defaultdict(list)
    for pid, (parent, _) in processes.items():
        children[parent].append(pid)
    seconds, stack = 0.0, [os.getpid()]
    while stack:
        pid = stack.pop()
        seconds += processes[pid][1]
        stack += children[pid]
    return seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    global _last
    report = yield
    if call.when == "teardown" and sys.platform.startswith("linux"):
        now = tree_seconds()
        report.user_properties.append(("cpu", now - (_last or 0.0)))
        _last = now
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    cases = [
        (seconds, report.nodeid)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, seconds in getattr(report, "user_properties", ())
        if name == "cpu" and report.when == "teardown"
    ]
    files: dict[str, list[float]] = collections.defaultdict(list)
    for seconds, nodeid in cases:
        files[nodeid.partition("::")[0]].append(seconds)
    terminalreporter.section(f"CPU seconds: {sum(seconds for seconds, _ in cases):.0f}")
    for name, spent in sorted(files.items(), key=lambda file: -sum(file[1])):
        terminalreporter.line(f"{sum(spent):8.1f} {len(spent):5d} {name}")
    terminalreporter.line("")
    for seconds, nodeid in sorted(cases, reverse=True)[:int(os.environ.get("CPU_TIME_CASES", 25))]:
        terminalreporter.line(f"{seconds:8.1f} {nodeid}")
