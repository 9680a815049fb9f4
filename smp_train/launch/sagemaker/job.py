"""A SageMaker training job, described once and checked without AWS."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_train.arguments import Resolved, parse
from smp_train.arguments.aliases import NAMES, SMP_KEYS
from smp_train.arguments.parse import canonical, read_command_line
from smp_train.arguments.training_flags import NODE_LOCAL
from smp_train.arguments.values import nearest
from smp_train.errors import ConfigError
from smp_train.launch.flags import as_arguments, inline_files
from smp_train.launch.images import check_image
from smp_train.launch.instances import Machines, find
from smp_train.launch.options import LaunchParser
from smp_train.launch.spec import check_run, read_env, refuse_recovery

CHECKPOINTS = "/opt/ml/checkpoints"
INPUT = "/opt/ml/input/data"
FSX = f"{INPUT}/fsx"
SCRATCH = "/tmp/"
"""Checkpoints below this folder may be lost with the instance, as for the trials of a tuner."""
# Newest PyTorch training image of SageMaker's SDK 2.257 that its torch_distributed accepts.
TORCH = {"framework_version": "2.8.0", "py_version": "py312"}
TORCH_IMAGE = "pytorch-training:2.8.0-gpu-py312"
# SMP v2's last release; AWS keeps its images in a separate account, and not in every region.
SMP = {"framework_version": "2.5.1", "py_version": "py311"}
SMP_IMAGE = "smdistributed-modelparallel:2.5.1-gpu-py311-cu124"
REGISTRIES = Path(__file__).with_name("registries.json")
ECR_IMAGE = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(\.cn)?/(?P<name>[^:@]+)(:(?P<tag>[\w.-]+))?"
)
DAY = 24 * 3600
S3 = (r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", "s3://bucket/prefix, with the name of a bucket")
FORMS = (
    ("role", r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+", "the ARN of a role, arn:aws:iam::123456789012:role/NAME"),
    *((name, *S3) for name in ("train", "test", "checkpoints", "output")),
    ("input_mode", "FastFile|File", "FastFile or File"),
    ("fsx", "fs-[0-9a-f]{8,}:/[A-Za-z0-9_-]+(/.*)?", "fs-0123456789abcdef0:/mountname/folder"),
)
"""Option, pattern of its values, and an example or description for the refusal."""


def parser() -> LaunchParser:
    """Return the parser of the options."""
    usage = "--role ARN --instance_type ml.T --instance_count N [options]"
    options = LaunchParser("sagemaker", "`smp-train launch sagemaker`: a SageMaker training job.", usage)
    options.share("dry_run", "check", "instance_type", "image", "env", "job_name")
    options.add("role", "ARN of the execution role")
    options.add("instance_count", "number of instances", int, 1)
    options.add("train", "s3:// prefix of the training shards: the channel train")
    options.add("test", "s3:// prefix of the validation shards: the channel test")
    options.add("checkpoints", "s3:// prefix that has a folder of checkpoints for each run; without it, below --output")
    options.add("output", "s3:// prefix for the code, the run folder and the model; without it, SageMaker's own bucket")
    options.add("fsx", f"FSx for Lustre: FILE-SYSTEM-ID:/mountname/folder; paths below {FSX}, or {INPUT}/train")
    options.add("input_mode", "FastFile (streamed) or File (downloaded first)", default="FastFile")
    options.add("max_run", "longest time to train, in seconds", int, 5 * DAY)
    options.add("spot", "use spot instances; needs --checkpoints or checkpoints on FSx", bool)
    options.add("max_wait", "longest time to wait and train with --spot, in seconds (default: max_run + 1 day)", int)
    options.add("keep_alive", "seconds to keep the instances for the next job (warm pool)", int)
    options.add("volume_gb", "size of each instance's disk, in GB", int, 400)
    options.add("retries", "starts after a fault of SageMaker's", int)
    options.add("tags", "tags of the job: KEY=VALUE", many=True)
    options.add("subnets", "subnets of a VPC, which FSx needs", many=True)
    options.add("security_groups", "security groups of a VPC, which FSx needs", many=True)
    options.add("region", "AWS region; without it, the configured region")
    return options


@dataclass(frozen=True)
class Job:
    """A training job, checked and complete."""

    options: argparse.Namespace
    """Options of the launcher; defaults of checkpoints and max_wait are filled in."""
    base_name: str
    machines: Machines
    hyperparameters: dict[str, Any]
    resolved: Resolved
    environment: dict[str, str]

    @property
    def instance_type(self) -> str:
        """SageMaker's name of the instance type."""
        return f"ml.{self.options.instance_type.removeprefix('ml.')}"

    @property
    def smp(self) -> bool:
        """Whether this runs on the SMP backend, in SMP's own container."""
        return bool(self.resolved.args.backend == "smp")

    @property
    def mp_parameters(self) -> dict[str, Any]:
        """SMP's parameters that this job sets."""
        args, is_given = self.resolved.args, self.resolved.given
        return {key: getattr(args, key) for key in SMP_KEYS if is_given(key)} if self.smp else {}

    @property
    def fsx_channel(self) -> str:
        """Name of the channel that mounts FSx: ``train`` if a flag has a path below it, as in AWS's notebooks."""
        args = self.resolved.args
        paths = [*args.checkpoint_dir, *(args.training_dir or []), *(args.test_dir or [])]
        in_train = any(path.startswith(f"{INPUT}/train/") for path in paths)
        return "train" if in_train and not self.options.train else "fsx"

    def on_fsx(self, folder: str) -> bool:
        """Return whether a folder is below the mount of FSx."""
        return f"{folder}/".startswith(f"{INPUT}/{self.fsx_channel}/")

    @property
    def lost_checkpoints(self) -> list[str]:
        """Folders of checkpoints that are only on the instance's disk: they end with the job."""
        return [
            folder
            for folder in self.resolved.args.checkpoint_dir
            if not ("://" in folder or in_channel(folder) or self.on_fsx(folder) or folder.startswith(NODE_LOCAL))
        ]

    @property
    def checkpoint_config(self) -> dict[str, str]:
        """The request's CheckpointConfig: a local folder and the S3 prefix to which SageMaker copies it.

        It is the run's folder, because SageMaker downloads the whole prefix at each start.
        """
        args, prefix = self.resolved.args, self.options.checkpoints
        folders = [os.path.normpath(f"{one}/{args.run_name}") for one in args.checkpoint_dir if in_channel(one)]
        local = os.path.commonpath(folders or [CHECKPOINTS])
        return {"S3Uri": prefix.rstrip("/") + local.removeprefix(CHECKPOINTS), "LocalPath": local} if prefix else {}

    @property
    def warnings(self) -> list[str]:
        """Warnings for the person who submits the job."""
        why = "on the instance's own disk; these checkpoints are lost when the job ends"
        return [f"--checkpoint_dir {folder}: {why}" for folder in self.lost_checkpoints]

    def image_uri(self, region: str) -> str:
        """Return the image: the user's, or AWS' for the backend. SageMaker pulls from the job's region only."""
        if image := self.options.image:
            match = ECR_IMAGE.fullmatch(image)
            if match and match["region"] != region:
                raise ConfigError(
                    f"--image {image}: is in {match['region']} and the job in {region}; push it to a repository there"
                )
            return str(image)
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


def hyperparameters(arguments: Sequence[str]) -> dict[str, Any]:
    """Return training flags as hyperparameters by name; numbers are numbers, lists are lists."""
    flags = {flag.name: flag.value for flag in read_command_line(arguments)}
    return {
        name: [_plain(str(item)) for item in value] if isinstance(value, list) else _plain(str(value))
        for name, value in flags.items()
    }


def _plain(text: str) -> Any:
    with suppress(ValueError):
        value = json.loads(text)
        if type(value) in (int, float):
            return value
    return text


def default_output(role: str | None, region: str | None, session: Any = None) -> str | None:
    """Return the default output prefix: the bucket and prefix of an SDK's session, or the SDKs' default bucket.

    None if it cannot be determined without a request to AWS.
    """
    account = re.match(r"arn:aws[a-z-]*:iam::(\d{12}):", role or "")
    bucket = getattr(session, "_default_bucket_name_override", None)  # the public method creates a bucket
    if bucket is None and account and region:
        bucket = f"sagemaker-{region}-{account[1]}"
    prefix = getattr(session, "default_bucket_prefix", None)
    return "/".join(filter(None, (f"s3://{bucket}", prefix, "smp-train"))) if bucket else None


def region_of(session: Any) -> str | None:
    """Return the region of a session of one of the SDKs, or the configured region."""
    region = getattr(session, "boto_region_name", None)
    if region is None:
        import boto3

        region = boto3.Session().region_name
    return str(region) if region else None


def _read_options(options: Mapping[str, Any]) -> argparse.Namespace:
    """Return options from a Python call, read as a command line's options."""
    reader, arguments = parser(), []
    for name, value in options.items():
        if name not in reader.names:
            raise ConfigError(f"unknown option {name}{nearest(name, reader.names)}")
        if reader.names[name].nargs == "+":
            arguments += [f"--{name}={pair}" for pair in _pairs(value or ())]
        elif value is not None:
            arguments.append(f"--{name}={int(value) if isinstance(value, bool) else value}")
    return reader.parse_args(arguments)


def _pairs(value: Any) -> list[str]:
    return [f"{name}={text}" for name, text in value.items()] if isinstance(value, Mapping) else list(value)


def build(settings: Sequence[str] | Mapping[str, Any], *, copy_to: str | None = None, **options: Any) -> Job:
    """Check training flags (arguments, or a mapping of hyperparameters) and launch options; return the job.

    ``options`` are the command's options by name. ``copy_to`` is the ``s3://`` prefix for checkpoints if no option
    names a prefix.

    Raises:
        ConfigError: SageMaker or the training would refuse the job.
    """
    checked = _read_options(options)
    hyper = dict(settings) if isinstance(settings, Mapping) else hyperparameters(settings)
    if {"config", "smp_config"} & {canonical(name) for name in hyper}:
        hyper = hyperparameters(inline_files(_arguments(hyper)))
    if not checked.instance_type:
        raise ConfigError("--instance_type is missing, such as ml.p5.48xlarge")
    instance = find(checked.instance_type)
    machines = Machines(instance, checked.instance_count, instance.gpus)
    environ = {"SM_TRAINING_ENV": "{}", "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data"}
    channels = [name for name in ("train", "test") if getattr(checked, name)]
    environ |= {f"SM_CHANNEL_{name.upper()}": f"{INPUT}/{name}" for name in channels}
    given = parse(_arguments(hyper), environ)
    if not given.args.run_name:
        hyper = {**hyper, "run_name": given.args.label}
    folder, checked.checkpoints = _checkpoint_folders(given, checked, copy_to)
    if folder:
        hyper = {name: value for name, value in hyper.items() if NAMES[canonical(name)].name != "checkpoint_dir"}
        hyper["checkpoint_dir"] = [folder]
    resolved = parse(_arguments(hyper), environ)
    refuse_recovery(resolved, "SageMaker's toolkit")
    check_run(resolved, checked.image, machines)
    if resolved.args.backend == "smp":
        # These settings are passed as SMP's own parameter set, which SMP reads itself.
        hyper = {name: value for name, value in hyper.items() if canonical(name) != "mp_parameters"}
    checked.max_wait = checked.max_wait or (checked.max_run + DAY if checked.spot else None)
    name = re.sub(r"[^A-Za-z0-9]+", "-", checked.job_name or resolved.args.run_name).strip("-")
    base_name = name[:43].rstrip("-") or "smp-train"  # SageMaker allows 63 characters, and 20 are for the time
    job = Job(checked, base_name, machines, hyper, resolved, read_env(checked.env))
    check_image(instance, checked.image or job.image_uri("us-west-2"), resolved.args.backend)
    for problem in _problems(job, checked):
        raise ConfigError(problem)
    return job


def _arguments(hyper: Mapping[str, Any]) -> list[str]:
    return [flag for name, value in hyper.items() for flag in as_arguments(name, value)]


def _checkpoint_folders(
    resolved: Resolved, options: argparse.Namespace, copy_to: str | None
) -> tuple[str | None, str | None]:
    """Return (--checkpoint_dir to set, prefix to which SageMaker copies a local folder); each may be None.

    One instance writes to its disk, and SageMaker copies. Several write to shared storage: FSx, or S3 itself; AWS's
    notebooks name the local folder for several instances too.
    """
    output, several = options.output or copy_to, options.instance_count > 1
    is_given = resolved.given("checkpoint_dir") and not (several and resolved.args.checkpoint_dir == [CHECKPOINTS])
    if is_given and not any(map(in_channel, resolved.args.checkpoint_dir)):
        return None, options.checkpoints
    if options.fsx and not options.checkpoints and not is_given:
        return f"{FSX}/checkpoints", None
    folder = options.checkpoints or (f"{output.rstrip('/')}/checkpoints" if output else None)
    return (folder, None) if several and not is_given else (None, folder)


def in_channel(folder: str) -> bool:
    """Return whether a folder is `CHECKPOINTS`, which SageMaker copies to S3, or below it."""
    return "://" not in folder and Path(CHECKPOINTS) in (path := Path(os.path.normpath(folder)), *path.parents)


def _problems(job: Job, options: argparse.Namespace) -> Iterator[str]:
    """Yield a message for each setting that SageMaker would refuse, or that would lose checkpoints."""
    args, count, spot, wait = job.resolved.args, options.instance_count, options.spot, options.max_wait
    if not options.role:
        yield "--role is missing: the ARN of a role, arn:aws:iam::123456789012:role/NAME"
    for name, pattern, form in FORMS:
        value = getattr(options, name)
        if value and not re.fullmatch(pattern, value):
            yield f"--{name} {value}: is not {form}"
    if options.fsx and not (options.subnets and options.security_groups):
        yield "--fsx needs --subnets and --security_groups of the file system's VPC"
    on_fsx = all(map(job.on_fsx, args.checkpoint_dir))
    if on_fsx and not options.fsx:
        yield f"--checkpoint_dir {args.checkpoint_dir[0]} is on FSx: give --fsx FILE-SYSTEM-ID:/mountname/folder"
    for folder in job.lost_checkpoints:
        if spot or not folder.startswith(SCRATCH):
            yield (
                f"--checkpoint_dir {folder}: is lost with the instance; leave it out ({CHECKPOINTS}, which SageMaker "
                "copies to --checkpoints), or give s3://bucket/prefix or a folder on --fsx"
            )
    is_shared = on_fsx or all("://" in folder for folder in args.checkpoint_dir)
    if count > 1 and not is_shared:
        yield (
            f"{count} instances share no disk, and a checkpoint is written by all of them: give "
            "--checkpoints s3://bucket/prefix, or --fsx"
        )
    if spot and not (options.checkpoints or is_shared):
        yield "--spot without --checkpoints starts from the beginning after every interruption; give --checkpoints"
    if spot and options.keep_alive:
        yield "--keep_alive: SageMaker has no warm pools of spot instances; give --spot or --keep_alive"
    if wait and not spot:
        yield "--max_wait is for --spot; --max_run limits the training"
    if wait and wait < options.max_run:
        yield f"--max_wait {wait} is below --max_run {options.max_run}; it counts waiting and training"
    for channel, name in ((options.train, "training_dir"), (options.test, "test_dir")):
        if channel and job.resolved.given(name):
            yield f"--{name} and its channel both say where data is; give one of them"
