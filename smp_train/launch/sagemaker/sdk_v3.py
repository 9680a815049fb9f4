"""A job as a ready trainer of SageMaker's SDK v3, for notebooks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError
from smp_train.launch.sagemaker.job import CHECKPOINTS, Job, build, own_place, region_of
from smp_train.launch.sagemaker.request import review
from smp_train.launch.sagemaker.source import ENTRY, stage
from smp_train.telemetry.logging_utils import METRIC_DEFINITIONS


def model_trainer(
    words: Sequence[str] | Mapping[str, Any],
    *,
    source_dir: str | Path | None = None,
    sagemaker_session: Any = None,
    region: str | None = None,
    **options: Any,
) -> Any:
    """Return a ready `sagemaker.train.ModelTrainer`; ``model_trainer(...).train()`` starts the job.

    Args:
        words: training flags, as on a command line or as a mapping of hyperparameters.
        source_dir: an empty folder to stage the code in; a temporary one when not given.
        sagemaker_session: a `sagemaker.core.helper.session_helper.Session`; the SDK's default one when not given.
        region: the AWS region, which the image is in; without it, that of the session, or of AWS' configuration.
        options: those of `smp-train launch sagemaker`, by name.

    Raises:
        ConfigError: as `build` does, for what SDK v3 cannot carry, and without that SDK.
    """
    try:
        from sagemaker.core.helper.session_helper import Session
        from sagemaker.core.shapes import (
            CheckpointConfig,
            MetricDefinition,
            OutputDataConfig,
            RetryStrategy,
            StoppingCondition,
            Tag,
        )
        from sagemaker.core.training.configs import Compute, Networking, SourceCode
        from sagemaker.train import ModelTrainer
        from sagemaker.train.distributed import SMP, Torchrun
    except ImportError:
        raise ConfigError(
            "SageMaker's SDK v3 is not here; pip install 'sagemaker-train>=1.20,<2' (not beside SDK v2), or use "
            "estimator with SDK v2"
        ) from None
    region = region or region_of(sagemaker_session)
    if not region:
        raise ConfigError("no AWS region: give region=, or set AWS_DEFAULT_REGION")
    if sagemaker_session is None:
        # As the SDK would, but in this region: its configuration may name a bucket.
        import boto3

        sagemaker_session = Session(boto3.Session(region_name=region))
    job = build(words, keep_in=own_place(options.get("role"), region, sagemaker_session), **options)
    _check(job)
    review(job, region, encode=lambda value: value if isinstance(value, str) else json.dumps(value))
    folder = stage(Path(source_dir) if source_dir else Path(tempfile.mkdtemp(prefix="smp-train-source-")))
    more: dict[str, Any] = {}
    if job.checkpoints:
        more["checkpoint_config"] = CheckpointConfig(s3_uri=job.checkpoints, local_path=CHECKPOINTS)
    if job.output:
        more["output_data_config"] = OutputDataConfig(s3_output_path=job.output)
    if job.subnets:
        more["networking"] = Networking(subnets=list(job.subnets), security_group_ids=list(job.security_groups))
    if job.environment:
        more["environment"] = dict(job.environment)
    if job.tags:
        more["tags"] = [Tag(key=key, value=value) for key, value in job.tags.items()]
    waiting = {"max_wait_time_in_seconds": job.max_wait} if job.max_wait else {}
    compute: dict[str, Any] = {"enable_managed_spot_training": True} if job.spot else {}
    if job.keep_alive:
        compute["keep_alive_period_in_seconds"] = job.keep_alive
    trainer = ModelTrainer(
        sagemaker_session=sagemaker_session,
        role=job.role,
        base_job_name=job.base_name,
        training_image=job.image_uri(region),
        source_code=SourceCode(
            source_dir=str(folder), entry_script=ENTRY, requirements="requirements.txt", ignore_patterns=["__pycache__"]
        ),
        distributed=Torchrun(smp=SMP(**job.mp_parameters) if job.mp_parameters else None),
        compute=Compute(
            instance_type=job.instance_type,
            instance_count=job.instance_count,
            volume_size_in_gb=job.volume_gb,
            **compute,
        ),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=job.max_run, **waiting),
        hyperparameters=dict(job.hyperparameters),
        input_data_config=_channels(job),
        **more,
    ).with_metric_definitions([MetricDefinition(name=one["Name"], regex=one["Regex"]) for one in METRIC_DEFINITIONS])
    return trainer.with_retry_strategy(RetryStrategy(maximum_retry_attempts=job.retries)) if job.retries else trainer


def _check(job: Job) -> None:
    """Refuse what the container's side of SDK v3 would break: it writes values between single quotes of a shell."""
    for name, value in job.hyperparameters.items():
        if "'" in json.dumps(value):
            raise ConfigError(
                f"--{name} {value!r}: SDK v3 cannot pass a value with a single quote; use estimator (SDK v2)"
            )


def _channels(job: Job) -> list[Any]:
    from sagemaker.core.shapes import Channel, DataSource, FileSystemDataSource, S3DataSource

    found = []
    for name, uri in (("train", job.train), ("test", job.test)):
        if uri:
            source = S3DataSource(s3_data_type="S3Prefix", s3_uri=uri, s3_data_distribution_type="FullyReplicated")
            found.append(
                Channel(channel_name=name, data_source=DataSource(s3_data_source=source), input_mode=job.input_mode)
            )
    if job.fsx:
        system, _, path = job.fsx.partition(":")
        volume = FileSystemDataSource(
            file_system_id=system, file_system_access_mode="rw", file_system_type="FSxLustre", directory_path=path
        )
        found.append(Channel(channel_name="fsx", data_source=DataSource(file_system_data_source=volume)))
    return found
