"""The launching pages name files, options and variables that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smp_train.arguments.aliases import NAMES
from smp_train.arguments.parse import canonical
from smp_train.launch import k8s, local, sagemaker, script, slurm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/launching.md", ROOT / "docs/migration.md"]
# Of sbatch, srun, docker's and nsys' own, of `prepare`, and of the programs that are being left.
OTHERS = {
    "exclude", "gpus_per_node", "container_image", "test_only", "nproc_per_node", "delay", "duration", "input",
    "output", "tokenizer", "conda", "help", "shm_size", "ipc", "folder", "checkpoint", "json", "nodes", "network",
    "disable_status",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_options_and_variables_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = set(re.findall(r"(?<![\w/])((?:launchers|iam|smp_train)/[\w./-]*\w)", text))
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert [link for link in re.findall(r"\]\(([\w-]+\.md)", text) if not (page.parent / link).exists()] == []
    options = {name for platform in (slurm, sagemaker, k8s, local) for name in platform.parser().names}
    flags = {canonical(name) for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)}
    assert flags - options - set(NAMES) - OTHERS == set()
    scripts = [*(ROOT / "launchers").glob("*/*.sh"), ROOT / "docker_build.sh", ROOT / "smp_train/launch/batch_job.py"]
    known = "\n".join(path.read_text() for path in scripts) + str(script.KINDS) + "HF_TOKEN"
    for name in set(re.findall(r"\b([A-Z_]{4,}|model_size|model_type|shard_degree)=[\w/]", text)):
        assert name.startswith("NCCL_") or re.search(rf"\b{name}\b", known), name
