"""The report of a failure: one line on stderr, an exit code, and messages to peers and launcher."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from smp_train.distributed import failures, generation, heartbeat, start_attempted
from smp_train.errors import CAUSE_VARIABLE, SmpTrainError, explained, no_memory, redacted
from smp_train.run.stop import wait_for_request

if TYPE_CHECKING:
    from smp_train.distributed import Runtime

QUIET_SECONDS = 1.0
"""Wait of a rank that ends because of another rank, under launchers that do not blame the first process that ends."""
LOCAL_RANK_0_SECONDS = 5.0
"""Wait of a node's other ranks for local rank 0 to report a failure that all of them have."""

@dataclass
class FailureReporter:
    """Reports the failure that ends this process.

    Attributes:
        debug: print the traceback too.
        runtime: this process's rank and world; None until the launcher is detected, and for verbs of one process.
    """

    debug: bool = False
    runtime: Runtime | None = None

    def report(self, failure: Exception) -> int:
        """Print a failure, pass it to peers and launcher, and return the exit code."""
        heartbeat.end()
        if note := heartbeat.ending():  # the watcher has reported the reason
            failures.give_way(note["end"])
            return 1
        failure = explained(failure)
        code = failure.exit_code if isinstance(failure, SmpTrainError) else 1
        callstack = redacted("".join(traceback.format_exception(failure))) if self.debug else ""
        sys.stderr.write(callstack)
        text = redacted(" ".join(message_of(failure).split()))
        runtime = self.runtime if self.runtime is not None and self.runtime.world_size > 1 else None
        lost, repeats = failures.lost_peer(failure), isinstance(failure, SmpTrainError) and failure.repeats
        if not (lost or repeats):
            failures.tell_peers(text.removeprefix("error: "))
        member = generation.member
        if member is not None and isinstance(failure, SmpTrainError) and not (lost or member.joins):
            member.refuse(text.removeprefix("error: "))  # all ranks, and a replacement, would fail alike
        # Before rendezvous all ranks of a node fail for the same reason, and local rank 0 reports it. The other ranks
        # wait. If no launcher has killed them by then, or local rank 0 has not failed, they report the reason too.
        if runtime is not None and runtime.local_rank > 0 and not start_attempted():
            time.sleep(LOCAL_RANK_0_SECONDS)
        # Rank 0 and the failing rank report; other ranks would repeat them.
        if not repeats or runtime is None or runtime.rank == 0:
            rank = "" if runtime is None else f"[rank {runtime.rank} on {runtime.hostname}] "
            # One write: print makes two where the stream is unbuffered, as under torchrun, and ranks share the stream.
            sys.stderr.write(f"smp-train: {rank}{text}\n")
        if lost:
            failures.write_cause()
        if runtime is not None and (lost or repeats):
            blames_first = CAUSE_VARIABLE in os.environ or failures.ERROR_FILE in os.environ
            wait_for_request(failures.GIVE_WAY_SECONDS if blames_first else QUIET_SECONDS)
        failures.write_error_file(text, code, callstack)
        return code


def message_of(failure: Exception) -> str:
    """Return the message for the user."""
    text = " ".join(str(failure).split())
    if isinstance(failure, SmpTrainError):
        return f"error: {text}"
    if failures.lost_peer(failure):
        reason = re.sub(r"^\[\S+:\d+\] ", "", text).partition(". ")[0]
        first = failures.first_failure() or "its own message, or the launcher's, says why"
        return f"error: lost touch with another rank; {first} ({reason[:200]})"
    if (allocator_message := no_memory(failure)) is not None:
        return (
            f"error: out of memory: {allocator_message}; lower --train_batch_size or --max_context_width, give "
            "--activation_checkpointing full or --sm_activation_offloading 1, or share the model among more GPUs"
        )
    return f"internal error: {type(failure).__name__}: {text} (run again with --debug 1 for the traceback)"


def exit_immediately(code: int) -> NoReturn:
    """Exit without ending the process group: its end would wait for peers that may be in a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_uncaught(reporter: FailureReporter) -> None:
    """Install an excepthook that reports a failure as the command does, and exits immediately with its exit code."""
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
        code = 1
        if isinstance(failure, SmpTrainError) or (isinstance(failure, Exception) and failures.lost_peer(failure)):
            code = reporter.report(failure)
        else:
            previous_hook(kind, failure, trace)
        exit_immediately(code)  # an excepthook has no other way to set the exit code

    sys.excepthook = hook
