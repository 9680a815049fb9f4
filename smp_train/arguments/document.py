"""``--help``, ``--print_config`` and ``docs/flags.md``, made from the flags' rows.

``python -m smp_train.arguments > docs/flags.md`` writes the document.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from smp_train.arguments.aliases import ALIASES, MP_PARAMETERS, WITHOUT_EFFECT
from smp_train.arguments.flag import Flag, show
from smp_train.arguments.groups import GROUPS, flags

if TYPE_CHECKING:
    from smp_train.arguments.parse import Resolved

INDENT, WIDTH = 34, 100
USAGE = """\
usage: smp-train train [--flag value ...]
       torchrun --nproc-per-node N -m smp_train train [--flag value ...]

Trains a decoder-only language model."""
NOTATION = """\
Flags are written with _ or -, as --flag value or --flag=value. A switch takes 0/1 or true/false, or stands alone for 1;
--no-flag is 0. SageMaker's forms "1", "True", "None", "" and "[1, 2]" are read. Precedence: command line, SM_HP_*,
--config file, preset, default. If a command line sets a flag twice, the last value counts. [brackets] hold the default;
(= --name) are other systems' names."""


def _names(names: Iterable[str]) -> str:
    return " ".join(f"--{name}" for name in names)


def _fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _entry(head: str, text: str) -> str:
    """Return a flag and its meaning in two columns."""
    head = f"  --{head}"
    lines = textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
    if len(head) < INDENT - 1:
        head = head.ljust(INDENT) + lines.pop(0)
    return "\n".join([head, *(" " * INDENT + line for line in lines)])


def _placeholder(flag: Flag) -> str:
    kinds = {bool: "0|1", int: "N", float: "X", str: "0|1|TEXT" if flag.switch else "NAME" if flag.choices else "TEXT"}
    return f"{kinds[flag.kind]} ..." if flag.many else kinds[flag.kind]


def _meaning(flag: Flag) -> str:
    text = flag.help
    if not set(flag.choices) <= set(re.findall(r"\w+", text)):
        text += f" ({', '.join(map(str, flag.choices))})"
    for ours in dict.fromkeys(flag.values.values()):
        text += f"; {ours} = {', '.join(theirs for theirs, value in flag.values.items() if value == ours)}"
    if flag.shown_default not in ("-", ""):
        text += f" [{flag.shown_default}]"
    if flag.only_natively:
        text += f" (without SMP only {' or '.join(map(show, flag.only_natively[0]))})"
    elif flag.smp_only:
        text += " (SMP only)"
    aliases = [alias.name for alias in ALIASES if flag.name in alias.flags and alias.name != MP_PARAMETERS]
    return text + (f" (= {_names(aliases)})" if aliases else "")


def title(group: type) -> str:
    """Return a group's name, the part of its first line before the colon."""
    return str(group.__doc__).split(":")[0]


def _sections() -> Iterator[tuple[str, str, str]]:
    """Yield title, sentence and body of each part of the reference."""
    for group in GROUPS:
        name, _, sentence = " ".join(str(group.__doc__).split()).partition(": ")
        members = [flag for flag in flags().values() if flag.group is group]
        yield name, sentence, "\n".join(_entry(f"{flag.name} {_placeholder(flag)}", _meaning(flag)) for flag in members)
    refused = [name for name, (accepted, _) in WITHOUT_EFFECT.items() if accepted == ()]
    idle = [name for name in WITHOUT_EFFECT if name not in refused]
    body = [
        *(_entry(each.name, f"{_names(each.flags)}: {each.help}") for each in ALIASES if each.flags and each.help),
        _fill(f"No effect, or refused for some values; the message gives the reason: {_names(idle)}", "  "),
        _fill(f"Refused, with the flags to give instead: {_names(refused)}", "  "),
    ]
    yield "Names from other systems", "names with translated values, and names without effect.", "\n".join(body)


def help_text() -> str:
    """Return the output of ``smp-train train --help``."""
    parts = [f"{_fill(f'{name}: {sentence}')}\n{body}" for name, sentence, body in _sections()]
    return "\n\n".join([USAGE, _fill(NOTATION), *parts]) + "\n"


def markdown() -> str:
    """Return ``docs/flags.md``."""
    origin = "Made from the program by `python -m smp_train.arguments > docs/flags.md`; do not edit."
    parts = [
        f"## {name}\n\n{sentence[0].upper()}{sentence[1:]}\n\n```text\n{textwrap.dedent(body)}\n```"
        for name, sentence, body in _sections()
    ]
    return "\n\n".join(["# Training flags", origin, NOTATION.replace("SM_HP_*", "`SM_HP_*`"), *parts]) + "\n"


def print_config(resolved: Resolved, model_values: Mapping[str, tuple[Any, str]] | None = None) -> str:
    """Return every setting with its value and its source, grouped and aligned.

    ``model_values`` are values and sources of flags that the user did not set, such as a preset's widths.
    """
    table = {name: (getattr(resolved.args, name), resolved.sources[name]) for name in flags()}
    table |= model_values or {}
    shown = {name: show(value) or "-" for name, (value, _) in table.items()}
    name_width, value_width = max(map(len, table)), min(40, max(map(len, shown.values())))
    lines = []
    for group in GROUPS:
        lines += ["", f"# {title(group)}"]
        for name, flag in flags().items():
            if flag.group is group:
                source = table[name][1]
                if source == "default" and shown[name] == "-" and flag.shown_default != "-":
                    source = f"default: {flag.shown_default}"
                lines.append(f"{name:<{name_width}}  {shown[name]:<{value_width}}  {source}")
    return "\n".join(lines[1:]) + "\n"
