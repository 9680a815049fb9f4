"""A job as a ready trainer of SageMaker's SDK v3, for notebooks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError
from smp_train.launch.sagemaker.request import review
from smp_train.launch.sagemaker.source import ENTRY


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
        from sagemaker.core import shapes
        from sagemaker.core.helper.session_helper import Session
        from sagemaker.core.training.configs import Compute, Networking, SourceCode
        from sagemaker.train import ModelTrainer
        from sagemaker.train.distributed import SMP, Torchrun
    except ImportError:
        raise ConfigError(
            "SageMaker's SDK v3 is not here; pip install 'sagemaker-train>=1.20,<2' (not beside SDK v2), or use "
            "estimator with SDK v2"
        ) from None
    if sagemaker_session is None:
        import boto3

        boto_session = boto3.Session(region_name=region)
        sagemaker_session = Session(boto_session) if boto_session.region_name else None
    job, wanted, folder = review(words, options, sagemaker_session, source_dir=source_dir, region=region, encode=_text)
    spot = {"enable_managed_spot_training": True} if job.spot else {}

    def section(name: str, kind: Any, **more: Any) -> Any:
        """Return a part of the request as the SDK has it, None where the request has none."""
        return kind(**_snake(wanted[name]), **more) if name in wanted else None

    trainer = ModelTrainer(
        sagemaker_session=sagemaker_session,
        role=job.role,
        base_job_name=job.base_name,
        training_image=wanted["AlgorithmSpecification"]["TrainingImage"],
        source_code=SourceCode(
            source_dir=str(folder), entry_script=ENTRY, requirements="requirements.txt", ignore_patterns=["__pycache__"]
        ),
        distributed=Torchrun(smp=SMP(**job.mp_parameters) if job.mp_parameters else None),
        hyperparameters=dict(job.hyperparameters),
        environment=job.environment or {},
        compute=section("ResourceConfig", Compute, **spot),
        networking=section("VpcConfig", Networking),
        stopping_condition=section("StoppingCondition", shapes.StoppingCondition),
        checkpoint_config=section("CheckpointConfig", shapes.CheckpointConfig),
        output_data_config=section("OutputDataConfig", shapes.OutputDataConfig) if job.output else None,
        input_data_config=[shapes.Channel(**_snake(one)) for one in wanted.get("InputDataConfig", [])],
        tags=[shapes.Tag(**_snake(one)) for one in wanted.get("Tags", [])] or None,
    )
    metrics = wanted["AlgorithmSpecification"]["MetricDefinitions"]
    trainer = trainer.with_metric_definitions([shapes.MetricDefinition(**_snake(one)) for one in metrics])
    retries = section("RetryStrategy", shapes.RetryStrategy)
    return trainer.with_retry_strategy(retries) if retries else trainer


def _text(value: Any) -> str:
    """Return a hyperparameter as SDK v3 writes it; its container writes it between single quotes of a shell."""
    text = value if isinstance(value, str) else json.dumps(value)
    if "'" in text:
        raise ConfigError(f"{value!r}: SDK v3 cannot pass a value with a single quote; use estimator (SDK v2)")
    return text


def _snake(value: Any) -> Any:
    """Return a part of a request with its names as the SDK's classes have them: S3Uri as s3_uri."""
    if isinstance(value, list):
        return [_snake(one) for one in value]
    if not isinstance(value, dict):
        return value
    split = {name: re.sub(r"(?<=[a-z0-9])([A-Z])|(?<=[A-Z])([A-Z])(?=[a-z])", r"_\1\2", name) for name in value}
    return {split[name].lower(): _snake(one) for name, one in value.items()}
