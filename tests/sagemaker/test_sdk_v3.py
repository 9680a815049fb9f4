"""Against SageMaker's own SDK v3, a double of its service (moto), and the programs it sends to the container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sagemaker.train", reason="SageMaker's SDK v3 is in an environment of `make test-sagemaker`")
import boto3
from sagemaker.core.helper.session_helper import Session

from smp_train.errors import ConfigError
from smp_train.launch import sagemaker
from tests.sagemaker import jobs
from tests.sagemaker.jobs import KINDS, OPTIONS, REGION, flags


def train(words: Any, **options: Any) -> dict[str, Any]:
    """Run `train` of a model trainer and return the request that went out."""
    import botocore.client

    sent: dict[str, Any] = {}
    original = botocore.client.BaseClient._make_api_call

    def call(self: Any, name: str, arguments: dict[str, Any]) -> Any:
        if name == "CreateTrainingJob":
            sent.update(arguments)
        return original(self, name, arguments)

    session = Session(boto3.Session(), default_bucket="bucket")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.client.BaseClient, "_make_api_call", call)
        sagemaker.model_trainer(words, sagemaker_session=session, **options).train(wait=False)
    return sent


def decoded(hyper: dict[str, str]) -> dict[str, Any]:
    """Return hyperparameters as the container reads them, without what the toolkit of SDK v2 needs for itself."""

    def read(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return {name: read(value) for name, value in hyper.items() if not name.startswith("sagemaker_")}


def comparable(request: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same however a job is submitted: all but how code reaches the container."""
    kept = {name: value for name, value in request.items() if name not in ("TrainingJobName", "ProfilerConfig")}
    kept["HyperParameters"] = decoded(request["HyperParameters"])
    kept["AlgorithmSpecification"] = {
        name: value
        for name, value in request["AlgorithmSpecification"].items()
        if name not in ("ContainerEntrypoint", "ContainerArguments", "EnableSageMakerMetricsTimeSeries")
    }
    kept["InputDataConfig"] = [
        channel
        for channel in request.get("InputDataConfig", [])
        if channel["ChannelName"] not in ("code", "sm_drivers")
    ]
    kept["OutputDataConfig"] = {"S3OutputPath": request["OutputDataConfig"]["S3OutputPath"]}
    kept.setdefault("EnableManagedSpotTraining", False)
    kept.setdefault("Tags", [])
    return {name: value for name, value in kept.items() if value not in ({}, None)}


@pytest.mark.parametrize("kind", KINDS)
def test_model_trainer_and_plain_request_describe_the_same_job(aws: None, kind: str) -> None:
    options = {**OPTIONS, **KINDS[kind]}
    sent = train(flags(kind), **options)
    plain = sagemaker.request(
        sagemaker.build(flags(kind), **options), region=REGION, name="a-name", code="s3://bucket/code"
    )
    assert comparable(sent) == comparable(plain)
    jobs.check_request(sent, kind)


def test_checkpoints_are_kept_where_nobody_says_where(aws: None) -> None:
    sent = train(flags("plain"), **{name: value for name, value in OPTIONS.items() if name != "output"})
    assert sent["CheckpointConfig"]["S3Uri"] == "s3://bucket/smp-train/checkpoints/llama_v2-7b", "the session's bucket"


def test_the_sdks_configuration_may_name_the_bucket(
    aws: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(
        "SchemaVersion: '1.0'\n"
        "SageMaker: {PythonSDK: {Modules: {Session: {DefaultS3Bucket: ours, DefaultS3ObjectKeyPrefix: team}}}}\n"
    )
    boto3.client("s3").create_bucket(Bucket="ours", CreateBucketConfiguration={"LocationConstraint": REGION})
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(tmp_path / "config.yaml"))
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    options = {name: value for name, value in OPTIONS.items() if name != "output"}
    trainer = sagemaker.model_trainer(flags("plain"), region=REGION, **options)
    assert trainer.checkpoint_config.s3_uri == "s3://ours/team/smp-train/checkpoints/llama_v2-7b"
    assert trainer.sagemaker_session.boto_region_name == REGION


def test_what_its_container_would_break_is_refused(aws: None) -> None:
    with pytest.raises(ConfigError, match="cannot pass a value with a single quote"):
        sagemaker.model_trainer({"tensorboard_dir": "it's"}, **OPTIONS)


def test_the_other_sdk_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"SDK v2 is not here; pip install 'sagemaker>=2\.233,<3', or use model_trainer"
    ):
        sagemaker.estimator([], **OPTIONS)


# What the container runs, with its folders below another root and without a torch to ask for its version.
CONTAINER = """
import json, os, sys
base, drivers = sys.argv[1:]
sys.path.insert(0, drivers)
from common import utils
utils.SOURCE_CODE_JSON = utils.DISTRIBUTED_JSON = None
read = lambda name: json.load(open(os.path.join(drivers, name)))
from scripts import environment
environment.read_source_code_json = lambda: read("sourcecode.json")
environment.read_distributed_json = lambda: read("distributed.json")
for name, value in list(vars(environment).items()):
    if name.startswith("SM_") and isinstance(value, str) and value.startswith("/opt/ml"):
        setattr(environment, name, base + value[len("/opt/ml"):])
config = {name: json.load(open(f"{base}/input/config/{name}.json")) for name in
          ("resourceconfig", "inputdataconfig", "hyperparameters")}
environment.set_env(config["resourceconfig"], config["inputdataconfig"], config["hyperparameters"], f"{base}/env")
import shlex
for line in open(f"{base}/env"):
    name, _, value = line[len("export "):].partition("=")
    os.environ[name] = shlex.split(value)[0]
from distributed_drivers import torchrun_driver
torchrun_driver.pytorch_version = lambda: (2, 8)
sm = {name: value for name, value in os.environ.items() if name.startswith("SM_")}
print(json.dumps([torchrun_driver.create_commands(), sm]))
"""


def download(uri: str, folder: Path) -> Path:
    """Copy a channel from S3, as SageMaker does before the container starts."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3")
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            place = folder / item["Key"].removeprefix(prefix).lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, item["Key"], str(place))
    return folder


def container(request: dict[str, Any], base: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command line and environment that the SDK's own programs make of a request, channels in place."""
    jobs.configure_container(base, request)
    channels = {channel["ChannelName"]: channel for channel in request["InputDataConfig"]}
    for name in ("code", "sm_drivers"):
        download(channels[name]["DataSource"]["S3DataSource"]["S3Uri"], base / "input/data" / name)
    done = subprocess.run(
        [sys.executable, "-c", CONTAINER, str(base), str(base / "input/data/sm_drivers")],
        capture_output=True, text=True, check=False, env={**os.environ, "TRAINING_JOB_NAME": "a-name"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(900)  # torch is imported twice, and the machine may be busy
@pytest.mark.skipif("SMP_TRAIN_PYTHON" not in os.environ, reason="SMP_TRAIN_PYTHON names no interpreter with torch")
def test_container_trains_with_what_the_drivers_make_of_the_request(aws: None, tmp_path: Path) -> None:
    """The whole way: trainer, request, uploaded code, the drivers' command line, our entry script, metrics."""
    more = {"mp_parameters": {"tensor_parallel_degree": 1}, "use_profiler": False, "grad_clip": 0.5}
    request = train({**jobs.TRAINING, **more}, **OPTIONS)
    command, variables = container(request, tmp_path / "ml")
    assert command[: command.index("train.py")] == ["torchrun", "--nnodes=1", "--nproc_per_node=1"]
    # JSON for booleans, lists and mappings: what our flags must read.
    assert command[command.index("--use_profiler") + 1] == "false"
    assert command[command.index("--checkpoint_freq") + 1] == "[2]"
    assert command[command.index("--mp_parameters") + 1] == '{"tensor_parallel_degree": 1}'
    torchrun = ["-m", "torch.distributed.run", "--standalone", *command[1:]]
    jobs.train_as_the_container(torchrun, tmp_path / "ml/input/data/code", tmp_path / "ml", variables)
