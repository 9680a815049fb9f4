"""`smp-train launch sagemaker`, and `estimator` for notebooks: one description of a SageMaker training job.

`Job` is checked without AWS. `request` is the CreateTrainingJob call that the command submits with boto3 alone;
`estimator` is the same job as a ready `sagemaker.pytorch.PyTorch` of SageMaker's SDK v2.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smp_train.arguments import Resolved, parse, validate
from smp_train.arguments.parse import read_command_line
from smp_train.errors import ConfigError
from smp_train.launch.instances import Instance, check_image, find
from smp_train.launch.options import COMMON, Option, help_text, split
from smp_train.launch.spec import CODE_DIR, read_env
from smp_train.telemetry.logging_utils import METRIC_DEFINITIONS

CHECKPOINTS = "/opt/ml/checkpoints"
FSX = "/opt/ml/input/data/fsx"
ENTRY = "train.py"
ENTRY_SCRIPT = '''"""SageMaker's entry script: its toolkit starts this on every process, hyperparameters as flags."""

import sys

from smp_train.launch.sagemaker_entry import main

if __name__ == "__main__":
    sys.exit(main())
'''
REQUIREMENTS = ("transformers>=4.44.2,<6", "tokenizers", "safetensors", "orjson>=3.9", "isal>=1.5", "tqdm", "pyyaml>=6")
# Newest PyTorch training image of SageMaker's SDK 2.257 that its torch_distributed accepts.
TORCH = {"framework_version": "2.8.0", "py_version": "py312"}
TORCH_IMAGE = "763104351884.dkr.ecr.{region}.amazonaws.com/pytorch-training:2.8.0-gpu-py312"
DAY = 24 * 3600


@dataclass(frozen=True)
class Job:
    """A training job, checked. Times are in seconds, sizes in GB; locations are ``s3://`` URIs.

    ``fsx`` is ``FILE-SYSTEM-ID:/mountname/folder``; it is mounted at ``/opt/ml/input/data/fsx`` on every instance.
    """

    base_name: str
    role: str
    instance: Instance
    instance_count: int
    hyperparameters: dict[str, Any]
    resolved: Resolved
    train: str | None = None
    test: str | None = None
    checkpoints: str | None = None
    output: str | None = None
    image: str | None = None
    fsx: str | None = None
    input_mode: str = "FastFile"
    max_run: int = 5 * DAY
    spot: bool = False
    max_wait: int | None = None
    keep_alive: int | None = None
    volume_gb: int = 400
    retries: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()

    @property
    def instance_type(self) -> str:
        """Name as SageMaker has it."""
        return f"ml.{self.instance.name}"


OPTIONS = (
    *COMMON,
    Option("role", "ARN of the execution role"),
    Option("instance_type", "instance type, such as ml.p5.48xlarge"),
    Option("instance_count", "number of instances", int, 1),
    Option("train", "s3:// prefix of the training shards: the channel train"),
    Option("test", "s3:// prefix of the validation shards: the channel test"),
    Option("checkpoints", "s3:// prefix that checkpoints are kept in, of this run alone; one instance only"),
    Option("output", "s3:// prefix for the code, the run folder and the model"),
    Option("fsx", "FSx for Lustre: FILE-SYSTEM-ID:/mountname/folder; paths below /opt/ml/input/data/fsx"),
    Option("image", "URI of the training image, where it is not SageMaker's PyTorch image"),
    Option("input_mode", "FastFile (streamed) or File (downloaded first)", default="FastFile"),
    Option("max_run", "longest time to train, in seconds", int, 5 * DAY),
    Option("spot", "use spot instances; needs --checkpoints or checkpoints on FSx", bool, False),
    Option("max_wait", "longest time to wait and train with --spot, in seconds (default: max_run + 1 day)", int),
    Option("keep_alive", "seconds to keep the instances for the next job (warm pool)", int),
    Option("volume_gb", "size of each instance's disk, in GB", int, 400),
    Option("retries", "starts after a fault of SageMaker's", int),
    Option("env", "environment variables of the container: NAME=VALUE", many=True),
    Option("tags", "tags of the job: KEY=VALUE", many=True),
    Option("subnets", "subnets of a VPC, which FSx needs", many=True),
    Option("security_groups", "security groups of a VPC, which FSx needs", many=True),
    Option("region", "AWS region; without it, the one that AWS is configured for"),
    Option("job_name", "first part of the job's name; without it, the run's name"),
)


def hyperparameters(words: Sequence[str]) -> dict[str, Any]:
    """Return training flags as hyperparameters by name; numbers are numbers, lists are lists."""
    found: dict[str, Any] = {}
    for given in read_command_line(words, []):
        found[given.name] = (
            [_plain(one) for one in given.value] if isinstance(given.value, list) else _plain(given.value)
        )
    return found


def _plain(text: Any) -> Any:
    try:
        value = json.loads(str(text))
    except ValueError:
        return str(text)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(text)


def build(words: Sequence[str] | Mapping[str, Any], **options: Any) -> Job:
    """Check training flags (words, or a mapping of hyperparameters) and launch options; return the job.

    ``options`` are those of `OPTIONS` by name; what is left out has its default.

    Raises:
        ConfigError: for everything that SageMaker or the training would refuse and that can be seen here.
    """
    values = {option.name: [] if option.many else option.default for option in OPTIONS}
    unknown = sorted(set(options) - set(values))
    if unknown:
        from smp_train.arguments.values import nearest

        raise ConfigError(f"unknown option {unknown[0]}{nearest(unknown[0], values)}")
    values |= {name: value for name, value in options.items() if value is not None}
    given = dict(words) if isinstance(words, Mapping) else hyperparameters(words)
    flags = [word for name, value in given.items() for word in _words(name, value)]
    if not values["instance_type"]:
        raise ConfigError("--instance_type is missing, such as ml.p5.48xlarge")
    instance = find(values["instance_type"])
    environ = {"SM_TRAINING_ENV": "{}", "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data"}
    environ |= {
        f"SM_CHANNEL_{name.upper()}": f"/opt/ml/input/data/{name}" for name in ("train", "test") if values[name]
    }
    resolved = parse(flags, environ)
    validate(resolved.args, values["instance_count"] * instance.gpus, instance.gpus)
    job = Job(
        base_name=_base_name(values["job_name"] or resolved.args.run_name),
        role=values["role"] or "",
        instance=instance,
        instance_count=values["instance_count"],
        hyperparameters=given,
        resolved=resolved,
        environment=read_env(_pairs(values["env"])),
        tags=dict(pair.partition("=")[::2] for pair in _pairs(values["tags"])),
        subnets=tuple(values["subnets"]),
        security_groups=tuple(values["security_groups"]),
        max_wait=values["max_wait"] or (values["max_run"] + DAY if values["spot"] else None),
        **{
            name: values[name]
            for name in (
                "train", "test", "checkpoints", "output", "image", "fsx", "input_mode", "max_run", "spot", "keep_alive",
                "volume_gb", "retries",
            )
        },
    )  # fmt: skip
    _check(job)
    return job


def _pairs(value: Any) -> list[str]:
    return [f"{name}={one}" for name, one in value.items()] if isinstance(value, Mapping) else list(value)


def _words(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]


def _base_name(text: str) -> str:
    """Return a text as the first part of a job name; the time needs 20 of the 63 characters."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:43].rstrip("-") or "smp-train"


def _check(job: Job) -> None:
    args = job.resolved.args
    if not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+", job.role):
        raise ConfigError(f"--role {job.role!r}: is not the ARN of a role, arn:aws:iam::123456789012:role/NAME")
    for name in ("train", "test", "checkpoints", "output"):
        place = getattr(job, name)
        if place and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", place):
            raise ConfigError(f"--{name} {place}: is not s3://bucket/prefix")
    if job.image:
        check_image(job.instance, job.image)
    if job.input_mode not in ("FastFile", "File"):
        raise ConfigError(f"--input_mode {job.input_mode}: is not FastFile or File")
    if job.fsx:
        if not re.fullmatch(r"fs-[0-9a-f]{8,}:/[A-Za-z0-9_-]+(/.*)?", job.fsx):
            raise ConfigError(f"--fsx {job.fsx}: is not fs-0123456789abcdef0:/mountname/folder")
        if not job.subnets or not job.security_groups:
            raise ConfigError("--fsx needs --subnets and --security_groups of the file system's VPC")
    on_fsx = all(place.startswith(FSX + "/") or place == FSX for place in args.checkpoint_dir)
    if on_fsx and not job.fsx:
        raise ConfigError(
            f"--checkpoint_dir {args.checkpoint_dir[0]} is on FSx: give --fsx FILE-SYSTEM-ID:/mountname/folder"
        )
    if job.instance_count > 1 and not on_fsx:
        raise ConfigError(
            f"{job.instance_count} instances share no disk, and a checkpoint is written by all of them: give --fsx and "
            f"--checkpoint_dir {FSX}/<folder>"
        )
    if job.spot and not (job.checkpoints or on_fsx):
        raise ConfigError(
            "--spot without --checkpoints starts from the beginning after every interruption; give --checkpoints"
        )
    if job.spot and job.keep_alive:
        raise ConfigError("--keep_alive: SageMaker has no warm pools of spot instances; give --spot or --keep_alive")
    if job.max_wait is not None and not job.spot:
        raise ConfigError("--max_wait is for --spot; --max_run limits the training")
    if job.max_wait is not None and job.max_wait < job.max_run:
        raise ConfigError(f"--max_wait {job.max_wait} is below --max_run {job.max_run}; it counts waiting and training")
    if job.keep_alive is not None and job.keep_alive > 21600:
        raise ConfigError(f"--keep_alive {job.keep_alive}: is above 21600 seconds")
    for source, name in ((job.train, "training_dir"), (job.test, "test_dir")):
        if source and job.resolved.given(name):
            raise ConfigError(f"--{name} and its channel both say where data is; give one of them")


def encoded(job: Job) -> dict[str, str]:
    """Return hyperparameters as SageMaker's SDK encodes them: JSON."""
    return {name: json.dumps(value) for name, value in job.hyperparameters.items()}


def request(job: Job, *, region: str, name: str, code: str) -> dict[str, Any]:
    """Return the CreateTrainingJob request; ``code`` is the s3:// URI of the source archive.

    Raises:
        ConfigError: where it is outside of SageMaker's limits, as far as botocore is installed to tell.
    """
    hyper = encoded(job) | {
        "sagemaker_program": ENTRY,
        "sagemaker_submit_directory": code,
        "sagemaker_job_name": name,
        "sagemaker_region": region,
        "sagemaker_container_log_level": "20",
        "sagemaker_torch_distributed_enabled": "true",
        "sagemaker_instance_type": job.instance_type,
    }
    hyper = {k: v if k not in _SDK_TEXTS else json.dumps(v) for k, v in hyper.items()}
    resources: dict[str, Any] = {
        "InstanceType": job.instance_type, "InstanceCount": job.instance_count, "VolumeSizeInGB": job.volume_gb,
    }  # fmt: skip
    if job.keep_alive:
        resources["KeepAlivePeriodInSeconds"] = job.keep_alive
    stopping = {"MaxRuntimeInSeconds": job.max_run}
    if job.max_wait:
        stopping["MaxWaitTimeInSeconds"] = job.max_wait
    wanted: dict[str, Any] = {
        "TrainingJobName": name,
        "RoleArn": job.role,
        "AlgorithmSpecification": {
            "TrainingImage": job.image or TORCH_IMAGE.format(region=region),
            "TrainingInputMode": "File",
            "EnableSageMakerMetricsTimeSeries": True,
            "MetricDefinitions": [dict(one) for one in METRIC_DEFINITIONS],
        },
        "HyperParameters": hyper,
        "ResourceConfig": resources,
        "StoppingCondition": stopping,
        "OutputDataConfig": {"S3OutputPath": job.output or code.rpartition("/")[0]},
        "ProfilerConfig": {"DisableProfiler": True},
    }
    if job.spot:
        wanted["EnableManagedSpotTraining"] = True
    channels = _channels(job)
    if channels:
        wanted["InputDataConfig"] = channels
    if job.checkpoints:
        wanted["CheckpointConfig"] = {"S3Uri": job.checkpoints, "LocalPath": CHECKPOINTS}
    if job.subnets or job.security_groups:
        wanted["VpcConfig"] = {"Subnets": list(job.subnets), "SecurityGroupIds": list(job.security_groups)}
    if job.environment:
        wanted["Environment"] = dict(job.environment)
    if job.tags:
        wanted["Tags"] = [{"Key": key, "Value": value} for key, value in job.tags.items()]
    if job.retries:
        wanted["RetryStrategy"] = {"MaximumRetryAttempts": job.retries}
    check_limits(wanted)
    return wanted


_SDK_TEXTS = frozenset(
    {
        "sagemaker_program",
        "sagemaker_submit_directory",
        "sagemaker_job_name",
        "sagemaker_region",
        "sagemaker_instance_type",
    }
)


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
        channels.append({"ChannelName": "fsx", "DataSource": {"FileSystemDataSource": source}})
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
    size = value if isinstance(value, int | float) else len(value)
    if not isinstance(value, bool):
        for bound, wrong in (("min", size < limits.get("min", size)), ("max", size > limits.get("max", size))):
            if wrong:
                unit = (
                    "" if isinstance(value, int | float) else (" characters" if isinstance(value, str) else " entries")
                )
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
            raise ConfigError(f"{where or 'the request'} lacks {', '.join(missing)}")
    elif shape.type_name == "list":
        for index, one in enumerate(value):
            _walk(shape.member, one, f"{where}[{index}]")
    elif shape.type_name == "map":
        for key, one in value.items():
            _walk(shape.key, key, f"{where} key {key}")
            _walk(shape.value, one, f"{where}.{key}")


def stage(folder: Path) -> Path:
    """Write what the container needs into ``folder``, nothing else of a checkout, and return it."""
    import shutil

    package = CODE_DIR / "smp_train"
    shutil.copytree(package, folder / "smp_train", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    (folder / ENTRY).write_text(ENTRY_SCRIPT, encoding="utf-8")
    (folder / "requirements.txt").write_text("\n".join(REQUIREMENTS) + "\n", encoding="utf-8")
    return folder


def archive(folder: Path) -> bytes:
    """Return a staged folder as ``sourcedir.tar.gz``, the same bytes for the same contents."""
    import gzip

    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return gzip.compress(plain.getvalue(), mtime=0)


def estimator(
    words: Sequence[str] | Mapping[str, Any],
    *,
    source_dir: str | Path | None = None,
    sagemaker_session: Any = None,
    **options: Any,
) -> Any:
    """Return a ready `sagemaker.pytorch.PyTorch`; ``estimator(...).fit(inputs(...))`` starts the job.

    Args:
        words: training flags, as on a command line or as a mapping of hyperparameters.
        source_dir: an empty folder to stage the code in; a temporary one when not given.
        sagemaker_session: a `sagemaker.Session`; the SDK's default one when not given.
        options: those of `smp-train launch sagemaker`, by name.

    Raises:
        ConfigError: as `build` does, and without SageMaker's SDK v2.
    """
    import tempfile

    try:
        from sagemaker.pytorch import PyTorch
    except ModuleNotFoundError:
        raise ConfigError("SageMaker's SDK v2 is not installed here; pip install 'sagemaker>=2.233,<3'") from None
    job = build(words, **options)
    folder = stage(Path(source_dir) if source_dir else Path(tempfile.mkdtemp(prefix="smp-train-source-")))
    image: dict[str, Any] = {"image_uri": job.image} if job.image else dict(TORCH)
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
        distribution={"torch_distributed": {"enabled": True}},
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
    return ready


def inputs(ready: Any) -> dict[str, Any]:
    """Return what to give to ``fit`` of an `estimator`: its channels."""
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


def _boto3() -> Any:
    try:
        import boto3
    except ModuleNotFoundError:
        raise ConfigError("boto3 is not installed here; pip install 'smp-train[s3]', or add --dry_run") from None
    return boto3


def check_account(job: Job, session: Any) -> list[str]:
    """Ask AWS whether role, data and places exist; return what could not be asked.

    Raises:
        ConfigError: for what does not exist.
    """
    from botocore.exceptions import ClientError

    unknown: list[str] = []
    s3, iam = session.client("s3"), session.client("iam")

    def ask(what: str, call: Any, **arguments: Any) -> Any:
        try:
            return call(**arguments)
        except ClientError as problem:
            code = problem.response["Error"]["Code"]
            if code in ("AccessDenied", "AccessDeniedException", "403"):
                unknown.append(f"{what}: may not be asked ({code})")
                return None
            raise ConfigError(f"{what}: {problem.response['Error'].get('Message') or code}") from None

    ask(f"role {job.role}", iam.get_role, RoleName=job.role.rpartition("/")[2])
    for name in ("train", "test", "checkpoints", "output"):
        place = getattr(job, name)
        if not place:
            continue
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        ask(f"--{name} {place}", s3.head_bucket, Bucket=bucket)
        if name in ("train", "test"):
            found = ask(f"--{name} {place}", s3.list_objects_v2, Bucket=bucket, Prefix=prefix, MaxKeys=1)
            if found is not None and not found.get("KeyCount"):
                raise ConfigError(f"--{name} {place}: there is nothing")
    return unknown


def main(words: Sequence[str]) -> int:
    """Run ``smp-train launch sagemaker`` and return its exit code."""
    if {"-h", "--help"} & set(words):
        usage = (
            "smp-train launch sagemaker --role ARN --instance_type ml.T --instance_count N [options] <training flags>"
        )
        print(help_text(usage, str(__doc__), OPTIONS))
        return 0
    options, training = split(words, OPTIONS)
    dry_run, check, region = (options.pop(name) for name in ("dry_run", "check", "region"))
    job = build(training, **options)
    if not job.output:
        raise ConfigError("--output is missing: an s3:// prefix for the code and the run folder")
    name = f"{job.base_name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    code = f"{job.output.rstrip('/')}/{name}/source/sourcedir.tar.gz"
    if dry_run:
        print(json.dumps(request(job, region=region or "us-west-2", name=name, code=code), indent=2))
        return 0
    session = _boto3().Session(region_name=region)
    if not session.region_name:
        raise ConfigError("no AWS region: give --region, or set AWS_DEFAULT_REGION")
    wanted = request(job, region=session.region_name, name=name, code=code)
    for line in check_account(job, session):
        print(f"smp-train: warning: {line}", file=sys.stderr)
    print(f"smp-train: {job.instance_count} x {job.instance_type}: role, data and limits are in order", file=sys.stderr)
    if check:
        return 0
    submit(wanted, session, code)
    console = (
        f"https://{session.region_name}.console.aws.amazon.com/sagemaker/home?region={session.region_name}#/jobs/{name}"
    )
    print(f"submitted {name}")
    print(f"log:    {console}")
    print(f"follow: aws logs tail /aws/sagemaker/TrainingJobs --log-stream-name-prefix {name} --follow")
    print(f"cancel: aws sagemaker stop-training-job --training-job-name {name}")
    return 0


def submit(wanted: Mapping[str, Any], session: Any, code: str) -> None:
    """Upload the code and create the training job."""
    import tempfile

    bucket, _, key = code.removeprefix("s3://").partition("/")
    with tempfile.TemporaryDirectory() as folder:
        session.client("s3").put_object(Bucket=bucket, Key=key, Body=archive(stage(Path(folder))))
    session.client("sagemaker").create_training_job(**wanted)
