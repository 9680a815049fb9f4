"""Services for launching (Slurm, containers, Kubernetes, AWS, Hugging Face), and harmful variables."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from smp_train.errors import install
from smp_train.launch import cluster
from smp_train.launch.command import ask
from smp_train.launch.doctor.finding import Finding, fail, ok, warn
from smp_train.launch.environment import lint
from smp_train.launch.preflight import hugging_face_home

HYPERPOD = Path("/opt/sagemaker_cluster")


def variables() -> Iterator[Finding]:
    """Check the environment for variables that older scripts export and that do harm today."""
    lines = [line.partition(" is set: ") for line in lint(os.environ)]
    harmful = [warn(f"variable {name}", *why.rpartition("; ")[::2]) for name, _, why in lines]
    yield from harmful or [ok("variables", "none that is better unset")]


def slurm() -> Iterator[Finding]:
    """Check Slurm, pyxis, and the restart of jobs that lose a node."""
    if not shutil.which("sbatch"):
        yield ok("Slurm", "is not here")
        return
    code, output = ask("scontrol", "ping")
    if "configuration source" in output:
        yield ok("Slurm", "is installed, and this machine belongs to no cluster")
        return
    if code or "UP" not in output:
        yield fail("Slurm", f"does not answer: {' '.join(output.split())[:160]}", "ask who runs the cluster")
        return
    _, nodes = ask("sinfo", "-h", "-o", "%P %a %D %T")
    yield ok("Slurm", f"answers{' (HyperPod)' if HYPERPOD.is_dir() else ''}; {'; '.join(nodes.splitlines()[:6])}")
    srun_help = ask("srun", "--help")[1]
    pyxis = ok("pyxis", "srun knows --container-image; `launch slurm --probe` asks a compute node")
    fix = "install pyxis for launch_training_enroot.sh, or use launch_training_conda.sh"
    yield pyxis if "--container-image" in srun_help else warn("pyxis", "srun knows no --container-image", fix)
    problems = cluster.restart_warnings(cluster.configuration(), srun_help)
    fine = ok("restart", "the cluster starts jobs again that lose a node")
    yield from [warn("restart", setting, consequence) for setting, consequence in problems] or [fine]


def containers() -> Iterator[Finding]:
    """Check the programs that build and run images."""
    engines = [name for name in ("docker", "podman") if shutil.which(name)]
    for name in engines:
        code, output = ask(name, "info")
        fix = "start its daemon, or join its group; docker_build.sh needs one of docker and podman"
        failed = warn(name, f"does not answer: {(output.splitlines() or ['?'])[-1][:160]}", fix)
        yield failed if code else ok(name, "answers")
    if not engines:
        yield ok("images", "neither docker nor podman here", "run docker_build.sh where one of them is")
    code, output = ask("enroot", "version")
    if code == 127:
        yield ok("enroot", "is not here", "without it docker_build.sh makes no .sqsh file, which Slurm starts from")
    else:
        yield warn("enroot", output[:160], "install it again") if code else ok("enroot", output)


def kubernetes() -> Iterator[Finding]:
    """Check kubectl and its connection to a cluster."""
    if not shutil.which("kubectl"):
        yield ok("kubectl", "is not here", "`launch k8s --dry_run` needs none")
        return
    code, output = ask("kubectl", "config", "current-context")
    fix = "`aws eks update-kubeconfig --name CLUSTER` connects it"
    yield warn("kubectl", "is connected to no cluster", fix) if code else ok("kubectl", f"connected to {output}")


def aws() -> Iterator[Finding]:
    """Check boto3's credentials and region, without a request to AWS (only to this machine's metadata service)."""
    if importlib.util.find_spec("boto3") is None:
        yield ok("AWS", "boto3 is not here: no s3:// places, no `launch sagemaker`", install("s3"))
        return
    for name in ("TIMEOUT", "NUM_ATTEMPTS"):  # outside EC2, boto3 would wait for a service that does not exist
        os.environ.setdefault(f"AWS_METADATA_SERVICE_{name}", "1")
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        session = boto3.Session()
        credentials, region = session.get_credentials(), session.region_name
    except BotoCoreError as problem:
        yield fail("AWS", " ".join(str(problem).split()), "mend ~/.aws/config, or AWS_PROFILE")
        return
    fix = "`aws configure`, `aws sso login`, or run where a role is attached"
    without = warn("AWS credentials", "none: s3:// and SageMaker cannot be used", fix)
    yield ok("AWS credentials", f"from {credentials.method}") if credentials else without
    no_region = warn("AWS region", "none", "set AWS_DEFAULT_REGION, or give --region")
    yield ok("AWS region", region) if region else no_region


def hugging_face() -> Iterator[Finding]:
    """Check for a token, which gated models need."""
    home = hugging_face_home(os.environ)
    has_token = os.environ.get("HF_TOKEN") or (home / "token").exists()
    without = ok("Hugging Face", "no token", "gated models (Llama, Gemma) need one: `hf auth login`, or HF_TOKEN")
    yield ok("Hugging Face", f"a token is here; files go to {home}") if has_token else without
