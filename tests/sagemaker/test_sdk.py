"""Against SageMaker's own SDK v2, a double of its service (moto), and its training toolkit.

They live in an environment of their own, as their pins exclude ours: `make test-sagemaker`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sagemaker.pytorch", reason="SageMaker's SDK is in the environment of `make test-sagemaker`")
import boto3
import sagemaker as sdk

from smp_train.launch import sagemaker
from tests.sagemaker import jobs
from tests.sagemaker.jobs import FLAGS, KINDS, OPTIONS, REGION, flags

ROOT = Path(__file__).parents[2]


def fit(words: Any, **options: Any) -> dict[str, Any]:
    """Run `fit` of an estimator and return the request that went out."""
    sent: dict[str, Any] = {}
    session = sdk.Session(boto3.Session())
    session.sagemaker_client.meta.events.register(
        "before-call.sagemaker.CreateTrainingJob", lambda params, **_: sent.update(json.loads(params["body"]))
    )
    ready = sagemaker.estimator(words, sagemaker_session=session, **options)
    ready.fit(wait=False)
    return sent


@pytest.mark.parametrize("kind", KINDS)
def test_estimator_and_plain_request_are_the_same(aws: None, kind: str) -> None:
    options = {**OPTIONS, **KINDS[kind]}
    sent = fit(flags(kind), **options)
    code = json.loads(sent["HyperParameters"]["sagemaker_submit_directory"])
    ours = sagemaker.request(
        sagemaker.build(flags(kind), **options), region=REGION, name=sent["TrainingJobName"], code=code
    )
    assert ours == sent
    jobs.check_request(sent, kind)


def test_checkpoints_are_kept_where_nobody_says_where(aws: None) -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "output"}
    own = "s3://sagemaker-us-west-2-123456789012/"
    sent = fit(FLAGS, **options, spot=True)
    assert sent["CheckpointConfig"]["S3Uri"] == f"{own}smp-train/checkpoints/llama_v2-7b"
    assert sent["OutputDataConfig"]["S3OutputPath"] == own
    hyper = fit(FLAGS, **options, instance_count=2)["HyperParameters"]
    assert json.loads(hyper["checkpoint_dir"]) == [f"{own}smp-train/checkpoints"]


def test_channels_can_be_added(aws: None) -> None:
    ready = sagemaker.estimator(FLAGS, sagemaker_session=sdk.Session(boto3.Session()), **OPTIONS)
    ready.fit(inputs={**sagemaker.inputs(ready), "more": "s3://bucket/more"}, wait=False)
    (job,) = boto3.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    shown = boto3.client("sagemaker").describe_training_job(TrainingJobName=job["TrainingJobName"])
    assert {channel["ChannelName"] for channel in shown["InputDataConfig"]} == {"train", "test", "more"}


@pytest.fixture
def service(environ: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """AWS as a server on this machine, as other processes see it."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    try:
        jobs.furnish()
        yield
    finally:
        server.stop()


def test_command_and_estimator_against_a_server(service: None) -> None:
    command = [sys.executable, "-m", "smp_train", *jobs.command()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    fitted = fit(FLAGS, **OPTIONS)["TrainingJobName"]
    names = [job["TrainingJobName"] for job in boto3.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]]
    assert set(names) == {done.stdout.splitlines()[0].removeprefix("submitted "), fitted}


TOOLKIT = """
import json
from sagemaker_training import environment
place = environment.Environment()
print(json.dumps([place.to_cmd_args(), place.to_env_vars()]))
"""


def container(request: dict[str, Any], base: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command line and environment that SageMaker's toolkit makes of a request."""
    group = {"instance_group_name": "homogeneousCluster", "instance_type": "ml.p5.48xlarge", "hosts": ["algo-1"]}
    jobs.configure_container(
        base, request, current_group_name=group["instance_group_name"], instance_groups=[group]
    )
    done = subprocess.run(
        [sys.executable, "-c", TOOLKIT], capture_output=True, text=True, check=True,
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(base), "TRAINING_JOB_NAME": request["TrainingJobName"]},
    )  # fmt: skip
    words, variables = json.loads(done.stdout.splitlines()[-1])
    return words, {name: str(value) for name, value in variables.items()}


@pytest.mark.timeout(900)  # torch is imported twice, and the machine may be busy
@pytest.mark.skipif("SMP_TRAIN_PYTHON" not in os.environ, reason="SMP_TRAIN_PYTHON names no interpreter with torch")
def test_container_trains_with_what_the_toolkit_makes_of_the_request(aws: None, tmp_path: Path) -> None:
    """The whole way: estimator, request, the toolkit's command line, our entry script, metrics read from its log."""
    pytest.importorskip("sagemaker_training")
    words, variables = container(fit(jobs.TRAINING, **OPTIONS), tmp_path / "ml")
    code = tmp_path / "code"
    code.mkdir()
    sagemaker.stage(code)
    jobs.train_as_the_container(["train.py", *words], code, tmp_path / "ml", variables)


def test_notebook_runs_from_top_to_bottom(aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk, "get_execution_role", lambda session: OPTIONS["role"])
    cells = json.loads((ROOT / "launchers/sagemaker/train.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    (job,) = boto3.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    assert job["TrainingJobName"] == names["training"].latest_training_job.name
