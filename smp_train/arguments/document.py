"""What is said of the flags: ``--help``, ``--print_config`` and the reference table ``docs/flags.md``.

All three are made from the flags themselves. ``python -m smp_train.arguments > docs/flags.md``
makes the table.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smp_train.arguments.aliases import ALIASES, REFUSED
from smp_train.arguments.flag import Flag, show
from smp_train.arguments.groups import GROUPS, LegacyArguments, flags
from smp_train.arguments.mp_parameters import SMP_KEYS

if TYPE_CHECKING:
    from smp_train.arguments.parse import Resolved

HELP_INDENT = 34

USAGE = """\
usage: smp-train train [--flag value ...]
       torchrun --nproc-per-node N -m smp_train train [--flag value ...]

Trains a decoder-only language model. Flags are written with _ or -, --flag value or --flag=value.
A switch takes 0/1, true/false, or nothing (--debug); --no-flag is 0. Flags may also come from
SageMaker hyperparameters and from --config FILE. The command line wins over hyperparameters, and
they over the file.
[brackets] hold the default; (= --x) is another system's name for the flag."""


def _aliases(name: str) -> list[str]:
    return [alias.name for alias in ALIASES if name in alias.ours]


def _placeholder(flag: Flag) -> str:
    if flag.kind is bool:
        word = "0|1"
    elif flag.switch:
        word = "0|1|TEXT"
    elif flag.kind is str:
        word = "NAME" if flag.choices else "TEXT"
    else:
        word = {int: "N", float: "X"}[flag.kind]
    return f"{word} ..." if flag.many else word


def only(flag: Flag) -> str:
    """Return what this version does not do with a flag; nothing where it does all."""
    if flag.idle and flag.group is not LegacyArguments:
        return f"{'without SMP, ' if flag.no_effect_natively else ''}no effect: {flag.idle}"
    if flag.only_natively:
        return f"without SMP, only {show(flag.only_natively.values[0])}"
    if not flag.only:
        return ""
    if flag.only.values == (None,):
        return "not available in this version"
    return f"only {' or '.join(show(value) for value in flag.only.values if value is not None)} in this version"


def _entry(flag: Flag, width: int) -> str:
    head = f"  --{flag.name} {_placeholder(flag)}"
    text = flag.help
    if flag.choices:
        text += f" ({', '.join(map(str, flag.choices))})"
    if flag.unit and flag.unit not in text.lower():
        text += f", in {flag.unit}"
    default = flag.shown_default
    text += f" [{default if default != '-' else 'none'}]"
    text += f" ({only(flag)})" if only(flag) else ""
    if _aliases(flag.name):
        text += f" (= {', '.join(f'--{name}' for name in _aliases(flag.name))})"
    lines = textwrap.wrap(text, width - HELP_INDENT, break_long_words=False, break_on_hyphens=False)
    if len(head) < HELP_INDENT - 1:
        first = head.ljust(HELP_INDENT) + lines.pop(0)
        return "\n".join([first, *(" " * HELP_INDENT + line for line in lines)])
    return "\n".join([head, *(" " * HELP_INDENT + line for line in lines)])


def title(group: type) -> str:
    """Return a group's name, the part of its first line before the colon."""
    return str(group.__doc__).split(":")[0]


def _sentence(group: type) -> str:
    return " ".join(str(group.__doc__).split())


def help_text(width: int = 100) -> str:
    """Return what ``smp-train train --help`` prints, no line longer than ``width``."""
    parts = [USAGE]
    for group in GROUPS:
        members = [flag for flag in flags().values() if flag.group is group]
        header = textwrap.fill(_sentence(group), width)
        if group is LegacyArguments:
            known = [name for flag in members for name in (flag.name, *_aliases(flag.name))]
            known += [alias.name for alias in ALIASES if not alias.ours and alias.help != REFUSED]
            names = " ".join(f"--{name}" for name in known)
            body = textwrap.fill(names, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
            refused = ", ".join(f"--{alias.name}" for alias in ALIASES if alias.help == REFUSED)
            body += f"\n\nRefused, with what to give instead: {refused}"
        else:
            body = "\n".join(_entry(flag, width) for flag in members)
        parts.append(f"{header}\n{body}")
    keys = textwrap.fill(", ".join(SMP_KEYS), width, initial_indent="  ", subsequent_indent="  ")
    parts.append(f"SMP's parameter set: --mp_parameters key=value,key=value (or JSON) sets\n{keys}")
    return "\n\n".join(parts) + "\n"


def print_config(resolved: Resolved, settled: Mapping[str, tuple[Any, str]] | None = None) -> str:
    """Return every setting with its value and where that came from, grouped and aligned.

    ``settled`` says what flags that were not given come to, such as a preset's widths, and where that is from.
    """
    table = flags()
    known = settled or {}
    values = {name: show(known[name][0] if name in known else getattr(resolved.args, name)) or "-" for name in table}
    name_width = max(map(len, table))
    value_width = min(40, max(map(len, values.values())))
    lines = []
    for group in GROUPS:
        lines += ["", f"# {title(group)}"]
        for flag in table.values():
            if flag.group is group:
                source = known[flag.name][1] if flag.name in known else resolved.sources[flag.name]
                if source == "default" and values[flag.name] == "-" and flag.shown_default != "-":
                    source = f"default: {flag.shown_default}"
                lines.append(f"{flag.name:<{name_width}}  {values[flag.name]:<{value_width}}  {source}")
    return "\n".join(lines[1:]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def markdown() -> str:
    """Return ``docs/flags.md``."""
    lines = [
        "# Training flags",
        "",
        "Made from the program by `python -m smp_train.arguments > docs/flags.md`; do not edit.",
        "",
        "`-` and `_` are alike. `--flag value`, `--flag=value`; a switch also stands alone, and `--no-flag` is 0.",
        'SageMaker\'s forms are read: `"1"`, `"True"`, `"None"`, `""`, `"[1, 2]"`.',
        "Precedence: command line, `SM_HP_*`, `--config` file, preset, default. On a command line the last value of a",
        "flag counts, under whatever name it is given, and the run says so; two names in another source must agree.",
    ]
    for group in GROUPS:
        head, _, sentence = _sentence(group).partition(": ")
        lines += ["", f"## {head}", "", sentence[0].upper() + sentence[1:], ""]
        lines += ["| flag | type | default | meaning |", "|---|---|---|---|"]
        for flag in flags().values():
            if flag.group is group:
                lines.append(_row(flag))
    lines += ["", "## Names from other systems", "", "| theirs | ours | from |", "|---|---|---|"]
    for alias in ALIASES:
        ours = ", ".join(f"`--{name}`" for name in alias.ours)
        if not ours:
            ours = alias.help if alias.help == REFUSED else f"no effect ({alias.help})"
        elif alias.help:
            ours += f": {alias.help}"
        lines.append(f"| `--{alias.name}` | {ours} | {alias.system} |")
    keys = ", ".join(f"`{key}`" for key in SMP_KEYS)
    lines += ["", f"`--mp_parameters`, as `key=value,key=value` or JSON, sets {keys}.", ""]
    return "\n".join(lines)


def _row(flag: Flag) -> str:
    kind = {bool: "0/1", int: "integer", float: "number", str: "text"}[flag.kind]
    kind = ("0/1 or text" if flag.switch and flag.kind is str else kind) + (" ..." if flag.many else "")
    if flag.unit:
        kind += f" ({flag.unit})"
    meaning = flag.help
    if flag.choices:
        meaning += ": " + ", ".join(f"`{choice}`" for choice in flag.choices)
    if flag.values:
        meaning += "; also " + ", ".join(f"`{theirs}` = `{ours}`" for theirs, ours in flag.values.items())
    limits = only(flag) or (f"no effect: {flag.idle}" if flag.idle else "")
    limits = limits[:1].upper() + limits[1:]
    if limits and not flag.idle:
        limits = f"**{limits}**"
    meaning += f". {limits}" if limits else ""
    default = flag.shown_default
    return f"| `--{flag.name}` | {kind} | {_cell(default) if default != '-' else 'none'} | {_cell(meaning)} |"
