"""Kubernetes manifests of one run: Kubeflow's `PyTorchJob`, and `HyperPodPyTorchJob` of HyperPod's own operator.

Both start one agent per pod (torchrun, hyperpodrun) on the same command line. Field names are those of the custom
resource definitions of kubeflow/training-operator 1.7 to 1.9 and of HyperPod's training operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smp_train.distributed.job import KUBERNETES_JOB
from smp_train.launch.nsys import recording
from smp_train.launch.spec import Spec

GRACE_SECONDS = 600
"""How long a pod may take to save after SIGTERM."""
SHUTDOWN_SECONDS = GRACE_SECONDS - 30
"""How long its agent then waits for the processes."""
CONTAINER = "pytorch"  # Kubeflow's operator looks for a container of this name
HEALTH = "sagemaker.amazonaws.com/node-health-status"
SMP_CLUSTER_LOGS = "/var/log/aws/clusters"  # SMP checks with it that this is HyperPod


@dataclass(frozen=True)
class Target:
    """Where and how a run goes to a Kubernetes cluster.

    ``claims`` and ``host_paths`` are (name of the claim or path on the node, path in the container); ``secrets`` are
    (variable, secret, key). ``node_type`` is the label of the nodes, with ``ml.`` on HyperPod.
    """

    name: str
    namespace: str
    image: str
    operator: str = "kubeflow"
    node_type: str | None = None
    claims: tuple[tuple[str, str], ...] = ()
    host_paths: tuple[tuple[str, str], ...] = ()
    secrets: tuple[tuple[str, str, str], ...] = ()
    queue: str | None = None
    priority: str | None = None
    service_account: str | None = None
    max_restarts: int = 3
    hang_after: int | None = None
    profile: str | None = None

    @property
    def on_hyperpod(self) -> bool:
        """Whether the nodes are HyperPod's: their instance types are named as SageMaker names them."""
        return bool(self.node_type and self.node_type.startswith("ml."))

    @property
    def resource(self) -> str:
        """The kind, as kubectl takes it."""
        return "pytorchjob" if self.operator == "kubeflow" else "hyperpodpytorchjob"


def manifest(spec: Spec, target: Target) -> dict[str, Any]:
    """Return the object to hand to the API server."""
    return _kubeflow(spec, target) if target.operator == "kubeflow" else _hyperpod(spec, target)


def _kubeflow(spec: Spec, target: Target) -> dict[str, Any]:
    annotations = {}
    if target.on_hyperpod:
        annotations = {
            "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
            "sagemaker.amazonaws.com/job-max-retry-count": str(target.max_restarts),
        }
    worker = {"replicas": spec.nodes, "restartPolicy": "OnFailure", "template": _template(spec, target)}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(target, annotations),
        "spec": {
            "nprocPerNode": str(spec.processes),
            # Kubeflow adds the restarts of all pods up, and a failure restarts every one of them.
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": target.max_restarts * spec.nodes},
            "elasticPolicy": {
                "rdzvBackend": "c10d", "rdzvId": target.name, "minReplicas": spec.nodes, "maxReplicas": spec.nodes,
                "maxRestarts": target.max_restarts,
            },
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }  # fmt: skip


def _hyperpod(spec: Spec, target: Target) -> dict[str, Any]:
    policy: dict[str, Any] = {
        "cleanPodPolicy": "None",
        "jobMaxRetryCount": target.max_restarts * 4,
        "restartPolicy": {
            "numRestartBeforeFullJobRestart": target.max_restarts, "evalPeriodSeconds": 21600, "maxFullJobRestarts": 1,
        },
    }  # fmt: skip
    if target.hang_after:
        # Without a limit for the first match: only one pod of the job prints losses, the others never match.
        loss = {"name": "loss", "logPattern": r".*Batch \d+ Loss: .*"}
        policy["logMonitoringConfiguration"] = [{**loss, "expectedRecurringFrequencyInSeconds": target.hang_after}]
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": _metadata(target, {}),
        "spec": {
            "nprocPerNode": str(spec.processes),
            "runPolicy": policy,
            "replicaSpecs": [{"name": "pods", "replicas": spec.nodes, "template": _template(spec, target)}],
        },
    }


def _metadata(target: Target, annotations: dict[str, str]) -> dict[str, Any]:
    optional = {"labels": _labels(target), "annotations": annotations}
    return {"name": target.name, "namespace": target.namespace, **{name: one for name, one in optional.items() if one}}


def _labels(target: Target) -> dict[str, str]:
    given = {"kueue.x-k8s.io/queue-name": target.queue, "kueue.x-k8s.io/priority-class": target.priority}
    return {name: value for name, value in given.items() if value}


def _template(spec: Spec, target: Target) -> dict[str, Any]:
    volumes, mounts = _volumes(target)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": target.image,
        "imagePullPolicy": "Always",
        "command": [_literal(word) for word in command(spec, target)],
        "env": _environment(spec, target),
        "volumeMounts": mounts,
    }
    if target.operator == "hyperpod":
        container["ports"] = [{"containerPort": 8080}]  # hyperpodrun listens there for the operator
    if spec.instance:
        amounts: dict[str, int] = {"nvidia.com/gpu": spec.processes}
        if spec.instance.efa:
            amounts["vpc.amazonaws.com/efa"] = spec.instance.efa
        container["resources"] = {"requests": amounts, "limits": dict(amounts)}
    pod: dict[str, Any] = {
        "containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": GRACE_SECONDS,
    }  # fmt: skip
    selector = {"node.kubernetes.io/instance-type": target.node_type} if target.node_type else {}
    if target.on_hyperpod:
        selector[HEALTH] = "Schedulable"
    if selector:
        pod["nodeSelector"] = selector
    if target.service_account:
        pod["serviceAccountName"] = target.service_account
    labels = _labels(target) if target.operator == "hyperpod" else {}
    return {**({"metadata": {"labels": labels}} if labels else {}), "spec": pod}


def command(spec: Spec, target: Target) -> list[str]:
    """Return the command of a pod, before Kubernetes expands ``$(NAME)``."""
    agent = ["torchrun", f"--nnodes={spec.nodes}", f"--nproc_per_node={spec.processes}"]
    if target.operator == "hyperpod":
        # The operator watches what the agent writes below log_dir.
        agent = [
            "hyperpodrun", *agent[1:], "--tee=3", "--log_dir=/tmp/hyperpod", "--shutdown-signal=SIGTERM",
            f"--shutdown-timeout={SHUTDOWN_SECONDS}",
        ]  # fmt: skip
    words = [*agent, "--module", "smp_train.launch.entry", *spec.train_flags]
    if target.profile == "nsys":
        folder = f"{spec.run_dir}/profile"
        make = ["/bin/bash", "-c", 'mkdir -p "$0" && exec "$@"', folder]
        words = [*make, *recording("nsys", f"{folder}/{target.name}_%h", words)]
    return words


def _literal(word: str) -> str:
    """Keep Kubernetes from expanding ``$(NAME)`` in a word: it reads ``$$`` as ``$``."""
    return word.replace("$", "$$")


def _environment(spec: Spec, target: Target) -> list[dict[str, Any]]:
    # A restarted pod has another host name; training recognizes the job by this variable.
    plain = {**spec.environment, "PYTHONUNBUFFERED": "1", KUBERNETES_JOB: f"{target.namespace}/{target.name}"}
    if target.operator != "hyperpod":
        # A variable, as torchrun before torch 2.13 refuses the flag of this name.
        plain.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    return [
        *({"name": name, "value": _literal(plain[name])} for name in sorted(plain)),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for name, secret, key in target.secrets
        ),
    ]


def _volumes(target: Target) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    host_paths = [*target.host_paths, *([(SMP_CLUSTER_LOGS, SMP_CLUSTER_LOGS)] if target.on_hyperpod else [])]
    # Data workers and NCCL share memory there; the container runtime's own /dev/shm has 64 MiB.
    found: list[tuple[str, dict[str, Any], str]] = [("shm", {"emptyDir": {"medium": "Memory"}}, "/dev/shm")]
    for number, (claim, path) in enumerate(target.claims):
        found.append((f"claim-{number}", {"persistentVolumeClaim": {"claimName": claim}}, path))
    for number, (source, path) in enumerate(host_paths):
        found.append((f"host-{number}", {"hostPath": {"path": source}}, path))
    volumes = [{"name": name, **volume} for name, volume, _ in found]
    return volumes, [{"name": name, "mountPath": path} for name, _, path in found]
