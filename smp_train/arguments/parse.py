"""From a command line, SageMaker's environment and a configuration file to `Arguments`.

Precedence: command line > ``SM_HP_*`` > ``--config`` file > (preset, applied where the model is built) >
default. On a command line the last value of a setting counts, under whatever name it is given, as launch
scripts that append ``"$@"`` rely on, and a note says so. In the other sources, which have no order, and where
SMP's own configuration is one side, names that disagree are refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smp_train.arguments.aliases import NAMES, Implied
from smp_train.arguments.flag import show
from smp_train.arguments.groups import Arguments, flags
from smp_train.arguments.mp_parameters import MP_PARAMETERS, read_mp_parameters
from smp_train.arguments.own import Own
from smp_train.arguments.values import NOT_GIVEN, convert, is_bool, nearest
from smp_train.distributed import is_sagemaker
from smp_train.errors import ConfigError

COMMAND_LINE, KEYWORD, DEFAULT = "command line", "keyword", "default"
CAUSES = {
    "model_type": "--from_scratch", "model_size": "--from_scratch", "sharding_strategy": "--hybrid_shard_degree",
    "run_dir": "--run_name", "activation_checkpointing": "--selective_checkpointing",
}  # fmt: skip
"""Settings that may follow from another one, and that one; see `Arguments`."""
NUMBER = re.compile(r"-(\d|\.\d)")


@dataclass(frozen=True)
class Resolved:
    """Arguments, the source of each value, notes for the user about them, and a program's own inputs; immutable."""

    args: Arguments
    sources: Mapping[str, str]
    notes: Sequence[str] = ()
    own: Own = field(default_factory=Own)

    def with_values(self, source: str, **values: Any) -> Resolved:
        """Return the settings with other values, which come from ``source``, and with what follows from them."""
        args = replace(self.args, **values)
        following = {
            name: f"follows from {cause}" for name, cause in CAUSES.items()
            if getattr(args, name) != getattr(self.args, name)
        }  # fmt: skip
        return replace(self, args=args, sources={**self.sources, **following, **dict.fromkeys(values, source)})

    def given(self, name: str) -> bool:
        """Return whether the user set ``name`` (rather than a default, the platform, or another setting)."""
        return self.sources[name].startswith((COMMAND_LINE, KEYWORD, "SM_HP_", "config file"))

    def given_here(self, name: str) -> bool:
        """Return whether the command line or the program itself sets ``name``, and no file that serves other runs."""
        return self.sources[name].startswith((COMMAND_LINE, KEYWORD))

    @property
    def by_keywords(self) -> bool:
        """Whether a Python program gave the settings, rather than a command."""
        return KEYWORD in self.sources.values()


@dataclass(frozen=True)
class Given:
    """One setting as a source gives it: the name it was given under, and its value as written."""

    name: str
    value: Any
    spelling: str  # how a message names it: --lr, SM_HP_LR, lr in run.yaml
    source: str


def canonical(name: str) -> str:
    """Return a flag's name with underscores."""
    return name.replace("-", "_")


def _unknown(name: str, spelling: str) -> ConfigError:
    hint = nearest(canonical(name), NAMES).replace("mean ", "mean --" if spelling.startswith("-") else "mean ")
    return ConfigError(f"unknown flag {spelling}{hint or '; `smp-train train --help` lists all'}")


def _one_flag(written: str, equals: str, attached: str, words: list[str]) -> Given:
    if not written.startswith("--"):
        raise ConfigError(f"unknown flag {written}: flags begin with two dashes, as in --lr 1e-4")
    name = canonical(written[2:])
    if name not in NAMES:
        switch = NAMES.get(name.removeprefix("no_"))
        if switch is None or not switch.is_switch:
            raise _unknown(name, written)
        if equals or words:
            raise ConfigError(f"{written} takes no value; write --{switch.name} {attached or words[0]}")
        return Given(switch.name, "0", written, COMMAND_LINE)
    known = NAMES[name]
    values = [attached, *words] if equals else words or (["1"] if known.is_switch else [])
    if not values:
        raise ConfigError(f"{written} expects a value")
    if len(values) > 1 and not known.takes_many:
        extra = values[1] if not known.is_switch or is_bool(values[0]) else values[0]
        raise ConfigError(f"unexpected argument {extra!r} after {written}")
    return Given(name, values if known.takes_many else values[0], written, COMMAND_LINE)


def read_command_line(argv: Sequence[str], notes: list[str]) -> list[Given]:
    """Read flags in order; of a name given twice the last one stays, and ``notes`` says so."""
    groups: list[tuple[str, list[str]]] = []  # a flag as written, and the words after it
    for token in map(str, argv):
        if token.startswith("-") and token != "-" and not NUMBER.match(token):
            groups.append((token, []))
        elif not groups:
            raise ConfigError(f"unexpected argument {token!r}: values follow a flag, as in --lr 1e-4")
        else:
            groups[-1][1].append(token)
    found: dict[str, Given] = {}
    for token, words in groups:
        one = _one_flag(*token.partition("="), words)
        if one.name in found and found.pop(one.name).value != one.value:
            notes.append(f"{one.spelling} is given more than once on the command line; the last one counts")
        found[one.name] = one
    return list(found.values())


def read_environment(environ: Mapping[str, str]) -> list[Given]:
    """Read SageMaker's hyperparameters; its own (``SM_HP_SAGEMAKER_*``) are not ours to judge."""
    variables = {name: canonical(name[6:].lower()) for name in sorted(environ) if name.startswith("SM_HP_")}
    variables = {variable: name for variable, name in variables.items() if not name.startswith("sagemaker_")}
    for variable, name in variables.items():
        if name not in NAMES:
            raise _unknown(name, variable)
    return [Given(name, environ[variable], variable, variable) for variable, name in variables.items()]


def read_config(path: str) -> list[Given]:
    """Read a YAML or JSON mapping of flag to value."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"--config {path}: {problem.strerror or problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        line = getattr(getattr(problem, "problem_mark", None), "line", None)
        where = f" line {line + 1}" if line is not None else ""
        raise ConfigError(f"--config {path}{where}: not YAML: {' '.join(str(problem).split())[:160]}") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected a mapping of flag: value, found {type(content).__name__}")
    found = []
    for key, value in content.items():
        name = canonical(str(key))
        if name not in NAMES:
            raise _unknown(name, f"{key} in {path}")
        if name == "config":
            raise ConfigError(f"--config {path}: a configuration file cannot name another")
        if isinstance(value, dict) and name != MP_PARAMETERS:
            raise ConfigError(f"--config {path}: {key} holds a mapping; write its flags at the top level")
        found.append(Given(name, value, f"{key} in {path}", f"config file {path}"))
    return found


def read_smp_config(path: str) -> list[Given]:
    """Read SMP's own configuration file, a JSON object of the keys that ``torch.sagemaker.init`` takes."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--smp_config {path}: {problem}; give a JSON file of SMP's configuration keys") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--smp_config {path}: expected an object of SMP's configuration keys")
    return [Given(MP_PARAMETERS, content, f"--smp_config {path}", f"config file {path}")]


def launched_by_smp(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return SMP's configuration as the launcher gives it, by key; what has no effect or no value is left out."""
    variable = "SM_HP_MP_PARAMETERS"
    given = Given(MP_PARAMETERS, environ.get(variable), variable, variable)
    return {name: value for name, value, _ in _settings(given, [])}


def _settings(given: Given, notes: list[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield (our flag, its value, source) for a setting under any name; empty ones are dropped."""
    via = given.source
    if given.name not in flags() and via == COMMAND_LINE:
        via = f"{COMMAND_LINE}, {given.spelling}"
    for ours, value in _values(given, notes).items():
        implied = isinstance(value, Implied)
        key = f"{given.spelling} {ours}" if given.name == MP_PARAMETERS else given.spelling
        converted = convert(flags()[ours], value.value if implied else value, key)
        if converted is not NOT_GIVEN:
            yield ours, Implied(converted) if implied else converted, via


def _values(given: Given, notes: list[str]) -> dict[str, Any]:
    """Return what a setting gives our flags, as text or as the source holds it."""
    if given.name == MP_PARAMETERS:
        values, tolerated = read_mp_parameters(given.value, given.spelling)
        notes.extend(f"{given.spelling}: {key} has no effect" for key in tolerated)
        return values
    known = NAMES[given.name]
    if known.read is None:
        return dict.fromkeys(known.ours, given.value)
    if given.value in (None, "", "None"):
        return {}
    try:
        values = known.read(str(given.value))
    except ValueError as problem:
        raise ConfigError(f"{given.spelling} {given.value!r}: {problem}") from None
    if not known.ours:
        notes.append(f"{given.spelling} {given.value} has no effect ({known.help})")
    return values


def _merge(layer: list[Given], notes: list[str]) -> dict[str, tuple[Any, str]]:
    """Return value and source by our flag's name; where two names disagree, `_settle` decides."""
    merged: dict[str, tuple[Any, str]] = {}
    spellings: dict[str, Given] = {}
    implied: dict[str, tuple[Any, str]] = {}
    for given in layer:
        for name, value, source in _settings(given, notes):
            if isinstance(value, Implied):
                implied[name] = (value.value, source)
                continue
            differs = name in merged and merged[name][0] != value
            if differs:
                _settle(name, spellings[name], given, show(merged[name][0]), show(value), notes)
            # Our own name is the better source to show when an alias says the same.
            if differs or name not in merged or given.name == name:
                merged[name] = (value, source)
                spellings[name] = given
    return implied | merged


def _settle(name: str, first: Given, second: Given, before: str, after: str, notes: list[str]) -> None:
    """Note that ``second`` overrides ``first``; refuse where they have no order, or SMP's configuration says other."""
    both = f"{first.spelling} and {second.spelling} both set {name}, to {before} and {after}"
    ordered = first.source == second.source == COMMAND_LINE
    if not ordered or MP_PARAMETERS in (first.name, second.name):
        raise ConfigError(f"{both}; give one of them")
    notes.append(f"{both}; the last one counts")


def read_keywords(settings: Mapping[str, Any]) -> list[Given]:
    """Read what a Python program gives by name; messages name it as a command line would."""
    unknown = next((name for name in settings if name not in NAMES), None)
    if unknown is not None:
        raise _unknown(unknown, f"--{unknown}")
    return [
        Given(name, os.fspath(value) if isinstance(value, os.PathLike) else value, f"--{name}", KEYWORD)
        for name, value in settings.items()
    ]


def _platform_defaults(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Defaults that SageMaker's environment gives."""
    found: dict[str, tuple[Any, str]] = {
        name: ([value] if flag.many else value, flag.variable)
        for name, flag in flags().items()
        if (value := environ.get(flag.variable))
    }
    if is_sagemaker(environ):
        found["checkpoint_dir"] = (["/opt/ml/checkpoints"], "SageMaker")
    return found


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Resolved:
    """Read a command line, ``SM_HP_*`` and ``--config`` into `Arguments`.

    ``environ`` defaults to ``os.environ``. Raises `ConfigError` for unknown flags (with the nearest
    known one), values of the wrong kind, and names that contradict each other without one of them being the last.
    """
    environ = os.environ if environ is None else environ
    notes: list[str] = []
    return _resolved([read_command_line(argv, notes), read_environment(environ)], environ, notes)


def from_keywords(
    settings: Mapping[str, Any], own: Own | None = None, environ: Mapping[str, str] | None = None
) -> Resolved:  # fmt: skip
    """Read settings by name, as `parse` reads flags, and ``--config``; SageMaker's channels are defaults.

    ``SM_HP_*`` are not read: they are the program's, which gives the settings. Raises `ConfigError` as `parse` does.
    """
    own = own or Own()
    resolved = _resolved([read_keywords(settings)], os.environ if environ is None else environ, [])
    # A program's rows take the place of a channel.
    rows = {"training_dir": own.training_data, "test_dir": own.validation_data}
    replaced = [flag for flag, data in rows.items() if data is not None and not resolved.given(flag)]
    return replace(resolved.with_values(DEFAULT, **dict.fromkeys(replaced)), own=own)


def _resolved(given: list[list[Given]], environ: Mapping[str, str], notes: list[str]) -> Resolved:
    layers = [_merge(layer, notes) for layer in given]
    for name, read in (("config", read_config), ("smp_config", read_smp_config)):
        path = next((layer[name][0] for layer in layers if name in layer), None)
        if path:
            layers.append(_merge(read(path), notes))
    layers.append(_platform_defaults(environ))
    values: dict[str, Any] = {}
    sources = dict.fromkeys(flags(), DEFAULT)
    for layer in reversed(layers):
        for name, (value, source) in layer.items():
            values[name] = value
            sources[name] = source
    if sources["training_dir"] == flags()["training_dir"].variable and sources["dataset"] != DEFAULT:
        notes.append(f"{sources['training_dir']} is not read: --dataset names the training data")
        del values["training_dir"]
        sources["training_dir"] = DEFAULT
    args = Arguments(**values)
    _explain_following(args, values, sources, notes)
    resolved = Resolved(args, sources)
    # A validation that never comes due needs no data.
    never = args.validation_freq is not None and args.validation_freq > args.max_steps
    if never and not (
        args.keep_best or args.early_stopping or args.evaluate_first or args.test_dir or args.use_synthetic_data
    ):
        notes.append(
            f"--validation_freq {args.validation_freq} is more than --max_steps {args.max_steps}: no validation; to "
            "validate after the last step, give --test_dir"
        )
        resolved = resolved.with_values("follows from --max_steps", validation_freq=None)
    return replace(resolved, notes=list(dict.fromkeys(notes)))


def _explain_following(args: Arguments, values: dict[str, Any], sources: dict[str, str], notes: list[str]) -> None:
    """Give a setting that follows from another its source, and a note if it overrides the user's value."""
    for name, cause in CAUSES.items():
        settled, asked = getattr(args, name), values.get(name, flags()[name].default)
        if settled == asked or (isinstance(asked, str) and asked.lower() == settled):
            continue
        if name == "sharding_strategy" and name in values:
            notes.append(f"{cause} {args.hybrid_shard_degree} turns --sharding_strategy {asked} into {settled}")
        sources[name] = f"follows from {cause}"
