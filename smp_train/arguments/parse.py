"""Reads a command line, SageMaker's environment, configuration files or a program's keywords into `Arguments`.

Precedence: command line > ``SM_HP_*`` > ``--config`` file > (preset, applied where the model is built) > default. On a
command line the last value of a flag counts, under any of its names, because launch scripts append ``"$@"``; a note
reports it. Entries of the other sources have no order, so names that disagree are refused; and so is SMP's parameter
set, in any source, if it disagrees with a flag.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smp_train.arguments.aliases import MP_PARAMETERS, NAMES
from smp_train.arguments.flag import show
from smp_train.arguments.groups import FOLLOWING, Arguments, flags
from smp_train.arguments.program_inputs import ProgramInputs
from smp_train.arguments.values import convert, nearest
from smp_train.distributed import is_sagemaker
from smp_train.errors import ConfigError, one_line

COMMAND_LINE, KEYWORD, DEFAULT = "command line", "keyword", "default"
NUMBER = re.compile(r"-(\d|\.\d)")


@dataclass(frozen=True)
class Resolved:
    """Arguments, the source of each value, notes for the user about them, and the program's inputs; immutable."""

    args: Arguments
    sources: Mapping[str, str]
    notes: Sequence[str] = ()
    inputs: ProgramInputs = field(default_factory=ProgramInputs)

    def with_values(self, source: str, **values: Any) -> Resolved:
        """Return the settings with other values from ``source``, and with the settings that follow from them."""
        args = replace(self.args, **values)
        following = {
            name: f"follows from {flag}"
            for name, flag in FOLLOWING.items() if getattr(args, name) != getattr(self.args, name)
        }  # fmt: skip
        return replace(self, args=args, sources={**self.sources, **following, **dict.fromkeys(values, source)})

    def given(self, name: str) -> bool:
        """Return whether the user set ``name`` (rather than a default, the platform, or another setting)."""
        return self.sources[name].startswith((COMMAND_LINE, KEYWORD, "SM_HP_", "config file"))

    def given_here(self, name: str) -> bool:
        """Return whether the command line or the program itself sets ``name``, not a file that serves other runs."""
        return self.sources[name].startswith((COMMAND_LINE, KEYWORD))

    @property
    def by_keywords(self) -> bool:
        """Whether a Python program set the settings, rather than a command."""
        return KEYWORD in self.sources.values()


@dataclass(frozen=True)
class Entry:
    """A name and its value in a source."""

    name: str
    """The name with underscores: a flag or an alias."""
    value: Any
    spelling: str
    """The name in messages: --lr, SM_HP_LR, lr in run.yaml."""
    source: str


Values = dict[str, tuple[Any, str]]
"""Value and source by the flag's name."""


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Resolved:
    """Read a command line, ``SM_HP_*`` and ``--config`` into `Arguments`.

    ``environ`` defaults to ``os.environ``. Raises `ConfigError` for unknown flags (with the nearest known flag), values
    of the wrong kind, and, except on a command line, two names of one flag with different values.
    """
    environ = os.environ if environ is None else environ
    return _resolve([read_command_line(argv), read_environment(environ)], environ)


def from_keywords(
    settings: Mapping[str, Any], inputs: ProgramInputs | None = None, environ: Mapping[str, str] | None = None
) -> Resolved:  # fmt: skip
    """Read settings, each named like its flag, and a ``config`` file; SageMaker's channels give defaults.

    ``SM_HP_*`` are not read, because they belong to the program. Raises `ConfigError` as `parse` does.
    """
    inputs = inputs or ProgramInputs()
    entries = [
        Entry(name, os.fspath(value) if isinstance(value, os.PathLike) else value, f"--{name}", KEYWORD)
        for name, value in settings.items()
    ]
    resolved = _resolve([entries], os.environ if environ is None else environ)
    # If the program passes rows, do not read SageMaker's channel as well.
    rows = {"training_dir": inputs.training_data, "test_dir": inputs.validation_data}
    channels = [flag for flag, data in rows.items() if data is not None and not resolved.given(flag)]
    return replace(resolved.with_values(DEFAULT, **dict.fromkeys(channels)), inputs=inputs)


def canonical(name: str) -> str:
    """Return a flag's name with underscores."""
    return name.replace("-", "_")


def read_command_line(argv: Sequence[str]) -> list[Entry]:
    """Return the flags of a command line, in its order."""
    groups: list[tuple[str, list[str]]] = []  # a flag as written, and the words after it
    for token in map(str, argv):
        if token.startswith("-") and token != "-" and not NUMBER.match(token):
            groups.append((token, []))
        elif not groups:
            raise ConfigError(f"unexpected argument {token!r}: values follow a flag, as in --lr 1e-4")
        else:
            groups[-1][1].append(token)
    return [_flag_entry(token, words) for token, words in groups]


def _flag_entry(token: str, words: list[str]) -> Entry:
    """Return the entry of a flag, written ``--name`` or ``--name=value``, and the words after it."""
    spelling, equals, attached = token.partition("=")
    if not spelling.startswith("--"):
        raise ConfigError(f"unknown flag {spelling}: flags begin with two dashes, as in --lr 1e-4")
    name, values = canonical(spelling[2:]), [attached, *words] if equals else words
    alias = NAMES.get(name)
    if alias is None:
        switch = NAMES.get(name.removeprefix("no_"))
        if switch is None or not switch.is_switch:
            raise _unknown(name, spelling)
        if values:
            raise ConfigError(f"{spelling} takes no value; write --{switch.name} {values[0]}")
        return Entry(switch.name, "0", spelling, f"{COMMAND_LINE}, {spelling}")
    if not values and alias.is_switch:
        values = ["1"]
    if not values:
        raise ConfigError(f"{spelling} expects a value")
    if len(values) > 1 and not alias.takes_many:
        raise ConfigError(f"unexpected argument {values[1]!r} after {spelling}")
    source = COMMAND_LINE if name in flags() else f"{COMMAND_LINE}, {spelling}"
    return Entry(name, values if alias.takes_many else values[0], spelling, source)


def _unknown(name: str, spelling: str) -> ConfigError:
    hint = nearest(name, NAMES).replace("mean ", "mean --" if spelling.startswith("-") else "mean ")
    return ConfigError(f"unknown flag {spelling}{hint or '; `smp-train train --help` lists all'}")


def read_environment(environ: Mapping[str, str]) -> list[Entry]:
    """Return SageMaker's hyperparameters, without SageMaker's own (``SM_HP_SAGEMAKER_*``)."""
    names = {variable: canonical(variable[6:].lower()) for variable in sorted(environ) if variable.startswith("SM_HP_")}
    return [
        Entry(name, environ[variable], variable, variable)
        for variable, name in names.items() if not name.startswith("sagemaker_")
    ]  # fmt: skip


def read_config(path: str) -> list[Entry]:
    """Return the flags in a YAML or JSON mapping."""
    entries = []
    for key, value in _mapping("config", path).items():
        name = canonical(str(key))
        if name == "config":
            raise ConfigError(f"--config {path}: a configuration file cannot name another")
        if isinstance(value, dict) and name != MP_PARAMETERS:
            raise ConfigError(f"--config {path}: {key} holds a mapping; write its flags at the top level")
        entries.append(Entry(name, value, f"{key} in {path}", f"config file {path}"))
    return entries


def read_smp_config(path: str) -> list[Entry]:
    """Return the parameter set in SMP's own configuration file, a JSON object for ``torch.sagemaker.init``."""
    return [Entry(MP_PARAMETERS, _mapping("smp_config", path), f"--smp_config {path}", f"config file {path}")]


def _mapping(flag: str, path: str) -> dict[Any, Any]:
    """Return the mapping in the YAML or JSON file that a flag names."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"--{flag} {path}: {problem.strerror or problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        mark = getattr(problem, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"--{flag} {path}{line}: not YAML: {one_line(problem):.160}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"--{flag} {path}: expected a mapping of flag: value, found {type(content).__name__}")
    return content or {}


def launched_by_smp(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return SMP's configuration from the launcher, by key, without keys that have no effect or no value."""
    variable = "SM_HP_MP_PARAMETERS"
    entry = Entry(MP_PARAMETERS, environ.get(variable), variable, variable)
    return {name: value for name, (value, _) in _merge([entry], []).items()}


def _resolve(sources: list[list[Entry]], environ: Mapping[str, str]) -> Resolved:
    notes: list[str] = []
    layers = [_merge(entries, notes) for entries in sources]
    for flag, read in (("config", read_config), ("smp_config", read_smp_config)):
        path = next((layer[flag][0] for layer in layers if flag in layer), None)
        if path:
            layers.append(_merge(read(path), notes))
    values = _platform_defaults(environ)
    for layer in reversed(layers):
        values |= layer
    if values.get("training_dir", ("", ""))[1] == flags()["training_dir"].variable and "dataset" in values:
        _, variable = values.pop("training_dir")
        notes.append(f"{variable} is not read: --dataset names the training data")
    args = Arguments(**{name: value for name, (value, _) in values.items()})
    settings = {name: values.get(name, (flag.default, DEFAULT)) for name, flag in flags().items()}
    source_of = {name: source for name, (_, source) in settings.items()}
    for name, cause in FOLLOWING.items():
        value, final = (show(setting or None) for setting in (settings[name][0], getattr(args, name)))
        if final not in (value, value.lower()):
            if name in values and name == "validation_freq":
                notes.append(
                    f"--{name} {value} has no effect: {cause} {args.max_steps} ends the run before; give --test_dir to "
                    "validate after the last step"
                )
            elif name in values:
                notes.append(f"{cause} changes --{name} from {value} to {final}")
            source_of[name] = f"follows from {cause}"
    return Resolved(args, source_of, list(dict.fromkeys(notes)))


def _merge(entries: list[Entry], notes: list[str]) -> Values:
    """Return the values of a source's entries. Raises `ConfigError` if entries disagree, except on a command line."""
    values: Values = {}
    yielding: Values = {}
    setters: dict[str, Entry] = {}
    for entry in entries:
        for name, value in _flag_values(entry, notes).items():
            if name in NAMES[entry.name].yields:
                yielding[name] = value, entry.source
                continue
            disagrees = name in values and values[name][0] != value
            if disagrees:
                earlier, both = setters[name], f"{show(values[name][0])} and {show(value)}"
                message = f"{earlier.spelling} and {entry.spelling} both set {name}, to {both}"
                if earlier.spelling == entry.spelling:
                    message = f"{entry.spelling} is given as {both}"
                differs_from_smp = MP_PARAMETERS in (earlier.name, entry.name) and earlier.name != entry.name
                if differs_from_smp or not entry.source.startswith(COMMAND_LINE):
                    raise ConfigError(f"{message}; give one of them")
                notes.append(f"{message}; the last one counts")
            # If an alias and the flag agree, the flag is the better source to show.
            if disagrees or name not in values or entry.name == name:
                values[name], setters[name] = (value, entry.source), entry
    return yielding | values


def _flag_values(entry: Entry, notes: list[str]) -> dict[str, Any]:
    """Return the values of an entry by flag, without empty values of flags that cannot be empty."""
    alias, spelling = NAMES.get(entry.name), entry.spelling
    if alias is None:
        raise _unknown(entry.name, spelling)
    if alias.read is None:
        values = {name: convert(flags()[name], entry.value, spelling) for name in alias.flags}
    elif entry.value in (None, "", "None"):
        return {}
    else:
        try:
            texts = alias.read(json.dumps(entry.value) if isinstance(entry.value, dict) else str(entry.value))
        except ValueError as problem:
            raise ConfigError(f"{spelling} {entry.value!r}: {problem}") from None
        if not alias.flags:
            notes.append(f"{spelling} {entry.value} has no effect: {alias.help}")
        values = {name: convert(flags()[name], text, f"{spelling} {name}") for name, text in texts.items()}
    return {name: value for name, value in values.items() if value is not None or flags()[name].optional}


def _platform_defaults(environ: Mapping[str, str]) -> Values:
    """Return the defaults in SageMaker's environment."""
    values: Values = {
        name: ([value] if flag.many else value, flag.variable)
        for name, flag in flags().items() if (value := environ.get(flag.variable))
    }  # fmt: skip
    if is_sagemaker(environ):
        values["checkpoint_dir"] = (["/opt/ml/checkpoints"], "SageMaker")
    return values
