"""Metrics of a run: `metrics.jsonl`, throughput between two log lines, and peak FLOP/s of devices.

`metrics.jsonl` holds one JSON object per line. A line without ``event`` is a logged step and has at least
`STEP_FIELDS`; a line with ``event`` is one of `EVENTS`. JSON has no NaN or infinity: such a value is written
as null and named in ``nonfinite``, for example ``{"loss": null, "nonfinite": {"loss": "nan"}}``.
The file is append-only: a run that resumes from an earlier step writes later steps again, and `history` drops the
superseded records.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train.errors import ConfigError
from smp_train.telemetry.logging_utils import get_logger

if TYPE_CHECKING:
    from smp_train.telemetry.trackers import Trackers

FILE_NAME = "metrics.jsonl"

SPEED_FIELDS = (
    "samples_per_sec",  # sequences, all devices
    "tokens_per_sec",  # positions, all devices
    "tokens_per_sec_per_device",
    "tflops_per_device",  # model FLOPs: 6 N_matmul + 12 L H d S per token; recomputation not counted
    "mfu",  # tflops_per_device as a fraction of the dense bf16 peak; null where that is unknown
    "step_sec",  # mean per update since the last record, without saving and validation
    "data_wait_sec",  # part of step_sec that this rank waited for its batch
)

STEP_FIELDS = (
    "step",  # optimizer updates done, from 1
    "loss",  # nats per counted token, mean over the global batch
    "grad_norm",  # before clipping
    "lr",  # used by this update
    *SPEED_FIELDS,
    "memory_gib",  # the allocator's peak since the last record; resident memory without a GPU
    "tokens",  # counted tokens trained on since the first step of the run, all devices
    "consumed",  # samples taken from the data order so far
    "time",  # seconds since 1970
)

# Means per update over the steps since the last record, of those that every rank's device had passed; null before any.
# Absent with --telemetry minimal.
TIME_FIELDS = (
    "time_shares",  # parts of all time, mean over ranks, that add up to 1: `step_times.SHARES`
    "communication_share",  # collectives of weights and gradients (FSDP2), part of all time; on a GPU beside compute
    "host_ahead_sec",  # the host waited for its device, the least of all ranks; near 0: the host limits; null on a CPU
    "slowest_rank",  # that waits least for others; null in a world of one, as the next four
    "slowest_host",
    "slowest_phase",  # in which it differs most from the other ranks' median
    "slowest_sec",  # seconds per update more than the other ranks' median
    "slowest_share",  # the same as a part of a step
)
NAMED_FROM = 0.1
"""A rank is named, in the log and in the report, when it costs the others this part of a step."""

# Each has ``step``, the updates done. An attempt begins with `start` (at 0) or `resume` (from a checkpoint).
EVENTS = ("start", "resume", "save", "evaluate", "spike", "diverged", "profile", "stop", "finish")

_PEAKS: tuple[tuple[str, float], ...] = (
    (r"A10G\b", 70e12),
    (r"L4\b", 121e12),
    (r"L40S\b", 362e12),
    (r"A100\b", 312e12),
    (r"H100 NVL\b", 835.5e12),
    (r"H100 PCIe\b", 756.5e12),
    (r"H100\b", 989.4e12),
    (r"H200 NVL\b", 835.5e12),
    (r"H200\b", 989.4e12),
    (r"B200\b", 2250e12),
    (r"B300\b", 2250e12),
    (r"GB200\b", 2500e12),
)


def peak_flops(device_name: str) -> float | None:
    """Return the peak of dense bf16 matrix products in FLOP/s, None for a device outside the table.

    Figures are NVIDIA's: the data sheets of A10G, L4, L40S, A100, H100, H200 and GB200 and the HGX B200 and B300 pages,
    halved where a sheet quotes 2:4 sparsity. H100 SXM is 528 tensor cores x 1024 FLOP/clock x 1.83 GHz. A slice of a
    device (MIG), whose name contains the whole device's, has no known peak.

    Args:
        device_name: of ``torch.cuda.get_device_name``, such as ``NVIDIA H100 80GB HBM3``.
    """
    if "MIG" in device_name:
        return None
    return next((peak for name, peak in _PEAKS if re.search(rf"\b{name}", device_name)), None)


class Throughput:
    """Throughput between two log lines; `pause` excludes saving and validation.

    Does not synchronize by itself: call `window` after the device has been waited for, as reading the loss does.
    """

    def __init__(
        self, *, devices: int, flops_per_token: float | None = None, peak: float | None = None,
        synchronize: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """Start the first window.

        Args:
            devices: ranks of the whole run.
            flops_per_token: model FLOPs of one position, forward and backward.
            peak: FLOP/s of one device (`peak_flops`), None when unknown.
            synchronize: waits for the device at both ends of a pause, so that work queued before a save does
                not count as part of it: ``torch.cuda.synchronize`` on a GPU.
            clock: seconds; for tests.
        """
        self._devices, self._flops_per_token, self._peak = devices, flops_per_token, peak
        self._synchronize, self._clock = synchronize, clock
        self._restart()

    def _restart(self) -> None:
        self._began, self._paused, self._waited = self._clock(), 0.0, 0.0
        self._steps = self._samples = self._tokens = 0

    def add(self, *, samples: int, tokens: int) -> None:
        """Count one optimizer step: the sequences and positions of its global batch."""
        self._steps += 1
        self._samples += samples
        self._tokens += tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the body's time from the window. Must not be nested."""
        self._synchronize()
        began = self._clock()
        try:
            yield
        finally:
            self._synchronize()
            self._paused += self._clock() - began

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Count the body's time as waiting for data."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - began

    def window(self) -> dict[str, float | None]:
        """Return the speed fields of `STEP_FIELDS` since the last call, and start a new window.

        Without a step in the window every field is None.
        """
        seconds = self._clock() - self._began - self._paused
        fields: dict[str, float | None] = dict.fromkeys(SPEED_FIELDS)
        if self._steps and seconds > 0:
            per_device = self._tokens / seconds / self._devices
            flops = None if self._flops_per_token is None else per_device * self._flops_per_token
            fields.update(
                samples_per_sec=self._samples / seconds,
                tokens_per_sec=self._tokens / seconds,
                tokens_per_sec_per_device=per_device,
                tflops_per_device=None if flops is None else flops / 1e12,
                mfu=None if flops is None or self._peak is None else flops / self._peak,
                step_sec=seconds / self._steps,
                data_wait_sec=self._waited / self._steps,
            )
        self._restart()
        return fields


class MetricsWriter:
    """Appends to `metrics.jsonl` and passes on to trackers; does nothing on ranks other than the main one.

    Every line is flushed. A disk failure during the run loses records, with one warning, and does not stop the run.
    """

    def __init__(self, run_dir: str | Path, *, is_main: bool = True) -> None:
        """Open the file; `ConfigError` where that fails. Not collective."""
        self.trackers: Trackers | None = None
        self._file: Any = None
        self._failed = False
        self._ended = ""
        if not is_main:
            return
        path = Path(run_dir) / FILE_NAME
        try:
            self._file = path.open("a", encoding="utf-8")
            with path.open("rb") as before:
                before.seek(max(0, before.seek(0, os.SEEK_END) - 1))
                if before.read() not in (b"", b"\n"):  # the partial last line of a killed run
                    self._file.write("\n")
        except OSError as failure:
            raise ConfigError(f"{path}: cannot write metrics ({failure.strerror}); set --run_dir") from None

    def step(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write a logged step, and return it. Fields of `STEP_FIELDS` missing in ``record`` are written as null."""
        full = {**dict.fromkeys(STEP_FIELDS), "time": time.time(), **record}
        self._write(full)
        if self.trackers is not None:
            self.trackers.step(full)
        return full

    def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """Write an event of `EVENTS`, with ``step`` among its fields, and return it; `evaluate` also has ``loss``."""
        if name not in EVENTS:
            raise ValueError(f"{name} is not one of {EVENTS}")
        record = {"event": name, "time": time.time(), **fields}
        self._write(record)
        self._ended = name if name in ("finish", "stop") else ""
        if self.trackers is not None:
            self.trackers.event(record)
        return record

    def close(self) -> None:
        """Close the file, and the trackers after what they have to take; later calls do nothing."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        trackers, self.trackers, self._file = self.trackers, None, None
        if trackers is not None:
            trackers.close(self._ended)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(to_json(record) + "\n")
            self._file.flush()
        except OSError as failure:
            if not self._failed:
                get_logger().warning("%s: metrics are being lost (%s)", self._file.name, failure.strerror)
            self._failed = True


def to_json(record: Mapping[str, Any]) -> str:
    """Return ``record`` as one line of strict JSON, with non-finite numbers in ``nonfinite``."""
    odd = {name: str(value) for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    plain = {**record, **dict.fromkeys(odd), **({"nonfinite": odd} if odd else {})}
    return json.dumps(plain, allow_nan=False, default=str)


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return all records of a run in the order written, without partial lines of killed runs.

    Raises:
        ConfigError: the run has no metrics.
    """
    path = Path(run_dir) / FILE_NAME
    try:
        lines = path.read_bytes().splitlines()
    except OSError as failure:
        raise ConfigError(f"{path}: cannot read a run's metrics ({failure.strerror})") from None
    records: list[Any] = []
    for line in lines:
        with suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a run's records without superseded ones: a start discards all later steps of earlier attempts."""
    kept: list[dict[str, Any]] = []
    for record in records:
        if record.get("event") in ("start", "resume") and "step" in record:
            kept = [earlier for earlier in kept if earlier.get("step", 0) <= record["step"]]
        kept.append(record)
    return kept


def is_number(value: Any) -> bool:
    """Return whether a field of a record is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
