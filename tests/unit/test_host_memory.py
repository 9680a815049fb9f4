"""What of the host's memory a copy of the state may count on: the job's limit, not the machine's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smp_train.distributed.host_copy import local_bytes
from smp_train.distributed.host_memory import free_host_bytes

GIB = 1 << 30
STAT = "anon 7\nfile 900\n{0}active_file 200\n{0}inactive_file 100\n"


def group(folder: Path, **files: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


POD, JOB, V1 = Path("cgroups"), Path("cgroups/slurm/job_7"), Path("cgroups/memory")
FIRST_VERSION = {"limit_in_bytes": 5000, "usage_in_bytes": 4000, "stat": STAT.format("total_")}
GROUPS: dict[str, tuple[str, dict[Path, dict[str, Any]], int]] = {
    "no limit": ("0::/user\n", {POD / "user": {"max": "max", "high": "max", "current": 5}}, 8 * GIB),
    "page cache": ("0::/\n", {POD: {"max": 5000, "current": 4000, "stat": STAT.format("")}}, 5000 - 4000 + 300),
    # As in Slurm: the job has the limit, and the step and the task are within it.
    "narrowest group": (
        "0::/slurm/job_7/step_0/task_0\n",
        {JOB: {"max": 7000, "high": 6500, "current": 1000}, JOB / "step_0/task_0": {"max": "max", "current": 900}},
        5500,
    ),
    "first version": (
        "9:cpu,cpuacct:/docker/f00\n4:memory:/docker/f00\n0::/\n",
        {V1 / "docker/f00": FIRST_VERSION, Path("cgroups/cpu/docker/f00"): FIRST_VERSION | {"limit_in_bytes": 4001}},
        1300,
    ),
    # A container sees the end of the path alone.
    "first version in a container": ("4:memory:/docker/f00\n", {V1: FIRST_VERSION}, 1300),
}  # fmt: skip


@pytest.mark.parametrize(("groups", "files", "expected"), GROUPS.values(), ids=GROUPS)
def test_free_memory_is_what_the_narrowest_limit_leaves(
    groups: str, files: dict[Path, dict[str, Any]], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8388608 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    for folder, values in files.items():
        group(tmp_path / folder, **values)
    assert free_host_bytes(tmp_path / "proc", tmp_path / "cgroups") == expected
    assert free_host_bytes(tmp_path / "nowhere", tmp_path / "nowhere") is None


class OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def test_pinned_buffers_take_a_power_of_two() -> None:
    tensors = {"a": torch.zeros(1025), "b": torch.zeros(256), "empty": torch.zeros(0), "number": 3}
    assert local_bytes({"model": tensors}) == 4 * (1025 + 256)
    assert local_bytes({"model": tensors}, pinned=True) == 8192 + 1024
    tensors |= {name: tensors[name].as_subclass(OnGpu) for name in ("a", "b", "empty")}
    assert local_bytes({"model": tensors}) == 8192 + 1024
