"""The scripts of launchers/: which checkout they run, and which flags they make of variables and words."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from smp_train.arguments import parse
from smp_train.launch import script
from tests.training import SAMPLE

ROOT = Path(__file__).parents[2]
SLURM_KINDS = ("enroot", "conda", "slurm")
SLURM = ("launch_training_enroot.sh", "launch_training_conda.sh", "launch_slurm.sh")
SIZES = ("350M", "1B", "3B", "7B", "13B", "30B", "70B")


def run(path: Path, *words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOST_PYTHON": sys.executable, "PYTHON": "python", "NPROC": "1", **environ}
    return subprocess.run(
        [str(shutil.which("bash")), path, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip


def trained(shown: str) -> list[str]:
    """Return the training flags of a command as a dry run shows it."""
    words = shlex.split(shown.splitlines()[-1])
    return words[words.index("--") + 1 :]


@dataclass
class Shown:
    """What the program behind a script prints, run in this process: the scripts themselves only start it."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, kind: str, *words: str, **environ: str) -> tuple[int, str, str]:
        """Return (exit code, stdout, stderr)."""
        environ = {"PATH": os.environ["PATH"], "PYTHON": "python", "NPROC": "1", **environ, "PWD": str(self.folder)}
        self.monkeypatch.setattr(os, "environ", environ)
        code = script.main([kind, "script.sh", *words])
        return (code, *self.capsys.readouterr())


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    monkeypatch.chdir(tmp_path)
    return Shown(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("kind", ["slurm", "local"])
def test_every_size_trains_from_scratch(kind: str, shown: Shown) -> None:
    for size in SIZES:
        code, out, err = shown(kind, "--dry_run", MODEL_SIZE=size)
        assert code == 0, err
        args = parse(trained(out), {}).args
        assert (args.from_scratch, args.model_size) == (True, size.lower())


@pytest.mark.parametrize("kind", SLURM_KINDS)
def test_flags_win_however_they_are_written(kind: str, shown: Shown) -> None:
    here = shown.folder
    (here / "run.yaml").write_text("model_type: gpt_neox\nmodel_size: 20b\nbatch_size: 3\nrun_dir: mine\n")
    config = {"model_type": "gpt_neox", "train_batch_size": 3, "run_dir": f"{here}/mine"}
    cases: list[tuple[list[str], dict[str, object]]] = [
        (["--from_scratch", "--model_size", "1b"], {"from_scratch": True, "model_size": "1b"}),
        (["--use_synthetic_data", "--lr", "1e-3"], {"use_synthetic_data": True, "lr": 1e-3}),
        (["--bf16", "--model_name_or_path", "gpt2"], {"hf_pretrained_model_name_or_dir": "gpt2"}),
        (["--config", f"{here}/run.yaml"], config),
        (["--run_dir", "/flag"], {"run_dir": "/flag"}),
    ]
    for words, wanted in cases:
        code, out, err = shown(kind, *words, "--dry-run", **({"RUN_DIR": "/variable"} if "--run_dir" in words else {}))
        assert code == 0, err
        args = vars(parse(trained(out), {}).args)
        assert {name: args[name] for name in wanted} == wanted


@pytest.mark.parametrize("kind", ["conda", "slurm", "local"])
def test_flags_win_over_what_scripts_choose(kind: str, shown: Shown) -> None:
    cases: list[tuple[list[str], list[str], list[str]]] = [
        (["--training_dir", str(SAMPLE / "train")], [], ["synthetic"]),
        (["--dataset", "org/name", "--tokenizer", "gpt2"], [], ["synthetic", "training_dir"]),
        (["--hf_model", "gpt2", "--use_synthetic_data"], ["runs/gpt2"], ["from_scratch", "model_size", "70b", "7b"]),
        (["--train_batch_size", "3", "--use_synthetic_data"], [], ["--train_batch_size 4"]),
    ]
    for words, there, gone in cases:
        training = str(SAMPLE / "train") if "training_dir" in gone else ""
        code, out, err = shown(kind, *words, "--dry_run", TEST_DIR=str(SAMPLE / "test"), TRAINING_DIR=training)
        assert code == 0, err
        out = out.replace(str(shown.folder), "")
        assert all(word in out for word in [*there, "--test_dir"]), out
        assert not any(word in out for word in gone), out


@pytest.mark.parametrize("kind", SLURM_KINDS)
def test_mistakes_are_known_before_a_job_is_submitted(kind: str, shown: Shown) -> None:
    degrees = ["--dry_run", "--vocab_size", "50257", "--tensor_parallel_degree", "2"]
    for words, said in ((["--max_stepz", "7"], "--max_steps"), (degrees, "50257")):
        code, _, err = shown(kind, *words)
        assert (code, err.count("\n"), said in err) == (2, 1, True), err


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
