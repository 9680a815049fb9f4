"""The body of every Slurm batch script: run the step, forward requests to stop, requeue a run that has not finished.

Runs on the first node of the job, outside of any container: ``python3 -m smp_train.launch.batch_job ASKED <JOB``.
ASKED is the signal that Slurm has sent already, or empty; JOB is a `Job` as JSON. Standard library only and Python 3.8
or newer, as the host's own interpreter may run it.
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
from smp_train.launch.command import ask, ignore_sigterm, say
from smp_train.launch.srun_step import Job, check_start, make_folders, srun_command
from smp_train.launch.starts import SENT, Starts

REQUEUED = 128 + signal.SIGTERM
FAILURE = re.compile(r"LAUNCH-FAIL node=(?P<node>\S+) rank=(?P<rank>\S+) rc=(?P<rc>\d+) cause=(?P<cause>\S+)")
SECONDARY = ("lost-peer", "aborted")
"""Causes of ranks that failed because of another rank: they lost touch with it, or NCCL aborted them."""


def read_text(path: str | Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return Path(path).read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def ask_slurm(*command: str) -> str:
    """Return the output of one of Slurm's commands, "" if it fails."""
    code, output = ask(*command, survives=True)
    return "" if code else output


class Start:
    """One start of a job: from the state of its folders before the step to the decision after it."""

    def __init__(self, job: Job, asked: str = "") -> None:
        self.job, self.run_dir = job, Path(job.run_dir)
        self.id = os.environ["SLURM_JOB_ID"]
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self.asked = asked
        """Signal by which Slurm asked to stop: USR1 (time is up, or preempted), TERM, or ""."""
        self.user_asked = False
        """A person asked to stop, by STOP or by ^C in an allocation."""
        self.end_step = False
        """A person asked twice: end the step without saving, even if it is still starting."""
        self.ended = False
        self.step: subprocess.Popen[bytes] | None = None
        self.stop = self.run_dir / "STOP"
        self.starts = Starts(job.run_dir, self.id)
        self.logs = f"{job.run_dir}/logs/{self.id}.{self.restart}"
        """Common beginning of the paths of this start's log folders; each step appends its number."""
        # A marker's text contains its time, so a marker left by an earlier run in this folder is recognized.
        self.markers = {name: read_text(self.run_dir / name) for name in ("DONE", "STOPPED")}
        self.losses_before = self.count_losses()

    def job_values(self, pattern: str) -> list[str]:
        """Return the matches in Slurm's description of the job, which has Name=value pairs."""
        return re.findall(pattern, ask_slurm("scontrol", "show", "job", self.id), re.MULTILINE)

    def count_losses(self) -> int:
        """Return how many steps the run has logged."""
        return read_text(self.run_dir / "metrics.jsonl").count('"loss"')

    def count(self) -> None:
        """Record this start; raise `SmpTrainError` after too many starts without a checkpoint."""
        if self.starts.has_saved(self.job.checkpoints):
            self.starts.write({})
        self.starts.refuse_loop(self.job.max_attempts, reported_only=self.job.checkpoints_in_s3)
        self.starts.add(f"{self.restart}.0", SENT)

    def is_own_stop(self) -> bool:
        """Return whether STOP was written by a start of this script; a person's STOP is empty."""
        return read_text(self.stop).strip() in ("USR1", "TERM")

    def stopped_before(self) -> bool:
        """Remove STOP; return whether a person made it after this job was submitted."""
        if not self.stop.exists():
            return False
        is_own, made = self.is_own_stop(), self.stop.stat().st_mtime
        self.stop.unlink()
        if is_own or self.restart:
            return not is_own
        submitted = self.job_values(r"SubmitTime=(\d\S+)")
        return bool(submitted) and int(made) >= time.mktime(time.strptime(submitted[0], "%Y-%m-%dT%H:%M:%S"))

    def run(self, command: list[str]) -> int:
        """Run the step to its end, forwarding requests to stop; return srun's exit code."""
        os.environ["SMP_TRAIN_KEEP_STOP"] = "1"  # from here on, STOP is meant for this start
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        if self.asked:
            self.request_stop()
        say(
            f"job {self.id}, start {self.restart + 1}, nodes {os.environ.get('SLURM_JOB_NODELIST', '')}, run folder "
            f"{self.run_dir}; to stop and save: touch {self.stop}"
        )
        # A terminal sends ^C to srun too, which would answer it.
        self.step = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        if self.end_step:
            self.step.terminate()
        code = self.step.wait()
        self.ended = True
        if self.is_own_stop():
            self.stop.unlink()
        return code if code >= 0 else 128 - code

    def on_signal(self, number: int, _: Any) -> None:
        """Forward a request to stop; a person's ^C in an allocation saves and stops, a second ^C ends the step."""
        if number == signal.SIGINT:
            self.end_step = self.user_asked
            if self.end_step and self.step is not None:
                self.step.terminate()
            self.user_asked = True
            if not self.stop.exists():
                self.stop.touch()
            return
        self.asked = "USR1" if number == signal.SIGUSR1 else self.asked or "TERM"
        if not self.ended:
            self.request_stop()

    def request_stop(self) -> None:
        """Write STOP for the run; a person's STOP stays as it is, and has precedence."""
        if self.stop.exists() and not self.is_own_stop():
            self.user_asked = True
            return
        with suppress(OSError):
            self.stop.write_text(f"{self.asked}\n", encoding="utf-8")

    def wrote(self, marker: str) -> bool:
        """Return whether this start wrote DONE or STOPPED."""
        return read_text(self.run_dir / marker) not in ("", self.markers[marker])

    def conclude(self, code: int) -> int:
        """Requeue the job, or return its exit code, depending on the run folder: srun returns 0 also for a lost node.

        Raises:
            SmpTrainError: too many starts brought no checkpoint, or the job cannot be requeued.
        """
        stopped = self.wrote("STOPPED")
        if self.wrote("DONE") or stopped or self.starts.has_saved(self.job.checkpoints):
            self.starts.write({})
        if self.wrote("DONE"):
            say(f"finished: {self.run_dir}/DONE")
            return 0
        if stopped and (not self.asked or self.user_asked):
            say(f"stopped on request and saved: {self.run_dir}/STOPPED; submit the same script again to go on")
            return 0
        failure, reporting_nodes = self.first_failure()
        if failure:
            silent = self.silent_nodes(reporting_nodes) if failure["cause"] in SECONDARY else ""
            say(f"first failure of this start: {failure[0]}{silent}")
            if not self.may_succeed_later(failure["cause"]):
                say(f"error: this would fail again in the same way: not starting it again; logs: {self.logs}.*")
                return int(failure["rc"])
        state = "".join(self.job_values(r"JobState=([A-Z_]*)")[:1])
        if self.asked == "TERM" and state != "RUNNING":
            self.starts.remove(self.restart)  # the run is not at fault
            say(
                f"ended by Slurm ({state}): it starts the job again when it lost a node; otherwise submit the same "
                "script again to go on"
            )
            return REQUEUED
        self.starts.refuse_loop(self.job.max_attempts, reported_only=self.job.checkpoints_in_s3)
        why = f"asked to stop by {self.asked}; " if self.asked else ""
        say(f"not finished ({why}srun returned {code}): putting the job back into the queue")
        return self.requeue(failure["node"] if failure and failure["cause"] == "node" else None)

    def first_failure(self) -> tuple[Any, list[str]]:
        """Return the last step's failure (a match of `FAILURE`, or None) and the nodes that reported a failure."""
        steps = [path.rpartition(".")[2][:-1] for path in glob.glob(f"{glob.escape(self.logs)}.*/")]
        last = max((int(step) for step in steps if step.isdigit()), default=-1)  # auto-resume runs several steps
        files = sorted(Path(f"{self.logs}.{last}").glob("failed-*"))
        failures = [match for file in files for match in FAILURE.finditer(read_text(file))]
        # A crash loop comes first. Ranks that lost touch with another rank do not know the cause: they come last.
        failures.sort(key=lambda match: (match["cause"] != "crash-loop", match["cause"] in SECONDARY))
        return failures[0] if failures else None, [match["node"] for match in failures]

    def silent_nodes(self, reporting_nodes: list[str]) -> str:
        """Return a text that names nodes without a report, if most nodes reported, and nodes that Slurm has lost."""
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        names = ask_slurm("scontrol", "show", "hostnames", nodes).split()
        silent = [name for name in names if name not in reporting_nodes]
        states = ask_slurm("sinfo", "--noheader", "--Node", "--nodes", nodes, "--format", "%N %T")
        down = sorted(set(re.findall(r"^(\S+) +\S*(?:down|fail|\*$)", states, re.MULTILINE)))
        # If most nodes are silent, srun ended them before they could write.
        text = f"; no word from {','.join(silent)}" if 0 < len(silent) <= len(reporting_nodes) else ""
        return text + (f"; Slurm has lost {','.join(down)}" if down else "")

    def may_succeed_later(self, cause: str) -> bool:
        """Return whether another start may succeed.

        A mistake shows at the first start, before the first step; later the same cause means a disk or a network.
        """
        if cause not in ("configuration", "data", "checkpoint"):
            return cause != "crash-loop"
        return self.restart > 0 or self.count_losses() > self.losses_before

    def requeue(self, bad: str | None) -> int:
        """Put the job back into the queue, without a bad node; Slurm ends this script as it takes the job back."""
        ended: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
        if subprocess.run(["scontrol", "requeue", self.id], check=False, preexec_fn=ignore_sigterm).returncode:
            raise SmpTrainError(
                "the job could not be requeued (is it submitted with --requeue, and does the cluster allow it?); "
                "submit the same script again to go on"
            )
        if bad:
            self.exclude(bad)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(REQUEUED))
        if not ended:
            time.sleep(60)
        return REQUEUED

    def exclude(self, bad: str) -> None:
        """Exclude bad nodes from the job's next starts if enough others are left."""
        if self.job_values(r"(?:ReqNodeList|Features|Reservation)=[^( \n]"):
            say(f"warning: the job may run on certain nodes only, and {bad} is not left out; replace or reboot it")
            return
        excluded = ",".join([*(name for name in self.job_values(r"ExcNodeList=(\S+)")[:1] if name != "(null)"), bad])
        names = ask_slurm("scontrol", "show", "hostnames", excluded).split()
        usable = ask_slurm(
            "sinfo", "--noheader", "--Node", "--partition", os.environ.get("SLURM_JOB_PARTITION", ""), "--responding",
            "--states", "idle,alloc,mix,comp", "--format", "%N",
        ).split()  # fmt: skip
        if len(set(usable) - set(names)) < int(os.environ.get("SLURM_JOB_NUM_NODES") or 1):
            say(f"warning: no other node can take the place of {bad}; replace or reboot it")
            return
        if ask("scontrol", "update", f"JobId={self.id}", f"ExcNodeList={excluded}", survives=True)[0] == 0:
            say(f"the job stays off {bad} from now on")


def run(job: Job, *, asked: str = "", dry_run: bool = False) -> int:
    """Run one start of a job, or print its srun command; return the exit code of the batch script."""
    try:
        if not dry_run and not os.environ.get("SLURM_JOB_ID"):
            raise ConfigError("this is a batch script: submit it with sbatch")
        # Slurm sets the variable on clusters with GRES; otherwise it is left from the shell that submitted this job.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        by_slurm = os.environ.get("SLURM_JOB_GPUS") or os.environ.get("SLURM_GPUS_ON_NODE")
        if visible is not None and not by_slurm and not any(option.startswith("--nproc=") for option in job.agent):
            say(f"warning: CUDA_VISIBLE_DEVICES={visible} is left out: each node has its own GPUs; NPROC keeps it")
            del os.environ["CUDA_VISIBLE_DEVICES"]
        if dry_run:
            print(shlex.join(srun_command(job, dry_run=True)))
            return 0
        check_start(job)
        make_folders(job)
        start = Start(job, asked)
        command = srun_command(job)
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
    showing = bool(os.environ.get("DRY_RUN")) and not os.environ.get("SLURM_JOB_ID")
    sys.exit(run(Job(**json.load(sys.stdin)), asked="".join(sys.argv[1:]), dry_run=showing))
