"""The command ``smp-train <verb>`` and its verbs.

Exit codes: 0 done, or stopped on request; 2 bad arguments or configuration; 3 bad data; 4 bad checkpoint; 130
interrupted; 1 anything else. A failure is one line on stderr; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from smp_train import __version__, distributed
from smp_train.arguments.values import is_bool, nearest
from smp_train.errors import ConfigError, install, redacted
from smp_train.failure_report import FailureReporter, exit_immediately
from smp_train.progress import Progress
from smp_train.run.stop import ignore_repeats


class Verb(NamedTuple):
    """A verb's help, and the module of its ``main``, which is imported on use.

    ``flags`` is a module without torch and numpy; its ``read`` prints help and refuses mistakes before that import.
    """

    help: str
    module: str
    flags: str = ""


PLAN_FLAGS, PREPARE_FLAGS = "smp_train.planning.options", "smp_train.data.prepare.options"
VERBS: dict[str, Verb] = {
    "train": Verb("train a model (this is what launchers start on every process)", "smp_train.train_lib"),
    "plan": Verb("say memory, time and cost of a run, before it has a machine", "smp_train.planning.cli", PLAN_FLAGS),
    "launch": Verb("start a run on a cluster or on this machine", "smp_train.launch"),
    "chaos": Verb("disturb a run, and show that it recovers without a loss", "smp_train.launch.chaos"),
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
    argv = list(sys.argv[1:] if argv is None else argv)
    reporter = FailureReporter(debug=split_debug(argv)[1])
    try:
        return run_verb(argv, reporter)
    except KeyboardInterrupt:
        code = 130
        sys.stderr.write("smp-train: interrupted\n")
    except Exception as failure:
        code = reporter.report(failure)
    if distributed.world_size() > 1:
        exit_immediately(code)
    return code


def run_verb(argv: list[str], reporter: FailureReporter) -> int:
    """Run the verb that ``argv`` names, and return its exit code."""
    arguments = split_debug(argv)[0]
    if not arguments or arguments[0] in {*HELP_FLAGS, "help"}:
        print(usage(), end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"smp-train {__version__}")
        return 0
    name, *arguments = arguments
    if name not in VERBS:
        hint = nearest(name, VERBS) or f"; the verbs are {', '.join(VERBS)}"
        raise ConfigError(f"unknown verb {name!r}{hint}")
    if name == "train":
        return train(argv[argv.index(name) + 1 :], reporter)  # --debug is a flag of this verb
    if name in COLLECTIVE and not HELP_FLAGS & set(arguments):
        reporter.runtime = distributed.detect()
    if VERBS[name].flags:
        importlib.import_module(VERBS[name].flags).read(arguments)
    return int(import_verb(name).main(arguments))


def train(argv: list[str], reporter: FailureReporter) -> int:
    """Check the flags of `smp-train train` without torch, then train; return the exit code."""
    from smp_train.arguments import help_text, parse, print_config, validate
    from smp_train.arguments.validation import ineffective, prompts_only, runs_natively
    from smp_train.distributed.host import check_native_releases
    from smp_train.models.resolve import settled_flags
    from smp_train.telemetry.logging_utils import setup_logging

    if HELP_FLAGS & set(argv):
        print(help_text(), end="")
        return 0
    runtime = reporter.runtime = distributed.detect()
    resolved = parse(argv)
    args = resolved.args
    reporter.debug = reporter.debug or args.debug
    if args.print_config:
        if runtime.is_main:
            print(redacted(print_config(resolved, settled_flags(args))), end="")
            print("".join(f"# {line}\n" for line in ineffective(resolved, args.backend)), end="")
        return 0
    validate(args, runtime.world_size, runtime.local_world_size)
    settled_flags(args)  # refuses an unknown preset before any rank waits for another
    if runs_natively(args):
        check_native_releases()
    if runtime.world_size == runtime.local_world_size:  # other nodes may have GPUs, or more memory
        from smp_train.launch.preflight import check_host

        check_host(resolved, runtime.world_size, runtime.local_world_size)
    if not prompts_only(args):  # otherwise stdout must contain the model's text only
        setup_logging(runtime.rank)  # replaced when the run folder exists; stderr is for failures
    with Progress("Importing PyTorch", shown=runtime.is_main):
        module = import_verb("train")
    code = int(module.main(resolved, runtime))
    ignore_repeats()
    return code


def import_verb(name: str) -> ModuleType:
    """Import a verb's module; `ConfigError` for a missing third-party package."""
    # Imports create no garbage, but the collector would take a fifth of the start-up time to search them repeatedly.
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


def split_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Return ``argv`` without --debug and its value, which most verbs' parsers do not know, and whether it is on."""
    arguments: list[str] = []
    debug = after_flag = False
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if flag == "--debug":
            debug, after_flag = value.lower() not in OFF, not equals
            continue
        if after_flag and is_bool(argument):
            debug = argument.lower() not in OFF
        else:
            arguments.append(argument)
        after_flag = False
    return arguments, debug
