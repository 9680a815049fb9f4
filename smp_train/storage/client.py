"""One client per process for S3, or any server with its protocol, with one retry policy; and S3's errors in words.

Credentials, region and endpoint are configured as for boto3: ``AWS_PROFILE``, ``AWS_REGION``,
``AWS_ENDPOINT_URL`` and so on.
"""

from __future__ import annotations

import logging
import os
import time
from functools import lru_cache
from typing import Any

from smp_train.errors import ConfigError, SmpTrainError, install, one_line
from smp_train.storage.base import split

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Parallel requests per rank. One connection to S3 carries about 80 MB/s."""
ATTEMPTS = 8
"""Tries per request, over a minute or two: S3 throttles (503) when many readers or writers begin at once."""
READ_TIMEOUT_SECONDS = 30.0
"""A connection that is silent for so long is closed, and its request is repeated."""
SILENT_SECONDS = 30.0
"""Least interval between two warnings that S3 does not answer."""
IDENTITY = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_PROFILE")
"""A change of these variables makes a new client."""


def client() -> Any:
    """Return this process's client, which all threads share: making one costs more than many requests.

    A forked child gets a new client, since it must not use its parent's.
    """
    return _made(os.getpid(), READ_TIMEOUT_SECONDS, *(os.environ.get(name) for name in IDENTITY))


@lru_cache(maxsize=4)
def _made(process: int, read_timeout: float, *identity: str | None) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise ConfigError(f"s3:// needs the package boto3: {install('s3')}") from None
    config = Config(
        max_pool_connections=4 * AT_ONCE, connect_timeout=10, read_timeout=read_timeout,
        # The mode "standard" stops retrying when many of a client's requests fail at once.
        retries={"mode": "legacy", "total_max_attempts": ATTEMPTS},
    )  # fmt: skip
    try:
        # The default session cannot make clients in several threads, and keeps replaced credentials.
        made = boto3.session.Session().client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"s3: no client can be made ({one_line(error)}); check the AWS variables") from None
    warned = -SILENT_SECONDS

    def warn(caught_exception: BaseException | None = None, attempts: int = 1, **_: Any) -> None:
        """Handle botocore's event ``needs-retry``. Returning None leaves the decision to botocore."""
        nonlocal warned
        if caught_exception and attempts < ATTEMPTS and time.monotonic() - warned >= SILENT_SECONDS:
            warned = time.monotonic()
            logger.warning("%s does not answer (%s); trying again, up to %d times",
                           made.meta.endpoint_url, one_line(caught_exception), ATTEMPTS)  # fmt: skip

    made.meta.events.register("needs-retry.s3", warn)
    return made


def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of a request that S3 refuses, and of a broken connection."""
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    return BotoCoreError, ClientError, HTTPError, ConnectionError, TimeoutError


def code_of(error: BaseException | None) -> str:
    """Return S3's error code; empty if the error is not an answer from S3."""
    return str((getattr(error, "response", None) or {}).get("Error", {}).get("Code", ""))


PERMISSIONS = {"get": "GetObject", "head": "GetObject", "delete": "DeleteObject", "list": "ListBucket"}
"""The permission that an operation needs, by the operation's first word; all other operations need PutObject."""


def explain(error: BaseException, location: str, operation: str, kind: type[SmpTrainError]) -> SmpTrainError:
    """Return a ``kind`` of error with the location, the reason and a remedy for boto3's error in an operation."""
    answer = (getattr(error, "response", None) or {}).get("ResponseMetadata", {})
    code, status = code_of(error), answer.get("HTTPStatusCode")
    region = answer.get("HTTPHeaders", {}).get("x-amz-bucket-region")
    if code in ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidToken"):
        reason = f"the AWS credentials have expired ({code}); renew them and start again"
    elif code in ("InvalidAccessKeyId", "SignatureDoesNotMatch"):
        reason = f"the AWS credentials are not valid ({code}); try: aws sts get-caller-identity"
    elif code == "NoSuchBucket":
        reason = f"no such bucket (404 {code}); check the name, and AWS_ENDPOINT_URL if it is set"
    elif (status in (301, 307, 400) and region) or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        reason = f"the bucket is in another region ({status} {code}); set AWS_REGION={region or '...'}"
    elif type(error).__name__ == "NoCredentialsError":
        reason = "no AWS credentials found; set AWS_PROFILE, or give the machine a role"
    else:
        bucket, permission = split(location, kind)[0], PERMISSIONS.get(operation.partition("_")[0], "PutObject")
        reason = {
            403: f"access denied (403 {code}); the role in use needs s3:{permission} on {bucket}",
            404: f"no such object (404 {code}); was it removed after the listing?",
            412: "was replaced while it was being read (412); start again when the data is complete",
            416: "is shorter than it should be (416); it has been replaced",
        }.get(status, f"S3 does not answer as it should ({one_line(error)})")
    return kind(f"{location}: {reason}")
