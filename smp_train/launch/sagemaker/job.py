"""A SageMaker training job, described once and checked without AWS."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_train.arguments import Resolved, parse
from smp_train.arguments.aliases import NAMES
from smp_train.arguments.mp_parameters import SMP_KEYS
from smp_train.arguments.parse import canonical, read_command_line
from smp_train.arguments.training_flags import NODE_LOCAL
from smp_train.arguments.values import nearest
from smp_train.errors import ConfigError
from smp_train.launch.flags import as_words, inline_files
from smp_train.launch.images import check_image
from smp_train.launch.instances import Instance, find
from smp_train.launch.options import COMMON, Option
from smp_train.launch.spec import check_run, read_env

CHECKPOINTS = "/opt/ml/checkpoints"
INPUT = "/opt/ml/input/data"
FSX = f"{INPUT}/fsx"
SCRATCH = "/tmp/"
"""Checkpoints below this folder may be lost with the instance, as for the trials of a tuner."""
# Newest PyTorch training image of SageMaker's SDK 2.257 that its torch_distributed accepts.
TORCH = {"framework_version": "2.8.0", "py_version": "py312"}
TORCH_IMAGE = "pytorch-training:2.8.0-gpu-py312"
# SMP v2's last release; its images are in an account of their own, and not in every region.
SMP = {"framework_version": "2.5.1", "py_version": "py311"}
SMP_IMAGE = "smdistributed-modelparallel:2.5.1-gpu-py311-cu124"
REGISTRIES = Path(__file__).with_name("registries.json")
ECR_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/(?P<name>[^:@]+)(:(?P<tag>[\w.-]+))?"
)
DAY = 24 * 3600


@dataclass(frozen=True)
class Job:
    """A training job, checked and complete. Most fields are options of the same name, described in `OPTIONS`."""

    base_name: str
    role: str
    instance: Instance
    instance_count: int
    hyperparameters: dict[str, Any]
    resolved: Resolved
    train: str | None
    test: str | None
    checkpoints: str | None
    output: str | None
    image: str | None
    fsx: str | None
    input_mode: str
    max_run: int
    spot: bool
    max_wait: int | None
    keep_alive: int | None
    volume_gb: int
    retries: int | None
    environment: dict[str, str]
    tags: dict[str, str]
    subnets: Sequence[str]
    security_groups: Sequence[str]

    @property
    def instance_type(self) -> str:
        """Name as SageMaker has it."""
        return f"ml.{self.instance.name}"

    @property
    def smp(self) -> bool:
        """Whether this runs on the SMP backend, in SMP's own container."""
        return bool(self.resolved.args.backend == "smp")

    @property
    def mp_parameters(self) -> dict[str, Any]:
        """SMP's parameters as this job sets them; the others have SMP's or our defaults."""
        args, given = self.resolved.args, self.resolved.given
        return {key: getattr(args, key) for key in SMP_KEYS if given(key)} if self.smp else {}

    @property
    def fsx_channel(self) -> str:
        """Name of the channel that mounts FSx: ``train`` if a flag has a path below it, as in AWS's notebooks."""
        args = self.resolved.args
        paths = [*args.checkpoint_dir, *(args.training_dir or []), *(args.test_dir or [])]
        return "train" if not self.train and any(path.startswith(f"{INPUT}/train/") for path in paths) else "fsx"

    def on_fsx(self, folder: str) -> bool:
        """Return whether a folder is below the mount of FSx."""
        return f"{folder}/".startswith(f"{INPUT}/{self.fsx_channel}/")

    @property
    def lost_checkpoints(self) -> list[str]:
        """Folders of checkpoints that are on the instance's own disk alone: they end with the job."""
        return [
            folder
            for folder in self.resolved.args.checkpoint_dir
            if not ("://" in folder or in_channel(folder) or self.on_fsx(folder) or folder.startswith(NODE_LOCAL))
        ]

    @property
    def checkpoint_config(self) -> dict[str, str]:
        """The request's CheckpointConfig: a local folder and the S3 prefix that SageMaker keeps a copy of it in.

        It is the run's own folder, because SageMaker downloads the whole prefix at each start.
        """
        args = self.resolved.args
        folders = [os.path.normpath(f"{one}/{args.run_name}") for one in args.checkpoint_dir if in_channel(one)]
        local = os.path.commonpath(folders or [CHECKPOINTS])
        copy = (self.checkpoints or "").rstrip("/") + local.removeprefix(CHECKPOINTS)
        return {"S3Uri": copy, "LocalPath": local} if self.checkpoints else {}

    @property
    def warnings(self) -> list[str]:
        """Warnings for the person who submits the job."""
        why = "on the instance's own disk; these checkpoints are lost when the job ends"
        return [f"--checkpoint_dir {folder}: {why}" for folder in self.lost_checkpoints]

    def image_uri(self, region: str) -> str:
        """Return the image: the one given, or AWS' for the backend. SageMaker pulls from the job's region only."""
        found = ECR_IMAGE.fullmatch(self.image or "")
        if found and found["region"] != region:
            raise ConfigError(
                f"--image {self.image}: is in {found['region']} and the job in {region}; push it to a repository there"
            )
        if self.image:
            return self.image
        image = SMP_IMAGE if self.smp else TORCH_IMAGE
        name = image.partition(":")[0]
        accounts = json.loads(REGISTRIES.read_text(encoding="utf-8"))[name]
        if region not in accounts:
            raise ConfigError(
                f"AWS has no image {name} in {region}; it has in {', '.join(sorted(accounts))}: give one of them as "
                "--region, or an --image of your own"
            )
        domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        return f"{accounts[region]}.dkr.ecr.{region}.{domain}/{image}"


OPTIONS = (
    *COMMON,
    Option("role", "ARN of the execution role"),
    Option("instance_type", "instance type, such as ml.p5.48xlarge"),
    Option("instance_count", "number of instances", int, 1),
    Option("train", "s3:// prefix of the training shards: the channel train"),
    Option("test", "s3:// prefix of the validation shards: the channel test"),
    Option("checkpoints", "s3:// prefix that has a folder of checkpoints for each run; without it, below --output"),
    Option("output", "s3:// prefix for the code, the run folder and the model; without it, SageMaker's own bucket"),
    Option("fsx", f"FSx for Lustre: FILE-SYSTEM-ID:/mountname/folder; paths below {FSX}, or {INPUT}/train"),
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
    given = {one.name: one.value for one in read_command_line(words, [])}
    return {
        name: [_plain(one) for one in value] if isinstance(value, list) else _plain(value)
        for name, value in given.items()
    }


def _plain(text: Any) -> Any:
    try:
        value = json.loads(str(text))
    except ValueError:
        return str(text)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(text)


def own_place(role: str | None, region: str | None, session: Any = None) -> str | None:
    """Return the default output prefix: the bucket and prefix of an SDK's session, or the SDKs' own default bucket.

    None where it cannot be determined without a request to AWS.
    """
    account = re.match(r"arn:aws[a-z-]*:iam::(\d{12}):", role or "")
    bucket = getattr(session, "_default_bucket_name_override", None)  # the public method creates a bucket
    if bucket is None and account and region:
        bucket = f"sagemaker-{region}-{account[1]}"
    prefix = getattr(session, "default_bucket_prefix", None)
    return "/".join(filter(None, (f"s3://{bucket}", prefix, "smp-train"))) if bucket else None


def region_of(session: Any) -> str | None:
    """Return the region of a session of one of the SDKs, or the one AWS is configured for."""
    region = getattr(session, "boto_region_name", None)
    if region is None:
        import boto3

        region = boto3.Session().region_name
    return str(region) if region else None


def build(words: Sequence[str] | Mapping[str, Any], *, keep_in: str | None = None, **options: Any) -> Job:
    """Check training flags (words, or a mapping of hyperparameters) and launch options; return the job.

    ``options`` are those of `OPTIONS` by name; what is left out has its default. ``keep_in`` is the ``s3://`` prefix
    below which checkpoints are kept where the options name none.

    Raises:
        ConfigError: for everything that SageMaker or the training would refuse, as far as it is known here.
    """
    values = {option.name: [] if option.many else option.default for option in OPTIONS}
    for name in sorted(set(options) - set(values)):
        raise ConfigError(f"unknown option {name}{nearest(name, values)}")
    values |= {name: value for name, value in options.items() if value is not None}
    for option in OPTIONS:
        value = values[option.name]
        if option.kind is int and value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"--{option.name} {value!r}: expects a number, at least 1")
    given = dict(words) if isinstance(words, Mapping) else hyperparameters(words)
    flags = [word for name, value in given.items() for word in as_words(name, value)]
    if {"config", "smp_config"} & {canonical(name) for name in given}:
        flags = inline_files(flags)
        given = hyperparameters(flags)
    if not values["instance_type"]:
        raise ConfigError("--instance_type is missing, such as ml.p5.48xlarge")
    instance, count = find(values["instance_type"]), values["instance_count"]
    environ = {"SM_TRAINING_ENV": "{}", "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data"}
    channels = [name for name in ("train", "test") if values[name]]
    environ |= {f"SM_CHANNEL_{name.upper()}": f"/opt/ml/input/data/{name}" for name in channels}
    resolved = parse(flags, environ)
    if not resolved.args.run_name:
        given = {**given, "run_name": resolved.args.label}
        flags.append(f"--run_name={resolved.args.label}")
        resolved = parse(flags, environ)
    own, values["checkpoints"] = _checkpoint_folders(resolved, values, keep_in)
    if own:
        others = {name: value for name, value in given.items() if NAMES[canonical(name)].name != "checkpoint_dir"}
        given = {**others, "checkpoint_dir": [own]}
        resolved = parse([word for name, value in given.items() for word in as_words(name, value)], environ)
    check_run(resolved, values["image"], instance, count, instance.gpus)
    if resolved.args.backend == "smp":
        # They travel as SMP's own parameter set, which SMP reads itself.
        given = {name: value for name, value in given.items() if canonical(name) != "mp_parameters"}
    name = re.sub(r"[^A-Za-z0-9]+", "-", values["job_name"] or resolved.args.run_name).strip("-")
    values |= {
        "base_name": name[:43].rstrip("-") or "smp-train",  # the time needs 20 of the 63 characters
        "role": values["role"] or "",
        "instance": instance,
        "hyperparameters": given,
        "resolved": resolved,
        "environment": read_env(_pairs(values["env"])),
        "tags": dict(pair.partition("=")[::2] for pair in _pairs(values["tags"])),
        "max_wait": values["max_wait"] or (values["max_run"] + DAY if values["spot"] else None),
    }
    job = Job(**{one.name: values[one.name] for one in dataclasses.fields(Job)})
    for problem in _problems(job):
        raise ConfigError(problem)
    return job


def _checkpoint_folders(
    resolved: Resolved, values: Mapping[str, Any], keep_in: str | None
) -> tuple[str | None, str | None]:
    """Return (--checkpoint_dir to set, prefix that SageMaker copies a local folder to), either or none of them.

    One instance writes to its disk, and SageMaker copies. Several write to what all of them see: FSx, or S3 itself;
    AWS's notebooks name the local folder for several instances too.
    """
    output = values["output"] or keep_in
    several = values["instance_count"] > 1
    given = resolved.given("checkpoint_dir") and not (several and resolved.args.checkpoint_dir == [CHECKPOINTS])
    if given and not any(map(in_channel, resolved.args.checkpoint_dir)):
        return None, values["checkpoints"]
    if values["fsx"] and not values["checkpoints"] and not given:
        return f"{FSX}/checkpoints", None
    folder = values["checkpoints"] or (f"{output.rstrip('/')}/checkpoints" if output else None)
    return (folder, None) if several and not given else (None, folder)


def in_channel(folder: str) -> bool:
    """Return whether a folder is the one that SageMaker copies to S3, or below it."""
    return "://" not in folder and Path(CHECKPOINTS) in (path := Path(os.path.normpath(folder)), *path.parents)


def _pairs(value: Any) -> list[str]:
    return [f"{name}={one}" for name, one in value.items()] if isinstance(value, Mapping) else list(value)


def _problems(job: Job) -> Iterator[str]:
    """Yield what SageMaker would refuse, and what would lose checkpoints."""
    args = job.resolved.args
    if not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+", job.role):
        said = f"--role {job.role!r}: is not" if job.role else "--role is missing:"
        yield f"{said} the ARN of a role, arn:aws:iam::123456789012:role/NAME"
    for name in ("train", "test", "checkpoints", "output"):
        uri = getattr(job, name)
        if uri and not re.match(r"s3://[^/]", uri):
            yield f"--{name} {uri}: is not s3://bucket/prefix"
        bucket = (uri or "").removeprefix("s3://").partition("/")[0]
        if uri and not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
            yield (
                f"--{name} {uri}: {bucket} is not the name of a bucket, which has 3 to 63 small letters, digits, "
                "dots and dashes"
            )
    check_image(job.instance, job.image or job.image_uri("us-west-2"), args.backend)
    if job.input_mode not in ("FastFile", "File"):
        yield f"--input_mode {job.input_mode}: is not FastFile or File"
    if job.fsx and not re.fullmatch(r"fs-[0-9a-f]{8,}:/[A-Za-z0-9_-]+(/.*)?", job.fsx):
        yield f"--fsx {job.fsx}: is not fs-0123456789abcdef0:/mountname/folder"
    if job.fsx and not (job.subnets and job.security_groups):
        yield "--fsx needs --subnets and --security_groups of the file system's VPC"
    on_fsx = all(map(job.on_fsx, args.checkpoint_dir))
    if on_fsx and not job.fsx:
        yield f"--checkpoint_dir {args.checkpoint_dir[0]} is on FSx: give --fsx FILE-SYSTEM-ID:/mountname/folder"
    for folder in job.lost_checkpoints:
        if job.spot or not folder.startswith(SCRATCH):
            yield (
                f"--checkpoint_dir {folder}: is lost with the instance; leave it out ({CHECKPOINTS}, which SageMaker "
                "copies to --checkpoints), or give s3://bucket/prefix or a folder on --fsx"
            )
    kept = on_fsx or all("://" in folder for folder in args.checkpoint_dir)
    if job.instance_count > 1 and not kept:
        yield (
            f"{job.instance_count} instances share no disk, and a checkpoint is written by all of them: give "
            "--checkpoints s3://bucket/prefix, or --fsx"
        )
    if job.spot and not (job.checkpoints or kept):
        yield "--spot without --checkpoints starts from the beginning after every interruption; give --checkpoints"
    if job.spot and job.keep_alive:
        yield "--keep_alive: SageMaker has no warm pools of spot instances; give --spot or --keep_alive"
    if job.max_wait is not None and not job.spot:
        yield "--max_wait is for --spot; --max_run limits the training"
    if job.max_wait is not None and job.max_wait < job.max_run:
        yield f"--max_wait {job.max_wait} is below --max_run {job.max_run}; it counts waiting and training"
    if job.keep_alive is not None and job.keep_alive > 21600:
        yield f"--keep_alive {job.keep_alive}: is above 21600 seconds"
    for source, name in ((job.train, "training_dir"), (job.test, "test_dir")):
        if source and job.resolved.given(name):
            yield f"--{name} and its channel both say where data is; give one of them"
