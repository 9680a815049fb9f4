"""The CreateTrainingJob request of a job, and SageMaker's limits on it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smp_train.errors import ConfigError
from smp_train.launch.sagemaker.job import CHECKPOINTS, Job, in_channel
from smp_train.launch.sagemaker.source import ENTRY
from smp_train.telemetry.logging_utils import METRIC_DEFINITIONS


def request(
    job: Job, *, region: str, name: str, code: str, encode: Callable[[Any], str] = json.dumps
) -> dict[str, Any]:
    """Return the CreateTrainingJob request; ``code`` is the s3:// URI of the source archive.

    ``encode`` writes a hyperparameter as text, by default as SageMaker's SDK v2 does.

    Raises:
        ConfigError: where checkpoints would be lost with the instance, and where the request is outside of SageMaker's
            limits, if botocore is installed.
    """
    if any(map(in_channel, job.resolved.args.checkpoint_dir)) and not job.checkpoints:
        raise ConfigError(
            f"checkpoints in {CHECKPOINTS} would be lost with the instance: give --checkpoints s3://bucket/prefix, or "
            "--output s3://bucket/prefix, below which they are kept then"
        )
    toolkit: dict[str, Any] = {
        "sagemaker_program": ENTRY,
        "sagemaker_submit_directory": code,
        "sagemaker_job_name": name,
        "sagemaker_region": region,
        "sagemaker_container_log_level": 20,
        "sagemaker_torch_distributed_enabled": True,
        "sagemaker_instance_type": job.instance_type,
    }
    if job.smp:
        toolkit["sagemaker_distributed_dataparallel_enabled"] = False
        toolkit |= _given(mp_parameters=job.mp_parameters)
    hyper = {name: encode(value) for name, value in job.hyperparameters.items()}
    hyper |= {name: json.dumps(value) for name, value in toolkit.items()}
    wanted = _given(
        TrainingJobName=name,
        RoleArn=job.role,
        AlgorithmSpecification={
            "TrainingImage": job.image_uri(region),
            "TrainingInputMode": "File",
            "EnableSageMakerMetricsTimeSeries": True,
            "MetricDefinitions": [dict(one) for one in METRIC_DEFINITIONS],
        },
        HyperParameters=hyper,
        InputDataConfig=_channels(job),
        ResourceConfig=_given(
            InstanceType=job.instance_type, InstanceCount=job.instance_count, VolumeSizeInGB=job.volume_gb,
            KeepAlivePeriodInSeconds=job.keep_alive,
        ),
        StoppingCondition=_given(MaxRuntimeInSeconds=job.max_run, MaxWaitTimeInSeconds=job.max_wait),
        EnableManagedSpotTraining=job.spot,
        CheckpointConfig=job.checkpoint_config,
        OutputDataConfig={"S3OutputPath": job.output or code.rpartition("/")[0]},
        VpcConfig=_given(Subnets=list(job.subnets), SecurityGroupIds=list(job.security_groups)),
        Environment=dict(job.environment),
        Tags=[{"Key": key, "Value": value} for key, value in job.tags.items()],
        RetryStrategy=_given(MaximumRetryAttempts=job.retries),
        ProfilerConfig={"DisableProfiler": True},
    )  # fmt: skip
    check_limits(wanted)
    return wanted


def _given(**members: Any) -> dict[str, Any]:
    """Return the members of a request that have a value."""
    return {name: value for name, value in members.items() if value}


def warn(lines: Sequence[str]) -> None:
    """Print warnings on stderr."""
    for line in lines:
        print(f"smp-train: warning: {line}", file=sys.stderr)


def _channels(job: Job) -> list[dict[str, Any]]:
    channels: list[dict[str, Any]] = []
    for name, uri in (("train", job.train), ("test", job.test)):
        if uri:
            source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
            channels.append({"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": job.input_mode})
    if job.fsx:
        system, _, path = job.fsx.partition(":")
        source = {
            "FileSystemId": system, "FileSystemAccessMode": "rw", "FileSystemType": "FSxLustre", "DirectoryPath": path,
        }  # fmt: skip
        channels.append({"ChannelName": job.fsx_channel, "DataSource": {"FileSystemDataSource": source}})
    return channels


def check_limits(wanted: Mapping[str, Any]) -> None:
    """Compare a request with SageMaker's service model; `ConfigError` names the first member outside of a limit."""
    try:
        import botocore.session
    except ModuleNotFoundError:
        return
    model = botocore.session.get_session().get_service_model("sagemaker")
    _walk(model.operation_model("CreateTrainingJob").input_shape, wanted, "")


def _walk(shape: Any, value: Any, where: str) -> None:
    limits = shape.metadata
    is_number = isinstance(value, int | float)
    size = value if is_number else len(value)
    unit = "" if is_number else " characters" if isinstance(value, str) else " entries"
    for bound, wrong in (("min", size < limits.get("min", size)), ("max", size > limits.get("max", size))):
        if wrong and not isinstance(value, bool):
            raise ConfigError(f"{where}: {size}{unit}, SageMaker's {bound}imum is {limits[bound]}")
    if isinstance(value, str):
        pattern = limits.get("pattern")
        # Classes of Unicode (tags) are beyond Python's re.
        if pattern and "\\p{" not in pattern and not re.fullmatch(pattern, value):
            raise ConfigError(f"{where} {value[:80]!r}: does not match SageMaker's {pattern}")
        if limits.get("enum") and value not in limits["enum"]:
            raise ConfigError(f"{where} {value!r}: SageMaker does not have it")
    if shape.type_name == "structure":
        for name in value:
            if name not in shape.members:
                raise ConfigError(f"{where}.{name}: SageMaker does not have it")
            _walk(shape.members[name], value[name], f"{where}.{name}".lstrip("."))
        missing = [name for name in shape.required_members if name not in value]
        if missing:
            raise ConfigError(f"{where or 'the request'}: missing {', '.join(missing)}")
    elif shape.type_name == "list":
        for index, one in enumerate(value):
            _walk(shape.member, one, f"{where}[{index}]")
    elif shape.type_name == "map":
        for key, one in value.items():
            _walk(shape.key, key, f"{where} key {key}")
            _walk(shape.value, one, f"{where}.{key}")
