"""Profiles of a few steps after each start: PyTorch's (`--use_profiler`) or Nsight Systems' (`--profile_nsys`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from smp_train.arguments import Arguments
from smp_train.errors import ConfigError
from smp_train.telemetry.logging_utils import get_logger

OPERATORS = 30
"""Rows of the table of the most expensive operators."""

log = get_logger()


class Profiler:
    """Records the chosen steps on each rank. Steps to record are counted from the start of this process."""

    def __init__(self, args: Arguments, run_dir: Path, rank: int) -> None:
        """Prepare recording into ``<run_dir>/profile``. Raises `ConfigError` if that folder cannot be created."""
        self.folder, self.rank, self.nsys = run_dir / "profile", rank, args.profile_nsys
        self.first, self.last = args.profile_start, args.profile_start + args.profile_steps - 1
        self.done = 0
        self.torch_profiler: Any = None
        if not (args.use_profiler or args.profile_nsys):
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise ConfigError(f"{self.folder}: cannot write profiles ({failure.strerror}); set --run_dir") from None
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
        """Mark training step ``number``; not collective."""
        self.done += 1
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
        """End an unfinished recording and write the steps that it has; not collective."""
        self._stop()
        if self.nsys and self.first <= self.done < self.last and torch.cuda.is_available():
            torch.cuda.cudart().cudaProfilerStop()

    def _stop(self) -> None:
        profiler, self.torch_profiler = self.torch_profiler, None
        if profiler is not None:
            profiler.stop()
            log.info("Profile of steps: %s", self.folder)

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
        """Write the trace and the table of the most expensive operators."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with suppress(OSError):
            profiler.export_chrome_trace(str(self.folder / f"trace-rank{self.rank}.json.gz"))
            table = profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=OPERATORS)
            (self.folder / f"operators-rank{self.rank}.txt").write_text(table + "\n", encoding="utf-8")
