"""One client for S3, or anything that speaks its protocol, with one retry policy; and what its errors mean.

Credentials, region and endpoint are boto3's own business: ``AWS_PROFILE``, ``AWS_REGION``, ``AWS_ENDPOINT_URL`` and
the rest mean what they always mean. boto3 is imported when a client is made, not before.
"""

from __future__ import annotations

import logging
import os
import time
from functools import lru_cache
from typing import Any

from smp_train.errors import ConfigError, SmpTrainError, install, one_line

logger = logging.getLogger(__name__)

SCHEME = "s3://"
AT_ONCE = 8
"""Requests in flight per rank: one connection of S3 brings some 80 MB/s."""
ATTEMPTS = 8
"""Tries per request, over a minute or two; S3 asks for patience (503) where many readers or writers begin at once."""
READ_TIMEOUT_SECONDS = 30.0
"""A connection that brings nothing for so long is given up and opened again."""
SILENT_SECONDS = 30.0
"""Between two warnings that S3 does not answer."""
IDENTITY = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_PROFILE")
ACTIONS = {
    "put_object": "s3:PutObject", "get_object": "s3:GetObject", "head_object": "s3:GetObject",
    "delete_object": "s3:DeleteObject", "delete_objects": "s3:DeleteObject", "copy_object": "s3:PutObject",
    "copy": "s3:PutObject", "list_objects_v2": "s3:ListBucket", "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject", "complete_multipart_upload": "s3:PutObject",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
}  # fmt: skip
"""The permission that each operation needs."""


def is_s3(location: str) -> bool:
    """Return whether a location is in S3."""
    return location.startswith(SCHEME)


def split(location: str, error: type[SmpTrainError] = ConfigError) -> tuple[str, str]:
    """Return (bucket, key) of ``s3://bucket/key``. Raises ``error`` where there is no bucket."""
    bucket, _, key = location[len(SCHEME) :].partition("/")
    if not bucket:
        raise error(f"{location}: names no bucket; write s3://bucket/prefix")
    return bucket, key


def client() -> Any:
    """Return the one client of this process, which all its threads share: making one costs more than many requests.

    It must not be used in a forked child, which is given one of its own.
    """
    return _made(os.getpid(), READ_TIMEOUT_SECONDS, *(os.environ.get(name) for name in IDENTITY))


@lru_cache(maxsize=4)
def _made(process: int, read_timeout: float, *identity: str | None) -> Any:
    try:
        import boto3
        import botocore.session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise ConfigError(f"s3:// needs the package boto3: {install('s3')}") from None
    try:
        # A session of its own: the shared one is not safe to make clients from in several threads, and keeps
        # credentials that may have been replaced. What boto3 reads from its own files is kept.
        core = botocore.session.get_session()
        core.register_component("data_loader", _loader())
        made = boto3.session.Session(botocore_session=core).client(
            "s3",
            config=Config(
                max_pool_connections=4 * AT_ONCE,
                connect_timeout=10,
                read_timeout=read_timeout,
                # Not "standard", which gives up early where many requests of a client fail at once.
                retries={"mode": "legacy", "total_max_attempts": ATTEMPTS},
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"s3: no client can be made ({one_line(error)}); check the AWS variables") from None
    warned = -SILENT_SECONDS

    def warn(caught_exception: BaseException | None = None, attempts: int = 1, **_: Any) -> None:
        """Handle botocore's event ``needs-retry``; the return value None leaves the decision to botocore."""
        nonlocal warned
        if caught_exception is None or attempts >= ATTEMPTS or time.monotonic() - warned < SILENT_SECONDS:
            return
        warned = time.monotonic()
        logger.warning("%s does not answer (%s); trying again, up to %d times",
                       made.meta.endpoint_url, one_line(caught_exception), ATTEMPTS)  # fmt: skip

    made.meta.events.register("needs-retry.s3", warn)
    return made


@lru_cache
def _loader() -> Any:
    from botocore.loaders import create_loader

    return create_loader()


def failures() -> tuple[type[Exception], ...]:
    """Return what a request, or reading its answer, may raise when S3 refuses or the connection breaks off."""
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    return BotoCoreError, ClientError, HTTPError, ConnectionError, TimeoutError


def code_of(error: BaseException) -> str:
    """Return S3's error code, empty for an error that is no answer of S3."""
    return str((getattr(error, "response", None) or {}).get("Error", {}).get("Code", ""))


def explain(error: BaseException, what: str, operation: str, kind: type[SmpTrainError]) -> SmpTrainError:
    """Return a ``kind`` that says what to do about boto3's error in an operation on ``what``."""
    answer = (getattr(error, "response", None) or {}).get("ResponseMetadata", {})
    code, status = code_of(error), answer.get("HTTPStatusCode")
    region = answer.get("HTTPHeaders", {}).get("x-amz-bucket-region")
    if code in ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidToken"):
        return kind(f"{what}: the AWS credentials have expired ({code}); renew them and start again")
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch"):
        return kind(f"{what}: the AWS credentials are not valid ({code}); try: aws sts get-caller-identity")
    if code == "NoSuchBucket":
        return kind(f"{what}: no such bucket (404 {code}); check the name, and AWS_ENDPOINT_URL if it is set")
    if status == 403:
        bucket = split(what, kind)[0]
        return kind(f"{what}: access denied (403 {code}); the role in use needs {ACTIONS[operation]} on {bucket}")
    if status == 404:
        return kind(f"{what}: no such object (404 {code}); was it removed after the listing?")
    if status == 412:
        return kind(f"{what}: was replaced while it was being read (412); start again when the data is complete")
    if status == 416:
        return kind(f"{what}: is shorter than it should be (416); it has been replaced")
    if (status in (301, 307, 400) and region) or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return kind(f"{what}: the bucket is in another region ({status} {code}); set AWS_REGION={region or '...'}")
    if type(error).__name__ == "NoCredentialsError":
        return kind(f"{what}: no AWS credentials found; set AWS_PROFILE, or give the machine a role")
    return kind(f"{what}: S3 does not answer as it should ({one_line(error)})")
