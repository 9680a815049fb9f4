"""What a Slurm cluster's own words mean for a run, with doubles of its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_train.errors import ConfigError
from smp_train.launch import cluster, slurm
from smp_train.launch.options import split
from smp_train.launch.spec import build

CONFIG = "TaskPlugin              = task/none\nPrologFlags             = (null)\nJobRequeue = 1\nPreemptType = x\n"
PARTITION = "PartitionName=dev Default=YES DefaultTime=NONE GraceTime=120 MaxTime=UNLIMITED PreemptMode=REQUEUE"


def doubles(folder: Path, monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, config: str = "", partition: str = PARTITION, srun: str = "",
    gres: str = "",
) -> None:  # fmt: skip
    """Put doubles of Slurm's commands, with these answers, first in the path."""
    scontrol = f'case "$2" in config) cat <<E\n{CONFIG}{config}\nE\n;; *) echo "{partition}";; esac'
    doubles(folder, monkeypatch, scontrol=scontrol, srun=f'echo "{srun}"', sinfo=f'echo "{gres}"')


def told(tmp_path: Path, *words: str) -> list[str]:
    training = ["--use_synthetic_data", "1", "--run_dir", str(tmp_path / "run")]
    options, flags = split(['--nodes=2', '--nproc=1', *words, *training], slurm.parser())
    return cluster.warnings(build(flags, options), options)


@pytest.mark.parametrize(
    ("said", "words", "expected"),
    [
        ({}, [], []),
        ({"config": "JobRequeue = 0"}, [], ["JobRequeue=0"]),
        ({"srun": "--auto-resume"}, [], []),
        ({"srun": "--auto-resume", "config": "TaskPlugin = task/cgroup"}, [], ["TaskPlugin=task/cgroup"]),
        ({"srun": "--auto-resume", "config": "PrologFlags = Alloc,NoHold"}, [], ["PrologFlags=Alloc,NoHold"]),
        ({"srun": "--auto-resume"}, ["--gpus_per_node", "8"], ["--gpus_per_node: Slurm does not swap nodes"]),
        ({"gres": "gpu:8"}, [], ["this cluster has GRES"]),
        ({"gres": "gpu:8"}, ["--gpus_per_node", "8"], []),
        ({"partition": PARTITION.replace("=120", "=0")}, [], ["partition dev: a preempted job is given 0 s"]),
        ({"partition": PARTITION.replace("=120", "=0"), "config": "PreemptType = preempt/none"}, [], []),
    ],
)
def test_warned(
    said: dict[str, str], words: list[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(tmp_path / "bin", monkeypatch, **said)
    lines = told(tmp_path, *words)
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


def test_limit_of_the_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path / "bin", monkeypatch, partition=PARTITION.replace("UNLIMITED", "00:05:00"))
    with pytest.raises(ConfigError, match=r"partition dev: .*--time.* 5 min"):
        told(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "step_sec": 100.0}\n')
    answers(tmp_path / "bin", monkeypatch, partition=PARTITION.replace("NONE", "1-00:00:00"))
    (line,) = told(tmp_path)
    assert line.startswith("--checkpoint_freq 1000: that takes 27.8 h")
    assert told(tmp_path, "--time", "3-00:00:00") == []


def test_no_pyxis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path / "bin", monkeypatch)
    with pytest.raises(ConfigError, match="--container-image"):
        told(tmp_path, "--image", "/x.sqsh")


def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, *words: str, **options: Any) -> list[str]:
    doubles(tmp_path / "bin", monkeypatch, srun=body)
    given, _ = split(words, slurm.parser())
    return cluster.probe(given, ["/usr", *options.get("needed", ())])


# What follows srun's own options is run here, as if this were the compute node.
NODE = 'case "$*" in --help) exit;; esac; while [ "$1" != bash ]; do shift; done; exec "$@"'


def test_probe_says_what_a_node_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(tmp_path, monkeypatch, NODE) == []
    with pytest.raises(ConfigError, match=r"/no/data, /no/image\.sqsh"):
        probe(tmp_path, monkeypatch, NODE, needed=["/no/data", "/no/image.sqsh"])
    with pytest.raises(ConfigError, match="--container-image"):
        probe(tmp_path, monkeypatch, NODE, "--image", "/usr")
    with_pyxis = NODE.replace("--help) exit", "--help) echo --container-image; exit")
    assert probe(tmp_path, monkeypatch, with_pyxis, "--image", "/usr") == []


def test_probe_where_no_node_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = probe(tmp_path, monkeypatch, "echo 'srun: error: Requested nodes are busy' >&2; exit 1")
    assert said == "--probe: no compute node could be asked: srun: error: Requested nodes are busy"
    monkeypatch.setattr(cluster, "ask", lambda *_, **__: (124, "no answer within 1 s"))
    assert "no answer within" in probe(tmp_path, monkeypatch, NODE)[0]
