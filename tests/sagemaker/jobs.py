"""The jobs that every way to submit them must describe alike, and AWS as moto doubles it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import boto3

from smp_train.telemetry.logging_utils import METRIC_DEFINITIONS
from tests.training import SAMPLE, TINY

REGION = "us-west-2"
FLAGS = ["--model_type", "llama_v2", "--model_size=7b", "--max_steps", "100", "--lr", "1e-4", "--hybrid_shard_degree=8"]
OPTIONS: dict[str, Any] = {
    "role": "arn:aws:iam::123456789012:role/training",
    "instance_type": "ml.p5.48xlarge",
    "train": "s3://bucket/train",
    "test": "s3://bucket/test",
    "output": "s3://bucket/out",
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "spot": {"spot": True, "checkpoints": "s3://bucket/run-1", "tags": {"team": "x"}, "env": {"A": "b"}},
    "warm pool": {"keep_alive": 600, "retries": 3, "checkpoints": "s3://bucket/run-1"},
    "image": {
        "image": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.9.0-gpu-py312", "input_mode": "File",
    },
    "fsx": {
        "fsx": "fs-0123456789abcdef0:/mount/x", "subnets": ["subnet-1"], "security_groups": ["sg-1"],
        "instance_count": 2,
    },
    "several": {"instance_count": 2},
    "no data": {"train": None, "test": None},
    "smp": {},
    "channel": {},
}  # fmt: skip
ENVIRON = {
    "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true", "SAGEMAKER_SUPPRESS_V2_WARNING": "1", "SAGEMAKER_VALIDATE_ROLE": "false",
}  # fmt: skip


def flags(kind: str) -> list[str]:
    """Return the training flags of one of `KINDS`."""
    more = {"fsx": ["--checkpoint_dir", "/opt/ml/input/data/fsx/checkpoints"], "smp": ["--backend", "smp"]}
    more["no data"] = ["--use_synthetic_data", "1"]
    more["channel"] = ["--checkpoint_dir", "/opt/ml/checkpoints"]
    return [*FLAGS, *more.get(kind, [])]


def furnish() -> None:
    """Make the bucket, data and role that `OPTIONS` name."""
    boto3.client("s3").create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": REGION})
    for name in ("train", "test"):
        boto3.client("s3").put_object(Bucket="bucket", Key=f"{name}/0.json.gz", Body=b"")
    boto3.client("iam").create_role(RoleName="training", AssumeRolePolicyDocument="{}")


def command(**changes: str) -> list[str]:
    """Return a command line of the launcher, with other options."""
    words = [word for name, value in {**OPTIONS, **changes}.items() for word in (f"--{name}", value)]
    return ["launch", "sagemaker", *words, *FLAGS]


def check_request(sent: dict[str, Any], kind: str) -> None:
    """Check what two kinds of jobs are there for."""
    if kind == "channel":
        wanted = {"S3Uri": "s3://bucket/out/checkpoints/llama_v2-7b", "LocalPath": "/opt/ml/checkpoints/llama_v2-7b"}
        assert sent["CheckpointConfig"] == wanted
    if kind == "smp":
        assert "smdistributed-modelparallel:2.5.1-gpu-py311-cu124" in sent["AlgorithmSpecification"]["TrainingImage"]
        assert json.loads(sent["HyperParameters"]["mp_parameters"]) == {"hybrid_shard_degree": 8}


def configure_container(base: Path, request: dict[str, Any], **resources: Any) -> None:
    """Write what SageMaker puts below /opt/ml/input/config."""
    config = base / "input/config"
    config.mkdir(parents=True)
    hosts = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "lo"}
    kind = {"current_instance_type": request["ResourceConfig"]["InstanceType"]}
    channels = {channel["ChannelName"]: {"TrainingInputMode": "File"} for channel in request["InputDataConfig"]}
    (config / "hyperparameters.json").write_text(json.dumps(request["HyperParameters"]))
    (config / "resourceconfig.json").write_text(json.dumps({**hosts, **kind, **resources}))
    (config / "inputdataconfig.json").write_text(json.dumps(channels))


TRAINING = {
    **TINY, "vocab_size": 1024, "use_synthetic_data": 0, "validation_freq": 2, "max_steps": 4, "checkpoint_freq": [2],
}  # fmt: skip


def train_as_the_container(command: list[str], code: Path, base: Path, variables: dict[str, str]) -> None:
    """Train on the sample below ``base``, as /opt/ml, and again as SageMaker's restart does; read the metrics."""
    for name in ("train", "test"):
        shutil.copytree(SAMPLE / name, base / "input/data" / name)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHON"))}

    def train(*more: str) -> str:
        here = ["--checkpoint_dir", str(base.parent / "checkpoints")]  # not /opt/ml/checkpoints, on this machine
        done = subprocess.run(
            [os.environ["SMP_TRAIN_PYTHON"], *command, *here, *more], cwd=code, capture_output=True, text=True,
            timeout=400, check=False, env={**kept, "OMP_NUM_THREADS": "1", **variables},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    log = train()
    assert json.loads((base / "output/data/DONE").read_text())["step"] == 4
    found = {one["Name"] for one in METRIC_DEFINITIONS if re.search(one["Regex"], log)}
    assert {one["Name"] for one in METRIC_DEFINITIONS} - found <= {"train:mfu_percent"}, "on a CPU there is no MFU"
    assert "at step 4" in train("--max_steps", "6")
