"""Checks of a job that only AWS can answer, and its submission."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError, install
from smp_train.launch.command import advise
from smp_train.launch.sagemaker.job import ECR_IMAGE, Job
from smp_train.launch.sagemaker.source import archive, stage


def boto3() -> Any:
    """Return the module boto3; `ConfigError` says how to install it."""
    try:
        import boto3 as module
    except ModuleNotFoundError:
        raise ConfigError(f"boto3 is not installed here; {install('s3')}, or add --dry_run") from None
    return module


def check_account(job: Job, session: Any) -> list[str]:
    """Ask AWS whether role, image, data and places exist; return what could not be asked.

    Raises:
        ConfigError: for what does not exist.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    unknown: list[str] = []
    s3, iam = session.client("s3"), session.client("iam")

    def ask(what: str, call: Any, **arguments: Any) -> Any:
        try:
            return call(**arguments)
        except ClientError as problem:
            code = problem.response["Error"]["Code"]
            if code in ("AccessDenied", "AccessDeniedException", "403"):
                unknown.append(f"{what}: may not be asked ({code})")
                return None
            message = problem.response["Error"].get("Message") or code
            raise ConfigError(f"{what}: {message}{advise(code, ADVICE)}") from None
        except BotoCoreError as problem:
            raise ConfigError(f"{what}: {problem}{advise(type(problem).__name__, ADVICE)}") from None

    ask(f"role {job.role}", iam.get_role, RoleName=job.role.rpartition("/")[2])
    named = [(name, getattr(job, name)) for name in ("train", "test", "checkpoints", "output")]
    named += [("checkpoint_dir", place) for place in job.resolved.args.checkpoint_dir if "://" in place]
    for name, place in named:
        if not place:
            continue
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        ask(f"--{name} {place}", s3.head_bucket, Bucket=bucket)
        if name in ("train", "test"):
            found = ask(f"--{name} {place}", s3.list_objects_v2, Bucket=bucket, Prefix=prefix, MaxKeys=1)
            if found is not None and not found.get("KeyCount"):
                raise ConfigError(f"--{name} {place}: there is nothing")
    place = ECR_IMAGE.fullmatch(job.image or "")
    if place:
        found = ask(
            f"--image {job.image}",
            session.client("ecr").batch_get_image,
            registryId=place["account"],
            repositoryName=place["name"],
            imageIds=[{"imageTag": place["tag"] or "latest"}],
        )
        if found is not None and found["failures"]:
            raise ConfigError(f"--image {job.image}: {found['failures'][0].get('failureReason', 'is not there')}")
    return unknown


ADVICE = (
    ("404", "`aws s3 mb` makes a bucket"),
    ("301", "the bucket is in another region: give --region, or a bucket of this one"),
    ("PermanentRedirect", "the bucket is in another region: give --region, or a bucket of this one"),
    ("NoCredentials", "`aws configure` or `aws sso login`, or run where a role is attached"),
    ("PartialCredentials", "`aws configure` or `aws sso login`, or run where a role is attached"),
    ("ExpiredToken", "log in again: `aws sso login`"),
    ("InvalidClientTokenId", "these credentials are not known: `aws configure`"),
    ("UnrecognizedClient", "these credentials are not known: `aws configure`"),
    ("EndpointConnection", "is --region right, and is there a way to AWS from here?"),
    ("ResourceLimitExceeded", "ask for more in Service Quotas: SageMaker, '... for training job usage'"),
    ("AccessDenied", "these credentials need sagemaker:CreateTrainingJob and iam:PassRole for the role"),
    ("ResourceInUse", "a job of this name is there already: give another --job_name"),
)
"""By an error's code or its class."""


def submit(wanted: Mapping[str, Any], session: Any, code: str) -> None:
    """Upload the code and create the training job.

    Raises:
        ConfigError: with AWS's own words and what to do about them.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, key = code.removeprefix("s3://").partition("/")
    doing = f"uploading the code to {code}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            session.client("s3").put_object(Bucket=bucket, Key=key, Body=archive(stage(Path(folder))))
        doing = "CreateTrainingJob"
        session.client("sagemaker").create_training_job(**wanted)
    except ClientError as problem:
        error = problem.response["Error"]
        said = f"{error.get('Code')}: {error.get('Message')}{advise(error.get('Code', ''), ADVICE)}"
        raise ConfigError(f"{doing}: {' '.join(said.split())}") from None
    except BotoCoreError as problem:
        raise ConfigError(f"{doing}: {problem}{advise(type(problem).__name__, ADVICE)}") from None
