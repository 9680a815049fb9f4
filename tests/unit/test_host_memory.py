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


def free(tmp_path: Path, groups: str) -> int | None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8388608 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    return free_host_bytes(tmp_path / "proc", tmp_path / "cgroups")


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    group(tmp_path / "cgroups" / "user", max="max", high="max", current=5)
    assert free(tmp_path, "0::/user\n") == 8 * GIB
    assert free_host_bytes(tmp_path / "nowhere", tmp_path / "nowhere") is None


def test_a_pod_has_what_its_limit_leaves_and_its_page_cache(tmp_path: Path) -> None:
    group(tmp_path / "cgroups", max=5000, current=4000, stat=STAT.format(""))
    assert free(tmp_path, "0::/\n") == 5000 - 4000 + 300


def test_of_several_groups_the_narrowest_counts(tmp_path: Path) -> None:
    """As in Slurm: the job has the limit, and the step and the task are within it."""
    job = tmp_path / "cgroups" / "slurm" / "job_7"
    group(job, max=7000, high=6500, current=1000)
    group(job / "step_0" / "task_0", max="max", current=900)
    assert free(tmp_path, "0::/slurm/job_7/step_0/task_0\n") == 5500


@pytest.mark.parametrize("path", ["docker/f00", ""])
def test_the_first_version_of_control_groups(tmp_path: Path, path: str) -> None:
    """Also where the path is the host's, of which a container sees the end alone."""
    limits = {"limit_in_bytes": 5000, "usage_in_bytes": 4000, "stat": STAT.format("total_")}
    group(tmp_path / "cgroups" / "memory" / path, **limits)
    group(tmp_path / "cgroups" / "cpu" / "docker" / "f00", **limits | {"limit_in_bytes": 4001})
    assert free(tmp_path, "9:cpu,cpuacct:/docker/f00\n4:memory:/docker/f00\n0::/\n") == 1300


def test_over_the_limit_there_is_nothing_left(tmp_path: Path) -> None:
    group(tmp_path / "cgroups", max=5000, current=6000)
    assert free(tmp_path, "0::/\n") == 0


class OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def test_pinned_buffers_take_a_power_of_two() -> None:
    tensors = {"a": torch.zeros(1025), "b": torch.zeros(256), "empty": torch.zeros(0), "number": 3}
    assert local_bytes({"model": tensors}) == 4 * (1025 + 256)
    assert local_bytes({"model": tensors}, pinned=True) == 8192 + 1024
    tensors |= {name: tensors[name].as_subclass(OnGpu) for name in ("a", "b", "empty")}
    assert local_bytes({"model": tensors}) == 8192 + 1024
