"""Ready estimators of SageMaker's SDK v2 and trainers of SDK v3, for notebooks."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError
from smp_train.launch.sagemaker.job import SMP, TORCH, Job, build, default_output, region_of
from smp_train.launch.sagemaker.request import ENTRY, request, stage
from smp_train.launch.spec import warn

Flags = Sequence[str] | Mapping[str, Any]
"""Training flags, as on a command line or as a mapping of hyperparameters."""


def _prepare(
    flags: Flags, options: Mapping[str, Any], session: Any, source_dir: str | Path | None, region: str | None = None,
    encode: Callable[[Any], str] = json.dumps,
) -> tuple[Job, dict[str, Any], Path]:  # fmt: skip
    """Return (job, its request, folder with the staged code) for an SDK, whose ``session`` names a bucket.

    A job that SageMaker would refuse is refused here, before the SDK uploads anything.
    """
    region = region or region_of(session)
    if not region:
        raise ConfigError("no AWS region: give region= or a session of one, or set AWS_DEFAULT_REGION")
    job = build(flags, copy_to=default_output(options.get("role"), region, session), **options)
    code = f"{job.options.output or 's3://bucket'}/source/sourcedir.tar.gz"
    body = request(job, region=region, name=f"{job.base_name}-20000101-000000", code=code, encode=encode)
    warn(job.warnings)
    return job, body, stage(Path(source_dir or tempfile.mkdtemp(prefix="smp-train-source-")))


def estimator(
    flags: Flags, *, source_dir: str | Path | None = None, sagemaker_session: Any = None, **options: Any
) -> Any:
    """Return a ready `sagemaker.pytorch.PyTorch`; its ``fit()`` starts the job, by default on the job's channels.

    Without ``output`` the SDK takes the bucket of its session, also for checkpoints, in a folder of the run's name: a
    run that is started again resumes from it. Trials of a tuner share a name: give them a ``checkpoint_dir`` on their
    instance (such as /tmp/checkpoints), and ``inputs(...)`` to the tuner's ``fit``.

    Args:
        flags: training flags, as on a command line or as a mapping of hyperparameters.
        source_dir: an empty folder to stage the code in; by default a temporary folder.
        sagemaker_session: a `sagemaker.Session`; by default the SDK's.
        options: options of `smp-train launch sagemaker`, by name.

    Raises:
        ConfigError: as `build` does, and without SageMaker's SDK v2.
    """
    try:
        from sagemaker import Session
        from sagemaker.pytorch import PyTorch
    except ImportError:
        raise ConfigError(
            "SageMaker's SDK v2 is not here; pip install 'sagemaker>=2.233,<3', or use model_trainer with SDK v3"
        ) from None
    session = sagemaker_session or Session()  # the SDK's configuration may name its bucket
    job, body, folder = _prepare(flags, options, session, source_dir)
    settings = job.options
    modelparallel = {"modelparallel": {"enabled": True, "parameters": job.mp_parameters}}
    ready = PyTorch(
        entry_point=ENTRY, source_dir=str(folder), sagemaker_session=session, role=settings.role,
        base_job_name=job.base_name, image_uri=settings.image, **({} if settings.image else SMP if job.smp else TORCH),
        distribution={"torch_distributed": {"enabled": True}, **({"smdistributed": modelparallel} if job.smp else {})},
        hyperparameters=job.hyperparameters, environment=job.environment or None, tags=body.get("Tags"),
        instance_type=job.instance_type, instance_count=settings.instance_count, volume_size=settings.volume_gb,
        keep_alive_period_in_seconds=settings.keep_alive, max_run=settings.max_run, max_wait=settings.max_wait,
        use_spot_instances=settings.spot, max_retry_attempts=settings.retries,
        checkpoint_s3_uri=job.checkpoint_config.get("S3Uri"),
        checkpoint_local_path=job.checkpoint_config.get("LocalPath"),
        output_path=settings.output, code_location=settings.output.rstrip("/") if settings.output else None,
        subnets=settings.subnets or None, security_group_ids=settings.security_groups or None,
        metric_definitions=body["AlgorithmSpecification"]["MetricDefinitions"], enable_sagemaker_metrics=True,
        debugger_hook_config=False, disable_profiler=True,
    )  # fmt: skip
    ready.smp_train_job = job
    ready.fit = functools.partial(_fit, ready)
    return ready


def _fit(ready: Any, channels: Any = None, *more: Any, **options: Any) -> Any:
    """Call the SDK's ``fit``, by default with the job's channels; the service refuses an empty list."""
    channels = options.pop("inputs", channels)
    return type(ready).fit(ready, (inputs(ready) if channels is None else channels) or None, *more, **options)


def inputs(ready: Any) -> dict[str, Any]:
    """Return the channels that the ``fit`` of an `estimator` takes by default; add to them as you like."""
    from sagemaker.inputs import FileSystemInput, TrainingInput

    options = ready.smp_train_job.options
    uris = {"train": options.train, "test": options.test}
    channels = {name: TrainingInput(uri, input_mode=options.input_mode) for name, uri in uris.items() if uri}
    if options.fsx:
        system, _, path = options.fsx.partition(":")
        channels[ready.smp_train_job.fsx_channel] = FileSystemInput(system, "FSxLustre", path, "rw")
    return channels


def model_trainer(
    flags: Flags, *, source_dir: str | Path | None = None, sagemaker_session: Any = None, region: str | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Return a ready `sagemaker.train.ModelTrainer`; ``model_trainer(...).train()`` starts the job.

    Arguments are those of `estimator`, for SDK v3: ``sagemaker_session`` is a
    `sagemaker.core.helper.session_helper.Session`; ``region`` is by default the session's, or AWS' configured region.

    Raises:
        ConfigError: as `build` does, for values that SDK v3 cannot carry, and without that SDK.
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
    job, body, folder = _prepare(flags, options, sagemaker_session, source_dir, region, _text)
    algorithm = body["AlgorithmSpecification"]
    spot = {"enable_managed_spot_training": True} if job.options.spot else {}

    def section(name: str, kind: Any, **more: Any) -> Any:
        """Return a part of the request as an object of the SDK, None if the request has no such part."""
        return kind(**_snake(body[name]), **more) if name in body else None

    trainer = ModelTrainer(
        sagemaker_session=sagemaker_session,
        role=job.options.role,
        base_job_name=job.base_name,
        training_image=algorithm["TrainingImage"],
        source_code=SourceCode(
            source_dir=str(folder), entry_script=ENTRY, requirements="requirements.txt", ignore_patterns=["__pycache__"]
        ),
        distributed=Torchrun(smp=SMP(**job.mp_parameters) if job.mp_parameters else None),
        hyperparameters=job.hyperparameters,
        environment=job.environment or {},
        compute=section("ResourceConfig", Compute, **spot),
        networking=section("VpcConfig", Networking),
        stopping_condition=section("StoppingCondition", shapes.StoppingCondition),
        checkpoint_config=section("CheckpointConfig", shapes.CheckpointConfig),
        output_data_config=section("OutputDataConfig", shapes.OutputDataConfig) if job.options.output else None,
        input_data_config=[shapes.Channel(**_snake(item)) for item in body.get("InputDataConfig", [])],
        tags=[shapes.Tag(**_snake(item)) for item in body.get("Tags", [])] or None,
    )
    metrics = [shapes.MetricDefinition(**_snake(item)) for item in algorithm["MetricDefinitions"]]
    trainer = trainer.with_metric_definitions(metrics)
    retries = section("RetryStrategy", shapes.RetryStrategy)
    return trainer.with_retry_strategy(retries) if retries else trainer


def _text(value: Any) -> str:
    """Return a hyperparameter as SDK v3 writes it; its container puts it between single quotes of a shell."""
    text = value if isinstance(value, str) else json.dumps(value)
    if "'" in text:
        raise ConfigError(f"{value!r}: SDK v3 cannot pass a value with a single quote; use estimator (SDK v2)")
    return text


def _snake(value: Any) -> Any:
    """Return a part of a request with the names of the SDK's classes: s3_uri for S3Uri."""
    if isinstance(value, list):
        return [_snake(item) for item in value]
    if not isinstance(value, dict):
        return value
    split = {name: re.sub(r"(?<=[a-z0-9])([A-Z])|(?<=[A-Z])([A-Z])(?=[a-z])", r"_\1\2", name) for name in value}
    return {split[name].lower(): _snake(item) for name, item in value.items()}
