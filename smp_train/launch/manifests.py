"""Kubernetes manifests of one run: Kubeflow's `PyTorchJob`, and `HyperPodPyTorchJob` of HyperPod's operator.

Both start one agent per pod (torchrun, hyperpodrun) on the same command line. Field names follow the custom
resource definitions of kubeflow/training-operator 1.7 to 1.9 and of HyperPod's training operator. ``options`` are the
checked options of `k8s.prepare`.
"""

from __future__ import annotations

import argparse
from typing import Any

from smp_train.distributed.job import KUBERNETES_JOB
from smp_train.launch.nsys import recording
from smp_train.launch.spec import Spec
from smp_train.launch.srun_step import SMP_CLUSTER_LOGS

GRACE_SECONDS = 600
"""How long a pod may take to save after SIGTERM."""
SHUTDOWN_SECONDS = GRACE_SECONDS - 30
"""How long its agent then waits for the processes."""
CONTAINER = "pytorch"  # Kubeflow's operator looks for a container of this name
HEALTH = "sagemaker.amazonaws.com/node-health-status"


def on_hyperpod(options: argparse.Namespace) -> bool:
    """Return whether the nodes are HyperPod's: their instance types have SageMaker's names."""
    return bool(options.instance_type and options.instance_type.startswith("ml."))


def resource(options: argparse.Namespace) -> str:
    """Return the kind of the object, in kubectl's form."""
    return "pytorchjob" if options.operator == "kubeflow" else "hyperpodpytorchjob"


def manifest(spec: Spec, options: argparse.Namespace) -> dict[str, Any]:
    """Return the object for the API server."""
    return _kubeflow(spec, options) if options.operator == "kubeflow" else _hyperpod(spec, options)


def _kubeflow(spec: Spec, options: argparse.Namespace) -> dict[str, Any]:
    nodes, annotations = spec.machines.nodes, {}
    if on_hyperpod(options):
        annotations = {
            "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
            "sagemaker.amazonaws.com/job-max-retry-count": str(options.max_restarts),
        }
    worker = {"replicas": nodes, "restartPolicy": "OnFailure", "template": _template(spec, options)}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(options, annotations),
        "spec": {
            "nprocPerNode": str(spec.machines.processes),
            # Kubeflow adds the restarts of all pods up, and a failure restarts every pod.
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": options.max_restarts * nodes},
            "elasticPolicy": {
                "rdzvBackend": "c10d", "rdzvId": options.job_name, "minReplicas": nodes, "maxReplicas": nodes,
                "maxRestarts": options.max_restarts,
            },
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }  # fmt: skip


def _hyperpod(spec: Spec, options: argparse.Namespace) -> dict[str, Any]:
    restarts = options.max_restarts
    policy: dict[str, Any] = {
        "cleanPodPolicy": "None",
        "jobMaxRetryCount": restarts * 4,
        "restartPolicy": {
            "numRestartBeforeFullJobRestart": restarts, "evalPeriodSeconds": 21600, "maxFullJobRestarts": 1,
        },
    }  # fmt: skip
    if options.hang_after:
        # The first match has no limit: only one pod of the job prints losses.
        loss = {"name": "loss", "logPattern": r".*Batch \d+ Loss: .*"}
        policy["logMonitoringConfiguration"] = [{**loss, "expectedRecurringFrequencyInSeconds": options.hang_after}]
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": _metadata(options, {}),
        "spec": {
            "nprocPerNode": str(spec.machines.processes),
            "runPolicy": policy,
            "replicaSpecs": [{"name": "pods", "replicas": spec.machines.nodes, "template": _template(spec, options)}],
        },
    }


def _metadata(options: argparse.Namespace, annotations: dict[str, str]) -> dict[str, Any]:
    optional = _without_empty({"labels": _labels(options), "annotations": annotations})
    return {"name": options.job_name, "namespace": options.namespace, **optional}


def _labels(options: argparse.Namespace) -> dict[str, str]:
    return _without_empty(
        {"kueue.x-k8s.io/queue-name": options.queue, "kueue.x-k8s.io/priority-class": options.priority}
    )


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _template(spec: Spec, options: argparse.Namespace) -> dict[str, Any]:
    volumes, mounts = _volumes(options)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": options.image,
        "imagePullPolicy": "Always",
        "command": [_literal(part) for part in command(spec, options)],
        "env": _environment(spec, options),
        "volumeMounts": mounts,
    }
    if options.operator == "hyperpod":
        container["ports"] = [{"containerPort": 8080}]  # hyperpodrun listens there for the operator
    instance = spec.machines.instance
    if instance:
        amounts = {"nvidia.com/gpu": spec.machines.processes, "vpc.amazonaws.com/efa": instance.efa}
        container["resources"] = {"requests": _without_empty(amounts), "limits": _without_empty(amounts)}
    pod = {
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "nodeSelector": _without_empty(
            {
                "node.kubernetes.io/instance-type": options.instance_type,
                HEALTH: "Schedulable" if on_hyperpod(options) else "",
            }
        ),
        "serviceAccountName": options.service_account,
    }
    labels = _labels(options) if options.operator == "hyperpod" else {}
    return {**({"metadata": {"labels": labels}} if labels else {}), "spec": _without_empty(pod)}


def command(spec: Spec, options: argparse.Namespace) -> list[str]:
    """Return the command of a pod, before Kubernetes expands ``$(NAME)``."""
    agent = ["torchrun", f"--nnodes={spec.machines.nodes}", f"--nproc_per_node={spec.machines.processes}"]
    if options.operator == "hyperpod":
        # The operator watches the agent's files below log_dir.
        agent = [
            "hyperpodrun", *agent[1:], "--tee=3", "--log_dir=/tmp/hyperpod", "--shutdown-signal=SIGTERM",
            f"--shutdown-timeout={SHUTDOWN_SECONDS}",
        ]  # fmt: skip
    run = [*agent, "--module", "smp_train.launch.entry", *spec.train_flags]
    if options.profile == "nsys":
        folder = f"{spec.run_dir}/profile"
        make = ["/bin/bash", "-c", 'mkdir -p "$0" && exec "$@"', folder]
        run = [*make, *recording("nsys", f"{folder}/{options.job_name}_%h", run)]
    return run


def _literal(text: str) -> str:
    """Return a word in which Kubernetes expands no ``$(NAME)``: it reads ``$$`` as ``$``."""
    return text.replace("$", "$$")


def _environment(spec: Spec, options: argparse.Namespace) -> list[dict[str, Any]]:
    # A restarted pod has another host name; training recognizes the job by this variable.
    job = {"PYTHONUNBUFFERED": "1", KUBERNETES_JOB: f"{options.namespace}/{options.job_name}"}
    values = {**spec.environment, **job}
    if options.operator != "hyperpod":
        # A variable, as torchrun before torch 2.13 refuses the flag of this name.
        values.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    return [
        *({"name": name, "value": _literal(values[name])} for name in sorted(values)),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for name, secret, key in options.secrets
        ),
    ]


def _volumes(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    host_paths = [*options.host_paths, *([(SMP_CLUSTER_LOGS, SMP_CLUSTER_LOGS)] if on_hyperpod(options) else [])]
    # Data workers and NCCL share memory there; the container runtime's own /dev/shm has 64 MiB.
    rows: list[tuple[str, dict[str, Any], str]] = [("shm", {"emptyDir": {"medium": "Memory"}}, "/dev/shm")]
    for number, (claim, path) in enumerate(options.claims):
        rows.append((f"claim-{number}", {"persistentVolumeClaim": {"claimName": claim}}, path))
    for number, (source, path) in enumerate(host_paths):
        rows.append((f"host-{number}", {"hostPath": {"path": source}}, path))
    volumes = [{"name": name, **volume} for name, volume, _ in rows]
    return volumes, [{"name": name, "mountPath": path} for name, _, path in rows]
