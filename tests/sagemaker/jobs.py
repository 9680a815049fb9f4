"""The jobs that every way to submit them must describe alike, and AWS as moto doubles it."""

from __future__ import annotations

import os
from typing import Any

import boto3

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
        "image": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.7.1-gpu-py312", "input_mode": "File",
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
BEYOND: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no instance": ({}, {"instance_count": 0}, "--instance_count 0"),
    "long value": ({"tensorboard_dir": "x" * 3000}, {}, "HyperParameters.tensorboard_dir: 300"),
    "long variable": ({}, {"env": {"LONG": "x" * 600}}, "Environment.LONG: 600 characters"),
    "many retries": ({}, {"retries": 31}, "MaximumRetryAttempts: 31"),
}
"""What SageMaker would refuse: (flags, options, what is said)."""
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


def training_environ(**more: str) -> dict[str, str]:
    """Return an environment for the interpreter that trains, without this one's traces."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHON"))}
    return {**kept, "OMP_NUM_THREADS": "1", **more}
