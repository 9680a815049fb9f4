"""Environment variables that launchers set, and variables that they advise to unset.

A run needs few. The EFA plugin of NCCL (aws-ofi-nccl) chooses provider, buffer sizes, protocol and tuner for each
instance type; most exports in older scripts were workarounds for old releases.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from smp_train.launch.instances import Instance

# Variables that are often exported, and why they should not be.
DROPPED: dict[str, str] = {
    "FI_PROVIDER": "the NCCL plugin finds EFA by itself since its release 1.6, and without EFA this breaks the network",
    "FI_EFA_USE_DEVICE_RDMA": "on by itself since libfabric 1.18, and not supported on every instance type",
    "FI_EFA_FORK_SAFE": "does nothing in current libfabric",
    "FI_EFA_ENABLE_SHM_TRANSFER": "does nothing in current libfabric",
    "RDMAV_FORK_SAFE": "not needed on current kernels, and breaks some",
    "NCCL_PROTO": "the NCCL plugin chooses it by instance type; forcing it costs speed",
    "NCCL_BUFFSIZE": "the NCCL plugin chooses it by instance type",
    "NCCL_P2P_NET_CHUNKSIZE": "the NCCL plugin chooses it by instance type",
    "NCCL_TUNER_PLUGIN": "the NCCL plugin chooses it; a path here stops NCCL 2.27",
    "NCCL_MIN_NCHANNELS": "NCCL chooses it",
    "NCCL_SOCKET_NTHREADS": "NCCL chooses it",
    "NCCL_IB_DISABLE": "EFA is not InfiniBand: without effect",
    "NCCL_ASYNC_ERROR_HANDLING": "renamed TORCH_NCCL_ASYNC_ERROR_HANDLING, and on by default",
    "LD_PRELOAD": "it reaches into containers, where the library is another or is not there",
}

# Interfaces of containers and loopback; everything else may carry NCCL's bootstrap.
SOCKETS_SLURM = "^docker,lo,veth"
SOCKETS_KUBERNETES = "^lo,docker,veth,eni,pod-id-link0"


def variables(instance: Instance | None, *, kubernetes: bool = False) -> dict[str, str]:
    """Return the variables that a launcher sets for training on ``instance`` (None: unknown, or no GPU)."""
    values = {"HF_HUB_ETAG_TIMEOUT": "60", "TOKENIZERS_PARALLELISM": "false"}
    if instance is None:
        return values
    values |= {
        "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_IFNAME": SOCKETS_KUBERNETES if kubernetes else SOCKETS_SLURM,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    }
    if instance.efa:
        # Forked data workers run out of huge pages otherwise (ENOMEM).
        values["FI_EFA_USE_HUGE_PAGE"] = "0"
    if instance.name.startswith(("g5.", "g6.", "g6e.")) and instance.gpus > 1:
        values["NCCL_SHM_USE_CUDA_MEMCPY"] = "1"
    return values


def output_places(run_dir: str, logs: str, environ: Mapping[str, str], *, inside: bool) -> dict[str, str]:
    """Return variables that place files below the run folder, which outlives the node and the container.

    NCCL's flight recorder writes there what each rank did when a collective hangs. ``inside`` a container, downloads
    from Hugging Face go there too, for the next start.
    """
    values = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{logs}/nccl-trace-rank-"}
    in_image = os.path.join(environ.get("HOME", "/root"), ".cache/huggingface")
    if inside and not environ.get("HF_HUB_CACHE") and not os.path.isdir(in_image):
        values["HF_HOME"] = f"{run_dir}/huggingface"
    return values


def lint(environ: Mapping[str, str]) -> list[str]:
    """Return one line for each variable of ``environ`` that should not be set."""
    reasons = {name: why for name, why in DROPPED.items() if name in environ}
    sockets = environ.get("NCCL_SOCKET_IFNAME", "")
    excluded = sockets.removeprefix("^").split(",")
    if sockets and not sockets.startswith("^"):
        reasons["NCCL_SOCKET_IFNAME"] = "names of interfaces differ between instance types"
    elif any((name and "ens32".startswith(name)) or name.startswith("eth") for name in excluded):
        reasons["NCCL_SOCKET_IFNAME"] = "it may exclude the only interface there is"
    if environ.get("GLOO_SOCKET_IFNAME", "").startswith("^"):
        reasons["GLOO_SOCKET_IFNAME"] = "Gloo knows no ^ and looks for an interface of that name"
    if environ.get("TMPDIR") and not os.path.isdir(environ["TMPDIR"]):
        reasons["TMPDIR"] = "this folder does not exist here"
    if environ.get("NCCL_DEBUG_SUBSYS", "").lower() == "off":
        reasons["NCCL_DEBUG_SUBSYS"] = "NCCL knows no such value"
    return [f"{name}={environ[name]} is set: {why}; unset it" for name, why in reasons.items()]
