"""`smp-train chaos`: disturb a run at random moments, and show whether it recovers without a loss.

``smp-train chaos --kills 3 -- --nproc 4 <training flags>`` starts that run on this machine as `smp-train launch local`
does, with --recovery in_place and --logging_freq 1. After random steps it disturbs random ranks, waits until
the run has recovered, and compares every loss with a second, undisturbed run. Both runs have names of their
own and a folder of their own, runs/chaos-<time>: no other run is touched.

Kinds: ``kill`` (SIGKILL). ``freeze`` (SIGSTOP): the rank is ended after --train_timeout_seconds, here 10 unless given.
``disk``: each write of the rank to a file fails, until a failed save has ended the run; then the same command is
started again, and the down time is counted from there. No disk is filled. ``s3``: the run's connections to S3, which go
through a proxy of this verb, are cut and refused for 2 to 6 seconds; the down time is that without a connection.

``smp-train chaos --run runs/NAME`` kills or freezes ranks of a run that trains now, without a comparison. Only its
ranks on this machine are disturbed. It must train with --recovery in_place.

Exit code: 0 if the run recovered each time, and all its numbers are those of the undisturbed run; otherwise 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smp_train.arguments import Arguments
from smp_train.arguments.verb_parser import VerbParser, at_least
from smp_train.errors import ConfigError
from smp_train.launch import flags as launch_flags
from smp_train.launch import local
from smp_train.launch.command import say
from smp_train.launch.disturb import KINDS, SIGNALS, Training, disturb, find_supervisor
from smp_train.launch.options import split
from smp_train.launch.s3_proxy import Proxy
from smp_train.storage.base import SCHEME
from smp_train.storage.client import client
from smp_train.telemetry.goodput import goodput, in_words
from smp_train.telemetry.metrics import read_metrics

DONE = {
    "kill": "rank {} was killed", "freeze": "rank {} was frozen", "disk": "rank {} had a full disk",
    "s3": "S3 was cut off",
}  # fmt: skip
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
    add("--kinds", default="kill", metavar="KIND,...", help="some of kill, freeze, disk and s3, joined by commas "
        "(default: kill)")  # fmt: skip
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
        if kind not in KINDS:
            raise ConfigError(f"chaos: --kinds {kind}: is not kill, freeze, disk or s3; give some of them")
        if options.run and kind not in SIGNALS:
            raise ConfigError(f"chaos: --kinds {kind}: needs a run that this verb starts; give its flags, not --run")
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
        words, log = command(training, kinds, folder, name), Path(f"{folder / name}.log")
        disturbed = name == "disturbed"
        proxy = Proxy(client().meta.endpoint_url) if disturbed and "s3" in kinds else None
        say(f"training {folder.name}-{name}; its log: {log}")
        with Training(words, log, proxy.environment() if proxy else {}) as run:
            if disturbed:
                pid = run.process.pid
                result["disturbances"] = disturb(folder / name, pid, options.kills, kinds, dice, run, proxy)
            result["exit_codes"][name] = run.process.wait()
        if result["exit_codes"][name]:
            say(f"it ended with exit code {result['exit_codes'][name]}; see {log}")
            return result
        result["goodput"][name] = goodput(read_metrics(folder / name))
    return result if options.no_compare else result | compare(folder)


def command(training: Sequence[str], kinds: Sequence[str], folder: Path, name: str) -> list[str]:
    """Return the command that trains a run in ``folder``."""
    words = launch_flags.without(training, {"recovery", "run_name", "run_dir", "logging_freq"})
    options, flags = split(words, local.parser())
    if (options.nnodes or 1) > 1:
        raise ConfigError("chaos: --nnodes: this verb starts runs on one machine; disturb others with --run")
    resolved = launch_flags.complete(flags)[1]
    given = resolved.given
    check_kinds(kinds, resolved.args)
    more: dict[str, Any] = {} if given("checkpoint_dir") else {"checkpoint_dir": folder / "checkpoints"}
    more |= {flag: value for flag, value in FREEZE_FLAGS.items() if "freeze" in kinds and not given(flag)}
    more |= {"recovery": "in_place", "run_name": f"{folder.name}-{name}", "run_dir": folder / name, "logging_freq": 1}
    own = [f"--{flag}={value}" for flag, value in more.items()]
    return [sys.executable, "-m", "smp_train", "launch", "local", *words, *own]


def check_kinds(kinds: Sequence[str], args: Arguments) -> None:
    """Raise `ConfigError` for a kind that could not disturb a run with these flags."""
    data = [*(args.training_dir or ()), *(args.dataset or ()), args.test_dir or ""]
    if "disk" in kinds and any(SCHEME in path for path in args.checkpoint_dir):
        raise ConfigError("chaos: --kinds disk: a full disk fails no save to s3://; give a folder as --checkpoint_dir")
    if "s3" in kinds and not any(SCHEME in path for path in (*args.checkpoint_dir, *data)):
        raise ConfigError("chaos: --kinds s3: neither --checkpoint_dir nor the data is in s3://")
    if "s3" in kinds and (proxies := urllib.request.getproxies().keys() - {"no"}):
        name = f"{min(proxies)}_proxy".upper()
        raise ConfigError(f"chaos: --kinds s3: {name} is set, and this kind needs a proxy of its own; unset {name}")


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
        victims = each.get("replaced") or [each.get("rank")]
        names = ", ".join("?" if rank is None else str(rank) for rank in victims)
        lines.append(f"{each['after_step']:>10}  {DONE[each['kind']].format(names):<24}")
        numbers = f"{each['down_sec']:>8.1f} s{each['step']:>16}{each['repeated']:>17}" if "step" in each else ""
        lines[-1] += numbers or f"  not {'noticed' if each.get('unnoticed') else 'recovered'}"
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
