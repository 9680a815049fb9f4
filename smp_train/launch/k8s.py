"""`smp-train launch k8s`: render a Kubernetes manifest, check it, submit it with kubectl."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from smp_train.arguments.values import nearest
from smp_train.errors import ConfigError
from smp_train.launch import planned, timing
from smp_train.launch.command import call, say
from smp_train.launch.flags import inline_files
from smp_train.launch.images import check_image
from smp_train.launch.manifests import GRACE_SECONDS, RESOURCES, manifest, on_hyperpod
from smp_train.launch.options import LaunchParser, split
from smp_train.launch.spec import VARIABLE, Spec, build, describe, refuse_recovery

OPERATORS = ("kubeflow", "hyperpod")  # --recovery in_place needs neither
CONNECT = "`aws eks update-kubeconfig --name CLUSTER` connects kubectl"
ADVICE = (
    ("no matches for kind", "the operator of this kind is not installed in the cluster"),
    ("AlreadyExists", "delete the finished job with kubectl delete, or give another --job_name"),
    ("persistentvolumeclaims", "`kubectl get pvc -n NAMESPACE` lists the claims"),
    ("secrets", "`kubectl create secret generic NAME --from-literal=KEY=VALUE` makes one"),
    ("unable to connect", CONNECT),
    ("connection to the server", CONNECT),
)


def parser() -> LaunchParser:
    """Return the parser of the options."""
    usage = "--nodes N --instance_type T --image URI --claims C:/fsx [options]"
    options = LaunchParser("k8s", __doc__, usage)
    options.share("dry_run", "check", "nodes", "instance_type", "nproc", "image", "env", "profile", "job_name")
    options.add("operator", "kubeflow (PyTorchJob) or hyperpod (HyperPodPyTorchJob)", default="kubeflow")
    options.add("namespace", "namespace; HyperPod restarts jobs in kubeflow and hyperpod-... only", default="kubeflow")
    options.add("claims", "persistent volume claims, such as FSx: CLAIM:/path", many=True, metavar="CLAIM:/PATH")
    options.add("host_paths", "folders of the nodes, such as their NVMe disks: /path:/path", many=True)
    options.add("secrets", "environment variables from secrets, such as HF_TOKEN: NAME=SECRET:KEY", many=True)
    options.add("queue", "Kueue queue")
    options.add("priority", "Kueue priority class")
    options.add("service_account", "service account of the pods, which gives access to S3")
    options.add("max_restarts", "restarts after a failure before giving up", int, 3)
    options.add("hang_after", "hyperpod: restart when no loss is printed for so many seconds", int)
    return options


def prepare(arguments: Sequence[str]) -> tuple[Spec, argparse.Namespace]:
    """Return the run and its launch options, both checked, with claims, host_paths and secrets as tuples."""
    options, training = split(arguments, parser())
    for name in ("claims", "host_paths"):
        setattr(options, name, [_pair(name, text) for text in getattr(options, name)])
    if not options.claims:
        raise ConfigError(
            "a pod's own disk ends with it: give --claims CLAIM:/path, a volume that all pods share, for the run "
            "folder, checkpoints and data"
        )
    options.secrets = [_secret(text) for text in options.secrets]
    spec = build(
        inline_files(training), options, base=options.claims[0][1], kubernetes=True,
        environ={name: "from a secret" for name, _, _ in options.secrets},  # pods do not get this shell's variables
    )  # fmt: skip
    image, operator, namespace = options.image, options.operator, options.namespace
    if not spec.machines.processes:
        raise ConfigError("give --instance_type, or --nproc for the number of processes in each pod")
    if not image:
        raise ConfigError("--image is missing: the URI of an image with this package, which docker_build.sh makes")
    if image.endswith(".sqsh"):
        raise ConfigError(
            f"--image {image}: Kubernetes pulls images from a registry; push the one docker_build.sh made"
        )
    check_image(spec.machines.instance, image, spec.resolved.args.backend)
    if operator not in OPERATORS:
        raise ConfigError(f"--operator {operator}: is not kubeflow or hyperpod{nearest(operator, OPERATORS)}")
    if options.hang_after and operator != "hyperpod":
        raise ConfigError("--hang_after: only HyperPod's operator watches the log; add --operator hyperpod")
    if operator == "hyperpod":
        refuse_recovery(spec.resolved, "hyperpodrun")
    if spec.resolved.args.recovery != "off":
        options.operator = "job"
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace):
        raise ConfigError(f"--namespace {namespace}: small letters, digits and dashes only, at most 63")
    options.job_name = _job_name(options.job_name, spec)
    _check_folders(spec, options)
    return spec, options


def _pair(name: str, text: str) -> tuple[str, str]:
    source = r"/[^:]*" if name == "host_paths" else r"[^:]+"
    if not re.fullmatch(rf"{source}:/.*", text):
        raise ConfigError(f"--{name} {text}: is not {'CLAIM' if name == 'claims' else '/path'}:/path")
    return text.partition(":")[0], text.partition(":")[2]


def _secret(text: str) -> tuple[str, str, str]:
    match = re.fullmatch(rf"({VARIABLE.pattern})=([a-z0-9.-]+):([A-Za-z0-9._-]+)", text)
    if not match:
        raise ConfigError(f"--secrets {text}: is not NAME=SECRET:KEY, as Kubernetes names secrets and their keys")
    return match[1], match[2], match[3]


def _job_name(name: str | None, spec: Spec) -> str:
    """Return the job's name; pods and their host names append up to 13 characters, and 63 is the limit."""
    from_run = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")[:50].strip("-") or "smp-train"
    if re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", name or from_run):
        return name or from_run
    if name:
        raise ConfigError(
            f"--job_name {name}: small letters, digits and dashes, a letter first, at most 50; it names the pods"
        )
    return f"run-{from_run}"[:50].rstrip("-")


def _check_folders(spec: Spec, options: argparse.Namespace) -> None:
    """Refuse folders that pods do not have, or that are lost with them."""
    shared = [path for _, path in options.claims]
    mounted = [*shared, *(path for _, path in options.host_paths)]
    for name in ("run_dir", "checkpoint_dir", "training_dir", "test_dir", "resume_from_checkpoint"):
        value = getattr(spec.resolved.args, name)
        is_output = name in ("run_dir", "checkpoint_dir")
        for folder in value if isinstance(value, list) else [value]:
            if not folder or "://" in folder:
                continue
            if not any(f"{folder}/".startswith(path.rstrip("/") + "/") for path in (shared if is_output else mounted)):
                kind = "volume that all pods share" if is_output else "volume of the pods"
                raise ConfigError(
                    f"--{name} {folder}: is on no {kind}; give --claims CLAIM:/path, and a folder below that path"
                )


def warnings(options: argparse.Namespace) -> list[str]:
    """Return warnings about the cluster of this job."""
    lines = []
    has_restarts = options.namespace.startswith(("kubeflow", "hyperpod"))
    if on_hyperpod(options) and options.operator == "kubeflow" and not has_restarts:
        lines.append(f"HyperPod restarts jobs in namespaces kubeflow and hyperpod-... only, not in {options.namespace}")
    if options.operator == "hyperpod" and not on_hyperpod(options):
        lines.append("--operator hyperpod runs on HyperPod nodes: give --instance_type as ml.p5.48xlarge")
    if options.operator == "hyperpod":
        lines.append("the image must hold hyperpodrun: EXTRA_PACKAGES=hyperpod-elastic-agent docker_build.sh")
    return lines


def kubectl(*arguments: str, text: str = "") -> None:
    """Run kubectl; `ConfigError` with its own error and the remedy."""
    call("kubectl", *arguments, text=text, absent="install it, or add --dry_run to see the manifest", advice=ADVICE)


def main(arguments: Sequence[str]) -> int:
    """Run ``smp-train launch k8s`` and return its exit code."""
    import yaml

    spec, options = prepare(arguments)
    text = str(yaml.safe_dump(manifest(spec, options), sort_keys=False, width=200))
    job, in_namespace = f"{RESOURCES[options.operator]}/{options.job_name}", f"-n {options.namespace}"
    lines = [*warnings(options), *timing.save_warnings(spec.resolved, spec.machines, None, GRACE_SECONDS)]
    if options.dry_run:
        describe(spec, lines)
        planned.note_unplanned(spec.resolved.args, spec.machines)
        print(text, end="")
        return 0
    describe(spec, [*lines, *planned.check(spec.resolved, spec.train_flags, spec.machines)])
    kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
    for kind, names in (
        ("persistentvolumeclaims", [claim for claim, _ in options.claims]),
        ("secrets", [secret for _, secret, _ in options.secrets]),
    ):
        for name in names:
            kubectl("get", kind, name, "-n", options.namespace, "-o", "name")
    if options.check:
        say(f"the cluster would take {job}")
        return 0
    kubectl("create", "-f", "-", text=text)
    pod = first = f"{options.job_name}-{'worker' if options.operator == 'kubeflow' else 'pods'}-0"
    if options.operator == "job":
        labels = f"job-name={options.job_name}", "job-completion-index=0"
        pod, first = job, "-l " + ",".join(f"batch.kubernetes.io/{label}" for label in labels)
        job += f" service/{options.job_name}"
    print(f"submitted {RESOURCES[options.operator]}/{options.job_name}")
    print(f"pods:   kubectl get pods {in_namespace} | grep ^{options.job_name}-")
    print(f"log:    {spec.run_dir}/metrics.jsonl on the volume")
    print(f"follow: kubectl logs {in_namespace} -f {first}")
    print(f"stop:   kubectl exec {in_namespace} {pod} -- touch {spec.run_dir}/STOP    (saves first)")
    print(f"cancel: kubectl delete {in_namespace} {job}")
    return 0
