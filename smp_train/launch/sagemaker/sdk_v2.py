"""A job as a ready estimator of SageMaker's SDK v2, for notebooks."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError
from smp_train.launch.sagemaker.job import CHECKPOINTS, SMP, TORCH, Job, build, own_place, region_of
from smp_train.launch.sagemaker.request import review
from smp_train.launch.sagemaker.source import ENTRY, stage
from smp_train.telemetry.logging_utils import METRIC_DEFINITIONS


def estimator(
    words: Sequence[str] | Mapping[str, Any],
    *,
    source_dir: str | Path | None = None,
    sagemaker_session: Any = None,
    **options: Any,
) -> Any:
    """Return a ready `sagemaker.pytorch.PyTorch`; its ``fit()`` starts the job, on its own channels when given none.

    Without ``output`` the SDK takes the bucket of its session, and there checkpoints are kept as well, below the run's
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
    sagemaker_session = sagemaker_session or Session()  # as the SDK would: its configuration may name a bucket
    region = region_of(sagemaker_session)
    if not region:
        raise ConfigError("no AWS region: give a session of one, or set AWS_DEFAULT_REGION")
    job = build(words, keep_in=own_place(options.get("role"), region, sagemaker_session), **options)
    review(job, region)
    folder = stage(Path(source_dir) if source_dir else Path(tempfile.mkdtemp(prefix="smp-train-source-")))
    image: dict[str, Any] = {"image_uri": job.image} if job.image else dict(SMP if job.smp else TORCH)
    distribution: dict[str, Any] = {"torch_distributed": {"enabled": True}}
    if job.smp:
        distribution["smdistributed"] = {"modelparallel": {"enabled": True, "parameters": job.mp_parameters}}
    more: dict[str, Any] = {}
    if job.checkpoints:
        more |= {"checkpoint_s3_uri": job.checkpoints, "checkpoint_local_path": CHECKPOINTS}
    if job.output:
        more |= {"output_path": job.output, "code_location": job.output.rstrip("/")}
    if job.subnets:
        more |= {"subnets": list(job.subnets), "security_group_ids": list(job.security_groups)}
    if job.spot:
        more |= {"use_spot_instances": True, "max_wait": job.max_wait}
    if job.keep_alive:
        more["keep_alive_period_in_seconds"] = job.keep_alive
    if job.retries:
        more["max_retry_attempts"] = job.retries
    ready = PyTorch(
        entry_point=ENTRY,
        source_dir=str(folder),
        role=job.role,
        instance_type=job.instance_type,
        instance_count=job.instance_count,
        volume_size=job.volume_gb,
        max_run=job.max_run,
        base_job_name=job.base_name,
        hyperparameters=dict(job.hyperparameters),
        distribution=distribution,
        metric_definitions=[dict(one) for one in METRIC_DEFINITIONS],
        environment=dict(job.environment) or None,
        tags=[{"Key": key, "Value": value} for key, value in job.tags.items()] or None,
        enable_sagemaker_metrics=True,
        debugger_hook_config=False,
        disable_profiler=True,
        sagemaker_session=sagemaker_session,
        **image,
        **more,
    )
    ready.smp_train_job = job
    ready.fit = functools.partial(_fit, ready)
    return ready


def _fit(ready: Any, inputs: Any = None, *more: Any, **options: Any) -> Any:
    """Stand for the SDK's ``fit``: the job's own channels where none are given."""
    # Not even an empty list of channels may be sent; None sends none.
    return type(ready).fit(ready, (_channels(ready) if inputs is None else inputs) or None, *more, **options)


def inputs(ready: Any) -> dict[str, Any]:
    """Return the channels of an `estimator`, which its ``fit`` takes when it is given none; add to them as you like."""
    return _channels(ready)


def _channels(ready: Any) -> dict[str, Any]:
    from sagemaker.inputs import FileSystemInput, TrainingInput

    job: Job = ready.smp_train_job
    found: dict[str, Any] = {}
    for name, uri in (("train", job.train), ("test", job.test)):
        if uri:
            found[name] = TrainingInput(uri, input_mode=job.input_mode)
    if job.fsx:
        system, _, path = job.fsx.partition(":")
        found["fsx"] = FileSystemInput(system, "FSxLustre", path, "rw")
    return found
