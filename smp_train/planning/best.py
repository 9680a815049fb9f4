"""``smp-train plan --search``: the best settings of a run as a table, and why the others are not in it."""

from __future__ import annotations

from typing import Any

from smp_train.arguments.chosen import words
from smp_train.errors import ConfigError
from smp_train.planning import cost
from smp_train.planning.fitting import TIGHT, devices, gib, on_host, tight
from smp_train.planning.search import NO_HOST, Plan, Search
from smp_train.planning.space import Space
from smp_train.planning.step_time import Machine


def search(
    space: Space, there: int | None, machine: Machine | None, *, compiled: bool, cautious: bool = False
) -> tuple[dict[str, Any], str, list[Plan]]:  # fmt: skip
    """Return what is found, as ``--json`` prints it, a complaint where nothing fits, else "", and the plans.

    A ``cautious`` search leaves a tenth of a GPU's memory free, unless nothing fits so.
    """
    if there is None:
        raise ConfigError("--search needs --memory_gib, or --instance_type: what fits depends on it")
    if space.args.expert_parallel_degree > 1:
        raise ConfigError(
            f"--expert_parallel_degree {space.args.expert_parallel_degree}: --search does not cover expert "
            "parallelism; give degree 1, or leave out --search"
        )
    for bound in [int(TIGHT * there)] * (cautious and space.gpu) + [there]:
        of = Search(space, bound, machine, compiled)
        plans = of.run()
        if plans:
            break
    found = {
        "model": space.spec.name, "devices": space.devices, "memory": there, "rows": space.rows,
        "tokens": space.rows * space.seq_len, "best": [described(space, plan, there) for plan in plans],
        "lost": dict(of.lost.most_common()), "stepped": len(of.stepped),
    }  # fmt: skip
    if plans:
        return found, "", plans
    least = min((plan.needed for plan in of.stepped.values()), default=None)
    why = f"the least of those stepped needs {gib(least)}" if least else "; ".join(of.lost)
    if space.host is not None and of.lost[NO_HOST]:
        why += f", others more than the {gib(space.host)} of host memory for each device"
    complaint = f"nothing fits {devices(space.devices)} of {gib(there)}: {why}; take more or larger devices"
    return found, complaint, plans


def described(space: Space, plan: Plan, there: int) -> dict[str, Any]:
    """Return one plan, sizes in bytes."""
    flags = space.flags(plan.setting)
    found: dict[str, Any] = {
        "flags": flags, "words": words(flags), "needed": plan.needed,
        "tight": tight(plan.needed, there, gpu=space.gpu),
        "host": on_host(plan.args, plan.memory, gpu=space.gpu),
    }  # fmt: skip
    if plan.time is not None:
        found |= {
            "step_seconds": plan.time.step_seconds, "tokens_per_second": plan.time.tokens_per_second,
            "mfu": plan.time.mfu, "parts": plan.time.parts,
        }  # fmt: skip
    return found


def text(found: dict[str, Any]) -> str:
    """Return what is found as a table."""
    best = found["best"]
    untimed = "; no speed is known for this machine: in the order of docs/planning.md's rule"
    rows = [
        f"{found['model']} on {devices(found['devices'])} of {gib(found['memory'])}, "
        f"{found['rows']:,} rows of {found['tokens'] // found['rows']:,} tokens a step"
        + (untimed if best and "step_seconds" not in best[0] else ""), "",
    ]  # fmt: skip
    if best:
        rows.append(f"  {'tokens/s':>10} {'step':>9} {'memory':>11}    flags")
    for plan in best:
        speed, step = "-", "-"
        if "step_seconds" in plan:
            speed, step = f"{plan['tokens_per_second']:,.0f}", f"{plan['step_seconds']:.2f} s"
        memory = gib(plan["needed"]) + (" *" if plan["tight"] else "  ")
        rows.append(f"  {speed:>10} {step:>9} {memory:>13}  {plan['words'] or '(as given)'}")
    if any(plan["tight"] for plan in best):
        rows += ["", f"  * more than {TIGHT:.0%} of the device: try it before a long run"]
    if spent := cost.text(found):
        rows += ["", "  with the first:", *spent[:-1]]
    left = "not among them" if best else "nothing fits"
    rows += [""] * bool(best) + [f"  {left}, after {found['stepped']} were stepped:"]
    rows += [f"  {count:>8}  {reason}" for reason, count in found["lost"].items()]
    return "\n".join(rows)
