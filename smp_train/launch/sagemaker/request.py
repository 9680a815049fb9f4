"""The CreateTrainingJob request of a job, and the source archive for the container."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError
from smp_train.launch.sagemaker.job import CHECKPOINTS, Job, in_channel
from smp_train.launch.spec import CODE_DIR
from smp_train.telemetry.logging_utils import METRIC_DEFINITIONS

ENTRY = "train.py"
ENTRY_SCRIPT = '''"""SageMaker's entry script: its toolkit starts this on every process, hyperparameters as flags."""

import sys

from smp_train.launch.entry import main

if __name__ == "__main__":
    sys.exit(main())
'''
REQUIREMENTS = (
    "transformers>=4.44.2,<6", "tokenizers", "safetensors", "orjson>=3.9", "pysimdjson>=6", "isal>=1.5", "tqdm",
    "pyyaml>=6",
)  # fmt: skip


def request(
    job: Job, *, region: str, name: str, code: str, encode: Callable[[Any], str] = json.dumps
) -> dict[str, Any]:
    """Return the CreateTrainingJob request; ``code`` is the s3:// URI of the source archive.

    ``encode`` writes a hyperparameter as text, by default as SageMaker's SDK v2 does.

    Raises:
        ConfigError: checkpoints would be lost with the instance.
    """
    options = job.options
    if any(map(in_channel, job.resolved.args.checkpoint_dir)) and not options.checkpoints:
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
        toolkit |= _without_empty(mp_parameters=job.mp_parameters)
    hyper = {name: encode(value) for name, value in job.hyperparameters.items()}
    hyper |= {name: json.dumps(value) for name, value in toolkit.items()}
    return _without_empty(
        TrainingJobName=name,
        RoleArn=options.role,
        AlgorithmSpecification={
            "TrainingImage": job.image_uri(region),
            "TrainingInputMode": "File",
            "EnableSageMakerMetricsTimeSeries": True,
            "MetricDefinitions": [dict(metric) for metric in METRIC_DEFINITIONS],
        },
        HyperParameters=hyper,
        InputDataConfig=_channels(job),
        ResourceConfig=_without_empty(
            InstanceType=job.instance_type, InstanceCount=options.instance_count, VolumeSizeInGB=options.volume_gb,
            KeepAlivePeriodInSeconds=options.keep_alive,
        ),
        StoppingCondition=_without_empty(
            MaxRuntimeInSeconds=options.max_run, MaxWaitTimeInSeconds=options.max_wait
        ),
        EnableManagedSpotTraining=options.spot,
        CheckpointConfig=job.checkpoint_config,
        OutputDataConfig={"S3OutputPath": options.output or code.rpartition("/")[0]},
        VpcConfig=_without_empty(Subnets=options.subnets, SecurityGroupIds=options.security_groups),
        Environment=job.environment,
        Tags=[dict(zip(("Key", "Value"), tag.partition("=")[::2], strict=True)) for tag in options.tags],
        RetryStrategy=_without_empty(MaximumRetryAttempts=options.retries),
        ProfilerConfig={"DisableProfiler": True},
    )  # fmt: skip


def _without_empty(**members: Any) -> dict[str, Any]:
    """Return the members of a request that have a value."""
    return {name: value for name, value in members.items() if value}


def _channels(job: Job) -> list[dict[str, Any]]:
    options = job.options
    channels: list[dict[str, Any]] = []
    for name, uri in (("train", options.train), ("test", options.test)):
        if uri:
            source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
            data = {"DataSource": {"S3DataSource": source}, "InputMode": options.input_mode}
            channels.append({"ChannelName": name, **data})
    if options.fsx:
        system, _, path = options.fsx.partition(":")
        source = {
            "FileSystemId": system, "FileSystemAccessMode": "rw", "FileSystemType": "FSxLustre", "DirectoryPath": path,
        }  # fmt: skip
        channels.append({"ChannelName": job.fsx_channel, "DataSource": {"FileSystemDataSource": source}})
    return channels


def stage(folder: Path) -> Path:
    """Write the files that the container needs into ``folder``, and return it."""
    package = CODE_DIR / "smp_train"
    shutil.copytree(package, folder / "smp_train", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    (folder / ENTRY).write_text(ENTRY_SCRIPT, encoding="utf-8")
    (folder / "requirements.txt").write_text("\n".join(REQUIREMENTS) + "\n", encoding="utf-8")
    return folder


def archive(folder: Path) -> bytes:
    """Return a staged folder as ``sourcedir.tar.gz``, the same bytes for the same contents."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return gzip.compress(plain.getvalue(), mtime=0)
