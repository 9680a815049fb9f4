"""`smp-train launch k8s`: render a Kubernetes manifest, check it, submit it with kubectl."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from smp_train.arguments.values import nearest
from smp_train.errors import ConfigError
from smp_train.launch import planned, timing
from smp_train.launch.command import call
from smp_train.launch.flags import inline_files
from smp_train.launch.images import check_image
from smp_train.launch.manifests import GRACE_SECONDS, Target, manifest
from smp_train.launch.options import COMMON, Option, print_help, split
from smp_train.launch.spec import VARIABLE, Spec, build, profile_flags, tell

OPERATORS = ("kubeflow", "hyperpod")
USAGE = "smp-train launch k8s --nodes N --instance_type T --image URI --claims C:/fsx [options] <training flags>"
OPTIONS = (
    *COMMON,
    Option("nodes", "number of nodes: one pod on each", int, 1),
    Option("instance_type", "EC2 instance type of the nodes; ml.p5.48xlarge on HyperPod, p5.48xlarge elsewhere"),
    Option("nproc", "processes in each pod; without it, one per GPU of --instance_type", int),
    Option("image", "container image with this package: docker_build.sh makes it"),
    Option("operator", "kubeflow (PyTorchJob) or hyperpod (HyperPodPyTorchJob)", default="kubeflow"),
    Option("namespace", "namespace; HyperPod restarts jobs in kubeflow and hyperpod-... only", default="kubeflow"),
    Option("claims", "persistent volume claims, such as FSx: CLAIM:/path", many=True, metavar="CLAIM:/PATH"),
    Option("host_paths", "folders of the nodes, such as their NVMe disks: /path:/path", many=True),
    Option("env", "further environment variables: NAME=VALUE", many=True),
    Option("secrets", "environment variables from secrets, such as HF_TOKEN: NAME=SECRET:KEY", many=True),
    Option("queue", "Kueue queue"),
    Option("priority", "Kueue priority class"),
    Option("service_account", "service account of the pods, which S3 access comes with"),
    Option("job_name", "name of the job; without it, from the run's name"),
    Option("max_restarts", "restarts after a failure before giving up", int, 3),
    Option("hang_after", "hyperpod: restart when no loss is printed for so many seconds", int),
    Option("profile", "torch: PyTorch profiler; nsys: Nsight Systems, which must be in the image"),
)


def prepare(options: dict[str, Any], training: Sequence[str]) -> tuple[Spec, Target]:
    """Check launch options and training flags, as far as can be done here; return the run and where it goes."""
    claims, host_paths = (_pairs(name, options[name]) for name in ("claims", "host_paths"))
    words = inline_files([*training, *profile_flags(options["profile"])])
    if not claims:
        raise ConfigError(
            "a pod's own disk ends with it: give --claims CLAIM:/path, a volume that all pods share, for the run "
            "folder, checkpoints and data"
        )
    secrets = tuple(_secret(text) for text in options["secrets"])
    spec = build(
        words, nodes=options["nodes"], processes=options["nproc"], instance_type=options["instance_type"],
        env=options["env"], image=options["image"], base=claims[0][1], kubernetes=True,
        environ={name: "from a secret" for name, _, _ in secrets},  # nothing of this shell reaches the pods
    )  # fmt: skip
    if not spec.processes:
        raise ConfigError("give --instance_type, or --nproc for the number of processes in each pod")
    image, operator, namespace = options["image"], options["operator"], options["namespace"]
    if not image:
        raise ConfigError("--image is missing: the URI of an image with this package, which docker_build.sh makes")
    if image.endswith(".sqsh"):
        raise ConfigError(
            f"--image {image}: Kubernetes pulls images from a registry; push the one docker_build.sh made"
        )
    check_image(spec.instance, image, spec.resolved.args.backend)
    if operator not in OPERATORS:
        raise ConfigError(f"--operator {operator}: is not kubeflow or hyperpod{nearest(operator, OPERATORS)}")
    if options["hang_after"] and operator != "hyperpod":
        raise ConfigError("--hang_after: only HyperPod's operator watches the log; add --operator hyperpod")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace):
        raise ConfigError(f"--namespace {namespace}: small letters, digits and dashes only, at most 63")
    same = ("queue", "priority", "service_account", "max_restarts", "hang_after", "profile")
    target = Target(
        name=_job_name(options["job_name"], spec), namespace=namespace, image=image, operator=operator,
        node_type=options["instance_type"], claims=claims, host_paths=host_paths, secrets=secrets,
        **{name: options[name] for name in same},
    )  # fmt: skip
    _check_folders(spec, target)
    return spec, target


def _pairs(name: str, texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    source = r"/[^:]*" if name == "host_paths" else r"[^:]+"
    for text in texts:
        if not re.fullmatch(rf"{source}:/.*", text):
            raise ConfigError(f"--{name} {text}: is not {'CLAIM' if name == 'claims' else '/path'}:/path")
    return tuple((text.partition(":")[0], text.partition(":")[2]) for text in texts)


def _secret(text: str) -> tuple[str, str, str]:
    found = re.fullmatch(rf"({VARIABLE.pattern})=([a-z0-9.-]+):([A-Za-z0-9._-]+)", text)
    if not found:
        raise ConfigError(f"--secrets {text}: is not NAME=SECRET:KEY, as Kubernetes names secrets and their keys")
    return found[1], found[2], found[3]


def _job_name(given: str | None, spec: Spec) -> str:
    """Return the job's name; pods and their host names append up to 13 characters, and 63 is the limit."""
    name = given or re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")[:50].strip("-") or "smp-train"
    if re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", name):
        return name
    if given:
        raise ConfigError(
            f"--job_name {given}: small letters, digits and dashes, a letter first, at most 50; it names the pods"
        )
    return f"run-{name}"[:50].rstrip("-")


def _check_folders(spec: Spec, target: Target) -> None:
    """Refuse folders that pods do not have, or that are lost with them."""
    shared = [path for _, path in target.claims]
    mounted = [*shared, *(path for _, path in target.host_paths)]
    for name in ("run_dir", "checkpoint_dir", "training_dir", "test_dir", "resume_from_checkpoint"):
        value = getattr(spec.resolved.args, name)
        volumes, kind = mounted, "volume of the pods"
        if name in ("run_dir", "checkpoint_dir"):
            volumes, kind = shared, "volume that all pods share"
        for folder in value if isinstance(value, list) else [value]:
            if not folder or "://" in folder:
                continue
            if not any(f"{folder}/".startswith(path.rstrip("/") + "/") for path in volumes):
                raise ConfigError(
                    f"--{name} {folder}: is on no {kind}; give --claims CLAIM:/path, and a folder below that path"
                )


def text_of(spec: Spec, target: Target) -> str:
    """Return the manifest as YAML."""
    import yaml

    return str(yaml.safe_dump(manifest(spec, target), sort_keys=False, width=200))


def warnings(target: Target) -> list[str]:
    """Return warnings about the cluster of this job."""
    found = []
    watched = target.namespace.startswith(("kubeflow", "hyperpod"))
    if target.on_hyperpod and target.operator == "kubeflow" and not watched:
        found.append(f"HyperPod restarts jobs in namespaces kubeflow and hyperpod-... only, not in {target.namespace}")
    if target.operator == "hyperpod" and not target.on_hyperpod:
        found.append("--operator hyperpod runs on HyperPod nodes: give --instance_type as ml.p5.48xlarge")
    if target.operator == "hyperpod":
        found.append("the image must hold hyperpodrun: EXTRA_PACKAGES=hyperpod-elastic-agent docker_build.sh")
    return found


def kubectl(*words: str, text: str = "") -> None:
    """Run kubectl; `ConfigError` with its own error and what to do about it."""
    call("kubectl", *words, text=text, absent="install it, or add --dry_run to see the manifest", advice=ADVICE)


CONNECT = "`aws eks update-kubeconfig --name CLUSTER` connects kubectl"
ADVICE = (
    ("no matches for kind", "the operator of this kind is not installed in the cluster"),
    ("AlreadyExists", "delete the finished job with kubectl delete, or give another --job_name"),
    ("persistentvolumeclaims", "`kubectl get pvc -n NAMESPACE` lists the claims"),
    ("secrets", "`kubectl create secret generic NAME --from-literal=KEY=VALUE` makes one"),
    ("unable to connect", CONNECT),
    ("connection to the server", CONNECT),
)


def check(text: str, target: Target) -> None:
    """Have the cluster validate the manifest, and look for the claims and secrets that it names."""
    kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
    for claim, _ in target.claims:
        kubectl("get", "persistentvolumeclaims", claim, "-n", target.namespace, "-o", "name")
    for _, secret, _ in target.secrets:
        kubectl("get", "secrets", secret, "-n", target.namespace, "-o", "name")


def main(words: Sequence[str]) -> int:
    """Run ``smp-train launch k8s`` and return its exit code."""
    if print_help(words, USAGE, __doc__, OPTIONS):
        return 0
    options, training = split(words, OPTIONS)
    spec, target = prepare(options, training)
    text = text_of(spec, target)
    saving = timing.save_warnings(
        spec.resolved, limit=None, margin=GRACE_SECONDS, instance=spec.instance, nodes=spec.nodes,
        processes=spec.processes,
    )  # fmt: skip
    if not options["dry_run"]:
        saving += planned.check(spec.resolved, spec.train_flags, spec.instance, spec.nodes, spec.processes)
    tell(spec, [*warnings(target), *saving])
    if options["dry_run"]:
        planned.tell_unplanned(spec.resolved.args, spec.instance, spec.processes)
        print(text, end="")
        return 0
    check(text, target)
    if options["check"]:
        print(f"smp-train: the cluster would take {target.resource}/{target.name}", file=sys.stderr)
        return 0
    kubectl("create", "-f", "-", text=text)
    pod, where = f"{target.name}-{'worker' if target.operator == 'kubeflow' else 'pods'}-0", f"-n {target.namespace}"
    print(f"submitted {target.resource}/{target.name}")
    print(f"pods:   kubectl get pods {where} | grep ^{target.name}-")
    print(f"log:    {spec.run_dir}/metrics.jsonl on the volume")
    print(f"follow: kubectl logs {where} -f {pod}")
    print(f"stop:   kubectl exec {where} {pod} -- touch {spec.run_dir}/STOP    (saves first)")
    print(f"cancel: kubectl delete {where} {target.resource}/{target.name}")
    return 0
