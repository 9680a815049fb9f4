"""Metrics of a run: `metrics.jsonl`, throughput between two log lines, and peak FLOP/s of devices.

`metrics.jsonl` has one JSON object per line: a logged step with at least `STEP_FIELDS`, or one of `EVENTS`, which
has the field ``event``. JSON cannot express nan and infinity, so these are written as null and named in ``nonfinite``:
``{"loss": null, "nonfinite": {"loss": "nan"}}``. The file is append-only: a run that resumes from an earlier step
writes later steps again, and `history` drops the superseded records.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train.errors import ConfigError
from smp_train.storage.json_lines import LineWriter, read_lines
from smp_train.telemetry.goodput import goodput
from smp_train.telemetry.logging_utils import get_logger, writing

if TYPE_CHECKING:
    from smp_train.telemetry.trackers import Trackers

FILE_NAME = "metrics.jsonl"

SPEED_FIELDS = (
    "samples_per_sec",  # sequences, all devices
    "tokens_per_sec",  # positions, all devices
    "tokens_per_sec_per_device",
    "tflops_per_device",  # model FLOPs: 6 N_matmul + 12 L H d S per token; recomputation not counted
    "mfu",  # tflops_per_device as a fraction of the dense bf16 peak; null for a device without a known peak
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

# Means per update over the steps since the last record that every rank's device has completed; null before the first of
# them. Absent with --telemetry minimal.
TIME_FIELDS = (
    "time_shares",  # parts of all time, mean over ranks, that add up to 1: `step_times.SHARES`
    "communication_share",  # share of the time in FSDP2's collectives; they overlap compute on a GPU
    "host_ahead_sec",  # least time of any rank's host waiting for its device; near 0: the host limits; null on a CPU
    "slowest_rank",  # the rank that waits least; this and the next four fields are null with one rank
    "slowest_host",
    "slowest_phase",  # phase in which that rank differs most from the other ranks' median
    "slowest_sec",  # seconds per update above the other ranks' median
    "slowest_share",  # slowest_sec as a share of a step
)
NAMED_FROM = 0.1
"""The log and the report name a rank that delays all other ranks by this share of a step."""

# Each event has ``step``, the updates done. An attempt begins with `start` (at 0) or `resume` (from a checkpoint).
EVENTS = ("start", "resume", "save", "evaluate", "spike", "diverged", "recovery", "profile", "stop", "finish")

_PEAKS = {
    "A10G": 70e12, "L4": 121e12, "L40S": 362e12, "A100": 312e12, "H100 NVL": 835.5e12, "H100 PCIe": 756.5e12,
    "H100": 989.4e12, "H200 NVL": 835.5e12, "H200": 989.4e12, "B200": 2250e12, "B300": 2250e12, "GB200": 2500e12,
}  # fmt: skip


def peak_flops(device_name: str) -> float | None:
    """Return the peak of dense bf16 matrix products in FLOP/s, None for a device outside the table.

    The figures are from NVIDIA's data sheets and HGX pages, halved if they quote 2:4 sparsity. H100 SXM is 528 tensor
    cores x 1024 FLOP/clock x 1.83 GHz. The name of a MIG slice contains the device's name; its peak is unknown.
    ``device_name`` is the result of ``torch.cuda.get_device_name``, such as ``NVIDIA H100 80GB HBM3``.
    """
    if "MIG" in device_name:
        return None
    return next((peak for name, peak in _PEAKS.items() if re.search(rf"\b{name}\b", device_name)), None)


class Throughput:
    """Throughput between two log lines; `pause` excludes saving and validation.

    ``devices`` counts the ranks of the run, ``flops_per_token`` is one position's forward and backward pass, and
    ``peak`` is one device's `peak_flops`. ``synchronize`` is called at both ends of a pause, so that work queued before
    a save is not part of the pause. Call `window` after a wait for the device, such as reading the loss.
    """

    def __init__(
        self, *, devices: int, flops_per_token: float | None = None, peak: float | None = None,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._devices, self._flops_per_token, self._peak = devices, flops_per_token, peak
        self._synchronize = synchronize
        self._restart()

    def _restart(self) -> None:
        self._began, self._paused, self._waited = time.perf_counter(), 0.0, 0.0
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
        began = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._paused += time.perf_counter() - began

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Count the body's time as waiting for data."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    def window(self) -> dict[str, float | None]:
        """Return `SPEED_FIELDS` since the last call (all None if there was no step), and start a new window."""
        seconds = time.perf_counter() - self._began - self._paused
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
    """Appends records to `metrics.jsonl` and passes them to trackers; does nothing on ranks other than 0.

    Every line is flushed. A disk failure during the run loses records, with one warning, and does not stop the run.
    """

    def __init__(self, run_dir: str | Path, *, is_main: bool = True) -> None:
        """Open the file. Raises `ConfigError` if it cannot be written. Not collective."""
        self.trackers: Trackers | None = None
        self._lines: LineWriter | None = None
        self._ended = ""
        if not is_main:
            return
        path = Path(run_dir) / FILE_NAME
        with writing(path, "metrics"):
            self._lines = LineWriter(path)

    def step(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write a logged step and return it. Fields of `STEP_FIELDS` that ``record`` lacks are written as null."""
        full = {**dict.fromkeys(STEP_FIELDS), "time": time.time(), **record}
        self._write(full)
        if self.trackers is not None:
            self.trackers.step(full)
        return full

    def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """Write an event of `EVENTS`, with ``step`` among its fields, and return it; `evaluate` also has ``loss``.

        `recovery`, `stop` and `finish` also have the `goodput` until now.
        """
        if name not in EVENTS:
            raise ValueError(f"{name} is not one of {EVENTS}")
        record = {"event": name, "time": time.time(), **fields}
        if self._lines is not None and name in ("recovery", "stop", "finish"):
            with suppress(OSError):
                record |= goodput([*read_lines(self._lines.path), record])
        self._write(record)
        self._ended = name if name in ("finish", "stop") else ""
        if self.trackers is not None:
            self.trackers.event(record)
        return record

    def close(self) -> None:
        """Close the file, and the trackers once they have taken their queued records; later calls do nothing."""
        if self._lines is not None:
            self._lines.close()
        trackers, self.trackers, self._lines = self.trackers, None, None
        if trackers is not None:
            trackers.close(self._ended)

    def _write(self, record: dict[str, Any]) -> None:
        if self._lines is None:
            return
        failed = self._lines.failure is not None
        self._lines.write(to_json(record))
        if self._lines.failure is not None and not failed:
            get_logger().warning("%s: metrics are being lost (%s)", self._lines.path, self._lines.failure.strerror)


def to_json(record: Mapping[str, Any]) -> str:
    """Return ``record`` as one line of strict JSON, with non-finite numbers in ``nonfinite``."""
    odd = {name: str(value) for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    plain = {**record, **dict.fromkeys(odd), **({"nonfinite": odd} if odd else {})}
    return json.dumps(plain, allow_nan=False, default=str)


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return all records of a run in the order written. Raises `ConfigError` if the run has no metrics."""
    path = Path(run_dir) / FILE_NAME
    try:
        return read_lines(path)
    except OSError as failure:
        raise ConfigError(f"{path}: cannot read a run's metrics ({failure.strerror})") from None


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a run's records without superseded records: starts and recoveries discard later steps before them."""
    current: list[dict[str, Any]] = []
    for record in records:
        if record.get("event") in ("start", "resume", "recovery") and "step" in record:
            current = [earlier for earlier in current if earlier.get("step", 0) <= record["step"]]
        current.append(record)
    return current


def is_number(value: Any) -> bool:
    """Return whether a field of a record is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
