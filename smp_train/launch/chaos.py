"""`smp-train chaos`: kill or freeze ranks of a run at random moments, and show whether it recovers without a loss.

``smp-train chaos --kills 3 -- --nproc 4 <training flags>`` starts that run on this machine as `smp-train launch local`
does, with --recovery in_place and --logging_freq 1. After random steps it sends signals to random ranks, waits until
the run has recovered, and compares every loss with a second, undisturbed run. Both runs have names of their
own and a folder of their own, runs/chaos-<time>: no other run is touched.

``smp-train chaos --run runs/NAME`` does that to a run that trains now, without a comparison. Only its ranks on this
machine are disturbed. It must train with --recovery in_place.

Exit code: 0 if the run recovered each time, and all its numbers are those of the undisturbed run; otherwise 1.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smp_train.arguments.verb_parser import VerbParser, at_least
from smp_train.errors import ConfigError
from smp_train.launch import flags as launch_flags
from smp_train.launch import local
from smp_train.launch.command import say
from smp_train.launch.disturb import SIGNALS, disturb, find_supervisor
from smp_train.launch.options import split
from smp_train.telemetry.goodput import goodput, in_words
from smp_train.telemetry.metrics import read_metrics

DONE = {"kill": " was killed", "freeze": " was frozen"}
NO_KINDS = ("disk", "s3")
FREEZE_FLAGS = {"hang_report_seconds": 5, "train_timeout_seconds": 10}
"""A frozen rank is replaced after this time, unless the user's flags have another."""
EXACT = ("loss", "grad_norm", "lr", "tokens", "consumed")


def parser() -> VerbParser:
    """Return the parser of the options before ``--``."""
    options = VerbParser(
        prog="smp-train chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- <what follows smp-train launch local>\n       %(prog)s [options] --run RUN",
    )  # fmt: skip
    add = options.add_argument
    add("--kills", type=at_least(1), default=1, metavar="N", help="number of disturbances (default: 1)")
    add("--kinds", default="kill", metavar="KIND,...", help="kill (SIGKILL) or freeze (SIGSTOP; the run ends the rank "
        "after --train_timeout_seconds, here 10 unless given), or both (default: kill)")  # fmt: skip
    add("--seed", type=int, help="seed of moments and ranks (default: another each time)")
    add("--no_compare", action="store_true", help="do not train the undisturbed run")
    add("--run", help="the run folder of a run that trains now")
    add("--json", action="store_true", help="print one JSON object instead of the report")
    return options


def main(argv: Sequence[str]) -> int:
    """Run ``smp-train chaos`` and return its exit code."""
    middle = [*argv, "--"].index("--")
    options, training = parser().parse_args(argv[:middle]), argv[middle + 1 :]
    kinds = options.kinds.split(",")
    for kind in kinds:
        if kind not in SIGNALS:
            because = " (a save that fails ends the run, so it is no test of recovery in place)" * (kind in NO_KINDS)
            raise ConfigError(f"chaos: --kinds {kind}: is not kill or freeze{because}; give one of them, or both")
    if bool(training) == bool(options.run):
        raise ConfigError("chaos: give -- and the flags of a run to start, or --run and the folder of one that trains")
    dice, result = random.Random(options.seed), dict[str, Any]()
    if options.run:
        run = Path(options.run)
        result = {"disturbances": disturb(run, find_supervisor(run), options.kills, kinds, dice)}
    else:
        result = run_twice(training, options, kinds, dice)
    result["ok"] = (
        all("down_sec" in each for each in result["disturbances"])
        and not result.get("different_steps") and not any(result.get("exit_codes", {}).values())
    )  # fmt: skip
    print(json.dumps(result) if options.json else report(result))
    return 0 if result["ok"] else 1


def run_twice(
    training: Sequence[str], options: argparse.Namespace, kinds: Sequence[str], dice: random.Random
) -> dict[str, Any]:
    """Train a disturbed run, then an undisturbed one, and return what happened."""
    folder = Path("runs", time.strftime("chaos-%Y%m%d-%H%M%S")).absolute()
    result: dict[str, Any] = {"folder": str(folder), "exit_codes": {}, "goodput": {}}
    for name in ("disturbed", "undisturbed")[: 1 if options.no_compare else 2]:
        say(f"training {folder.name}-{name}; its log: {folder / name}.log")
        with started(command(training, kinds, folder, name), Path(f"{folder / name}.log")) as process:
            if name == "disturbed":
                result["disturbances"] = disturb(folder / name, process.pid, options.kills, kinds, dice)
            result["exit_codes"][name] = process.wait()
        if result["exit_codes"][name]:
            say(f"it ended with exit code {result['exit_codes'][name]}; see {folder / name}.log")
            return result
        result["goodput"][name] = goodput(read_metrics(folder / name))
    return result if options.no_compare else result | compare(folder)


def command(training: Sequence[str], kinds: Sequence[str], folder: Path, name: str) -> list[str]:
    """Return the command that trains a run in ``folder``."""
    words = launch_flags.without(training, {"recovery", "run_name", "run_dir", "logging_freq"})
    options, flags = split(words, local.parser())
    if (options.nnodes or 1) > 1:
        raise ConfigError("chaos: --nnodes: this verb starts runs on one machine; disturb others with --run")
    given = launch_flags.complete(flags)[1].given
    more: dict[str, Any] = {} if given("checkpoint_dir") else {"checkpoint_dir": folder / "checkpoints"}
    more |= {flag: value for flag, value in FREEZE_FLAGS.items() if "freeze" in kinds and not given(flag)}
    more |= {"recovery": "in_place", "run_name": f"{folder.name}-{name}", "run_dir": folder / name, "logging_freq": 1}
    own = [f"--{flag}={value}" for flag, value in more.items()]
    return [sys.executable, "-m", "smp_train", "launch", "local", *words, *own]


@contextmanager
def started(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command whose output goes to a file; on exit, kill what is left of it, with its ranks."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()  # its ranks die with it
        process.wait()


def compare(folder: Path) -> dict[str, Any]:
    """Return how many steps were compared, and which of them differ in `EXACT`."""
    ours, theirs = (
        [(each["step"], [each[field] for field in EXACT]) for each in read_metrics(run) if "event" not in each]
        for run in (folder / "disturbed", folder / "undisturbed")
    )
    expected = dict(theirs)
    different = {step for step, values in ours if values != expected.get(step)} | expected.keys() - dict(ours).keys()
    return {"steps": len(expected), "different_steps": sorted(different), "last_loss": theirs[-1][1][0]}


def report(result: Mapping[str, Any]) -> str:
    """Return the report for people."""
    lines = ["", f"{'after step':>10}  {'disturbance':<24}{'down for':>10}{'went on after':>16}{'steps repeated':>17}"]
    for each in result["disturbances"]:
        victim = "rank " + ", ".join(map(str, each.get("replaced", "?")))
        lines.append(f"{each['after_step']:>10}  {victim + DONE[each['kind']]:<24}")
        numbers = f"{each['down_sec']:>8.1f} s{each['step']:>16}{each['repeated']:>17}" if "step" in each else ""
        lines[-1] += numbers or "  not recovered"
    lines += ["", *(f"goodput, {name}: {in_words(each)}" for name, each in result.get("goodput", {}).items())]
    if different := result.get("different_steps"):
        share = f"{len(different)} of {result['steps']} steps"
        lines.append(f"{share} differ from the undisturbed run, first {different[0]}")
    elif "steps" in result:
        lines.append(f"equal to the undisturbed run, bit for bit: loss, gradient norm and learning rate of all "
                     f"{result['steps']} steps; the last loss is {result['last_loss']}")  # fmt: skip
    count, recovered = len(result["disturbances"]), sum("step" in each for each in result["disturbances"])
    lines.append(f"{'ok' if result['ok'] else 'FAILED'}: recovered from {recovered} of {count} disturbances")
    return "\n".join(lines)
