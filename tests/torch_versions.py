"""Tests of the native backend on each release of torch that it supports: ``python -m tests.torch_versions``.

Each release gets an environment below `ENVIRONMENTS`, some 7 GB with CUDA libraries, which is deleted after its tests.
A release that fails does not end the others. ``TORCH_VERSIONS="2.8.0 2.15.0"`` selects releases.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-torch"
RELEASES = {
    "2.8.0": "4.50.3",
    "2.9.1": "4.57.6",
    "2.10.0": "5.6.0",
    "2.11.0": "5.17.0",
    "2.12.1": "5.20.2",
    "2.13.0": "5.21.1",
    "2.14.1": "5.22.2",
    "2.15.0": "5.23.0",
}
"""By release of torch: the release of transformers that it is tested with. The GPU machine has torch 2.11 with 5.17."""
TESTS = [
    "unit/test_models_changes", "unit/test_models_hf_weights", "unit/test_models_initialization",
    "unit/test_models_resolve", "unit/test_mesh", "unit/test_activations", "unit/test_losses", "unit/test_attention",
    "unit/test_checkpoints", "unit/test_checkpoints_state", "distributed/test_same_numbers", "distributed/test_resume",
    "distributed/test_activations", "distributed/test_expert_parallel", "distributed/test_router_loss",
    "distributed/test_steps", "distributed/test_dropout", "distributed/test_planning_work",
    "distributed/test_torch_releases", "distributed/test_cuda_groups",
]  # fmt: skip
"""Of these files, what `make test` runs, and tests marked `release`."""
ALSO = {"2.11.0": ["distributed/test_bench_gpu"]}
"""More files for one release: the GPU machine's has what GPUs are measured by."""
SELECTED = "not slow or core or release"
PACKAGES = ["accelerate", "boto3", "psutil", "pytest", "pytest-timeout", "hypothesis"]
LIMIT_SECONDS = 5400


@dataclass
class Result:
    """What the tests on one release gave."""

    torch: str
    transformers: str
    state: str = "not run"
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    cpu_seconds: str = ""
    minutes: float = 0


def main() -> int:
    """Run the tests on every selected release, print a table, and return 1 if any of them failed."""
    selected = os.environ.get("TORCH_VERSIONS", "").split() or [*RELEASES]
    unknown = [release for release in selected if release not in RELEASES]
    if unknown:
        print(f"TORCH_VERSIONS: {unknown[0]} is not among {', '.join(RELEASES)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that environments are deleted
    shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
    results = []
    try:
        installer = ENVIRONMENTS / "uv"
        venv.create(installer, with_pip=True)
        run([installer / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"])
        for release in selected:
            results.append(test(release, RELEASES[release], installer / "bin" / "uv"))
            print(row(results[-1]), flush=True)
    finally:
        shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
    print("\n| torch | transformers | result | passed | skipped | failed | CPU s | minutes |\n" + "|---" * 8 + "|")
    print("\n".join(map(row, results)))
    return int(any(result.state != "passed" for result in results))


def row(result: Result) -> str:
    """Return a result as a row of the table."""
    cells = [result.torch, result.transformers, result.state, result.passed, result.skipped, result.failed]
    return f"| {' | '.join(map(str, cells))} | {result.cpu_seconds} | {result.minutes:.0f} |"


def test(release: str, transformers: str, uv: Path) -> Result:
    """Return the result of the tests on one release, in an environment that is deleted before this returns."""
    result, began, folder = Result(release, transformers), time.monotonic(), ENVIRONMENTS / release
    python = folder / "bin" / "python"
    print(f"=== torch {release}, transformers {transformers}", flush=True)
    try:
        run([uv, "venv", "--quiet", "--python", sys.executable, folder])
        run([
            uv, "pip", "install", "--quiet", "--no-cache", "--python", python, f"torch=={release}",
            f"transformers=={transformers}", *PACKAGES, "--editable", f"{ROOT}[train,hf,lora]",
        ])  # fmt: skip
        files = [f"tests/{name}.py" for name in [*TESTS, *ALSO.get(release, [])]]
        report, log = ENVIRONMENTS / f"{release}.xml", ENVIRONMENTS / f"{release}.log"
        # The usual folder of temporary files keeps those of the last three runs, and others may be under way.
        places = [f"--basetemp={ENVIRONMENTS / 'tmp'}", f"--junitxml={report}"]
        options = ["-p", "tests.cpu_time", "-m", SELECTED, *places]
        code = run([python, "-m", "pytest", *options, *files], log=log, must_pass=False)
        result.state = "passed" if code == 0 else f"exit code {code}"
        count(result, report, log)
    except (subprocess.SubprocessError, OSError) as failure:
        result.state = " ".join(str(failure).split())[:120]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result.minutes = (time.monotonic() - began) / 60
    return result


def count(result: Result, report: Path, log: Path) -> None:
    """Read the numbers of tests and their CPU seconds from what pytest wrote."""
    if report.exists():
        suite = next(ElementTree.parse(report).iter("testsuite"))
        number = {name: int(suite.get(name, 0)) for name in ("tests", "errors", "failures", "skipped")}
        result.failed, result.skipped = number["errors"] + number["failures"], number["skipped"]
        result.passed = number["tests"] - result.failed - result.skipped
    seconds = re.search(r"CPU seconds: (\d+)", log.read_text(errors="replace"))
    result.cpu_seconds = seconds[1] if seconds else ""


def run(words: Sequence[str | Path], *, log: Path | None = None, must_pass: bool = True) -> int:
    """Run a command and return its exit code; also write what it prints to ``log``. Killed after `LIMIT_SECONDS`.

    Raises `subprocess.SubprocessError` where it fails and ``must_pass``.
    """
    process = subprocess.Popen(
        list(map(str, words)), cwd=ROOT, start_new_session=True, text=True, errors="replace",
        stdout=subprocess.PIPE if log else None, stderr=subprocess.STDOUT if log else None,
    )  # fmt: skip
    limit = threading.Timer(LIMIT_SECONDS, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        if log:
            assert process.stdout is not None
            with log.open("w") as file:
                for line in process.stdout:
                    print(line, end="", flush=True)
                    file.write(line)
        code = process.wait()
    finally:
        limit.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code and must_pass:
        raise subprocess.CalledProcessError(code, list(map(str, words)))
    return code


if __name__ == "__main__":
    sys.exit(main())
