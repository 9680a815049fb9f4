"""`smp-train launch sagemaker`, and what notebooks use: one description of a SageMaker training job.

`build` checks a job without AWS. `request` is the CreateTrainingJob call that the command submits with boto3 alone;
`estimator` is the same job as a ready `sagemaker.pytorch.PyTorch` of SageMaker's SDK v2, `model_trainer` as a ready
`sagemaker.train.ModelTrainer` of SDK v3.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence

from smp_train.arguments import ineffective
from smp_train.errors import ConfigError
from smp_train.launch import planned, preflight, timing
from smp_train.launch.environment import lint
from smp_train.launch.flags import start_line
from smp_train.launch.options import print_help, split
from smp_train.launch.sagemaker.account import boto3, check_account, submit
from smp_train.launch.sagemaker.job import FSX, OPTIONS, Job, build, own_place
from smp_train.launch.sagemaker.request import check_limits, request, warn
from smp_train.launch.sagemaker.sdk import estimator, inputs, model_trainer
from smp_train.launch.sagemaker.source import archive, stage

__all__ = [
    "FSX", "OPTIONS", "Job", "archive", "build", "check_limits", "estimator", "inputs", "model_trainer", "request",
    "stage",
]  # fmt: skip

USAGE = "smp-train launch sagemaker --role ARN --instance_type ml.T --instance_count N [options] <training flags>"
STOP_SECONDS = 120
"""Seconds between SIGTERM and the end of a container, at --max_run and at a spot interruption."""


def main(words: Sequence[str]) -> int:
    """Run ``smp-train launch sagemaker`` and return its exit code."""
    if print_help(words, USAGE, __doc__, OPTIONS):
        return 0
    options, training = split(words, OPTIONS)
    dry_run, check, region = (options.pop(name) for name in ("dry_run", "check", "region"))
    session = None
    if dry_run:
        region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-west-2"
    else:
        session = boto3().Session(region_name=region)
        region = session.region_name
        if not region:
            raise ConfigError("no AWS region: give --region, or set AWS_DEFAULT_REGION")
    options["output"] = options["output"] or own_place(options["role"], region)
    job = build(training, **options)
    print(f"smp-train: {start_line(job.resolved.args)}", file=sys.stderr)
    name = f"{job.base_name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    code = f"{str(job.output).rstrip('/')}/{name}/source/sourcedir.tar.gz"
    wanted = request(job, region=region, name=name, code=code)
    if session is None:
        warn(job.warnings)
        planned.tell_unplanned(job.resolved.args, job.instance, job.instance.gpus)
        print(json.dumps(wanted, indent=2))
        return 0
    found = [*job.warnings, *lint(job.environment), *ineffective(job.resolved)]
    if job.subnets:
        found.append(
            "--subnets: packages are installed when the container starts; the subnets need a way to PyPI (NAT), or "
            "give an --image that has them"
        )
    found += preflight.missing_token(job.resolved, job.environment, home=False)
    found += timing.save_warnings(
        job.resolved, limit=job.max_run, margin=STOP_SECONDS, instance=job.instance, nodes=job.instance_count,
        processes=job.instance.gpus,
    )  # fmt: skip
    found += check_account(job, session)
    found += planned.check(job.resolved, training, job.instance, job.instance_count, job.instance.gpus)  # takes longest
    warn(found)
    print(f"smp-train: {job.instance_count} x {job.instance_type}: role, data and limits are in order", file=sys.stderr)
    if check:
        return 0
    submit(wanted, session, code)
    console = f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{name}"
    print(f"submitted {name}")
    print(f"log:    {console}")
    print(f"follow: aws logs tail /aws/sagemaker/TrainingJobs --log-stream-name-prefix {name} --follow")
    print(f"cancel: aws sagemaker stop-training-job --training-job-name {name}")
    return 0
