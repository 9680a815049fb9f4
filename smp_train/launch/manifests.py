"""Kubernetes manifests of one run: `PyTorchJob` of Kubeflow, `HyperPodPyTorchJob`, or `Job` for recovery in place.

Each starts one agent per pod (torchrun, hyperpodrun, ours) on the same command line. The objects are in manifests.yaml;
``options`` are the checked options of `k8s.prepare`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from string import Template
from typing import Any

from smp_train.distributed.job import KUBERNETES_JOB
from smp_train.launch.coordinator import POD_IP
from smp_train.launch.nsys import recording
from smp_train.launch.spec import Spec
from smp_train.launch.srun_step import SMP_CLUSTER_LOGS

GRACE_SECONDS = 600
"""How long a pod may take to save after SIGTERM."""
SHUTDOWN_SECONDS = GRACE_SECONDS - 30
"""How long the pod's agent waits for its processes after SIGTERM."""
RESOURCES = {"kubeflow": "pytorchjob", "hyperpod": "hyperpodpytorchjob", "job": "job"}
"""Kind of the object, in kubectl's form, by operator; a `Job` needs no operator."""
LOST_NODE_SECONDS = 30
"""How long a `Job` waits before it replaces the pod of a node that does not answer; Kubernetes itself waits 300 s."""


def on_hyperpod(options: argparse.Namespace) -> bool:
    """Return whether the nodes are HyperPod's: their instance types have SageMaker's names."""
    return bool(options.instance_type and options.instance_type.startswith("ml."))


def manifest(spec: Spec, options: argparse.Namespace) -> dict[str, Any]:
    """Return the object for the API server."""
    import yaml

    machines, hyperpod, restarts = spec.machines, options.operator == "hyperpod", options.max_restarts
    is_job = options.operator == "job"
    labels = {"kueue.x-k8s.io/queue-name": options.queue, "kueue.x-k8s.io/priority-class": options.priority}
    efa = machines.instance.efa if machines.instance else 0
    gpus = machines.processes if machines.instance else 0
    volumes = _volumes(options)
    # The first match has no limit: only one pod of the job prints losses.
    loss = {"name": "loss", "logPattern": r".*Batch \d+ Loss: .*"}
    values = {
        "POD_LABELS": labels if hyperpod else {},
        "IMAGE": options.image,
        "COMMAND": [_literal(part) for part in command(spec, options)],
        "ENV": _environment(spec, options),
        "MOUNTS": [{"name": name, "mountPath": path} for name, _, path in volumes],
        "PORTS": [{"containerPort": 8080}] if hyperpod else [],  # hyperpodrun listens there for the operator
        "RESOURCES": {"nvidia.com/gpu": gpus or None, "vpc.amazonaws.com/efa": efa or None},
        "VOLUMES": [{"name": name, **volume} for name, volume, _ in volumes],
        "GRACE_SECONDS": GRACE_SECONDS,
        "INSTANCE_TYPE": options.instance_type,
        "HEALTH": "Schedulable" if on_hyperpod(options) else None,
        "SERVICE_ACCOUNT": options.service_account,
        "SUBDOMAIN": options.job_name if is_job else None,
        "RESTART_POLICY": "Never" if is_job else None,
        "TOLERATIONS": [
            {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute",
             "tolerationSeconds": LOST_NODE_SECONDS} for state in ("not-ready", "unreachable")
        ] if is_job else [],
        "NAME": options.job_name,
        "NAMESPACE": options.namespace,
        "LABELS": labels,
        "AUTO_RESUME": "true" if on_hyperpod(options) else None,
        "RETRIES": str(restarts) if on_hyperpod(options) else None,
        "PROCESSES": str(machines.processes),
        "NODES": machines.nodes,
        "RESTARTS": restarts,
        "RESTARTS_OF_PODS": restarts * machines.nodes,
        "RESTARTS_OF_JOB": restarts * 4,
        "LOG_MONITORING": [{**loss, "expectedRecurringFrequencyInSeconds": options.hang_after}]
        if options.hang_after
        else [],
    }
    text = Template(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    filled = text.substitute({name: json.dumps(value, ensure_ascii=False) for name, value in values.items()})
    return _without_empty(yaml.safe_load(filled)[options.operator])


def _without_empty(value: Any) -> Any:
    """Return a value without the empty members of its mappings."""
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    if not isinstance(value, dict):
        return value
    members = {name: _without_empty(member) for name, member in value.items()}
    return {name: member for name, member in members.items() if member not in (None, {}, [])}


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
    if options.operator == "job":
        ours = ["python", "-m", "smp_train.launch.node_agent", f"--nproc={spec.machines.processes}"]
        run = [*ours, "--", *spec.train_flags]
    if options.profile == "nsys":
        folder = f"{spec.run_dir}/profile"
        make = ["/bin/bash", "-c", 'mkdir -p "$0" && exec "$@"', folder]
        run = [*make, *recording("nsys", f"{folder}/{options.job_name}_%h", run)]
    return run


def _literal(text: str) -> str:
    """Return a text in which Kubernetes expands no ``$(NAME)``: it reads ``$$`` as ``$``."""
    return text.replace("$", "$$")


def _environment(spec: Spec, options: argparse.Namespace) -> list[dict[str, Any]]:
    # A restarted pod has another host name; training recognizes the job by this variable.
    job = {"PYTHONUNBUFFERED": "1", KUBERNETES_JOB: f"{options.namespace}/{options.job_name}"}
    values = {**spec.environment, **job}
    fields: dict[str, str] = {}
    if options.operator == "job":
        values |= {"NNODES": str(spec.machines.nodes), "MASTER_ADDR": f"{options.job_name}-0.{options.job_name}"}
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        fields = {"NODE_RANK": index, POD_IP: "status.podIP"}
    elif options.operator == "kubeflow":
        # A variable, as torchrun before torch 2.13 refuses the flag of this name.
        values.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    sources = [(name, {"secretKeyRef": {"name": secret, "key": key}}) for name, secret, key in options.secrets]
    sources += [(name, {"fieldRef": {"fieldPath": path}}) for name, path in fields.items()]
    return [
        *({"name": name, "value": _literal(values[name])} for name in sorted(values)),
        *({"name": name, "valueFrom": source} for name, source in sources),
    ]


def _volumes(options: argparse.Namespace) -> list[tuple[str, dict[str, Any], str]]:
    """Return (name, volume, path in the container) of each volume."""
    host_paths = [*options.host_paths, *([(SMP_CLUSTER_LOGS, SMP_CLUSTER_LOGS)] if on_hyperpod(options) else [])]
    claims = [({"persistentVolumeClaim": {"claimName": claim}}, path) for claim, path in options.claims]
    paths = [({"hostPath": {"path": source}}, path) for source, path in host_paths]
    return [
        # Data workers and NCCL share memory in /dev/shm; the container runtime's own /dev/shm has only 64 MiB.
        ("shm", {"emptyDir": {"medium": "Memory"}}, "/dev/shm"),
        *((f"claim-{number}", *claim) for number, claim in enumerate(claims)),
        *((f"host-{number}", *path) for number, path in enumerate(paths)),
    ]
