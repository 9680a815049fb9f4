"""A real Slurm with several nodes on this one machine (Debian's slurm-wlm and munge, as root).

Each node is a `slurmd` in namespaces of its own: it has its own host name, and killing it kills all that runs on it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RIGS = itertools.count()
PATIENCE_SECONDS = 600.0
"""For what takes seconds on a machine of one's own."""
MISSING = [name for name in ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "gcc") if not shutil.which(name)]
USABLE = not MISSING and os.geteuid() == 0


class Rig:
    """A cluster of `nodes` nodes n1, n2, ... below ``folder``, with doubles of pyxis and of HyperPod's auto-resume.

    With ``gpus`` it has GRES, and each node so many GPUs, as far as Slurm knows.
    """

    def __init__(self, folder: Path, nodes: int = 3, *, auto_resume: bool = False, gpus: int = 0) -> None:
        self.folder, self.nodes, self.gpus = folder, nodes, gpus
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.hurried: set[tuple[str, str]] = set()
        for name in ("etc", "run", "log", "state", "spool", "bin"):
            (folder / name).mkdir(parents=True)
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        self.environ |= {
            "SLURM_CONF": str(folder / "etc/slurm.conf"),
            "RIG": str(folder),
            "PYXIS_DOUBLE_IMAGE_PATHS": ":".join(_python_folders()),
        }
        if auto_resume:
            self.environ |= {"REAL_SRUN": str(shutil.which("srun")), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
            shutil.copy(HERE / "srun_autoresume", folder / "bin/srun")
        self._configure(["pyxis_double", *(["auto_resume_double"] if auto_resume else [])])

    def _configure(self, plugins: list[str]) -> None:
        etc, host = self.folder / "etc", socket.gethostname().partition(".")[0]
        (etc / "munge.key").write_bytes(os.urandom(1024))
        (etc / "munge.key").chmod(0o600)
        # Below those that runs and other tests choose theirs from.
        port = _free_ports(12000 + (os.getpid() * 8 + next(RIGS)) % 1000 * 8, self.nodes + 1)
        names = [f"n{number}" for number in range(1, self.nodes + 1)]
        lines = [
            "ClusterName=rig", f"SlurmctldHost={host}(127.0.0.1)", "SlurmUser=root", "SlurmdUser=root",
            "AuthType=auth/munge", f"AuthInfo=socket={self.folder}/run/munge.sock,cred_expire=600",
            f"SlurmctldPort={port}", f"SlurmctldPidFile={self.folder}/run/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/run/slurmd-%n.pid", f"SlurmdSpoolDir={self.folder}/spool/%n",
            f"StateSaveLocation={self.folder}/state", f"SlurmctldLogFile={self.folder}/log/slurmctld.log",
            f"SlurmdLogFile={self.folder}/log/slurmd-%n.log", "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none", "MpiDefault=none", "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core",
            "SlurmdParameters=config_overrides", "SlurmctldParameters=preempt_send_user_signal",
            "SchedulerParameters=permit_job_expansion,sched_interval=1,bf_interval=1", "ReturnToService=2",
            # Long, for a machine that is busy with other things: a node is lost when `crash` says so.
            "SlurmdTimeout=600", "BatchStartTimeout=300", "MessageTimeout=100", "TCPTimeout=60",
            "UnkillableStepTimeout=600", "MinJobAge=0", "KillWait=5", "JobRequeue=1",
            "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
            "JobAcctGatherType=jobacct_gather/none", "JobAcctGatherFrequency=0",
            "AccountingStorageType=accounting_storage/none", f"PlugStackConfig={etc}/plugstack.conf",
        ]  # fmt: skip
        has = f" Gres=gpu:{self.gpus}" if self.gpus else ""
        lines += [
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port + number} CPUs=8 RealMemory=1000{has}"
            for number, name in enumerate(names, 1)
        ]
        if self.gpus:
            self._make_gpus()
            lines.append("GresTypes=gpu")
        lines += [
            f"PartitionName=dev Nodes=n[1-{self.nodes}] Default=YES PriorityTier=1 GraceTime=3600",
            f"PartitionName=prio Nodes=n[1-{self.nodes}] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF",
        ]
        (etc / "slurm.conf").write_text("\n".join(lines) + "\n")
        hosts = [f"127.0.0.1 localhost {host}\n", *(f"127.0.0.1 {name}\n" for name in names)]
        (etc / "hosts").write_text("".join(hosts))
        for name in plugins:
            build = ["gcc", "-shared", "-fPIC", "-w", "-o", self.folder / f"{name}.so", HERE / f"{name}.c"]
            subprocess.run(build, check=True, timeout=300)
        libraries = [f"required {self.folder}/{name}.so\n" for name in plugins]
        (etc / "plugstack.conf").write_text("".join(libraries))

    def _make_gpus(self) -> None:
        """Make twins of /dev/null that Slurm takes for GPUs."""
        (self.folder / "dev").mkdir()
        for number in range(self.gpus):
            os.mknod(self.folder / f"dev/nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        files = f"{self.folder}/dev/nvidia[0-{self.gpus - 1}]"
        (self.folder / "etc/gres.conf").write_text(f"Name=gpu File={files} Flags=nvidia_gpu_env\n")

    def __enter__(self) -> Rig:
        run = self.folder / "run"
        self._start(
            "munged", "munged", "--foreground", "--force", f"--key-file={self.folder}/etc/munge.key",
            f"--socket={run}/munge.sock", f"--pid-file={run}/munged.pid", f"--log-file={self.folder}/log/munged.log",
            f"--seed-file={run}/munge.seed",
        )  # fmt: skip
        try:
            self.wait(lambda: (run / "munge.sock").exists(), "munged")
            self._start("slurmctld", "slurmctld", "-D")
            self.wait(lambda: "is UP" in self.run("scontrol", "ping", check=False), "slurmctld")
            for number in range(1, self.nodes + 1):
                self.boot(f"n{number}")
            self.wait(lambda: self.idle() == self.nodes, "the nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        left = "" if self._has_ended("slurmctld") else self.run("squeue", "-h", "-o", "%i", check=False)
        for job in left.split():
            if job.isdigit():
                self.run("scancel", job, check=False)
        for process in reversed(list(self.processes.values())):
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def _start(self, name: str, *command: str) -> None:
        output = (self.folder / "log" / f"{name}.out").open("ab")
        self.processes[name] = subprocess.Popen(
            command, env=self.environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def boot(self, node: str) -> None:
        """Start a node."""
        inside = f"mount --bind '{self.folder}/etc/hosts' /etc/hosts; hostname {node}; exec slurmd -D -N {node}"
        self._start(
            node, "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc",
            "bash", "-c", inside,
        )  # fmt: skip

    def crash(self, node: str) -> None:
        """Kill a node with all that runs on it, as a lost machine, and have Slurm notice."""
        self.processes[node].send_signal(signal.SIGKILL)
        self.processes[node].wait()
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def idle(self) -> int:
        """Return the number of idle nodes; 0 also where Slurm does not answer."""
        said = self.run("sinfo", "-h", "-p", "dev", "-t", "idle", "-o", "%D", check=False).strip()
        return int(said) if said.isdigit() else 0

    def run(self, *command: str, check: bool = True, cwd: Path | None = None, **environ: str) -> str:
        """Run a command of Slurm and return all it says."""
        done = subprocess.run(
            command, env=self.environ | environ, cwd=cwd, check=False, timeout=300, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}"
        return done.stdout

    def state(self, job: str) -> str:
        """Return a job's state, such as PENDING, RUNNING, COMPLETED; "" where Slurm does not answer.

        A job that was put back would wait as long as credentials hold, which is long for nodes that are slow to answer.
        """
        shown = self.run("scontrol", "show", "job", job, check=False)
        start = (job, shown.partition("Restarts=")[2].partition(" ")[0])
        waits = "JobState=PENDING Reason=BeginTime" in shown and start not in self.hurried
        # A job that started in the second in which it was put back would have no new credential.
        if waits and not self.run("scontrol", "update", f"jobid={job}", "starttime=now+3", check=False):
            self.hurried.add(start)
        return shown.partition("JobState=")[2].partition(" ")[0]

    def wait(self, true: Callable[[], bool], what: str) -> None:
        """Wait until something comes true; fail, with the logs' ends, when it does not."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not true():
            # Without these nothing comes true any more, for this test and those after it.
            dead = [name for name in ("munged", "slurmctld") if self._has_ended(name)]
            if dead or time.monotonic() > deadline:
                tails = [
                    f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
                    for path in sorted((self.folder / "log").iterdir())
                ]
                why = f"{dead[0]} has ended" if dead else f"waited {PATIENCE_SECONDS:.0f} s"
                raise AssertionError(f"{why}, for {what}\n" + "\n".join(tails))
            time.sleep(0.2)

    def _has_ended(self, name: str) -> bool:
        return name in self.processes and self.processes[name].poll() is not None

    def wait_for_end(self, job: str, log: Path | None = None) -> str:
        """Wait until a job is over for good and return its state."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
        last = ""

        def ended() -> bool:
            nonlocal last
            last = self.state(job)
            return last in over

        try:
            self.wait(ended, f"job {job}")
        except AssertionError as late:
            raise AssertionError(
                f"{late}\n--- job\n{log.read_text()[-6000:] if log and log.exists() else ''}"
            ) from None
        return last


def _free_ports(first: int, count: int) -> int:
    """Return the first of ``count`` ports in a row that nothing listens on, from ``first`` upwards."""
    while True:
        with ExitStack() as probes, suppress(OSError):
            for port in range(first, first + count):
                probe = probes.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
            return first
        first += count


def _python_folders() -> list[str]:
    """Return the folders that an image must have for this interpreter and its packages to run."""
    folders = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])}
    folders |= {path for path in sys.path if path.endswith("site-packages") and not path.startswith(str(ROOT))}
    kept = sorted(folder for folder in folders if not folder.startswith("/usr"))
    return [one for one in kept if not any(one.startswith(other + "/") for other in kept)]
