"""``smp-train checkpoint``: list, verify and delete checkpoints, and convert them from and to other formats."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing

import torch

from smp_train.arguments.groups import Arguments
from smp_train.arguments.run_name import is_run_name
from smp_train.arguments.verb_parser import VerbParser, at_least, positive
from smp_train.checkpoints import listing
from smp_train.checkpoints.aws import sharded as aws
from smp_train.checkpoints.checkpoint import opened
from smp_train.checkpoints.find import Location, locate, open_checkpoint, open_verified
from smp_train.checkpoints.folder import RunFolder, open_folder
from smp_train.checkpoints.format import COMMITTED, METADATA
from smp_train.checkpoints.hf.export import export
from smp_train.checkpoints.hf.model_folder import new_model
from smp_train.checkpoints.owner import Ownership, look_at_owner, newest_claim
from smp_train.checkpoints.pretrained import kind_of, load_weights
from smp_train.checkpoints.save import CheckpointManager, Policy
from smp_train.distributed.job import Job
from smp_train.errors import CheckpointError, ConfigError, SmpTrainError, first_few, one_line, redacted
from smp_train.models.build import build_meta, materialise
from smp_train.models.configuration import changes_from
from smp_train.models.hub_state import gather_state
from smp_train.models.hugging_face import CONFIG_FILE, GENERATION_FILE, trust_code
from smp_train.models.resolve import configuration_next_to, resolve
from smp_train.models.tokenizer import tokenizer_files, tokenizer_folder
from smp_train.models.weight_files import WeightFiles
from smp_train.models.weight_writer import stored_tensors, write_weights
from smp_train.progress import MOVED, Progress
from smp_train.storage import normal, parent_of
from smp_train.storage.paths import place

OURS, ANY_OF_OURS = ("checkpoint", "run", "runs"), "a folder of runs, a run's folder or a checkpoint"
OPERANDS: dict[str, tuple[tuple[str, ...], type[SmpTrainError], str]] = {
    "listed": ((*OURS, "sample", "samples", "other"), CheckpointError, ANY_OF_OURS),
    "verified": (OURS, CheckpointError, ANY_OF_OURS),
    "opened": (OURS, CheckpointError, "a checkpoint, or a run's folder for its newest checkpoint"),
    "pruned": (("run", "runs"), ConfigError, "a run's folder, or a folder of runs with --run_name"),
    "weights": ((*OURS, "sample", "samples", "other", "file"), CheckpointError, "a folder or a file with weights"),
    "imported": (("nothing", "other", "run", "samples"), ConfigError, "a run's folder, which may be a new one"),
    "model": (("nothing", "other"), ConfigError, "a folder for the model"),
}
"""For each role: the kinds of location allowed, the error for other kinds, and the remedy, which is also the help."""
KINDS = {
    "checkpoint": "is one checkpoint", "run": "holds the checkpoints of a run", "runs": "holds the checkpoints of runs",
    "sample": "is a checkpoint of SMP's sample scripts or of another program", "file": "is a file",
    "samples": "holds checkpoints of SMP's sample scripts", "nothing": "does not exist",
    "other": "holds no checkpoint of this program",
}  # fmt: skip

SWITCH: dict[str, object] = {"type": int, "choices": (0, 1), "default": 0}
FLAGS: dict[str, dict[str, object]] = {
    "--json": {"action": "store_true", "help": "as JSON"},
    "--dtype": {"choices": ("float32", "bfloat16", "float16"), "help": "default: as stored"},
    "--tokenizer": {"help": "folder or name of the tokenizer to write with the model"},
    "--max_shard_gb": {"type": positive, "default": 5.0, "help": "size of one file (default: 5)"},
    "--overwrite": {**SWITCH, "help": "move a model that is there to previous-<n>/"},
    "--merge": {**SWITCH, "help": "add adapters into the weights"},
    "--model": {"help": "folder or name: the model of these weights, or the adapters' base model if it has moved"},
    "--trust_remote_code": {**SWITCH, "help": "run code that comes with the model or tokenizer"},
    "--step": {"type": at_least(0, 10**15), "help": "step of the checkpoint (default: the source's, else 0)"},
    "--run_name": {"help": "the run, in a folder of several"},
    "--keep": {"type": at_least(1), "required": True, "help": "number of intact checkpoints to keep, at least 1"},
    "--damaged": {**SWITCH, "help": "delete damaged checkpoints, too"},
    "--dry_run": {**SWITCH, "help": "only print what would be deleted"},
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    whole = VerbParser(prog="smp-train checkpoint", description=__doc__, allow_abbrev=False)
    verbs = whole.add_subparsers(dest="verb", required=True, parser_class=VerbParser)
    writing = ("--dtype", "--tokenizer", "--max_shard_gb", "--overwrite", "--trust_remote_code")
    for action, names, roles, flags in (
        (list_checkpoints, ["list", "ls"], ["listed"], ["--json"]),
        (show, ["show"], ["opened"], ["--json"]),
        (verify, ["verify"], ["verified"], []),
        (export_model, ["export"], ["opened", "model"], ["--merge", "--model", *writing]),
        (convert, ["convert"], ["weights", "model"], writing),
        (import_weights, ["import"], ["weights", "imported"], ["--model", "--step", "--trust_remote_code"]),
        (prune, ["prune"], ["pruned"], ["--keep", "--run_name", "--damaged", "--dry_run"]),
    ):
        about = (action.__doc__ or "").partition(".")[0]
        verb = verbs.add_parser(names[0], aliases=names[1:], help=about, description=about, allow_abbrev=False)
        verb.set_defaults(action=action)
        for operand, role in zip(("source", "target"), roles, strict=False):
            verb.add_argument(operand, help=OPERANDS[role][2])
        for flag in flags:
            verb.add_argument(flag, **FLAGS[flag])
    return whole


def main(argv: Sequence[str]) -> int:
    """Run the verb that the first argument names."""
    options = parser().parse_args(list(argv))
    trust_code(bool(getattr(options, "trust_remote_code", 0)))
    options.action(options)
    return 0


def _operand(path: str, role: str) -> Location:
    """Return a location with its kind. Raises the error in `OPERANDS` if ``role`` needs another kind."""
    kinds, error, remedy = OPERANDS[role]
    if not path.strip():
        raise ConfigError(f"'{path}' names no location; give {remedy}")
    location = locate(path)
    kind, remedy = location.kind, f"give {remedy}"
    if kind in ("nothing", "other") and place(path).is_file():
        kind = "file"
    elif kind == "other" and (samples := aws.checkpoint_paths(path)):
        kind = "sample" if samples == [location.path] else "samples"
        remedy = f"first `smp-train checkpoint import {samples[0]} FOLDER --model NAME_OR_FOLDER`"
    if kind not in kinds:
        raise error(f"{path} {KINDS[kind]}; {remedy}")
    folder, name = parent_of(location.path)
    while role == "model" and name:  # the path itself may not exist yet
        if (place(folder) / COMMITTED).is_file():
            raise error(f"{path} is inside of the checkpoint {folder}, which nothing is added to; {remedy}")
        folder, name = parent_of(folder)
    return location


def _folders(location: Location) -> list[RunFolder]:
    """Return the folders of the runs at a location."""
    folders = [open_folder(os.path.join(location.path, run)) for run in location.runs]
    return folders or [location.folder]


def list_checkpoints(options: argparse.Namespace) -> None:
    """List the checkpoints of each run, oldest first."""
    location = _operand(options.source, "listed")
    rows = [row for folder in _folders(location) for row in listing.rows_of_run(folder)]
    rows = [row for row in rows if location.name in ("", row["name"])]
    if location.kind in ("runs", "other"):
        rows += listing.rows_of_sample(location.path)
    lines = listing.table(rows, location.folder.location) if rows else [f"no checkpoints in {location.path}"]
    print(json.dumps(rows, indent=1) if options.json else "\n".join(lines))


def show(options: argparse.Namespace) -> None:
    """Show a checkpoint's metadata and the number of its tensors."""
    location = locate(options.source)
    if location.kind == "other" and location.folder.storage.exists(METADATA):
        facts = listing.facts_of_tree(location.folder)
    else:
        _operand(options.source, "opened")
        facts = listing.facts_of_checkpoint(open_checkpoint(options.source))
    lines = [f"{key + ':':<12} {listing.in_words(value)}" for key, value in facts.items()]
    print(json.dumps(facts, indent=1) if options.json else "\n".join(lines))


def verify(options: argparse.Namespace) -> None:
    """Recompute the checksums of checkpoints, without changing anything."""
    location = _operand(options.source, "verified")
    checkpoints = [(folder, checkpoint.name) for folder in _folders(location) for checkpoint in folder.committed()]
    checkpoints = [(location.folder, location.name)] if location.name else checkpoints
    if not checkpoints:
        raise CheckpointError(f"{location.path} holds no committed checkpoint")
    damaged = []
    for folder, name in checkpoints:
        damage = listing.damage_of(folder, name, read_all=True)
        label = f"{os.path.basename(folder.location)}/{name}" if location.kind == "runs" else name
        print(f"{label}: {damage or 'intact'}")
        damaged += [label] * bool(damage)
    if damaged:
        raise CheckpointError(f"{len(damaged)} of {len(checkpoints)} damaged in {location.path}: {', '.join(damaged)}")


def export_model(options: argparse.Namespace) -> None:
    """Write a checkpoint's model as a Hugging Face folder."""
    _operand(options.source, "opened")
    _operand(options.target, "model")
    with Progress(f"verify {options.source}", unit="B", moved=MOVED):
        checkpoint = open_verified(options.source)
    dtype = options.dtype and getattr(torch, options.dtype)
    with Progress(f"export {checkpoint.name}", unit="B") as progress:
        export(
            checkpoint, options.target, dtype=dtype, tokenizer=options.tokenizer,
            shard_bytes=int(options.max_shard_gb * 1e9), overwrite=bool(options.overwrite),
            merge=bool(options.merge), base=options.model, on_progress=progress.set_count,
        )  # fmt: skip
    print(f"wrote step {checkpoint.step} of {checkpoint.path} to {options.target}")


def convert(options: argparse.Namespace) -> None:
    """Write weights of any form as a Hugging Face folder of safetensors, under the names they have."""
    _operand(options.source, "weights")
    _operand(options.target, "model")
    if kind_of(options.source) == "ours":
        raise ConfigError(f"{options.source} is a checkpoint: smp-train checkpoint export {options.source} FOLDER")
    source = place(options.source)
    folder = source if source.is_dir() else source.parent
    if os.path.realpath(normal(options.target)) == os.path.realpath(normal(folder)):
        raise ConfigError(f"{options.target} holds the weights that are read; give another folder to write")
    small = {name: (folder / name).read_bytes() for name in (GENERATION_FILE, CONFIG_FILE) if (folder / name).is_file()}
    try:
        json.loads(small.get(CONFIG_FILE, b""))
    except (ValueError, RecursionError) as error:
        config = f"{folder / CONFIG_FILE} is missing or not JSON"
        raise ConfigError(f"{config}: {one_line(error)}; put the model's configuration there") from None
    with ExitStack() as stack, Progress(f"convert {source.name}", unit="B") as progress:
        location = options.tokenizer or tokenizer_folder(str(source))
        small |= {} if location is None else tokenizer_files(location)
        # Open the weights before the target folder: if they cannot be read, the target's old model stays.
        items = stored_tensors(WeightFiles(source, stack), options.dtype and getattr(torch, options.dtype))
        with new_model(options.target, overwrite=bool(options.overwrite)) as out:
            index = write_weights(out.stream, items, int(options.max_shard_gb * 1e9), progress.set_count)
            out.put_all(small | index)
    print(f"wrote {len(items)} tensors of {source} to {options.target}")


def import_weights(options: argparse.Namespace) -> None:
    """Make a checkpoint from weights of any form, or from a checkpoint of SMP's sample, which fit in memory."""
    _operand(options.source, "weights")
    target = _operand(options.target, "imported")
    parent, run_name = parent_of(target.path)
    if not is_run_name(run_name):
        raise ConfigError(f"{options.target} cannot be a run's folder; give another one")
    source = place(options.source)
    if options.model is None and configuration_next_to(source) is None:
        raise ConfigError(f"{source} has no config.json beside it; say which model it is by --model FOLDER_OR_NAME")
    weights = {"pretrained_model_name": options.model, "pretrained_checkpoint_file": str(source)}
    spec = resolve(Arguments(finetune=True, trust_remote_code=options.trust_remote_code, **weights))
    sample = aws.find_checkpoint(str(source), spec.config)
    if sample is not None and (different := changes_from(sample.meta, spec.config)):
        raise CheckpointError(f"{source} is of another model ({'; '.join(different)}); give that one by --model FOLDER")
    step = options.step if options.step is not None else (0 if sample is None else sample.step)
    if names := [checkpoint.name for checkpoint in target.folder.committed() if checkpoint.step == step]:
        raise ConfigError(f"{target.path}/{names[0]} is a committed checkpoint; give another --step or folder")
    model = build_meta(spec)
    materialise(model, "cpu")
    if sample is not None and sample.has_moments:
        usage = "go on from it with --resume_from_checkpoint"
        state = gather_state(model, torch.optim.AdamW(model.parameters()))
        sample.load(state)
    else:
        usage = "start from it with --finetune 1 --pretrained_checkpoint_file"
        with Progress(f"read {source.name}", unit="B") as progress:
            load_weights(model, str(source if sample is None else sample.path), progress.set_count)
        state = gather_state(model)
    imported = {"from": redacted(str(source)), **({} if sample is None else sample.meta["imported"])}
    meta = {"model_config": spec.config.to_dict(), "tokens": 0, "imported": imported}
    owner = Ownership([target.folder], advice="give another folder, or wait until that job has ended")
    owner.acquire()
    manager = CheckpointManager(
        [Policy(parent, 0, 0)], run_name=run_name, model_type=spec.model_type, owner=owner, generation=owner.generation
    )
    with closing(manager):
        (path,) = manager.save(step, state, meta, force=True)
    print(f"wrote {path}; {usage} {path}")


def prune(options: argparse.Namespace) -> None:
    """Delete a run's checkpoints, except for the newest intact ones and the best that --keep_best keeps."""
    runs = {os.path.basename(folder.location): folder for folder in _folders(_operand(options.source, "pruned"))}
    folders = [folder for run, folder in runs.items() if options.run_name in (None, run)]
    if len(folders) != 1:
        raise ConfigError(f"{options.source} holds the runs {first_few(list(runs))}; name one of them with --run_name")
    folder = folders[0]
    surplus: list[tuple[str, str]] = []
    intact, best = 0, None
    committed = folder.committed()
    for checkpoint in committed:
        name, damage = checkpoint.name, listing.damage_of(folder, checkpoint.name)
        if not damage and (intact < options.keep or checkpoint.step == best):
            damage = listing.damage_of(folder, name, read_all=True)
            if not damage:
                meta = opened(folder, name).meta
                if not intact and (meta.get("arguments") or {}).get("keep_best"):
                    best = (meta.get("best") or {}).get("step")
                intact += 1
                continue
        surplus.append((name, f", which is damaged: {damage}" if damage else ""))
    if not committed:
        raise ConfigError(f"{folder.location} holds no committed checkpoint")
    if not intact:
        raise CheckpointError(f"{folder.location}: no checkpoint is intact, so nothing is deleted")
    for name, damage in reversed(surplus):
        if damage and not options.damaged:
            print(f"kept {name}{damage}; delete it with --damaged 1")
            continue
        try:
            if not options.dry_run:
                folder.delete(name)
        except OSError as error:
            raise CheckpointError(f"{folder.location}/{name} cannot be deleted: {error.strerror or error}") from None
        print(f"{'would delete' if options.dry_run else 'deleted'} {name}{damage}")
    if options.dry_run:
        return
    owner, alive, *_ = look_at_owner(folder, Job())
    if alive is False:
        for line in folder.sweep(max(newest_claim(folder)[0], committed[0].generation) + 1):
            print(line)
    else:
        print(f"{folder.location} is in use by {owner or 'a job'}; what its interrupted saves left stays")
