"""The scripts of launchers/: which checkout they run, and which flags they make of variables and words."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smp_train.arguments import parse
from tests.tiers import slow

ROOT = Path(__file__).parents[2]
SLURM = ("launch_training_enroot.sh", "launch_training_conda.sh", "launch_slurm.sh")
SIZES = ("350M", "1B", "3B", "7B", "13B", "30B", "70B")


def run(script: Path, *words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOST_PYTHON": sys.executable, "PYTHON": "python", "NPROC": "1", **environ}
    return subprocess.run(
        [str(shutil.which("bash")), script, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip


def trained(shown: str) -> list[str]:
    """Return the training flags of a command as a dry run shows it."""
    words = shlex.split(shown.splitlines()[-1])
    return words[words.index("--") + 1 :]


@pytest.mark.parametrize("script", ["hyperpod_slurm/launch_slurm.sh", "local/launch_single_node.sh"])
@pytest.mark.parametrize("size", slow(SIZES, lambda size: size != "7B"))
def test_every_size_trains_from_scratch(script: str, size: str, tmp_path: Path) -> None:
    here = {"PYTHON": sys.executable} if "local" in script else {}
    done = run(ROOT / "launchers" / script, "--dry_run", cwd=tmp_path, MODEL_SIZE=size, **here)
    assert done.returncode == 0, done.stderr
    args = parse(trained(done.stdout), {}).args
    assert (args.from_scratch, args.model_size) == (True, size.lower())


@pytest.mark.parametrize("script", slow(SLURM, SLURM[:2].__contains__))
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--from_scratch", "--model_size", "1b"], {"from_scratch": True, "model_size": "1b"}),
        (["--use_synthetic_data", "--lr", "1e-3"], {"use_synthetic_data": True, "lr": 1e-3}),
        (["--bf16", "--model_name_or_path", "gpt2"], {"hf_pretrained_model_name_or_dir": "gpt2"}),
        (["--config", "{}/run.yaml"], {"model_type": "gpt_neox", "train_batch_size": 3, "run_dir": "{}/mine"}),
        (["--run_dir", "/flag"], {"run_dir": "/flag"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_flags_win_however_they_are_written(
    script: str, words: list[str], wanted: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("model_type: gpt_neox\nmodel_size: 20b\nbatch_size: 3\nrun_dir: mine\n")
    variables = {"RUN_DIR": "/variable"} if "--run_dir" in words else {}
    words = [word.format(tmp_path) for word in words]
    done = run(ROOT / "launchers/hyperpod_slurm" / script, *words, "--dry-run", cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    args = vars(parse(trained(done.stdout), {}).args)
    for name, value in wanted.items():
        assert args[name] == (value.format(tmp_path) if isinstance(value, str) else value), name


@pytest.mark.parametrize("script", SLURM)
def test_mistakes_are_known_before_a_job_is_submitted(script: str, tmp_path: Path) -> None:
    done = run(ROOT / "launchers/hyperpod_slurm" / script, "--max_stepz", "7", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--max_steps" in done.stderr


@pytest.mark.parametrize("script", SLURM)
def test_a_degree_that_does_not_divide_the_model_is_refused_before_a_job_is_submitted(
    script: str, tmp_path: Path
) -> None:
    words = ["--dry_run", "--vocab_size", "50257", "--tensor_parallel_degree", "2"]
    done = run(ROOT / "launchers/hyperpod_slurm" / script, *words, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "50257" in done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout below a folder with a space in its name."""
    root = tmp_path / "my work/smp train"
    for name in ("launchers", "smp_train"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def slurm_of(folder: Path, job: str, command: str) -> dict[str, str]:
    """Return the environment of a cluster that knows one job by its number, and is full of jobs of others."""
    scontrol = folder / "bin/scontrol"
    scontrol.parent.mkdir(parents=True)
    scontrol.write_text(
        f'#!/bin/bash\necho "$*" >>{folder}/asked\n'
        f'[ "$*" = "show job {job}" ] && echo "   Command={command}" || echo "   Command={ROOT}/launchers/x/other.sh"\n'
    )
    scontrol.chmod(0o755)
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHON": ""}


@pytest.mark.parametrize("script", SLURM[1:])
@pytest.mark.parametrize("job", ["", "77"], ids=["no job", "in a shell on its nodes"])
@pytest.mark.parametrize("link", [False, True])
def test_a_script_that_is_run_is_of_its_own_checkout(
    script: str, job: str, link: bool, checkout: Path, tmp_path: Path
) -> None:
    environ = slurm_of(tmp_path / "slurm", "0", "/elsewhere/launchers/hyperpod_slurm/x.sh")
    path = checkout / "launchers/hyperpod_slurm" / script
    if link:
        (tmp_path / "train here").symlink_to(path)
        path = tmp_path / "train here"
    done = run(path, "--dry_run", cwd=tmp_path, **environ, SLURM_JOB_ID=job)
    assert done.returncode == 0, done.stderr
    assert f"{checkout}/.venv/bin/python" in shlex.split(done.stdout)
    assert not (tmp_path / "slurm/asked").exists()


@pytest.mark.parametrize("link", [False, True])
def test_a_job_is_of_the_checkout_that_its_script_was_submitted_from(
    link: bool, checkout: Path, tmp_path: Path
) -> None:
    script = submitted = checkout / "launchers/hyperpod_slurm/launch_training_conda.sh"
    if link:
        submitted = tmp_path / "train here"
        submitted.symlink_to(script)
    spool = tmp_path / "spool/job00077/slurm_script"
    spool.parent.mkdir(parents=True)
    shutil.copy(script, spool)
    environ = slurm_of(tmp_path / "slurm", "77", f"{submitted} --lr 1 --run_name a b")
    done = run(spool, "--dry_run", cwd=tmp_path, **environ, SLURM_JOB_ID="77")
    assert done.returncode == 0, done.stderr
    assert f"{checkout}/.venv/bin/python" in shlex.split(done.stdout)
    done = run(spool, "--dry_run", cwd=tmp_path, **environ, SLURM_JOB_ID="78")
    assert (done.returncode, "HYPERPOD_PATH" in done.stderr) == (2, True), "of this job nothing is known"


def test_a_host_without_a_python_is_named(checkout: Path, tmp_path: Path) -> None:
    for name in ("bash", "readlink", "hostname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    script = checkout / "launchers/hyperpod_slurm/launch_training_enroot.sh"
    done = run(script, "--dry_run", cwd=tmp_path, PATH=str(tmp_path), HOST_PYTHON="/no/python")
    assert (done.returncode, "HOST_PYTHON" in done.stderr) == (2, True)
