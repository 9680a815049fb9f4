"""Services that runs are submitted to (Slurm, containers, Kubernetes, AWS), and harmful variables."""

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

HYPERPOD = Path("/opt/sagemaker_cluster")


def variables() -> Iterator[Finding]:
    """Look for variables that older scripts export and that should not be set."""
    lines = [line.partition(" is set: ") for line in lint(os.environ)]
    found = [warn(f"variable {name}", *why.rpartition("; ")[::2]) for name, _, why in lines]
    yield from found or [ok("variables", "none that is better unset")]


def slurm() -> Iterator[Finding]:
    """Look for Slurm, pyxis, and the restart of jobs that lose a node."""
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
    config, usage = cluster.configuration(), ask("srun", "--help")[1]
    fix = "install pyxis for launch_training_enroot.sh, or use launch_training_conda.sh"
    pyxis = ok("pyxis", "srun knows --container-image; `launch slurm --probe` asks a compute node")
    yield pyxis if "--container-image" in usage else warn("pyxis", "srun knows no --container-image", fix)
    if config.get("JobRequeue") == "0":
        yield warn("requeue", "JobRequeue=0: a lost node ends a run", "set JobRequeue=1 in slurm.conf")
    if "--auto-resume" in usage:
        fine = ok("auto-resume", "srun knows it, and the configuration is one that it works with")
        yield from [warn("auto-resume", setting, why) for setting, why in cluster.auto_resume(config)] or [fine]


def containers() -> Iterator[Finding]:
    """Look for the programs that build and run images."""
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
    """Look for kubectl and a cluster that it is connected to."""
    if not shutil.which("kubectl"):
        yield ok("kubectl", "is not here", "`launch k8s --dry_run` needs none")
        return
    code, output = ask("kubectl", "config", "current-context")
    fix = "`aws eks update-kubeconfig --name CLUSTER` connects it"
    yield warn("kubectl", "is connected to no cluster", fix) if code else ok("kubectl", f"connected to {output}")


def aws() -> Iterator[Finding]:
    """Look for credentials and a region, as boto3 finds them; asks no service but the machine's own."""
    if importlib.util.find_spec("boto3") is None:
        yield ok("AWS", "boto3 is not here: no s3:// places, no `launch sagemaker`", install("s3"))
        return
    for name in ("TIMEOUT", "NUM_ATTEMPTS"):  # outside of EC2 no service answers for the machine's role
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
    none = warn("AWS credentials", "none: s3:// and SageMaker cannot be used", fix)
    yield ok("AWS credentials", f"from {credentials.method}") if credentials else none
    no_region = warn("AWS region", "none", "set AWS_DEFAULT_REGION, or give --region")
    yield ok("AWS region", region) if region else no_region


def hugging_face() -> Iterator[Finding]:
    """Look for a token, which gated models are asked for with."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    has_token = os.environ.get("HF_TOKEN") or (home / "token").exists()
    none = ok("Hugging Face", "no token", "gated models (Llama, Gemma) need one: `hf auth login`, or HF_TOKEN")
    yield ok("Hugging Face", f"a token is here; files go to {home}") if has_token else none
