"""A client for S3, or anything that speaks its protocol, and what its errors mean.

Credentials, region and endpoint are boto3's own business: ``AWS_PROFILE``, ``AWS_REGION``, ``AWS_ENDPOINT_URL`` and
the rest mean what they always mean. boto3 is imported when a client is made, not before.
"""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from typing import Any

from smp_train.errors import ConfigError, SmpTrainError, install

logger = logging.getLogger(__name__)

SCHEME = "s3://"
SILENT_SECONDS = 30.0
"""Between two warnings of a client that S3 does not answer."""


def is_s3(location: str) -> bool:
    """Tell whether a location is in S3."""
    return location.startswith(SCHEME)


def split(location: str, kind: type[SmpTrainError] = ConfigError) -> tuple[str, str]:
    """Return (bucket, key) of ``s3://bucket/key``. Raises ``kind`` where there is no bucket."""
    bucket, _, key = location[len(SCHEME) :].partition("/")
    if not bucket:
        raise kind(f"{location}: names no bucket; write s3://bucket/prefix")
    return bucket, key


def connect(*, attempts: int, connections: int, read_timeout: float, retries: str = "standard") -> Any:
    """Return a client that tries every request ``attempts`` times. It must not be shared over a fork.

    ``retries`` is botocore's mode: ``standard`` gives up early where many requests of the client fail at once,
    ``legacy`` does not.
    """
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
        client = boto3.session.Session(botocore_session=core).client(
            "s3",
            config=Config(
                max_pool_connections=connections,
                connect_timeout=10,
                read_timeout=read_timeout,
                retries={"mode": retries, "total_max_attempts": attempts},
            ),
        )
        client.meta.events.register("needs-retry.s3", _Retries(client.meta.endpoint_url, attempts).warn)
        return client
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"s3: no client can be made ({one_line(error)}); check the AWS variables") from None


class _Retries:
    """Warns where a request is about to be made again because S3 gave no answer."""

    def __init__(self, endpoint: str, attempts: int) -> None:
        self.endpoint, self.attempts = endpoint, attempts
        self.told = -SILENT_SECONDS

    def warn(self, caught_exception: BaseException | None = None, attempts: int = 1, **_: Any) -> None:
        """Handle botocore's event ``needs-retry``; what it returns, None, leaves the decision to botocore."""
        now = time.monotonic()
        if caught_exception is None or attempts >= self.attempts or now - self.told < SILENT_SECONDS:
            return
        self.told = now
        logger.warning(
            "%s does not answer (%s); trying again, up to %d times", self.endpoint, one_line(caught_exception),
            self.attempts,
        )  # fmt: skip


@lru_cache
def _loader() -> Any:
    from botocore.loaders import create_loader

    return create_loader()


def one_line(error: BaseException) -> str:
    """Return an error's text without line breaks."""
    return " ".join(str(error).split())


def explain(error: BaseException, what: str, action: str, kind: type[SmpTrainError]) -> SmpTrainError:
    """Turn boto3's error about ``what`` into a ``kind`` that says what to do; ``action`` is what it needs leave for."""
    response = getattr(error, "response", {}) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    region = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    bucket = split(what, kind)[0]
    if code in ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidToken"):
        return kind(f"{what}: the AWS credentials have expired ({code}); renew them and start again")
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch"):
        return kind(f"{what}: the AWS credentials are not valid ({code}); try: aws sts get-caller-identity")
    if code == "NoSuchBucket":
        return kind(f"{what}: no such bucket (404 {code}); check the name, and AWS_ENDPOINT_URL if it is set")
    if status == 403:
        return kind(f"{what}: access denied (403 {code}); the role in use needs {action} on {bucket}")
    if status == 404:
        return kind(f"{what}: no such object (404 {code}); was it removed after the listing?")
    if status == 412:
        return kind(f"{what}: was replaced while it was being read (412); start again when the data is complete")
    if (status in (301, 307, 400) and region) or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return kind(f"{what}: the bucket is in another region ({status} {code}); set AWS_REGION={region or '...'}")
    if type(error).__name__ == "NoCredentialsError":
        return kind(f"{what}: no AWS credentials found; set AWS_PROFILE, or give the machine a role")
    return kind(f"{what}: S3 does not answer as it should ({one_line(error)})")
