"""Checks of a job in the user's AWS account, and its submission."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError, install
from smp_train.launch.command import advise
from smp_train.launch.sagemaker.job import ECR_IMAGE, Job
from smp_train.launch.sagemaker.request import archive, stage

LOG_IN = "`aws configure` or `aws sso login`, or run where a role is attached"
OTHER_REGION = "the bucket is in another region: give --region, or a bucket of this one"
ADVICE = (
    ("404", "`aws s3 mb` makes a bucket"),
    ("301", OTHER_REGION),
    ("PermanentRedirect", OTHER_REGION),
    ("NoCredentials", LOG_IN),
    ("PartialCredentials", LOG_IN),
    ("ExpiredToken", "log in again: `aws sso login`"),
    ("InvalidClientTokenId", "these credentials are not known: `aws configure`"),
    ("UnrecognizedClient", "these credentials are not known: `aws configure`"),
    ("EndpointConnection", "is --region right, and is there a way to AWS from here?"),
    ("ResourceLimitExceeded", "ask for more in Service Quotas: SageMaker, '... for training job usage'"),
    ("AccessDenied", "these credentials need sagemaker:CreateTrainingJob and iam:PassRole for the role"),
    ("ResourceInUse", "a job of this name is there already: give another --job_name"),
)
"""Remedies by an error's code or its class."""
DENIED = ("AccessDenied", "AccessDeniedException", "403")


def boto3() -> Any:
    """Return the module boto3; `ConfigError` says how to install it."""
    try:
        import boto3 as module
    except ModuleNotFoundError:
        raise ConfigError(f"boto3 is not installed here; {install('s3')}, or add --dry_run") from None
    return module


@contextmanager
def _explained(subject: str, unknown: list[str] | None = None) -> Iterator[None]:
    """Turn an error of AWS into a `ConfigError` with its message and the remedy.

    If the list ``unknown`` is given, a denied request is added to it instead.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as problem:
        error = problem.response["Error"]
        code = error.get("Code", "")
        if unknown is None or code not in DENIED:
            message = " ".join(f"{code}: {error.get('Message') or 'no message'}".split())
            raise ConfigError(f"{subject}: {message}{advise(code, ADVICE)}") from None
        unknown.append(f"{subject}: may not be asked ({code})")
    except BotoCoreError as problem:
        raise ConfigError(f"{subject}: {problem}{advise(type(problem).__name__, ADVICE)}") from None


def check_account(job: Job, session: Any) -> list[str]:
    """Refuse a role, image, data or folders that do not exist in AWS; return warnings about denied requests."""
    unknown: list[str] = []
    s3 = session.client("s3")
    role, image = job.options.role, job.options.image
    with _explained(f"role {role}", unknown):
        session.client("iam").get_role(RoleName=role.rpartition("/")[2])
    locations = [(name, getattr(job.options, name) or "") for name in ("train", "test", "checkpoints", "output")]
    locations += [("checkpoint_dir", folder) for folder in job.resolved.args.checkpoint_dir]
    for name, uri in locations:
        if "://" not in uri:
            continue
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        with _explained(f"--{name} {uri}", unknown):
            s3.head_bucket(Bucket=bucket)
            is_data = name in ("train", "test")
            if is_data and not s3.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1).get("KeyCount"):
                raise ConfigError(f"--{name} {uri}: there is nothing")
    match = ECR_IMAGE.fullmatch(image or "")
    if match:
        with _explained(f"--image {image}", unknown):
            answer = session.client("ecr").batch_get_image(
                registryId=match["account"], repositoryName=match["name"],
                imageIds=[{"imageTag": match["tag"] or "latest"}],
            )  # fmt: skip
            for failure in answer["failures"]:
                raise ConfigError(f"--image {image}: {failure.get('failureReason', 'is not there')}")
    return unknown


def submit(body: Mapping[str, Any], session: Any, code: str) -> None:
    """Upload the code and create the training job."""
    bucket, _, key = code.removeprefix("s3://").partition("/")
    with _explained(f"uploading the code to {code}"), tempfile.TemporaryDirectory() as folder:
        session.client("s3").put_object(Bucket=bucket, Key=key, Body=archive(stage(Path(folder))))
    with _explained("CreateTrainingJob"):
        session.client("sagemaker").create_training_job(**body)
