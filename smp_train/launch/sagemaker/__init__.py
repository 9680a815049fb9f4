"""`smp-train launch sagemaker`, and the API of notebooks: one description of a SageMaker training job.

`build` checks a job without AWS. `request` is the CreateTrainingJob call that the command submits with boto3 alone;
`estimator` is the same job as a ready `sagemaker.pytorch.PyTorch` of SageMaker's SDK v2, `model_trainer` as a ready
`sagemaker.train.ModelTrainer` of SDK v3.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

from smp_train.arguments import ineffective
from smp_train.errors import ConfigError
from smp_train.launch import planned, preflight, timing
from smp_train.launch.command import say
from smp_train.launch.environment import lint
from smp_train.launch.flags import start_line
from smp_train.launch.options import split
from smp_train.launch.sagemaker.account import boto3, check_account, submit
from smp_train.launch.sagemaker.job import FSX, Job, build, default_output, parser
from smp_train.launch.sagemaker.request import archive, request, stage
from smp_train.launch.sagemaker.sdk import estimator, inputs, model_trainer
from smp_train.launch.spec import warn

__all__ = ["FSX", "Job", "archive", "build", "estimator", "inputs", "model_trainer", "parser", "request", "stage"]

STOP_SECONDS = 120
"""Seconds between SIGTERM and the end of a container, at --max_run and at a spot interruption."""


def main(arguments: Sequence[str]) -> int:
    """Run ``smp-train launch sagemaker`` and return its exit code."""
    options, training = split(arguments, parser())
    region, session = options.region, None
    if options.dry_run:
        region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-west-2"
    else:
        session = boto3().Session(region_name=region)
        region = session.region_name
        if not region:
            raise ConfigError("no AWS region: give --region, or set AWS_DEFAULT_REGION")
    options.output = options.output or default_output(options.role, region)
    job = build(training, **vars(options))
    say(start_line(job.resolved.args))
    name = f"{job.base_name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    code = f"{str(options.output).rstrip('/')}/{name}/source/sourcedir.tar.gz"
    body = request(job, region=region, name=name, code=code)
    if session is None:
        warn(job.warnings)
        planned.note_unplanned(job.resolved.args, job.machines)
        print(json.dumps(body, indent=2))
        return 0
    warnings = [*job.warnings, *lint(job.environment), *ineffective(job.resolved)]
    if options.subnets:
        warnings.append(
            "--subnets: packages are installed when the container starts; the subnets need a way to PyPI (NAT), or "
            "give an --image that has them"
        )
    warnings += preflight.missing_token(job.resolved, job.environment, home=False)
    warnings += timing.save_warnings(job.resolved, job.machines, options.max_run, STOP_SECONDS)
    warnings += check_account(job, session)
    warnings += planned.check(job.resolved, training, job.machines)  # last, as it takes longest
    warn(warnings)
    say(f"{options.instance_count} x {job.instance_type}: role and data are in order")
    if options.check:
        return 0
    submit(body, session, code)
    console = f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{name}"
    print(f"submitted {name}")
    print(f"log:    {console}")
    print(f"follow: aws logs tail /aws/sagemaker/TrainingJobs --log-stream-name-prefix {name} --follow")
    print(f"cancel: aws sagemaker stop-training-job --training-job-name {name}")
    return 0
