"""Profiles of a few steps after each start: PyTorch's (`--use_profiler`) or Nsight Systems' (`--profile_nsys`)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from smp_train import distributed
from smp_train.arguments import Arguments
from smp_train.errors import first_line
from smp_train.telemetry import verdict
from smp_train.telemetry.logging_utils import get_logger, writing

OPERATORS = 30
"""Rows of the table of the most expensive operators."""

log = get_logger()


class Profiler:
    """Records the chosen steps on each rank. The verdict on PyTorch's profile covers all ranks."""

    def __init__(self, args: Arguments, run_dir: Path, rank: int, event: Callable[..., Any] = dict) -> None:
        """Prepare recording into ``<run_dir>/profile``. Raises `ConfigError` if that folder cannot be created.

        The verdict is passed to ``event``, which is `MetricsWriter.event`.
        """
        self.folder, self.rank, self.event = run_dir / "profile", rank, event
        self.recorded: list[int] = []
        self.shares: verdict.Shares | None = None
        self.dearest: list[tuple[str, float]] = []
        self.first, self.last = args.profile_start, args.profile_start + args.profile_steps - 1
        self.done = 0
        self.torch_profiler: Any = None
        self.nsys = args.profile_nsys
        if not (args.use_profiler or args.profile_nsys):
            return
        with writing(self.folder, "profiles"):
            self.folder.mkdir(parents=True, exist_ok=True)
        if args.use_profiler:
            # If there is a step before the first step to record, it is warm-up: recorded and discarded.
            skipped, warmup = max(self.first - 2, 0), min(self.first - 1, 1)
            active = args.profile_steps
            schedule = torch.profiler.schedule(skip_first=skipped, wait=0, warmup=warmup, active=active, repeat=1)
            self.torch_profiler = torch.profiler.profile(
                schedule=schedule, on_trace_ready=self._write, record_shapes=True,
                profile_memory=args.enable_memory_profiling,
            )  # fmt: skip
            self.torch_profiler.start()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Mark training step ``number``. Steps to record are counted from the start of this process.

        Collective after the last recorded step.
        """
        self.done += 1
        if self.first <= self.done <= self.last:
            self.recorded.append(number)
        with ExitStack() as marks:
            if self.nsys:
                self._nsys(step_begins=True)
                if torch.cuda.is_available():
                    marks.enter_context(torch.cuda.nvtx.range(f"step {number}"))
                    if self.first <= self.done <= self.last:
                        marks.enter_context(torch.autograd.profiler.emit_nvtx())
            yield
        if self.nsys:
            self._nsys(step_begins=False)
        if self.torch_profiler is not None:
            self.torch_profiler.step()
            if self.done == self.last:
                self._stop()

    def close(self) -> None:
        """End an unfinished recording and write the steps that it has; collective if PyTorch's profiler is on."""
        self._stop()
        if self.nsys and self.first <= self.done < self.last and torch.cuda.is_available():
            torch.cuda.cudart().cudaProfilerStop()

    def _stop(self) -> None:
        profiler, self.torch_profiler = self.torch_profiler, None
        if profiler is not None:
            profiler.stop()
            self._judge()

    def _nsys(self, *, step_begins: bool) -> None:
        """Start or stop the capture range of `nsys profile --capture-range cudaProfilerApi`."""
        if not torch.cuda.is_available():
            if step_begins and self.done == self.first:
                log.warning("--profile_nsys 1: there is no GPU here, and nothing to record")
        elif step_begins and self.done == self.first:
            torch.cuda.cudart().cudaProfilerStart()
        elif not step_begins and self.done == self.last:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()

    def _write(self, profiler: Any) -> None:
        trace = self.folder / f"trace-rank{self.rank}.json.gz"
        on_gpu = torch.cuda.is_available()
        averages = profiler.key_averages()
        with suppress(OSError):
            profiler.export_chrome_trace(str(trace))
            table = averages.table(sort_by=f"self_{'cuda' if on_gpu else 'cpu'}_time_total", row_limit=OPERATORS)
            (self.folder / f"operators-rank{self.rank}.txt").write_text(table + "\n", encoding="utf-8")
        try:
            self.shares, self.dearest = verdict.shares(profiler.events()), verdict.dearest(averages, on_gpu=on_gpu)
        except Exception as failure:  # another release of torch may name events differently; training goes on
            log.warning("%s: no verdict on it (%s: %s)", trace, type(failure).__name__, first_line(failure))

    def _judge(self) -> None:
        """Log the verdict, and write it to the profile's folder and to `metrics.jsonl`; collective."""
        gathered = distributed.gather("judging the profile", lambda: (self.shares, socket.gethostname()))
        ranks = [shares for shares, _ in gathered if shares is not None]
        if len(ranks) < len(gathered) or distributed.rank() != 0:
            return
        text = verdict.paragraph(ranks, [host for _, host in gathered], self.recorded[0], self.recorded[-1])
        log.info("%s", text)
        rows = [f"{100 * share:5.1f} %  {name}" for name, share in self.dearest]
        with suppress(OSError):
            title = f"Dearest operators of rank {self.rank}, of all operators' own time:"
            content = "\n".join([text, "", title, *rows, ""])
            (self.folder / "verdict.txt").write_text(content, encoding="utf-8")
        self.event(name="profile", step=self.recorded[-1], verdict=text, operators=[row.strip() for row in rows])
