"""GPUs, network adapters, disks and limits of this machine, compared with its instance type."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from smp_train.launch import instances
from smp_train.launch.command import ask
from smp_train.launch.doctor.finding import Finding, fail, ok, warn
from smp_train.launch.node_agent import count_efa
from smp_train.launch.preflight import LOCAL_DISKS, PLUGIN_PLACES, existing, file_system, nccl_plugin

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_LEAST = 1 << 30
OPEN_FILES_LEAST = 4096


def gpus() -> Iterator[Finding]:
    """Check the driver, the number of GPUs, and errors of their memory."""
    instance = instances.this_machine()
    code, output = ask("nvidia-smi", "--query-gpu=name,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader")
    rows = [line.rpartition(",") for line in output.splitlines() if "," in line]
    bad = [number for number, (_, _, errors) in enumerate(rows) if errors.strip().isdigit() and int(errors) > 0]
    seen = f"{len(rows)} x {rows[0][0].strip() if rows else '?'}"
    if code == 127 and instance:
        missing = f"no nvidia-smi on this {instance.name}, which has {instance.gpus} GPUs"
        yield fail("GPUs", missing, "install the driver")
    elif code == 127:
        yield ok("GPUs", "none: runs here use the CPU")
    elif code:
        yield fail("GPUs", f"nvidia-smi: {(output.splitlines() or [str(code)])[-1]}", "replace or reboot this node")
    elif bad:
        yield fail("GPUs", f"{seen}; errors of memory that could not be corrected on {bad}", "replace this node")
    elif instance and len(rows) < instance.gpus:
        yield fail("GPUs", f"{seen} of the {instance.gpus} of a {instance.name}", "replace this node")
    else:
        yield ok("GPUs", seen)


def adapters() -> Iterator[Finding]:
    """Check the EFA adapters, NCCL's plugin for them, and the limit of locked memory."""
    instance, count = instances.this_machine(), count_efa()
    if instance and count < instance.efa:
        seen = f"{count} of the {instance.efa} adapters of a {instance.name}"
        hidden = warn("EFA", seen, "let the container see /dev/infiniband, or launch nodes with EFA")
        yield fail("EFA", seen, "replace this node") if count else hidden
        return
    if not count:
        yield ok("EFA", "this type has none" if instance else "no adapters: nodes reach each other through TCP")
        return
    plugin = nccl_plugin(os.environ)
    if plugin:
        yield ok("EFA", f"{count} adapters, NCCL plugin {plugin}")
    else:
        fix = "in a container it is the image's; else install aws-ofi-nccl, or NCCL goes through TCP"
        yield warn("EFA", f"{count} adapters, no NCCL plugin (libnccl-net*.so) in {', '.join(PLUGIN_PLACES)}", fix)
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        fix = "`ulimit -l unlimited`, in /etc/security/limits.conf, or for the container: --ulimit memlock=-1"
        yield fail("locked memory", "is limited, and EFA registers memory", fix)


def folder(path: Path) -> Iterator[Finding]:
    """Check whether runs can be written below ``path``, and whether other nodes would see them."""
    name = f"folder {path.resolve()}"
    try:
        path = existing(path)  # a run would make the folder itself
        with tempfile.NamedTemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        yield fail(name, problem.strerror or str(problem), "give another --folder, and the runs another --run_dir")
        return
    kind, free = file_system(path), shutil.disk_usage(path).free / 1e9
    seen = f"written to; {kind or 'unknown file system'}, {free:.0f} GB free"
    fix = "several nodes need a file system that all of them mount, such as FSx for Lustre"
    yield warn(name, seen, fix) if kind in LOCAL_DISKS else ok(name, seen)


def shared_memory() -> Iterator[Finding]:
    """Check /dev/shm, through which data workers and NCCL share memory."""
    if not SHARED_MEMORY.is_dir():
        yield warn("/dev/shm", "is not there", "data workers need it: --data_num_workers 0 does without")
        return
    size = shutil.disk_usage(SHARED_MEMORY).total
    fix = "docker run --shm-size=16g (or --ipc=host); in a pod an emptyDir of medium Memory"
    little = warn("/dev/shm", f"{size / 2**20:.0f} MiB: data workers and NCCL run out of it", fix)
    yield little if size < SHARED_MEMORY_LEAST else ok("/dev/shm", f"{size / 2**30:.1f} GiB")


def limits() -> Iterator[Finding]:
    """Check the limit of open files, which runs with many ranks and shards reach."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if files != unlimited and files < OPEN_FILES_LEAST:
        fix = "`ulimit -n 65536`" + ("" if most >= 65536 or most == unlimited else " (as root: it is capped)")
        yield warn("open files", f"{files}: connections of many ranks and open shards need more", fix)
    else:
        yield ok("open files", "unlimited" if files == unlimited else str(files))


def host_name() -> Iterator[Finding]:
    """Check whether this machine's name has an address, at which gloo listens."""
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        fix = f"add it to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo on a single machine; `getent hosts {name}` shows it"
        yield fail("host name", f"{name} has no address: ranks cannot reach each other at it", fix)
        return
    fix = "enough for one machine; for several, give it the address in /etc/hosts that the others know"
    loopback = warn("host name", f"{name} is {address}: gloo on other nodes cannot reach it there", fix)
    yield loopback if address.startswith("127.") or address == "::1" else ok("host name", f"{name} is {address}")
