"""What the launchers would submit, word for word; and what they refuse before anything is submitted."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smp_train import cli
from smp_train.arguments.aliases import NAMES
from smp_train.checkpoints.format import META, Marker
from smp_train.errors import ConfigError
from smp_train.launch import environment, instances, k8s, local, options, sagemaker, slurm
from smp_train.launch.sagemaker import job
from smp_train.launch.spec import CODE_DIR
from smp_train.storage.checksum import FileRecord
from tests.training import SAMPLE

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = [*sorted((ROOT / "launchers").rglob("*.sh")), ROOT / "docker_build.sh"]
ROLE = "arn:aws:iam::123456789012:role/training"
SLURM = ["slurm", "--nproc=2", "--use_synthetic_data=1"]
SAGEMAKER_RUN = [
    "sagemaker", f"--role={ROLE}", "--instance_type=ml.p5.48xlarge", "--train=s3://bucket/t", "--output=s3://bucket/o",
    "--region=eu-west-1",
]  # fmt: skip
K8S_RUN = ["k8s", "--image=r/i:1", "--instance_type=ml.p5.48xlarge", "--claims=f:/f", "--use_synthetic_data=1"]
LLAMA = ["--model_type", "llama_v2", "--model_size", "7b"]


def compare(name: str, text: str) -> None:
    """Compare with the golden file; SMP_TRAIN_UPDATE_GOLDEN=1 writes it instead, for a reviewer to read."""
    text = text.replace(sys.executable, "<python>").replace(str(CODE_DIR), "<code>")
    path = GOLDEN / name
    if os.environ.get("SMP_TRAIN_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = cli.main(["launch", *words, "--dry_run"])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["launch", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run where relative folders are the same on every machine."""
    monkeypatch.chdir("/")
    for name in environment.DROPPED:
        monkeypatch.delenv(name, raising=False)


def test_slurm_container(capsys: pytest.CaptureFixture[str]) -> None:
    script = dry_run(
        capsys, "slurm", "--nodes", "8", "--instance_type", "ml.p5.48xlarge", "--image", "/fsx/smpv2.sqsh",
        "--partition=dev", "--time", "2-00:00:00", "--env", "HF_TOKEN=a b", "X='q'", "--mounts", "/fsx",
        "--model_type", "llama_v2", "--model-size=70b", "--training_dir", "/fsx/data/train", "--max_steps", "100",
    )  # fmt: skip
    compare("slurm-container.sh", script)


def test_slurm_environment(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["slurm", "--nproc", "2", "--use_synthetic_data", "1", "--gpus_per_node=2", "--profile=nsys"]
    compare("slurm-environment.sh", dry_run(capsys, *words))


def test_rendered_script_is_clean(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(dry_run(capsys, *SLURM, "--tensorboard_dir", "it's $HOME"))
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    environ = {"DRY_RUN": "1", "PATH": os.environ["PATH"], "TRAINING_DIR": "/old", "CHECKPOINT_DIR": "/old"}
    shown = subprocess.run(["bash", path], capture_output=True, text=True, check=False, env=environ)
    assert "it's $HOME" in shlex.split(shown.stdout), shown.stderr
    assert "/old" not in shown.stdout, "that is of the shell that submits, and for the scripts"


def test_slurm_goes_on_without_a_lost_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = ["--nodes=2", "--spare_nodes=1", "--recovery=in_place"]
    script = dry_run(capsys, *SLURM, *more)
    assert {"#SBATCH --nodes=3", "#SBATCH --no-kill"} <= set(script.splitlines())
    path = tmp_path / "job.sh"
    path.write_text(script)
    environ = {"DRY_RUN": "1", "PATH": os.environ["PATH"]}
    shown = subprocess.run(["bash", path], capture_output=True, text=True, check=False, env=environ).stdout
    assert {"--kill-on-bad-exit=0", "--no-kill", "--spare_nodes=1", "--recovery=in_place"} <= set(shlex.split(shown))


def test_sagemaker_request(capsys: pytest.CaptureFixture[str]) -> None:
    said = dry_run(
        capsys, "sagemaker", "--role", ROLE, "--instance_type", "ml.p5.48xlarge", "--instance_count", "2",
        "--train", "s3://bucket/train", "--fsx", "fs-0123456789abcdef0:/mount/smp", "--subnets", "subnet-1",
        "--security_groups", "sg-1", "--output", "s3://bucket/out", "--region", "eu-west-1", "--job_name", "My run!",
        "--checkpoint_dir", "/opt/ml/input/data/fsx/checkpoints", "--model_type=llama_v2", "--model_size", "7b",
        "--hybrid_shard_degree", "8", "--lr", "1e-4", "--max_steps", "100",
    )  # fmt: skip
    request = json.loads(said)
    name = request["TrainingJobName"]
    assert name.startswith("My-run-2")
    compare("sagemaker.json", said.replace(name, "<name>"))


def test_local(capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "a"]
    compare("local.txt", dry_run(capsys, "local", "--nproc=2", *place, "--use_synthetic_data=1"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["moon"], "launch moon: no such place"),
        (["slurm", "--instance_type", "ml.inf2.xlarge"], "Trainium and Inferentia are not supported"),
        (["local", "--nproc=2", "--use_synthetic_data=1", "--dry_run", "--check"], "--dry_run and --check"),
        (["slurm", "--nproc", "2", "--partion", "x"], "unknown flag --partion; did you mean --partition?"),
        (["slurm", "--nproc", "2"], "no training data"),
        ([*SAGEMAKER_RUN, "--recovery=in_place"], "--recovery in_place: the processes are started by SageMaker"),
        (
            [*K8S_RUN, "--recovery=in_place", "--operator=hyperpod"],
            "--recovery in_place: the processes are started by hyperpodrun",
        ),
        ([*SLURM, "--spare_nodes=1"], "--spare_nodes 1: needs --recovery in_place"),
        (["slurm", "--nodes"], "argument --nodes: expected one argument"),
        ([*SLURM, "--probe=maybe"], "--probe: maybe: expects 0 or 1"),
        ([*SLURM, "--time", "1 day", "--dry_run"], "a space"),
        ([*SLURM, "--env", "1X=2"], "is not NAME=VALUE"),
        ([*SLURM, "--time", "5"], "nothing would be trained"),
        ([*SLURM, "--env", "A=1\n#SBATCH --hold", "--dry_run"], "line break"),
        (["local", "--nproc", "2", "--nnodes", "2", "--use_synthetic_data=1"], "needs NODE_RANK (0 to 1"),
        (["local", "--nproc", "2", "--training_dir", "/no/data", "--check"], "--training_dir /no/data: no such folder"),
    ],
)
def test_refused(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert complaint in refusal(capsys, *words)


SAGEMAKER = {"role": ROLE, "instance_type": "ml.p5.48xlarge", "train": "s3://bucket/train"}


@pytest.mark.parametrize(
    ("options_", "flags", "complaint"),
    [
        ({"role": "training"}, {}, "is not the ARN of a role"),
        ({"role": None}, {}, "--role is missing: the ARN of a role"),
        ({"train": "/data"}, {}, "--train /data: is not s3://bucket/prefix"),
        ({"train": "s3://ab/data"}, {}, "with the name of a bucket"),
        ({"instance_count": 2}, {}, "2 instances share no disk"),
        ({"spot": True}, {}, "--spot without --checkpoints"),
        ({"spot": True, "checkpoints": "s3://bucket/c", "max_wait": 10}, {}, "--max_wait 10 is below --max_run"),
        ({"spot": True, "checkpoints": "s3://bucket/c", "keep_alive": 60}, {}, "no warm pools of spot"),
        ({"fsx": "fs-0123456789abcdef0:/m"}, {}, "--fsx needs --subnets"),
        ({"train": None}, {}, "no training data"),
        ({}, {"training_dir": "/x"}, "both say where data is"),
        ({}, {"checkpoint_dir": "/fsx/ck"}, "--checkpoint_dir /fsx/ck: is lost with the instance"),
        ({}, {"checkpoint_dir": "/opt/ml/checkpoints-2"}, "is lost with the instance"),
        ({"spot": True}, {"checkpoint_dir": "/tmp/ck"}, "--checkpoint_dir /tmp/ck: is lost with the instance"),
        ({"instance_count": 2, "output": "s3://abc"}, {"checkpoint_dir": "/opt/ml/checkpoints/x"}, "share no disk"),
        ({}, {"checkpoint_dir": "/opt/ml/input/data/train/ck"}, "is lost with the instance"),
        ({"instance_count": 0}, {}, "--instance_count: 0: must be at least 1"),
        ({"max_run": "1 day"}, {}, "--max_run: invalid int value: '1 day'"),
        ({}, {"hybrid_shard_degre": 8}, "unknown flag --hybrid_shard_degre; did you mean --hybrid_shard_degree?"),
        ({}, {"hybrid_shard_degree": 3}, "does not divide the 8 processes"),
        ({}, {"mp_parameters": {"hybrid_shard_degre": 8}}, "'hybrid_shard_degre' is no parameter of SMP v2"),
        ({"instance_typ": 1}, {}, "unknown option instance_typ; did you mean instance_type?"),
    ],
)
def test_sagemaker_refuses(options_: dict[str, object], flags: dict[str, object], complaint: str) -> None:
    values = {name: value for name, value in {**SAGEMAKER, **options_}.items() if value is not None}
    with pytest.raises(ConfigError) as refused:
        sagemaker.build(flags, **values)
    assert complaint in str(refused.value)


MANY = {"instance_count": 2, "output": "s3://bucket/out"}
OUT = {"output": "s3://bucket/out"}
OWN = "/opt/ml/checkpoints"
BELOW = "s3://bucket/out/checkpoints"
FSX = {"fsx": "fs-0123456789abcdef0:/m", "subnets": ["subnet-1"], "security_groups": ["sg-1"]}
KEEP = {"copy_to": "s3://own/x"}
TWO = {"checkpoint_freq": [10, 10], "num_kept_checkpoints": [2, 2]}


@pytest.mark.parametrize(
    ("options_", "flags", "written", "copied"),
    [
        (OUT, {}, [OWN], BELOW),
        ({}, {}, [OWN], None),
        (OUT, {"ckpt_save_path": OWN}, [OWN], BELOW),
        (OUT, {"checkpoint_dir": [OWN, "s3://bucket/rare"], **TWO}, [OWN, "s3://bucket/rare"], BELOW),
        (OUT, {"checkpoint_dir": "s3://bucket/often"}, ["s3://bucket/often"], None),
        (KEEP, {"checkpoint_dir": f"{OWN}/mine"}, [f"{OWN}/mine"], f"{KEEP['copy_to']}/checkpoints"),
        ({**KEEP, "checkpoints": "s3://bucket/c"}, {}, [OWN], "s3://bucket/c"),
        ({**KEEP, "instance_count": 2}, {}, [f"{KEEP['copy_to']}/checkpoints"], None),
        ({**MANY, "checkpoints": "s3://bucket/c"}, {}, ["s3://bucket/c"], None),
        (MANY, {"checkpoint_dir": "s3://bucket/x"}, ["s3://bucket/x"], None),
        (MANY, {"ckpt_save_path": OWN}, [BELOW], None),
        ({**MANY, **FSX}, {}, ["/opt/ml/input/data/fsx/checkpoints"], None),
    ],
)  # fmt: skip
def test_sagemaker_keeps_checkpoints_where_all_instances_write(
    options_: dict[str, object], flags: dict[str, object], written: list[str], copied: str | None
) -> None:
    made = sagemaker.build({"model_type": "llama_v2", **flags}, **{**SAGEMAKER, **options_})
    assert (made.resolved.args.checkpoint_dir, made.options.checkpoints) == (written, copied)
    if OWN not in written[0]:
        assert made.hyperparameters["checkpoint_dir"] in (written, written[0])


# What AWS's notebooks of SMP v2 give their estimators: `hyperparameters`, and `parameters` of the distribution.
NOTEBOOK = {
    "activation_checkpointing": 1, "auto_wrap_policy": "transformer_auto_wrap_policy", "bf16": 1, "beta1": 0.9,
    "backward_fetch_policy": "backward_pre", "beta2": 0.95, "checkpoint_freq": 10, "clean_cache": 0,
    "delayed_param": 1, "distributed_backend": "nccl", "enable_memory_profiling": 0, "epochs": 100,
    "fast_validation": 0, "forward_prefetch": 1, "limit_all_gathers": 1, "logging_freq": 1, "lr": 1e-4,
    "lr_decay_iters": 47683, "lr_decay_style": "cosine", "max_steps": 15, "min_lr": 1e-5, "num_kept_checkpoints": 2,
    "plateau": 0.0, "seed": 12345, "sharding_strategy": "hybrid_shard", "train_batch_size": 2, "val_batch_size": 4,
    "use_smp_flash_attn": 1, "use_smp_implementation": 1, "validation_freq": 10, "vocab_size": 50257,
    "warmup": 0.0032, "weight_decay": 0.2, "zipped_data": 0,
}  # fmt: skip
WIDTHS = {"hidden_width": 4096, "max_context_width": 2048, "num_heads": 32, "num_layers": 32}
DEGREES = {"hybrid_shard_degree": 4, "sm_activation_offloading": True, "activation_loading_horizon": 2}
ON_FSX = "/opt/ml/input/data/train/smp-v2"
NOTEBOOKS: dict[str, tuple[dict[str, object], dict[str, object], dict[str, object]]] = {
    "llama 3.1, FP8, resumed": (
        {"model_type": "llama_v3", "llama_intermediate_size": 14336, "vocab_size": 128256, "fp8": 1,
         "rope_scaling_type": "llama3", "rotary_emb_base": 500000, "checkpoint_dir": OWN,
         "resume_from_checkpoint": f"{OWN}/llama_v3-10steps"},
        {"tensor_parallel_degree": 2, "context_parallel_degree": 2, "sm_activation_offloading": False}, OUT,
    ),
    "GPT-NeoX on FSx": (
        {"model_type": "gpt_neox", "checkpoint_dir": f"{ON_FSX}/ck", "training_dir": f"{ON_FSX}/train",
         "test_dir": f"{ON_FSX}/val", "dataset_type": "hf", "patch_neox_rope": 0,
         "hf_pretrained_model_name_or_dir": f"{ON_FSX}/model"},
        {"tensor_parallel_degree": 4, "hybrid_shard_degree": 8},
        {**FSX, "train": None, "test": None, "instance_count": 4},
    ),
    "Mixtral on 8 instances": (
        {"model_type": "mixtral", "moe": 1, "moe_load_balancing": "sinkhorn", "moe_all_to_all_dispatcher": 1,
         "num_key_value_heads": 8, "num_local_experts": 8, "fp8": 0, "checkpoint_dir": OWN},
        {"expert_parallel_degree": 2, "hybrid_shard_degree": 32}, {**OUT, "instance_count": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("notebook", NOTEBOOKS.values(), ids=NOTEBOOKS)
@pytest.mark.parametrize("together", [True, False])
def test_dictionaries_of_awss_notebooks(
    notebook: tuple[dict[str, object], dict[str, object], dict[str, object]], together: bool
) -> None:
    flags, degrees, options_ = notebook
    degrees = {**DEGREES, **degrees}
    given = {**NOTEBOOK, **WIDTHS, **flags, "backend": "smp"}
    given |= degrees if together else {"mp_parameters": degrees}
    made = sagemaker.build(given, **{**SAGEMAKER, "test": "s3://bucket/test", **options_})
    assert made.mp_parameters == degrees
    request = sagemaker.request(made, region="us-west-2", name="n", code="s3://bucket/code")
    mounted = {one["ChannelName"] for one in request["InputDataConfig"]}
    assert mounted == ({"train"} if "fsx" in options_ else {"train", "test"})
    written = BELOW if flags["model_type"] == "mixtral" else flags["checkpoint_dir"]
    assert made.resolved.args.checkpoint_dir == [written]


@pytest.mark.parametrize(
    ("folders", "local"),
    [
        (OWN, "/mine"), (f"{OWN}/", "/mine"), (f"{OWN}/a/../b", "/b/mine"), ([OWN, "s3://bucket/rare"], "/mine"),
        ([f"{OWN}/a", f"{OWN}/b"], ""), ("s3://bucket/x", ""),
    ],
)  # fmt: skip
def test_sagemaker_copies_the_runs_own_folder_alone(folders: str | list[str], local: str) -> None:
    """At each start it downloads all that is below the prefix: of other runs too, were it their parent."""
    many = TWO if isinstance(folders, list) else {}
    flags = {"run_name": "mine", "checkpoint_dir": folders, **many}
    made = sagemaker.build(flags, **SAGEMAKER, checkpoints="s3://bucket/c/")
    assert made.checkpoint_config == {"S3Uri": f"s3://bucket/c{local}", "LocalPath": f"{OWN}{local}"}


def test_sagemaker_warns_of_checkpoints_on_the_instance(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", *SAGEMAKER_RUN, "--dry_run", "--checkpoint_dir=/tmp/trial"]) == 0
    printed = capsys.readouterr()
    assert "CheckpointConfig" not in json.loads(printed.out)
    assert "--checkpoint_dir /tmp/trial: on the instance's own disk" in printed.err


def test_sagemaker_needs_no_more_than_a_role_and_data(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--instance_count", "2", "--instance_type", "ml.p5.48xlarge", "--role", ROLE, "--region", "eu-west-1"]
    request = json.loads(dry_run(capsys, "sagemaker", *words, "--train", "s3://bucket/train", *LLAMA))
    default = "s3://sagemaker-eu-west-1-123456789012/smp-train"
    assert request["OutputDataConfig"]["S3OutputPath"] == default
    assert json.loads(request["HyperParameters"]["checkpoint_dir"]) == [f"{default}/checkpoints"]
    session = type("Session", (), {"_default_bucket_name_override": "mine", "boto_region_name": "eu-west-1"})()
    assert job.default_output(ROLE, job.region_of(session)) == default
    assert job.default_output(ROLE, "eu-west-1", session) == "s3://mine/smp-train"
    assert job.default_output("a role", "eu-west-1") is job.default_output(ROLE, None) is None
    with pytest.raises(ConfigError, match="would be lost"):
        sagemaker.request(sagemaker.build({}, **SAGEMAKER), region="eu-west-1", name="x", code="s3://bucket/x")


@pytest.mark.parametrize(
    ("backend", "region", "image"),
    [
        ("native", "us-west-2", "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:"),
        ("native", "eu-south-1", "692866216735.dkr.ecr.eu-south-1.amazonaws.com/"),
        ("native", "cn-north-1", "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/"),
        ("smp", "eu-west-1", "658645717510.dkr.ecr.eu-west-1.amazonaws.com/smdistributed-"),
    ],
)
def test_sagemaker_image_by_region(backend: str, region: str, image: str) -> None:
    made = sagemaker.build({"backend": backend}, **SAGEMAKER)
    assert made.image_uri(region).startswith(image)
    if backend == "smp":
        with pytest.raises(ConfigError, match=r"eu-south-1.*us-west-2"):
            made.image_uri("eu-south-1")


def test_staged_source_is_clean_and_the_same_twice(tmp_path: Path) -> None:
    one, two = (sagemaker.stage(tmp_path / name) for name in ("one", "two") if (tmp_path / name).mkdir() is None)
    assert sagemaker.archive(one) == sagemaker.archive(two)
    assert {path.name for path in one.iterdir()} == {"train.py", "requirements.txt", "smp_train"}
    assert not list(one.rglob("__pycache__"))
    assert (one / "train.py").read_text() == (ROOT / "launchers/sagemaker/train.py").read_text()


def test_split_keeps_the_order_of_training_flags() -> None:
    parser = options.LaunchParser("x", "").share("dry_run", "check", "env", "nodes")
    words = ["--lr", "3", "--dry-run", "--env=A=1", "--max_steps=2", "--env", "B=2", "C=3", "--nodes", "4"]
    values, training = options.split(words, parser)
    assert vars(values) == {"dry_run": True, "check": False, "env": ["A=1", "B=2", "C=3"], "nodes": 4}
    assert training == ["--lr", "3", "--max_steps=2"]
    for platform in (slurm, sagemaker, local, k8s):
        assert set(platform.parser().names) & set(NAMES) == set(), "an option is no training flag"


def test_environment_follows_the_instance_and_harmful_variables_are_named() -> None:
    p5, g5 = (environment.variables(instances.find(name)) for name in ("ml.p5.48xlarge", "g5.12xlarge"))
    assert ("FI_EFA_USE_HUGE_PAGE" in p5, g5.get("NCCL_SHM_USE_CUDA_MEMCPY")) == (True, "1")
    assert not set(p5) & set(environment.DROPPED)
    for value in ("^lo", environment.SOCKETS_SLURM, environment.SOCKETS_KUBERNETES):
        assert environment.lint({"NCCL_SOCKET_IFNAME": value, "HOME": "/"}) == []
    for name, value in (
        ("NCCL_SOCKET_IFNAME", "^docker0,eth"), ("NCCL_SOCKET_IFNAME", "eth0"), ("GLOO_SOCKET_IFNAME", "^lo"),
        ("TMPDIR", "/no/folder"), ("NCCL_DEBUG_SUBSYS", "off"), *((name, "1") for name in environment.DROPPED),
    ):  # fmt: skip
        (line,) = environment.lint({name: value, "GLOO": "eth0"})
        assert line.startswith(f"{name}={value} is set: "), "with its reason"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--run_name", "my run"], "#SBATCH --job-name=my-run\n"),
        (["--run_dir", "/r%j"], "#SBATCH --output=/r%%j/logs/slurm-%j.out\n"),
        (["--run_name", "my run"], '#SBATCH --output="/runs/my run/logs/slurm-%j.out"\n'),
        (["--sbatch", "--comment=x y", "--sbatch=--mem=0"], "#SBATCH --comment=x y\n#SBATCH --mem=0\n"),
        # Where the script looks for checkpoints: a start that saved nothing counts as one in vain.
        (["--run_dir=/r"], '"checkpoints": ["/checkpoints/r"]'),
        (["--run_dir=/r", "--checkpoint_dir=/r/mine"], '"written": ["/r/mine"],\n  "checkpoints": ["/r/mine/r"]'),
        (["--run_name=x", "--checkpoint_dir=other"], '"checkpoints": ["/other/x"]'),
        (["--run_dir=/r", "--resume_from_checkpoint=/a/x-5steps"], '"--resume_from_checkpoint=/a/x-5steps"'),
        (["--run_dir=/r", "--checkpoint_dir=s3://bucket/x"], '"checkpoints_in_s3": true'),
        (["--run_dir=/a:b"], '"--run_dir=/a:b"'),  # without a container
    ],
)
def test_rendered_lines(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, *SLURM, *words)
    assert line in text
    assert ("checkpoints_in_s3" in text) == ("s3://" in words[-1])


def double(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def test_submitted_by_what_sbatch_answers_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = ["launch", "slurm", "--nproc=1", "--use_synthetic_data=1", "--run_dir", str(run)]
    monkeypatch.chdir(tmp_path)
    double(tmp_path / "bin", "sbatch", f'cat > {tmp_path}/script; echo "sbatch: lua: be nice" >&2; echo "77;cluster"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert cli.main([*words, "--check"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "script"}, "a check makes nothing"
    assert cli.main(words) == 0
    assert "submitted job 77\n" in capsys.readouterr().out
    assert (run / "logs").is_dir(), "where it is missing, Slurm ends the job without a word"
    assert not [*(tmp_path / "checkpoints").iterdir()], "the run makes its own folder in it"
    assert cli.main([*words, "--check"]) == 0
    assert "run run is new; the same command goes on with it" in capsys.readouterr().err
    said = "run run goes on from its step 7; another --run_name begins a new run"
    for step, name in ((9, "other"), (7, "run")):
        marker = tmp_path / f"checkpoints/{name}/x-{step}steps/COMMITTED"
        marker.parent.mkdir(parents=True)
        marker.write_bytes(Marker(step, "x", 1, {META: FileRecord(2, "0" * 8)}).to_bytes())
        assert cli.main([*words, "--check"]) == 0
        assert (said in capsys.readouterr().err) is (name == "run")
    double(tmp_path / "bin", "sbatch", 'echo "sbatch: error: Invalid partition" >&2; exit 1')
    assert cli.main([*words, "--partition=x"]) == 2
    assert "error: sbatch: Invalid partition; `sinfo`" in capsys.readouterr().err


def test_installed_package_travels_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head node's site-packages nothing but this package is for the nodes and their containers."""
    monkeypatch.setattr(slurm, "CHECKOUT", False)
    monkeypatch.chdir(tmp_path)
    double(tmp_path / "bin", "sbatch", 'cat > /dev/null; echo "77"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    words = ["slurm", "--nproc=1", "--use_synthetic_data=1", "--run_dir", str(tmp_path / "run")]
    assert f"\ncode={tmp_path}/run/code\n" in dry_run(capsys, *words)
    for _ in "12":
        assert cli.main(["launch", *words]) == 0
        assert [path.name for path in (tmp_path / "run/code").iterdir()] == ["smp_train"]
    assert (tmp_path / "run/code/smp_train/launch/batch_job.py").exists()
    assert not list((tmp_path / "run/code").rglob("__pycache__"))


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck() -> None:
    for path in SCRIPTS:
        done = subprocess.run(["shellcheck", "-x", path], capture_output=True, text=True, check=False, cwd=path.parent)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("script", "environ", "words"),
    [
        ("hyperpod_slurm/launch_training_enroot.sh", {"FSX_MOUNT": "/", "shard_degree": "8"}, ["--max_steps", "7"]),
        ("hyperpod_slurm/launch_training_conda.sh", {"TRAINING_DIR": str(SAMPLE / "train"), "model_size": "7b"}, []),
        ("hyperpod_slurm/launch_slurm.sh", {"USE_HF_MODEL": "true"}, ["--max_steps=7"]),
        ("local/launch_single_node.sh", {"NPROC": "2", "DRY_RUN": "1"}, ["--max-steps", "7"]),
        ("local/launch_single_node.sh", {"NPROC": "auto", "CUDA_VISIBLE_DEVICES": "0,1"}, ["--max-steps", "7"]),
        ("local/launch_multi_node.sh", {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "NPROC": "1"}, []),
    ],
)
def test_every_script_shows_what_it_would_do(script: str, environ: dict[str, str], words: list[str]) -> None:
    done = subprocess.run(
        [ROOT / "launchers" / script, *words, *([] if "DRY_RUN" in environ else ["--dry_run"])],
        capture_output=True, text=True, check=False, cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHON": "<python>" if "slurm" in script else sys.executable, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    compare(f"{Path(script).stem}.txt", done.stdout)
