"""The body of every Slurm batch script: start the step, forward requests to stop, requeue what did not finish.

Runs on the first node of the job, outside of any container: ``python3 -m smp_train.launch.batch_job ... -- FLAGS``.
Standard library only and Python 3.8 or newer, as the host's own interpreter may run it.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch.srun_step import Job, ignore_term, make_folders, output, read_command_line, say, step

REQUEUED = 128 + signal.SIGTERM
NOT_SHARED = re.compile(r"execve\(\)|No module named '?smp_train|pyxis: .*(No such file|does not exist)")
FAILURE = re.compile(r"LAUNCH-FAIL node=(?P<node>\S+) rank=(?P<rank>\S+) rc=(?P<rc>\d+) cause=(?P<cause>\S+)")
OVERDUE_SECONDS = 300.0
LOST = ("lost-peer", "aborted")
"""Causes of ranks that only lost touch with another rank, or that NCCL aborted for it."""


def read(path: str | Path, offset: int = 0) -> str:
    """Return the text of a file from a byte offset on; "" where it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def size(path: str | Path) -> int:
    """Return the size of a file in bytes, 0 without it."""
    return os.path.getsize(path) if os.path.exists(path) else 0


class Start:
    """One start of a job, from its folders as they were before it to what is decided after it."""

    def __init__(self, job: Job, asked: str = "") -> None:
        self.job, self.run_dir = job, Path(job.run_dir)
        self.id = os.environ["SLURM_JOB_ID"]
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self.asked = asked
        """Signal that Slurm asked to stop by: USR1 (time is up, or preempted), TERM, or ""."""
        self.user = False
        """A person asked to stop: by STOP, or by ^C in an allocation."""
        self.ended = False
        self.end_step = False
        """A person asked twice: end the step without saving, even if it is still starting."""
        self.step: subprocess.Popen[bytes] | None = None
        self.stop = self.run_dir / "STOP"
        self.starts = self.run_dir / "logs" / f"starts-{self.id}"
        """One line (restart, newest checkpoint known) for each start since the job's last checkpoint."""
        self.attempts = f"{job.run_dir}/logs/{self.id}.{self.restart}"
        """Folder of the logs of a step of this start, without its last part, the number of the step."""
        # Markers of an earlier run in this folder differ in their text, which has the time.
        self.markers = {name: read(self.run_dir / name) for name in ("DONE", "STOPPED")}
        self.recorded = size(self.run_dir / "metrics.jsonl")

    def shown(self, pattern: str) -> list[str]:
        """Return what matches in Slurm's description of the job: Name=value pairs."""
        return re.findall(pattern, output("scontrol", "show", "job", self.id), re.MULTILINE)

    def counted(self) -> list[tuple[int, int]]:
        """Return (restart, checkpoint known then) of the starts since the last checkpoint."""
        rows = [line.split() for line in read(self.starts).splitlines()]
        return [(int(row[0]), int(row[1])) for row in rows if len(row) == 2]

    def keep(self, count: int) -> None:
        """Keep the first ``count`` of the counted starts; a full disk does not prevent the next start."""
        kept = self.counted()[:count]
        with suppress(OSError):
            self.starts.write_text("".join(f"{restart} {known}\n" for restart, known in kept), encoding="utf-8")

    def begun(self) -> tuple[dict[int, int], int]:
        """Return (step that each restart of this job began with, newest one of the run), as node agents recorded."""
        begun, newest = {}, 0
        for line in read(self.run_dir / "launches.jsonl").splitlines():
            try:
                record = json.loads(line)
                newest = int(record["committed_step"])
                job, restart, _ = str(record["attempt"]).split(".")
            except (ValueError, KeyError, TypeError):
                continue
            if job == self.id:
                begun[int(restart)] = newest
        return begun, newest

    def saved(self) -> bool:
        """Whether this run committed a checkpoint in a folder since the starts were last counted."""
        markers = ("-mindepth", "2", "-maxdepth", "2", "-name", "COMMITTED", "-newer", str(self.starts))
        return any(output("find", folder, *markers) for folder in self.job.checkpoints)

    def refuse_loop(self, last: str | None = None) -> None:
        """Raise `SmpTrainError` where too many starts, after the ``last`` step with this one, brought no checkpoint."""
        counted = self.counted()
        begun, newest = self.begun()
        reached = read(f"{last}/committed-step").strip()
        if last and not self.job.checkpoints_in_s3:
            in_vain = len(counted)
        elif reached.isdigit():  # the node agent has looked into S3
            in_vain = sum(begun.get(restart, known) == int(reached) for restart, known in counted)
        else:  # the node agent counts those that reach it
            in_vain = sum(known == newest and restart not in begun for restart, known in counted)
        if in_vain >= self.job.max_attempts:
            raise SmpTrainError(
                f"{in_vain} starts of job {self.id} brought no new checkpoint: not trying again; logs: "
                f"{self.attempts}.* and the output of srun. Lower --checkpoint_freq if they needed longer"
            )

    def count(self) -> None:
        """Record this start; `SmpTrainError` where too many before it never reached the node agent."""
        if self.counted() and self.saved():
            self.keep(0)
        self.refuse_loop()
        with self.starts.open("a", encoding="utf-8") as file:
            file.write(f"{self.restart} {self.begun()[1]}\n")

    def stop_is_mine(self) -> bool:
        """Whether STOP was written by a start of this script; one that a person makes is empty."""
        return read(self.stop).strip() in ("USR1", "TERM")

    def stopped_before(self) -> bool:
        """Remove STOP; return whether a person made it since this job was submitted."""
        if not self.stop.exists():
            return False
        mine, made = self.stop_is_mine(), self.stop.stat().st_mtime
        self.stop.unlink()
        if mine or self.restart:
            return not mine
        submitted = self.shown(r"SubmitTime=(\d\S+)")
        return bool(submitted) and int(made) >= time.mktime(time.strptime(submitted[0], "%Y-%m-%dT%H:%M:%S"))

    def run(self, command: list[str]) -> int:
        """Run the step to its end, forwarding requests to stop; return srun's exit code."""
        os.environ["SMP_TRAIN_KEEP_STOP"] = "1"  # from here on a STOP is meant for this start
        self.outputs = {path: size(path) for path in self.shown(r"^ *Std(?:Out|Err)=(.+)$")}
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        if self.asked:
            self.ask()
        say(
            f"job {self.id}, start {self.restart + 1}, nodes {os.environ.get('SLURM_JOB_NODELIST', '')}, run folder "
            f"{self.run_dir}; to stop and save: touch {self.stop}"
        )
        # ^C of a terminal reaches srun too, which would answer it by itself.
        self.step = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        if self.end_step:
            self.step.terminate()
        code = self.wait(self.step)
        self.ended = True
        if self.stop_is_mine():
            self.stop.unlink()
        return code if code >= 0 else 128 - code

    def wait(self, step: subprocess.Popen[bytes]) -> int:
        """Wait for srun; end it where it goes on long after the run has ended, or after a person asked twice."""
        overdue = 0
        while True:
            try:
                return step.wait(OVERDUE_SECONDS)
            except subprocess.TimeoutExpired:
                overdue += self.end_step or self.new("DONE") or self.new("STOPPED")
            if overdue > 1:
                say(f"warning: the run has ended, srun has not for {OVERDUE_SECONDS:g} s: ending it")
                (step.terminate if overdue == 2 else step.kill)()

    def on_signal(self, number: int, _: Any) -> None:
        """Forward a request to stop; ^C of a person in an allocation saves and stops, ^C again ends the step."""
        if number == signal.SIGINT:
            self.end_step = self.user
            if self.end_step and self.step is not None:
                self.step.terminate()
            self.user = True
            if not self.stop.exists():
                self.stop.touch()
            return
        self.asked = "USR1" if number == signal.SIGUSR1 else self.asked or "TERM"
        if not self.ended:
            self.ask()

    def ask(self) -> None:
        """Ask the run to stop; a person's request stays as it is, and has precedence."""
        if self.stop.exists() and not self.stop_is_mine():
            self.user = True
            return
        with suppress(OSError):
            self.stop.write_text(f"{self.asked}\n", encoding="utf-8")

    def new(self, marker: str) -> bool:
        """Whether this start wrote DONE or STOPPED."""
        return read(self.run_dir / marker) not in ("", self.markers[marker])

    def conclude(self, code: int) -> int:
        """Requeue the job, or return its exit code, by what the run left: srun's ``code`` is 0 also for a lost node."""
        if self.new("DONE"):
            say(f"finished: {self.run_dir}/DONE")
            return 0
        if (not self.asked or self.user) and self.new("STOPPED"):
            say(f"stopped on request and saved: {self.run_dir}/STOPPED; submit the same script again to go on")
            return 0
        last = self.last_step()
        first, reported = self.first_failure(last)
        if first:
            silent = self.silent_nodes(reported) if first["cause"] in LOST else ""
            say(f"first failure of this start: {first[0]}{silent}")
            if not self.worth_another_start(first["cause"]):
                say(f"error: this would fail again in the same way: not starting it again; logs: {self.attempts}.*")
                return int(first["rc"])
        state = "".join(self.shown(r"JobState=([A-Z_]*)")[:1])
        if self.asked == "TERM" and state != "RUNNING":
            # No fault of the run's: it does not count, here and in the node agent.
            self.keep(len(self.counted()) - 1)
            with suppress(OSError):
                Path(last, "ended-by-slurm").touch()
            say(
                f"ended by Slurm ({state}): it starts the job again when it lost a node; otherwise submit the same "
                "script again to go on"
            )
            return REQUEUED
        if self.saved() or (self.asked and self.new("STOPPED")):
            self.keep(0)
        else:
            self.refuse_loop(last)
        why = f"asked to stop by {self.asked}; " if self.asked else ""
        say(f"not finished ({why}srun returned {code}): putting the job back into the queue")
        return self.requeue(first["node"] if first and first["cause"] == "node" else None)

    def last_step(self) -> str:
        """Return the log folder of the last step: auto-resume runs several in one start."""
        steps = [path.rpartition(".")[2] for path in glob.glob(f"{glob.escape(self.attempts)}.*/")]
        return f"{self.attempts}.{max((int(step[:-1]) for step in steps if step[:-1].isdigit()), default=-1)}"

    def first_failure(self, last: str) -> tuple[Any, list[str]]:
        """Return (match of `FAILURE`, nodes that left one) of the last step; None where nothing is known."""
        found = [match for path in sorted(Path(last).glob("failed-*")) for match in FAILURE.finditer(read(path))]
        # The crash-loop guard overrules all. Ranks that lost touch with a peer do not know why: they come last.
        found.sort(key=lambda match: 0 if match["cause"] == "crash-loop" else 2 if match["cause"] in LOST else 1)
        if found:
            return found[0], [match["node"] for match in found]
        # A run that was asked to stop has not failed, whatever an earlier step of it has.
        return (None if self.asked else self.failure_in_output()), []

    def failure_in_output(self) -> Any:
        """Return the failure in the job's output, of a node that could leave no file.

        A node without the shared file system cannot even start the agent. What this host has and a node has not is the
        node's fault; what is missing on this host as well, or any other end, may be the fault of all.
        """
        text = "\n".join(read(path, before) for path, before in self.outputs.items())
        earlier = "\n".join(map(read, glob.glob(f"{glob.escape(self.attempts)}.*/failed-*")))
        for match in FAILURE.finditer(text):
            if match[0] not in earlier:
                return match
        ends = re.findall(r"srun: error: ([^ ,[]+): task \d+: Exited with exit code (\d+)", text)
        if not ends:
            return None
        node, code = ends[0]
        here = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
        cause = "node" if NOT_SHARED.search(text) and (here, code) not in ends else "error"
        return FAILURE.search(f"LAUNCH-FAIL node={node} rank=-1 rc={code} cause={cause}")

    def silent_nodes(self, reported: list[str]) -> str:
        """Return which nodes left nothing while others lost touch with them, and which of them Slurm has lost."""
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        silent = [name for name in output("scontrol", "show", "hostnames", nodes).split() if name not in reported]
        states = output("sinfo", "--noheader", "--Node", "--nodes", nodes, "--format", "%N %T")
        down = sorted(set(re.findall(r"^(\S+) +\S*(?:down|fail|\*$)", states, re.MULTILINE)))
        # Most of the nodes: they were ended by srun before they could write.
        text = f"; no word from {','.join(silent)}" if 0 < len(silent) <= len(reported) else ""
        return text + (f"; Slurm has lost {','.join(down)}" if down else "")

    def worth_another_start(self, cause: str) -> bool:
        """A mistake shows at the first start, before its first step; later the same cause means a disk or a network."""
        if cause not in ("configuration", "data", "checkpoint"):
            return cause != "crash-loop"
        return self.restart > 0 or '"loss"' in read(self.run_dir / "metrics.jsonl", self.recorded)

    def requeue(self, bad: str | None) -> int:
        """Put the job back into the queue, off a bad node; Slurm ends this script as it takes the job back."""
        gone: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: gone.append(number))
        if subprocess.run(["scontrol", "requeue", self.id], check=False, preexec_fn=ignore_term).returncode:
            raise SmpTrainError(
                "the job could not be requeued (is it submitted with --requeue, and does the cluster allow it?); "
                "submit the same script again to go on"
            )
        if bad:
            self.exclude(bad)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(REQUEUED))
        if not gone:
            time.sleep(60)
        return REQUEUED

    def exclude(self, bad: str) -> None:
        """Keep the job off bad nodes as long as enough others are left for it."""
        if self.shown(r"(?:ReqNodeList|Features|Reservation)=[^( \n]"):
            say(f"warning: the job may run on certain nodes only, and {bad} is not left out; replace or reboot it")
            return
        excluded = ",".join([*(name for name in self.shown(r"ExcNodeList=(\S+)")[:1] if name != "(null)"), bad])
        names = output("scontrol", "show", "hostnames", excluded).split()
        there = output(
            "sinfo", "--noheader", "--Node", "--partition", os.environ.get("SLURM_JOB_PARTITION", ""), "--responding",
            "--states", "idle,alloc,mix,comp", "--format", "%N",
        )  # fmt: skip
        if len(set(there.split()) - set(names)) < int(os.environ.get("SLURM_JOB_NUM_NODES") or 1):
            say(f"warning: no other node can take the place of {bad}; replace or reboot it")
            return
        update = ["scontrol", "update", f"JobId={self.id}", f"ExcNodeList={excluded}"]
        if subprocess.run(update, check=False, preexec_fn=ignore_term).returncode == 0:
            say(f"the job stays off {bad} from now on")


def run(job: Job, *, asked: str = "", dry_run: bool = False) -> int:
    """Run one start of a job, or print its srun command; return the exit code of the batch script."""
    try:
        if not dry_run and not os.environ.get("SLURM_JOB_ID"):
            raise ConfigError("this is a batch script: submit it with sbatch")
        # Slurm chooses GPUs where it has GRES; anything else comes from the shell that submitted this job.
        leaked = os.environ.get("CUDA_VISIBLE_DEVICES")
        by_slurm = os.environ.get("SLURM_JOB_GPUS") or os.environ.get("SLURM_GPUS_ON_NODE")
        if leaked is not None and job.nproc == "auto" and not by_slurm:
            say(f"warning: CUDA_VISIBLE_DEVICES={leaked} is left out: each node has its own GPUs; NPROC keeps it")
            del os.environ["CUDA_VISIBLE_DEVICES"]
        if dry_run:
            print(shlex.join(step(job, dry_run=True)))
            return 0
        make_folders(job)
        start = Start(job, asked)
        command = step(job)
        if start.stopped_before():
            say(f"stopped on request before it started: {start.stop} was there; submit the same script again to go on")
            return 0
        start.count()
        return start.conclude(start.run(command))
    except SmpTrainError as refused:
        say(f"error: {refused}")
        return refused.exit_code
    except OSError as problem:  # such as a full disk
        say(f"error: {problem}, on {socket.gethostname()}")
        return 1


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # until `Start.run` forwards it
    rendered, already = read_command_line(sys.argv[1:])
    showing = bool(os.environ.get("DRY_RUN")) and not os.environ.get("SLURM_JOB_ID")
    sys.exit(run(rendered, asked=already, dry_run=showing))
