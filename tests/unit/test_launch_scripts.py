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

from smp_train import cli
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


CASES: list[tuple[str, list[str], dict[str, str], dict[str, object]]] = [
    *(("slurm", [], {"MODEL_SIZE": size}, {"from_scratch": True, "model_size": size.lower()}) for size in SIZES),
    ("local", [], {"MODEL_SIZE": "1B"}, {"from_scratch": True, "model_size": "1b"}),
    ("slurm", ["--from_scratch", "--model_size", "1b"], {}, {"from_scratch": True, "model_size": "1b"}),
    ("conda", ["--use_synthetic_data", "--lr", "1e-3"], {}, {"use_synthetic_data": True, "lr": 1e-3}),
    ("enroot", ["--bf16", "--model_name_or_path", "gpt2"], {}, {"hf_pretrained_model_name_or_dir": "gpt2"}),
    ("conda", ["--run_dir", "/flag"], {"RUN_DIR": "/variable"}, {"run_dir": "/flag"}),
    ("slurm", ["--training_dir", str(SAMPLE / "train")], {}, {"use_synthetic_data": False}),
    ("local", ["--dataset", "org/name", "--tokenizer", "gpt2"], {"TRAINING_DIR": str(SAMPLE / "train")},
     {"use_synthetic_data": False, "training_dir": None}),
    ("local", ["--hf_model", "gpt2"], {}, {"from_scratch": False, "model_size": None, "run_name": "gpt2"}),
    ("slurm", ["--train_batch_size", "3"], {"TEST_DIR": str(SAMPLE / "test")},
     {"train_batch_size": 3, "test_dir": str(SAMPLE / "test")}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "words", "environ", "wanted"), CASES)
def test_flags_win_over_what_scripts_choose(
    kind: str, words: list[str], environ: dict[str, str], wanted: dict[str, object], shown: Shown
) -> None:
    code, out, err = shown(kind, *words, "--dry-run", **environ)
    assert code == 0, err
    args = vars(parse(trained(out), {}).args)
    assert {name: args[name] for name in wanted} == wanted


def test_a_configuration_file_wins_too(shown: Shown) -> None:
    here = shown.folder
    (here / "run.yaml").write_text("model_type: gpt_neox\nmodel_size: 20b\nbatch_size: 3\nrun_dir: mine\n")
    wanted = {"model_type": "gpt_neox", "train_batch_size": 3, "run_dir": f"{here}/mine"}
    for kind in SLURM_KINDS:
        code, out, err = shown(kind, "--config", f"{here}/run.yaml", "--dry-run")
        assert code == 0, err
        args = vars(parse(trained(out), {}).args)
        assert {name: args[name] for name in wanted} == wanted


OPTIONS = {
    "INSTANCE_TYPE": "instance_type", "NPROC": "nproc", "IMAGE": "image", "PYTHON": "python", "FSX_MOUNT": "mounts",
    "MAX_ATTEMPTS": "max_attempts", "PREFLIGHT": "preflight", "PROFILE": "profile", "RUN_DIR": "run_dir",
    "CHECKPOINT_DIR": "checkpoint_dir", "TRAINING_DIR": "training_dir", "TEST_DIR": "test_dir",
    "shard_degree": "hybrid_shard_degree",
}  # fmt: skip
"""What `launch slurm` calls the variables of a script."""
SMP_IMAGE = "658645717510.dkr.ecr.us-west-2.amazonaws.com/smdistributed-modelparallel:2.5.1-gpu-py311-cu124"
NATIVE_IMAGE = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:{}"
MISTAKES: dict[str, tuple[dict[str, str], list[str], str]] = {
    "value of a flag": ({}, ["--max_steps=x"], "max_steps"),
    "two models": ({}, ["--hf_model=gpt2", "--from_scratch=1"], "--from_scratch"),
    "too large for the GPUs": ({"INSTANCE_TYPE": "g5.xlarge"}, ["--model_size=70b"], "A10G"),
    "no FP8": ({"INSTANCE_TYPE": "p4d.24xlarge"}, ["--fp8=1"], "A100"),
    "unknown instance type": ({"INSTANCE_TYPE": "p5.48xlrge"}, [], "did you mean p5.48xlarge"),
    "Trainium": ({"INSTANCE_TYPE": "trn1.32xlarge"}, [], "Trainium"),
    "no number": ({"NPROC": "abc"}, [], "NPROC: invalid int value: 'abc'"),
    "more processes than GPUs": ({"NPROC": "9", "INSTANCE_TYPE": "p5.48xlarge"}, [], "8 GPUs"),
    "preflight": ({"PREFLIGHT": "soon"}, [], "PREFLIGHT: invalid int value: 'soon'"),
    "profiler": ({"PROFILE": "all"}, [], "PROFILE all"),
    "degrees and processes": ({"NPROC": "3", "shard_degree": "5"}, [], "24 processes"),
    "interpreter without torch": ({"PYTHON": "{}/python"}, [], "torch"),
    "processors of the image": ({"IMAGE": SMP_IMAGE, "INSTANCE_TYPE": "p6e-gb200.36xlarge"}, [], "aarch64"),
    "CUDA of the image": ({"IMAGE": "a/b:cu124", "INSTANCE_TYPE": "p6-b200.48xlarge"}, [], "B200"),
    "torch of the image": ({"IMAGE": NATIVE_IMAGE.format("2.5.1")}, [], "2.5.1"),
    "mount": ({"IMAGE": "a/b", "FSX_MOUNT": "/no/mount"}, [], "/no/mount"),
    "mount with too many colons": ({"IMAGE": "a/b", "FSX_MOUNT": "/tmp:/x:ro:y"}, [], "FSX_MOUNT /tmp:/x:ro:y"),
    "colon in a path": ({"IMAGE": "a/b", "RUN_DIR": "{}/a:b"}, [], "colon"),
    "run folder": ({"RUN_DIR": "{}/file/run"}, [], "/file"),
    "no data": ({"TRAINING_DIR": "/no/data"}, [], "--training_dir /no/data"),
    "no shards": ({"TRAINING_DIR": "{}/empty"}, [], "is empty"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_the_same_answer_from_scripts_and_launch_slurm(
    mistake: str, shown: Shown, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = shown.folder
    (here / "empty").mkdir()
    (here / "file").touch()
    (here / "python").write_text("#!/bin/sh\nexit 1\n")
    (here / "python").chmod(0o755)
    variables, words, noun = MISTAKES[mistake]
    variables = {name: value.format(here) for name, value in variables.items()}
    if "IMAGE" not in variables:
        variables = {"PYTHON": sys.executable, **variables}
    model = {"model_type": "llama_v2", "model_size": "7b"}
    kind, file = ("enroot", SLURM[0]) if "IMAGE" in variables else ("conda", SLURM[1])
    submitted: list[str] = []
    monkeypatch.setattr(os, "execvp", lambda file, words: submitted.extend(words))
    answers = []
    for job in ({}, {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "8"}):
        environ = {"PATH": os.environ["PATH"], **model, **variables, **job}
        monkeypatch.setattr(os, "environ", environ)
        code = script.main([kind, str(ROOT / "launchers/hyperpod_slurm" / file), *words])
        answers.append((code, capsys.readouterr().err))
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    options = [f"--{OPTIONS[name]}={value}" for name, value in variables.items()]
    options += [f"--{name}={value}" for name, value in model.items() if f"--{name}=" not in "".join(words)]
    options += [] if "TRAINING_DIR" in variables else ["--use_synthetic_data=1"]
    code = cli.main(["launch", "slurm", "--nodes=8", *options, *words])
    said = capsys.readouterr().err
    for name, option in OPTIONS.items():
        said = said if name.endswith(("DIR", "degree")) else said.replace(f"--{option}", name)
    assert (code, said.count("\n"), noun in said) == (2, 1, True), said
    assert answers[0] == (code, said)
    assert answers[1][0] == code
    assert said.partition("error: ")[2] in answers[1][1], "in the job too, with the node's name where it is about files"
    assert submitted == []


def test_a_run_without_mistakes_is_submitted(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted: list[str] = []
    monkeypatch.setattr(os, "execvp", lambda file, words: submitted.append(" ".join(words)))
    monkeypatch.setattr(script, "run", lambda job, **_: 0)
    for words in ([], ["--check"]):
        assert shown("conda", *words, PYTHON=sys.executable)[0] == 0
    assert submitted == ["sbatch script.sh", "sbatch --test-only script.sh --check"]


def test_spare_nodes_are_among_the_nodes_of_the_job(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[str] = []
    monkeypatch.setattr(os, "execvp", lambda file, words: submitted.append(" ".join(words)))
    Path("script.sh").write_text("#!/bin/bash\n#SBATCH --nodes=9\n")
    agents: list[list[str]] = []
    monkeypatch.setattr(script, "run", lambda job, **_: bool(agents.append(job.agent)))
    variables = {"SPARE_NODES": "1", "PYTHON": sys.executable}
    code, _, err = shown("conda", "--recovery=in_place", **variables)
    assert (code, submitted) == (0, ["sbatch --no-kill script.sh --recovery=in_place"])
    assert "8 nodes" in err
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "9"}
    code, _, err = shown("conda", "--dry_run", "--recovery=in_place", **job, **variables)
    assert (code, "8 nodes" in err, "--spare_nodes=1" in agents[-1]) == (0, True, True), err
    code, _, err = shown("conda", "--recovery=in_place", **job | {"SLURM_JOB_NUM_NODES": "1"}, **variables)
    assert (code, "SPARE_NODES 1: the job has 1 nodes" in err) == (2, True), err


WIDTHS = ["--num_heads=12", "--num_key_value_heads=12", "--hidden_width=48"]


@pytest.mark.parametrize(
    ("image", "words", "noun"),
    [
        ("", ["--model_type=mixtral", "--model_size=8x7b", "--moe=1", "--expert_parallel_degree=8"], ""),
        (SMP_IMAGE, ["--vocab_size=50257", "--tensor_parallel_degree=2"], ""),
        ("registry/ours:1", ["--vocab_size=50257", "--tensor_parallel_degree=2"], ""),
        ("registry/ours:1", ["--tensor_parallel_degree=8", *WIDTHS], "12 attention"),
        (SMP_IMAGE, ["--tensor_parallel_degree=2", "--expert_parallel_degree=2", "--model_type=mixtral"], "on SMP"),
        (NATIVE_IMAGE.format("2.8.0"), ["--vocab_size=50257", "--tensor_parallel_degree=2"], "50257"),
        ("registry/ours:1", ["--backend=native", "--vocab_size=50257", "--tensor_parallel_degree=2"], "50257"),
    ],
)
def test_a_run_is_checked_for_the_backend_that_its_image_may_have(
    image: str, words: list[str], noun: str, shown: Shown
) -> None:
    """Without IMAGE: smpv2.sqsh, which docker_build.sh makes."""
    code, _, err = shown("enroot", "--dry_run", *words, IMAGE=image, NPROC="8")
    assert (code, noun in err) == (2 if noun else 0, True), err


def test_the_scripts_of_fsdp2_training_have_its_values(shown: Shown) -> None:
    wanted = {"max_steps": 100000, "lr": 3e-4, "min_lr": 3e-5, "warmup": 2000, "weight_decay": 0.1, "logging_freq": 10}
    wanted |= {"train_batch_size": 4, "grad_clip": 1.0, "checkpoint_freq": [1000]}
    for kind, more in (
        ("local", {"hf_pretrained_model_name_or_dir": "meta-llama/Llama-2-7b-hf", "gradient_accumulation_steps": 2}),
        ("slurm", {"from_scratch": True, "model_size": "7b", "gradient_accumulation_steps": 1}),
    ):
        code, out, err = shown(kind, "--dry_run")
        assert code == 0, err
        args = parse(trained(out), {}).args
        assert {name: getattr(args, name) for name in wanted | more} == wanted | more
        assert args.computes_in_bf16(gpu=True)
    for words in (["--lr=1e-5", "--epochs=2"], ["--model_size=1b"]):
        assert shown("local", "--dry_run", *words)[0] == 0


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


def test_a_script_runs_the_checkout_that_it_is_of_or_was_submitted_from(checkout: Path, tmp_path: Path) -> None:
    script, link = checkout / "launchers/hyperpod_slurm/launch_training_conda.sh", tmp_path / "train here"
    link.symlink_to(script)
    spool = tmp_path / "spool/job00077/slurm_script"
    spool.parent.mkdir(parents=True)
    shutil.copy(script, spool)
    environ = slurm_of(tmp_path / "slurm", "77", f"{link} --lr 1 --run_name a b")
    for path, job, asked in ((link, "", False), (script, "78", False), (spool, "77", True)):
        done = run(path, "--dry_run", cwd=tmp_path, **environ, SLURM_JOB_ID=job)
        assert done.returncode == 0, done.stderr
        assert f"{checkout}/.venv/bin/python" in shlex.split(done.stdout)
        assert (tmp_path / "slurm/asked").exists() is asked
    done = run(spool, "--dry_run", cwd=tmp_path, **environ, SLURM_JOB_ID="78")
    assert (done.returncode, "HYPERPOD_PATH" in done.stderr) == (2, True), "of this job nothing is known"


def test_a_host_without_a_python_is_named(checkout: Path, tmp_path: Path) -> None:
    for name in ("bash", "readlink", "hostname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    script = checkout / "launchers/hyperpod_slurm/launch_training_enroot.sh"
    done = run(script, "--dry_run", cwd=tmp_path, PATH=str(tmp_path), HOST_PYTHON="/no/python")
    assert (done.returncode, "HOST_PYTHON" in done.stderr) == (2, True)
