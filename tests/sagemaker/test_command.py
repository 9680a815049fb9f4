"""`smp-train launch sagemaker` against a double of AWS (moto): what is asked, submitted and refused."""

from __future__ import annotations

import json
from typing import Any

import boto3
import botocore.client
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

from smp_train import cli
from smp_train.errors import ConfigError
from smp_train.launch import sagemaker
from smp_train.launch.sagemaker import account
from tests.sagemaker.conftest import PLANNED
from tests.sagemaker.jobs import FLAGS, OPTIONS, command


def test_command_submits(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command(), "--check", "--env", "NCCL_PROTO=simple"]) == 0
    warned = capsys.readouterr().err
    assert "NCCL_PROTO=simple is set" in warned
    assert PLANNED in warned
    assert boto3.client("sagemaker").list_training_jobs()["TrainingJobSummaries"] == []
    assert cli.main(command()) == 0
    (job,) = boto3.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    out = capsys.readouterr().out
    assert f"submitted {job['TrainingJobName']}\n" in out
    assert f"stop-training-job --training-job-name {job['TrainingJobName']}" in out
    shown = boto3.client("sagemaker").describe_training_job(TrainingJobName=job["TrainingJobName"])
    bucket, _, key = json.loads(shown["HyperParameters"]["sagemaker_submit_directory"])[5:].partition("/")
    assert boto3.client("s3").head_object(Bucket=bucket, Key=key)["ContentLength"] > 10000


def test_image_is_looked_up(aws: None, capsys: pytest.CaptureFixture[str]) -> None:
    boto3.client("ecr").create_repository(repositoryName="smp-train")
    image = "123456789012.dkr.ecr.us-west-2.amazonaws.com/smp-train:1"
    assert cli.main([*command(image=image), "--check"]) == 2
    assert f"--image {image}: Requested image not found" in capsys.readouterr().err
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    layers = json.dumps(
        {"schemaVersion": 2, "mediaType": kind, "config": {"digest": "sha256:" + "0" * 64}, "layers": []}
    )
    boto3.client("ecr").put_image(
        repositoryName="smp-train", imageManifest=layers, imageManifestMediaType=kind, imageTag="1"
    )
    assert cli.main([*command(image=image), "--check"]) == 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"role": "arn:aws:iam::123456789012:role/nobody"}, "role/nobody"),
        ({"train": "s3://other/train"}, "--train s3://other/train"),
        ({"train": "s3://bucket/empty"}, "--train s3://bucket/empty: there is nothing"),
        (
            {"image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/smp-train:1"},
            "The repository with name 'smp-train' does not exist",
        ),
        (
            {"image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/smp-train:1"},
            "is in eu-west-1 and the job in us-west-2; push it to a repository there",
        ),
    ],
)
def test_refused_before_it_is_submitted(
    aws: None, changes: dict[str, str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command(**changes), "--check"]) == 2
    assert complaint in capsys.readouterr().err
    assert boto3.client("sagemaker").list_training_jobs()["TrainingJobSummaries"] == []


class Refusing:
    """A session of AWS of which every call fails in the same way."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem

    def client(self, service: str) -> Refusing:
        return self

    def __getattr__(self, call: str) -> Any:
        def fail(**_: Any) -> None:
            raise self.problem

        return fail


def refused(code: str, message: str = "no") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "x")


SUBMITTING = "uploading the code to s3://bucket/c/x.tar.gz: "


@pytest.mark.parametrize(
    ("submitting", "problem", "complaint"),
    [
        (False, NoCredentialsError(), "Unable to locate credentials; `aws configure` or `aws sso login`"),
        (False, EndpointConnectionError(endpoint_url="https://x"), "is --region right, and is there a way to AWS from"),
        (False, refused("301", "Moved Permanently"), "Moved Permanently; the bucket is in another region: give"),
        (False, refused("ExpiredToken"), "no; log in again: `aws sso login`"),
        (True, NoCredentialsError(), f"{SUBMITTING}Unable to locate credentials; `aws"),
        (True, refused("AccessDenied"), f"{SUBMITTING}AccessDenied: no"),
    ],
)
def test_aws_that_cannot_be_asked(submitting: bool, problem: Exception, complaint: str) -> None:
    session, job = Refusing(problem), sagemaker.build(FLAGS, **OPTIONS)
    code = "s3://bucket/c/x.tar.gz"
    with pytest.raises(ConfigError) as said:
        account.submit({}, session, code) if submitting else account.check_account(job, session)
    assert complaint in str(said.value)


def test_quota(aws: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    original = botocore.client.BaseClient._make_api_call

    def call(self: Any, name: str, arguments: dict[str, Any]) -> Any:
        if name == "CreateTrainingJob":
            raise refused("ResourceLimitExceeded", "The account-level service limit is 0 Instances")
        return original(self, name, arguments)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", call)
    assert cli.main(command()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "CreateTrainingJob: ResourceLimitExceeded: The account-level service limit is 0 Instances; ask for" in said
