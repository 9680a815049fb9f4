"""`smp-train launch k8s`: render a Kubernetes manifest, check it, submit it with kubectl."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from smp_train.arguments import parse
from smp_train.arguments.values import nearest
from smp_train.errors import ConfigError
from smp_train.launch import timing
from smp_train.launch.command import call
from smp_train.launch.flags import inline_files, named, without
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
    """Check launch options and training flags; return the run and where it goes.

    Raises:
        ConfigError: for everything that the cluster or the training would refuse and that can be seen here.
    """
    claims, host_paths = (_pairs(name, options[name]) for name in ("claims", "host_paths"))
    words = named(inline_files([*training, *profile_flags(options["profile"])]))
    given = parse(words, {}).args
    if not given.run_dir.startswith("/"):
        if not claims:
            raise ConfigError(
                "a pod's own disk ends with it: give --claims CLAIM:/path, a volume that all pods share, for the run "
                "folder, checkpoints and data"
            )
        words = [*without(words, {"run_dir"}), f"--run_dir={claims[0][1].rstrip('/')}/{given.run_dir}"]
    secrets = tuple(_secret(text) for text in options["secrets"])
    spec = build(
        words,
        nodes=options["nodes"],
        processes=options["nproc"],
        instance_type=options["instance_type"],
        env=options["env"],
        kubernetes=True,
        container=True,
        environ={name: "from a secret" for name, _, _ in secrets},  # nothing of this shell reaches the pods
    )
    image = options["image"]
    if not image:
        raise ConfigError("--image is missing: the URI of an image with this package, which docker_build.sh makes")
    if image.endswith(".sqsh"):
        raise ConfigError(
            f"--image {image}: Kubernetes pulls images from a registry; push the one docker_build.sh made"
        )
    check_image(spec.instance, image, spec.resolved.args.backend)
    if options["operator"] not in OPERATORS:
        raise ConfigError(
            f"--operator {options['operator']}: is not kubeflow or hyperpod{nearest(options['operator'], OPERATORS)}"
        )
    if options["hang_after"] and options["operator"] != "hyperpod":
        raise ConfigError("--hang_after: only HyperPod's operator watches the log; add --operator hyperpod")
    target = Target(
        name=_job_name(options["job_name"], spec),
        namespace=_label("namespace", options["namespace"]),
        image=image,
        operator=options["operator"],
        node_type=options["instance_type"],
        claims=claims,
        host_paths=host_paths,
        secrets=secrets,
        queue=options["queue"],
        priority=options["priority"],
        service_account=options["service_account"],
        max_restarts=options["max_restarts"],
        hang_after=options["hang_after"],
        profile=options["profile"],
    )
    _check_places(spec, target)
    return spec, target


def _pairs(name: str, texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    found = []
    for text in texts:
        source, colon, path = text.partition(":")
        if not colon or not source or not path.startswith("/") or (name == "host_paths" and source[0] != "/"):
            raise ConfigError(f"--{name} {text}: is not {'CLAIM' if name == 'claims' else '/path'}:/path")
        found.append((source, path))
    return tuple(found)


def _secret(text: str) -> tuple[str, str, str]:
    name, equals, place = text.partition("=")
    secret, colon, key = place.partition(":")
    if not (equals and colon and secret and key and VARIABLE.fullmatch(name)):
        raise ConfigError(f"--secrets {text}: is not NAME=SECRET:KEY")
    return name, secret, key


def _label(name: str, text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        raise ConfigError(f"--{name} {text}: small letters, digits and dashes only, at most 63")
    return text


def _job_name(given: str | None, spec: Spec) -> str:
    """Return the job's name; pods and their host names append up to 13 characters, and 63 is the limit."""
    name = given or re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")[:50].strip("-") or "smp-train"
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", name):
        if given:
            raise ConfigError(
                f"--job_name {given}: small letters, digits and dashes, a letter first, at most 50; it names the pods"
            )
        name = f"run-{name}"[:50].rstrip("-")
    return name


def _check_places(spec: Spec, target: Target) -> None:
    """Refuse folders that pods do not have, or that are lost with them."""
    args = spec.resolved.args
    shared = [path for _, path in target.claims]
    mounted = [*shared, *(path for _, path in target.host_paths)]
    for name in ("run_dir", "checkpoint_dir", "training_dir", "test_dir", "resume_from_checkpoint"):
        value = getattr(args, name)
        for place in value if isinstance(value, list) else [value]:
            if not place or "://" in place:
                continue
            writes = name in ("run_dir", "checkpoint_dir")
            if not any(_below(place, path) for path in (shared if writes else mounted)):
                raise ConfigError(
                    f"--{name} {place}: is on no "
                    + ("volume that all pods share" if writes else "volume of the pods")
                    + "; give --claims CLAIM:/path, and a folder below that path"
                )


def _below(place: str, path: str) -> bool:
    return place == path or place.startswith(path.rstrip("/") + "/")


def text_of(spec: Spec, target: Target) -> str:
    """Return the manifest as YAML."""
    import yaml

    return str(yaml.safe_dump(manifest(spec, target), sort_keys=False, width=200))


def warnings(target: Target) -> list[str]:
    """Return what this job lacks on its cluster."""
    found = []
    if (
        target.on_hyperpod
        and target.operator == "kubeflow"
        and not target.namespace.startswith(("kubeflow", "hyperpod"))
    ):
        found.append(
            f"HyperPod restarts jobs in the namespaces kubeflow and hyperpod-... only, not in {target.namespace}"
        )
    if target.operator == "hyperpod" and not target.on_hyperpod:
        found.append("--operator hyperpod runs on HyperPod nodes: give --instance_type as ml.p5.48xlarge")
    if target.operator == "hyperpod":
        found.append("the image must hold hyperpodrun: EXTRA_PACKAGES=hyperpod-elastic-agent docker_build.sh")
    return found


def kubectl(*words: str, text: str = "") -> None:
    """Run kubectl; `ConfigError` with its own error and what to do about it."""
    call("kubectl", *words, text=text, absent="install it, or add --dry_run to see the manifest", advice=ADVICE)


ADVICE = (
    ("no matches for kind", "the operator of this kind is not installed in the cluster"),
    ("AlreadyExists", "delete the finished job with kubectl delete, or give another --job_name"),
    ("persistentvolumeclaims", "`kubectl get pvc -n NAMESPACE` lists the claims"),
    ("secrets", "`kubectl create secret generic NAME --from-literal=KEY=VALUE` makes one"),
    ("unable to connect", "`aws eks update-kubeconfig --name CLUSTER` connects kubectl"),
    ("connection to the server", "`aws eks update-kubeconfig --name CLUSTER` connects kubectl"),
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
    found = warnings(target)
    found += timing.save_warnings(
        spec.resolved, limit=None, margin=GRACE_SECONDS, instance=spec.instance, nodes=spec.nodes,
        processes=spec.processes,
    )  # fmt: skip
    tell(spec, found)
    if options["dry_run"]:
        print(text, end="")
        return 0
    check(text, target)
    if options["check"]:
        print(f"smp-train: the cluster would take {target.resource}/{target.name}", file=sys.stderr)
        return 0
    kubectl("create", "-f", "-", text=text)
    place = f"-n {target.namespace}"
    print(f"submitted {target.resource}/{target.name}")
    print(f"pods:   kubectl get pods {place} | grep ^{target.name}-")
    print(f"log:    {spec.run_dir}/metrics.jsonl on the volume")
    print(f"follow: kubectl logs {place} -f {target.pod(0)}")
    print(f"stop:   kubectl exec {place} {target.pod(0)} -- touch {spec.run_dir}/STOP    (saves first)")
    print(f"cancel: kubectl delete {place} {target.resource}/{target.name}")
    return 0
