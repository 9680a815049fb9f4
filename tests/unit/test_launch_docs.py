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
    "output", "tokenizer", "conda", "help", "shm_size",
    "ipc", "folder", "checkpoint", "json", "nodes", "network", "disable_status",
}  # fmt: skip


def words(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w/])((?:launchers|iam|smp_train)/[\w./-]*\w)", words(page)))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
    for link in re.findall(r"\]\(([\w-]+\.md)", words(page)):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    options = {name for platform in (slurm, sagemaker, k8s, local) for name in platform.parser().names}
    named = {canonical(name) for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", words(page))}
    assert named - options - set(NAMES) - OTHERS == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_are_read_by_a_script(page: Path) -> None:
    scripts = "\n".join(path.read_text() for path in [*(ROOT / "launchers").glob("*/*.sh"), ROOT / "docker_build.sh"])
    scripts += (ROOT / "smp_train/launch/batch_job.py").read_text() + str(script.KINDS)
    scripts += "HF_TOKEN"  # of Hugging Face
    for name in set(re.findall(r"\b([A-Z_]{4,}|model_size|model_type|shard_degree)=[\w/]", words(page))) - {
        "NCCL_DEBUG"
    }:
        if not name.startswith("NCCL_"):
            assert re.search(rf"\b{name}\b", scripts), name
