"""A job as a ready estimator of SageMaker's SDK v2, for notebooks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError
from smp_train.launch.sagemaker.job import CHECKPOINTS, SMP, TORCH, Job
from smp_train.launch.sagemaker.request import review
from smp_train.launch.sagemaker.source import ENTRY
from smp_train.telemetry.logging_utils import METRIC_DEFINITIONS


def estimator(
    words: Sequence[str] | Mapping[str, Any],
    *,
    source_dir: str | Path | None = None,
    sagemaker_session: Any = None,
    **options: Any,
) -> Any:
    """Return a ready `sagemaker.pytorch.PyTorch`; its ``fit()`` starts the job, on its own channels when given none.

    Without ``output`` the SDK takes the bucket of its session, and checkpoints are kept there as well, below the run's
    name: the same run started again goes on. Trials of a tuner have one name: give them a ``checkpoint_dir`` of their
    own instance (such as /tmp/checkpoints), and ``inputs(...)`` to the tuner's ``fit``.

    Args:
        words: training flags, as on a command line or as a mapping of hyperparameters.
        source_dir: an empty folder to stage the code in; a temporary one when not given.
        sagemaker_session: a `sagemaker.Session`; the SDK's default one when not given.
        options: those of `smp-train launch sagemaker`, by name.

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
    job, _, folder = review(words, options, session, source_dir=source_dir)
    image = {} if job.image else SMP if job.smp else TORCH
    modelparallel = {"modelparallel": {"enabled": True, "parameters": job.mp_parameters}}
    ready = PyTorch(
        entry_point=ENTRY,
        source_dir=str(folder),
        sagemaker_session=session,
        role=job.role,
        base_job_name=job.base_name,
        image_uri=job.image,
        framework_version=image.get("framework_version"),
        py_version=image.get("py_version"),
        distribution={"torch_distributed": {"enabled": True}, **({"smdistributed": modelparallel} if job.smp else {})},
        instance_type=job.instance_type,
        instance_count=job.instance_count,
        volume_size=job.volume_gb,
        keep_alive_period_in_seconds=job.keep_alive,
        max_run=job.max_run,
        max_wait=job.max_wait,
        use_spot_instances=job.spot,
        max_retry_attempts=job.retries,
        hyperparameters=dict(job.hyperparameters),
        environment=job.environment or None,
        checkpoint_s3_uri=job.checkpoints,
        checkpoint_local_path=CHECKPOINTS if job.checkpoints else None,
        output_path=job.output,
        code_location=job.output.rstrip("/") if job.output else None,
        subnets=list(job.subnets) or None,
        security_group_ids=list(job.security_groups) or None,
        tags=[{"Key": key, "Value": value} for key, value in job.tags.items()] or None,
        metric_definitions=[dict(one) for one in METRIC_DEFINITIONS],
        enable_sagemaker_metrics=True,
        debugger_hook_config=False,
        disable_profiler=True,
    )
    ready.smp_train_job = job
    ready.fit = functools.partial(_fit, ready)
    return ready


def _fit(ready: Any, channels: Any = None, *more: Any, **options: Any) -> Any:
    """Replace the SDK's ``fit``: the job's own channels where none are given; the service refuses an empty list."""
    channels = options.pop("inputs", channels)
    return type(ready).fit(ready, (inputs(ready) if channels is None else channels) or None, *more, **options)


def inputs(ready: Any) -> dict[str, Any]:
    """Return the channels of an `estimator`, which its ``fit`` takes when it is given none; add to them as you like."""
    from sagemaker.inputs import FileSystemInput, TrainingInput

    job: Job = ready.smp_train_job
    places = {"train": job.train, "test": job.test}
    found = {name: TrainingInput(uri, input_mode=job.input_mode) for name, uri in places.items() if uri}
    if job.fsx:
        system, _, path = job.fsx.partition(":")
        found["fsx"] = FileSystemInput(system, "FSxLustre", path, "rw")
    return found
