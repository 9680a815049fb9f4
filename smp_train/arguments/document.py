"""``--help``, ``--print_config`` and ``docs/flags.md``, all made from the flags themselves.

``python -m smp_train.arguments > docs/flags.md`` writes the last.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from smp_train.arguments.aliases import ALIASES, REFUSED
from smp_train.arguments.flag import SYSTEMS, Flag, show
from smp_train.arguments.groups import GROUPS, flags
from smp_train.arguments.mp_parameters import SMP_KEYS

if TYPE_CHECKING:
    from smp_train.arguments.parse import Resolved

INDENT, WIDTH = 34, 100
USAGE = """\
usage: smp-train train [--flag value ...]
       torchrun --nproc-per-node N -m smp_train train [--flag value ...]

Trains a decoder-only language model."""
NOTATION = """\
Flags are written with _ or -, --flag value or --flag=value. A switch takes 0/1, true/false, or nothing; --no-flag is 0.
SageMaker's forms are read: "1", "True", "None", "", "[1, 2]". Precedence: command line, SM_HP_*, --config file, preset,
default. Of a flag given twice on a command line, under any name, the last value counts, and the run says so; two names
in another source must agree. [brackets] hold the default; (= --x) are other systems' names."""


def _names(names: Iterable[str]) -> str:
    return " ".join(f"--{name}" for name in names)


def _entry(head: str, text: str) -> str:
    """Return a flag and its meaning in two columns."""
    head = f"  --{head}"
    lines = textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
    if len(head) < INDENT - 1:
        head = head.ljust(INDENT) + lines.pop(0)
    return "\n".join([head, *(" " * INDENT + line for line in lines)])


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _placeholder(flag: Flag) -> str:
    kinds = {bool: "0|1", int: "N", float: "X", str: "0|1|TEXT" if flag.switch else "NAME" if flag.choices else "TEXT"}
    return f"{kinds[flag.kind]} ..." if flag.many else kinds[flag.kind]


def _limits(flag: Flag) -> str:
    """Return what this version does not do with a flag; nothing where it does all."""
    if flag.only_natively:
        return f" (without SMP only {' or '.join(map(show, flag.only_natively.values))})"
    if flag.only:
        values = [show(value) for value in flag.only.values if value is not None]
        return f" (only {' or '.join(values)})" if values else " (not available)"
    return " (SMP only)" if flag.no_effect_natively else f" (no effect: {flag.no_effect})" if flag.no_effect else ""


def _meaning(flag: Flag) -> str:
    text = flag.help
    if not set(flag.choices) <= set(re.findall(r"\w+", text)):
        text += f" ({', '.join(map(str, flag.choices))})"
    for ours in dict.fromkeys(flag.values.values()):
        text += f"; {ours} = {', '.join(theirs for theirs, value in flag.values.items() if value == ours)}"
    if flag.shown_default not in ("-", ""):
        text += f" [{flag.shown_default}]"
    aliases = [alias.name for alias in ALIASES if flag.name in alias.ours]
    return text + _limits(flag) + (f" (= {_names(aliases)})" if aliases else "")


def title(group: type) -> str:
    """Return a group's name, the part of its first line before the colon."""
    return str(group.__doc__).split(":")[0]


def _sections() -> Iterator[tuple[str, str, str]]:
    """Yield title, sentence and body of each part of the reference."""
    for group in GROUPS:
        name, _, sentence = " ".join(str(group.__doc__).split()).partition(": ")
        members = [flag for flag in flags().values() if flag.group is group]
        yield name, sentence, "\n".join(_entry(f"{flag.name} {_placeholder(flag)}", _meaning(flag)) for flag in members)
    notes = [
        _entry(alias.name, f"{_names(alias.ours)}: {alias.help}" if alias.ours else alias.help)
        for alias in ALIASES if alias.help and alias.help != REFUSED
    ]
    lists = {
        about: _names(alias.name for alias in ALIASES if system in alias.systems and not alias.help)
        for system, about in SYSTEMS.items()
    }
    lists["Refused, with what to give instead"] = _names(alias.name for alias in ALIASES if alias.help == REFUSED)
    body = "\n".join([*notes, *(_fill(f"{about}: {names}", "  ") for about, names in lists.items())])
    yield "Names from other systems", "first those with a note, then the others by system.", body
    yield "SMP's parameter set", "--mp_parameters key=value,key=value (or JSON) sets", _fill(", ".join(SMP_KEYS), "  ")


def help_text() -> str:
    """Return what ``smp-train train --help`` prints."""
    parts = [f"{_fill(f'{name}: {sentence}')}\n{body}" for name, sentence, body in _sections()]
    return "\n\n".join([USAGE, _fill(NOTATION), *parts]) + "\n"


def markdown() -> str:
    """Return ``docs/flags.md``."""
    made = "Made from the program by `python -m smp_train.arguments > docs/flags.md`; do not edit."
    parts = [
        f"## {name}\n\n{sentence[0].upper()}{sentence[1:]}\n\n```text\n{textwrap.dedent(body)}\n```"
        for name, sentence, body in _sections()
    ]
    return "\n\n".join(["# Training flags", made, NOTATION.replace("SM_HP_*", "`SM_HP_*`"), *parts]) + "\n"


def print_config(resolved: Resolved, settled: Mapping[str, tuple[Any, str]] | None = None) -> str:
    """Return every setting with its value and where that came from, grouped and aligned.

    ``settled`` says what flags that were not given come to, such as a preset's widths, and where that is from.
    """
    table, known = flags(), settled or {}
    values = {name: show(known[name][0] if name in known else getattr(resolved.args, name)) or "-" for name in table}
    name_width, value_width = max(map(len, table)), min(40, max(map(len, values.values())))
    lines = []
    for group in GROUPS:
        lines += ["", f"# {title(group)}"]
        for name, flag in table.items():
            if flag.group is group:
                source = known[name][1] if name in known else resolved.sources[name]
                if source == "default" and values[name] == "-" and flag.shown_default != "-":
                    source = f"default: {flag.shown_default}"
                lines.append(f"{name:<{name_width}}  {values[name]:<{value_width}}  {source}")
    return "\n".join(lines[1:]) + "\n"
