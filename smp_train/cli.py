"""The command ``smp-train <verb>``: its verbs, and the conversion of failures to exit codes.

Exit codes: 0 done, or stopped on request; 2 bad arguments or configuration; 3 bad data; 4 bad checkpoint; 130
interrupted; 1 anything else. A failure is one line on stderr; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

from smp_train import __version__, distributed
from smp_train.arguments.values import is_bool, nearest
from smp_train.distributed import failures, heartbeat, start_attempted, world_size
from smp_train.errors import (
    CAUSE_VARIABLE,
    ConfigError,
    LostPeerError,
    SmpTrainError,
    explained,
    install,
    no_memory,
    redacted,
)
from smp_train.progress import Progress
from smp_train.run.stop import ignore_repeats, wait_for_request

if TYPE_CHECKING:
    from smp_train.distributed import Runtime


class Verb(NamedTuple):
    """A verb: its help and the module of its ``main``, imported on use.

    ``flags`` is one that needs neither torch nor numpy: its ``read`` prints help and names mistakes first.
    """

    help: str
    module: str
    flags: str = ""


PLAN_FLAGS, PREPARE_FLAGS = "smp_train.planning.options", "smp_train.data.prepare.options"
VERBS: dict[str, Verb] = {
    "train": Verb("train a model (this is what launchers start on every process)", "smp_train.train_lib"),
    "plan": Verb("say memory, time and cost of a run, before it has a machine", "smp_train.planning.cli", PLAN_FLAGS),
    "launch": Verb("start a run on a cluster or on this machine", "smp_train.launch"),
    "doctor": Verb("say what this machine has and lacks, and how to mend it", "smp_train.launch.doctor"),
    "generate": Verb("continue a prompt with the model of a checkpoint", "smp_train.inference.generation"),
    "evaluate": Verb("loss and perplexity of a checkpoint on data sets", "smp_train.inference.evaluation"),
    "prepare": Verb("turn text into token shards", "smp_train.data.prepare.cli", PREPARE_FLAGS),
    "data": Verb("inspect or verify a data set, audit what a run used of it", "smp_train.data.cli"),
    "checkpoint": Verb("list, show, verify, export, convert, import, prune checkpoints", "smp_train.checkpoints.cli"),
    "bench": Verb("measure speed", "smp_train.bench"),
    "report": Verb("write a page of runs, also of a running one", "smp_train.telemetry.report"),
}

COLLECTIVE = {"generate", "evaluate"}
"""Verbs besides `train` that run on every rank of a launcher."""
HELP_FLAGS = {"-h", "--help"}
OFF = {"0", "false", "no", "off"}
GIVE_WAY_SECONDS = 5.0
"""Wait of a rank that failed because of another one, under launchers that report the first process to end."""
QUIET_SECONDS = 1.0
"""The same wait under other launchers."""
ALIKE_SECONDS = 5.0
"""Wait of a node's other processes before they report a failure that local rank 0 should have reported."""


@dataclass
class Failing:
    """State for the report of a failure, filled in during the start."""

    debug: bool = False
    runtime: Runtime | None = None


def usage() -> str:
    """Return what ``smp-train --help`` prints."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.help}" for name, verb in VERBS.items())
    return f"""\
usage: smp-train <verb> [--flag value ...]

{verbs}

`smp-train <verb> --help` lists a verb's flags; --debug prints tracebacks; --version prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``smp-train`` with ``argv`` (default: the process's own) and return the exit code."""
    # With a umask of 0, as on some clusters, any user could change files that are read again later.
    os.umask(os.umask(0o022) | 0o002)
    # Set before torch is imported: its warnings about lost peers are a page of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = list(sys.argv[1:] if argv is None else argv)
    failing = Failing(debug=_split_debug(words)[1])
    try:
        return _run(words, failing)
    except KeyboardInterrupt:
        code = 130
        sys.stderr.write("smp-train: interrupted\n")
    except Exception as problem:
        code = _fail(problem, failing)
    _leave(code)
    return code


def _fail(problem: Exception, failing: Failing) -> int:
    """Report a failure and return its exit code."""
    heartbeat.end()
    if order := heartbeat.ordered():  # the watcher has said why
        time.sleep(GIVE_WAY_SECONDS)
        failures.write_error_file(order["end"], 1)
        failures.write_cause()
        return 1
    error = explained(problem)
    code, text = (error.exit_code, f"error: {error}") if isinstance(error, SmpTrainError) else (1, _internal(error))
    _report(error, text, code, failing)
    return code


def end_uncaught(ranks: Runtime, *, debug: bool) -> None:
    """Let a failure that a program of several ranks does not catch end this one as it ends the command."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = 1
        if isinstance(error, SmpTrainError) or (isinstance(error, Exception) and _lost_peer(error)):
            code = _fail(error, Failing(debug, ranks))
        else:
            before(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # peers may wait in a collective, as in `_leave`; and no other way sets the exit code

    sys.excepthook = hook


def _run(words: list[str], failing: Failing) -> int:
    if words and words[0].partition("=")[0] == "--debug":
        words = _split_debug(words)[0]
    if not words or words[0] in {*HELP_FLAGS, "help"}:
        print(usage(), end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(f"smp-train {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in VERBS:
        hint = nearest(name, VERBS) or f"; the verbs are {', '.join(VERBS)}"
        raise ConfigError(f"unknown verb {name!r}{hint}")
    if name == "train":
        return _train(rest, failing)
    if name in COLLECTIVE and not HELP_FLAGS & set(rest):
        failing.runtime = distributed.detect()
    rest = _split_debug(rest)[0]
    if VERBS[name].flags:
        importlib.import_module(VERBS[name].flags).read(rest)
    return int(_import(name).main(rest))


def _train(words: list[str], failing: Failing) -> int:
    from smp_train.arguments import help_text, parse, print_config, validate
    from smp_train.arguments.validation import ineffective, prompts_only, runs_natively
    from smp_train.distributed.host import check_native_releases
    from smp_train.telemetry.logging_utils import setup_logging

    if HELP_FLAGS & set(words):
        print(help_text(), end="")
        return 0
    failing.runtime = distributed.detect()
    resolved = parse(words)
    failing.debug = failing.debug or resolved.args.debug
    if resolved.args.print_config:
        if failing.runtime.is_main:
            from smp_train.models.resolve import settled_flags

            shown = print_config(resolved, settled_flags(resolved.args))
            print(redacted(shown), end="")
            print("".join(f"# {line}\n" for line in ineffective(resolved, resolved.args.backend)), end="")
        return 0
    validate(resolved.args, failing.runtime.world_size, failing.runtime.local_world_size)
    from smp_train.models.resolve import settled_flags

    settled_flags(resolved.args)  # refuses an unknown preset before any rank waits for another
    if runs_natively(resolved.args):
        check_native_releases()
    ranks = failing.runtime
    if ranks.world_size == ranks.local_world_size:  # other machines may have GPUs, or more memory
        from smp_train.launch.preflight import check_host

        check_host(resolved, ranks.world_size, ranks.local_world_size)
    if not prompts_only(resolved.args):  # whose stdout is its answer
        setup_logging(failing.runtime.rank)  # until there is a run folder; stderr is for failures
    with Progress("Importing PyTorch", shown=failing.runtime.is_main):
        program = _import("train")
    code = int(program.main(resolved, failing.runtime))
    ignore_repeats()
    return code


def _import(name: str) -> ModuleType:
    """Import a verb's module; `ConfigError` for a missing third-party package."""
    # What is imported stays: to look for garbage in it, again and again, takes a fifth of a start.
    gc.disable()
    try:
        return importlib.import_module(VERBS[name].module)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package in ("", "smp_train"):
            raise
        raise ConfigError(
            f"`smp-train {name}` needs the package {package}, which is not installed here; {install('train')}"
        ) from missing
    finally:
        gc.freeze()
        gc.enable()


def _split_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words without --debug and its value, which the parsers of verbs do not know, and whether it is on."""
    kept: list[str] = []
    debug = after_flag = False
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--debug":
            debug, after_flag = value.lower() not in OFF, not equals
            continue
        if after_flag and is_bool(word):
            debug = word.lower() not in OFF
        else:
            kept.append(word)
        after_flag = False
    return kept, debug


# Messages of communication libraries about a lost or silent peer, whose own message gives the cause.
SAYS_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket|remote process exited", re.IGNORECASE
)


def _lost_peer(error: Exception) -> bool:
    if isinstance(error, LostPeerError):
        return True
    return isinstance(error, RuntimeError) and world_size() > 1 and bool(SAYS_LOST_PEER.search(str(error)))


def _internal(error: Exception) -> str:
    text = " ".join(str(error).split())
    if _lost_peer(error):
        reason = re.sub(r"^\[\S+:\d+\] ", "", text).partition(". ")[0]
        first = failures.first_failure() or "its own message, or the launcher's, says why"
        return f"error: lost touch with another rank; {first} ({reason[:200]})"
    if (said := no_memory(error)) is not None:
        return (
            f"error: out of memory: {said}; lower --train_batch_size or --max_context_width, give "
            "--activation_checkpointing full or --sm_activation_offloading 1, or share the model among more GPUs"
        )
    return f"internal error: {type(error).__name__}: {text} (run again with --debug 1 for the traceback)"


def _report(error: Exception, text: str, code: int, failing: Failing) -> None:
    """Print the line on the ranks that report it, and pass it to peers and launcher."""
    callstack = redacted("".join(traceback.format_exception(error))) if failing.debug else ""
    sys.stderr.write(callstack)
    runtime = failing.runtime
    if runtime is not None and runtime.world_size == 1:
        runtime = None
    lost, repeats = _lost_peer(error), bool(getattr(error, "repeats", False))
    text = redacted(" ".join(text.split()))
    if not (lost or repeats):
        failures.tell_peers(text.removeprefix("error: "))
    # Before rendezvous all processes of a node fail for the same reason, and local rank 0 reports it. The others report
    # it too if they still run after the wait: the launcher kills nobody, or local rank 0 has not failed yet.
    if runtime is not None and runtime.local_rank > 0 and not start_attempted():
        time.sleep(ALIKE_SECONDS)
    where = "" if runtime is None else f"[rank {runtime.rank} on {runtime.hostname}] "
    # Rank 0 and the failing rank report; other ranks would repeat them.
    if not repeats or runtime is None or runtime.rank == 0:
        # One write: unbuffered print makes two, as under torchrun, and ranks share the stream.
        sys.stderr.write(f"smp-train: {where}{text}\n")
    if lost:
        failures.write_cause()
    if runtime is not None and (lost or repeats):
        blamed = CAUSE_VARIABLE in os.environ or failures.ERROR_FILE in os.environ
        wait_for_request(GIVE_WAY_SECONDS if blamed else QUIET_SECONDS)
    failures.write_error_file(text, code, callstack)


def _leave(code: int) -> None:
    """Exit immediately where peers may wait in a collective that this rank will never enter.

    An orderly exit would wait for them while it destroys the process group.
    """
    if world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
