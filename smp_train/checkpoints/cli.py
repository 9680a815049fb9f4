"""``smp-train checkpoint``: look at checkpoints, check them, and turn them into other forms."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from smp_train.arguments.verb_parser import VerbParser, at_least, positive
from smp_train.checkpoints import Checkpoint, find, open_checkpoint
from smp_train.checkpoints.aws import sharded as aws
from smp_train.checkpoints.commit import CheckpointFolder, absent, open_folder, parent_of
from smp_train.checkpoints.discovery import is_checkpoint_folder, is_one_checkpoint
from smp_train.checkpoints.manager import CheckpointManager
from smp_train.checkpoints.manifest import ABANDONED, COMMITTED, DAMAGED, folder_name, name_before, parse_folder_name
from smp_train.checkpoints.pruning import deleting
from smp_train.checkpoints.runs import committed, committed_names, last_run, run_of
from smp_train.checkpoints.target import Policy
from smp_train.errors import CheckpointError, ConfigError, first_few, redacted
from smp_train.models.hugging_face import trust_code
from smp_train.progress import MOVED, Progress
from smp_train.storage import normal
from smp_train.storage.paths import Place, place


def parser() -> argparse.ArgumentParser:
    """Return the parser of this verb's sub-commands."""
    found = VerbParser(prog="smp-train checkpoint", description=__doc__, allow_abbrev=False)
    verbs = found.add_subparsers(dest="verb", required=True, parser_class=VerbParser)

    def verb(name: str, help: str, source: str, target: str | None = None, **more: Any) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=help, description=help, allow_abbrev=False, **more)
        made.add_argument("source", help=source)
        if target is not None:
            made.add_argument("target", help=target)
        return made

    either = "a checkpoint, or a folder of them (the newest one of the run that saved last)"
    listing = "list the checkpoints of a folder"
    made = verb("ls", listing, "folder of checkpoints, or one checkpoint", aliases=["list"])
    made.add_argument("--json", action="store_true", help="as JSON")
    made = verb("show", "tell what a checkpoint holds", either)
    made.add_argument("--json", action="store_true", help="all of it, as JSON")
    verb("verify", "recompute checksums", "a checkpoint, or a folder: all of its committed ones")
    for name, help, source in (
        ("export", "write a checkpoint's model as a Hugging Face folder", either),
        ("convert", "write weights of any form as safetensors", "folder or file (.safetensors, .bin, .pt)"),
    ):
        made = verb(name, help, source, "folder to write")
        made.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored")
        made.add_argument("--tokenizer", help="folder or name of the tokenizer to write beside the model")
        made.add_argument("--max_shard_gb", type=positive, default=5.0, help="size of one file (default: 5)")
        made.add_argument("--overwrite", type=int, choices=(0, 1), default=0, help="replace a model that is there")
        if name == "export":
            made.add_argument("--merge", type=int, choices=(0, 1), default=0, help="add adapters into the weights")
            made.add_argument("--model", help="these weights, where they have moved")
        made.add_argument("--trust_remote_code", type=int, choices=(0, 1), default=0, help="run a tokenizer's own code")
    made = verb("import", "make a checkpoint of weights of any form", "see --pretrained_checkpoint_file", "folder")
    made.add_argument("--model", help="folder or name of the model; default: config.json beside the weights")
    made.add_argument("--step", type=at_least(0), help="step of the checkpoint; default: what the source says, else 0")
    made.add_argument("--overwrite", type=int, choices=(0, 1), default=0, help="replace a checkpoint of that step")
    made.add_argument("--trust_remote_code", type=int, choices=(0, 1), default=0, help="run the model's own code")
    made = verb("prune", "delete all but a run's newest committed checkpoints, and its best", "folder of checkpoints")
    made.add_argument("--run_name", help="name or id of the run; needed where the folder holds several")
    made.add_argument("--keep", type=int, required=True, help="how many of each model type to keep, at least 1")
    made.add_argument("--damaged", type=int, choices=(0, 1), default=0, help="delete those set aside as damaged, too")
    made.add_argument("--abandoned", type=int, choices=(0, 1), default=0, help="and those that a run went back before")
    made.add_argument("--dry_run", type=int, choices=(0, 1), default=0, help="only say what would be deleted")
    return found


def main(argv: Sequence[str]) -> int:
    """Do what the first argument names."""
    options = parser().parse_args(list(argv))
    trust_code(bool(getattr(options, "trust_remote_code", 0)))
    actions = {
        "ls": ls, "list": ls, "show": show, "verify": verify, "export": export_model, "convert": convert,
        "import": import_weights, "prune": prune,
    }  # fmt: skip
    return actions[options.verb](options)


def ls(options: argparse.Namespace) -> int:
    """Print one line per checkpoint, finished or not, oldest step first; or a list of objects as JSON."""
    storage, only = _folder_and_name(options.source)
    others = {name: kind for kind in (ABANDONED, DAMAGED) for name in storage.aside(kind)}
    others |= dict.fromkeys(aws.checkpoint_names(storage.location), "SMP sample")
    rows: list[dict[str, Any]] = []
    for name in [only] if only else storage.names():
        sizes = storage.sizes(name)
        before = name_before(name)
        model_type, step = parse_folder_name(before) or ("", -1)
        if not (only or model_type or name.endswith((".staging", ".deleting", ".replaced"))):
            continue
        complete = COMMITTED in sizes and name == before
        state = "committed" if complete else others.get(name, "incomplete")
        run, saved = run_of(storage, name)
        rows.append(
            {
                "name": name, "path": os.path.join(storage.location, name), "step": step if model_type else None,
                "model_type": model_type or None, "state": state, "bytes": sum(sizes.values()), "files": len(sizes),
                "run": run.to_json() if run.id else None, "saved": _at(saved),
            }
        )  # fmt: skip
    rows.sort(key=lambda row: (-1 if row["step"] is None else row["step"], row["name"]))
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        of = f"  {row['saved'] or '':<20}  run {row['run']['name']} ({row['run']['id']})" if row["run"] else ""
        size = f"{in_bytes(row['bytes']):>10}  {row['files']} files"
        print(f"{row['name']:<{width}}  {row['state']:<10}  {size}{of}")
    if not rows:
        print(f"no checkpoints in {storage.location}")
    return 0


def _at(seconds: float) -> str | None:
    """Return a time as people and programs read it, in UTC; None where it is not known."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)) if 0 < seconds < 1e11 else None


def _of_model(found: Checkpoint) -> str:
    """Return the model of a checkpoint in a few words: our type and size, where it is from, transformers' type."""
    config, arguments = (found.meta.get(key) for key in ("model_config", "arguments"))
    config, arguments = (value if isinstance(value, dict) else {} for value in (config, arguments))
    size = arguments.get("model_size")
    pretrained = arguments.get("hf_pretrained_model_name_or_dir") or arguments.get("pretrained_model_name")
    named = f"{found.committed.model_type}-{size}" if size else found.committed.model_type
    return f"{named}{f' of {pretrained}' if pretrained else ''} ({config.get('model_type', 'unknown')} of transformers)"


def show(options: argparse.Namespace) -> int:
    """Print what a checkpoint says of itself, and how many tensors of which kind it holds."""
    from smp_train.checkpoints.dcp.trees import plain_values, saved_entries
    from smp_train.checkpoints.manifest import METADATA

    place = normal(options.source)
    folder, name = parent_of(place)
    if not is_checkpoint_folder(place) and open_folder(folder).has(name, METADATA):  # another program's
        reader = open_folder(folder).reader(name)
        entries = [saved_entries(reader)]
        facts: dict[str, Any] = {"path": place, "format": "DCP tree of another program"}
        facts |= plain_values(reader)
    else:
        found = open_checkpoint(newest(options.source))
        entries = found.entries()
        folder, name = parent_of(found.path)
        run, saved = run_of(open_folder(folder), name)
        facts = {
            "path": found.path, "model": _of_model(found), "run": f"{run} ({run.id})" if run.id else f"{run}",
            "saved": _at(saved) or "unknown", "step": found.step,
            "bytes": sum(record.size for record in found.committed.files.values()),
        }  # fmt: skip
        left_out = ("model_config", "generation_config", "arguments", "step", "run", "model_type")
        facts |= {key: value for key, value in found.meta.items() if key not in left_out}
    kinds: dict[str, list[int]] = {}
    for tree in entries:
        for key, entry in tree.items():
            if hasattr(entry, "size"):
                kinds.setdefault(key.split(".")[0], []).append(entry.size.numel())
    among = f" in {len(entries)} parts" if len(entries) > 1 else ""
    for kind, counts in kinds.items():
        facts[f"{kind}.*"] = f"{len(counts)} tensors, {sum(counts):,} numbers{among}"
    if options.json:
        print(json.dumps(facts, indent=1))
        return 0
    for key, value in facts.items():
        print(f"{key + ':':<12} {READ_AS.get(key, in_words)(value)}")
    return 0


def in_words(value: Any) -> str:
    """Return a value of meta.json as a person reads it: of a long list how many entries it has."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {f'({in_words(each)})' if isinstance(each, dict) else in_words(each)}"
                         for key, each in value.items())  # fmt: skip
    if isinstance(value, list):
        return f"{len(value)} entries" if len(value) > 8 else " ".join(map(in_words, value)) or "none"
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def _best(best: Any) -> str:
    if not isinstance(best, dict) or best.get("step") is None:
        return "no validation yet"
    return f"step {best['step']} with validation loss {best.get('loss')}, {best.get('since')} validations since"


def _spikes(spikes: Any) -> str:
    spans = spikes.get("skipped") if isinstance(spikes, dict) else None
    stretches = [f"{first}" if first == last else f"{first} to {last}" for first, last in spans or ()]
    return f"updates skipped: {f'steps {first_few(stretches)}' if stretches else 'none'}"


READ_AS: dict[str, Callable[[Any], str]] = {"best": _best, "spikes": _spikes}


def verify(options: argparse.Namespace) -> int:
    """Recompute all checksums; `CheckpointError` names what is damaged."""
    storage, only = _folder_and_name(options.source)
    names = [only] if only else committed_names(storage)
    if not names:
        raise CheckpointError(f"{storage.location} holds no committed checkpoint")
    damaged = []
    for name in names:
        try:
            checkpoint = open_checkpoint(os.path.join(storage.location, name))
            with Progress(f"verify {name}", unit="B", moved=MOVED):
                problems = checkpoint.verify()
            if not problems:
                checkpoint.entries()
        except CheckpointError as error:
            problems = [str(error)]
        print(f"{name}: {'; '.join(problems) or 'intact'}")
        damaged += [name] * bool(problems)
    if damaged:
        raise CheckpointError(f"{len(damaged)} of {len(names)} damaged in {storage.location}: {', '.join(damaged)}")
    return 0


def export_model(options: argparse.Namespace) -> int:
    """Write a checkpoint's model as a Hugging Face folder."""
    from smp_train.checkpoints.hf.export import export

    _check_target(options.target)
    source = newest(options.source)
    with Progress(f"verify {os.path.basename(source)}", unit="B", moved=MOVED):
        found = find(source)
    assert found is not None
    with Progress(f"export {os.path.basename(found.path)}", unit="B") as progress:
        export(
            found, options.target, dtype=_dtype(options), tokenizer=options.tokenizer,
            shard_bytes=int(options.max_shard_gb * 1e9), overwrite=bool(options.overwrite),
            merge=bool(options.merge), base=options.model, on_progress=progress.at,
        )  # fmt: skip
    print(f"wrote step {found.step} of {found.path} to {options.target}")
    return 0


def convert(options: argparse.Namespace) -> int:
    """Write weights of any form as a Hugging Face folder of safetensors, under the names they have."""
    import torch

    from smp_train.checkpoints.hf import tokenizer
    from smp_train.checkpoints.hf.model_folder import LazyTensors, new_model
    from smp_train.models.hf_weights import NOT_WEIGHTS
    from smp_train.models.weight_files import WeightFiles

    _check_target(options.target)
    source = _weights(options.source)
    if (source / COMMITTED).is_file():
        raise ConfigError(f"{source} is a checkpoint of this program: smp-train checkpoint export {source} FOLDER")
    folder = source if source.is_dir() else source.parent
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json, without which the weights cannot be opened; put it there")
    if os.path.realpath(normal(options.target)) == os.path.realpath(normal(folder)):
        raise ConfigError(f"{options.target} holds the weights that are read; give another folder to write")
    with ExitStack() as stack:
        location = options.tokenizer or tokenizer.tokenizer_folder(str(source))
        files_of_tokenizer = {} if location is None else tokenizer.tokenizer_files(location)
        # Opened first: what cannot be read is no reason to remove what is in the other folder.
        files = WeightFiles(source, stack)
        names = [name for name in files.files if not NOT_WEIGHTS.search(name)]
        items = []
        for name in names:
            block = files.tensor(name)
            shape = block.get_shape()
            stored = block[(slice(0, 0),) * len(shape) or ...].dtype
            dtype = (stored.is_floating_point and _dtype(options)) or stored

            def read(name: str = name, block: Any = block, dtype: Any = dtype) -> dict[str, Any]:
                return {name: block[...].to(dtype)}

            items.append(LazyTensors({name: torch.empty(shape, dtype=dtype, device="meta")}, read))
        with new_model(options.target, overwrite=bool(options.overwrite)) as out:
            with Progress(f"convert {source.name}", unit="B") as progress:
                out.put_weights(items, int(options.max_shard_gb * 1e9), progress.at)
            small = [name for name in ("generation_config.json", "config.json") if (folder / name).is_file()]
            out.put_all(files_of_tokenizer | {name: (folder / name).read_bytes() for name in small})
    print(f"wrote {len(names)} tensors of {source} to {options.target}")
    return 0


def import_weights(options: argparse.Namespace) -> int:
    """Make a committed checkpoint of weights of any form, or of a checkpoint of SMP's sample; holds it in memory."""
    import torch

    from smp_train.checkpoints.pretrained import load_weights
    from smp_train.checkpoints.state import gather_state
    from smp_train.models.build import build_meta, materialise
    from smp_train.models.configuration import changes_from
    from smp_train.models.resolve import beside, resolve

    source = _weights(options.source)
    if options.model is None and beside(source) is None:
        raise ConfigError(f"{source} has no config.json beside it; say which model it is by --model FOLDER_OR_NAME")
    spec = resolve(
        argparse.Namespace(
            trust_remote_code=options.trust_remote_code, finetune=True, pretrained_model_name=options.model,
            pretrained_checkpoint_file=str(source), finetune_checkpoint_load_dir=None,
            hf_pretrained_model_name_or_dir=None, model_type=None, model_size=None,
        )
    )  # fmt: skip
    found = aws.find_checkpoint(str(source), spec.config)
    different = [] if found is None else changes_from(found.meta, spec.config)
    if different:
        raise CheckpointError(f"{source} is of another model ({'; '.join(different)}); give that one by --model FOLDER")
    told = {} if found is None else found.meta["imported"]
    step = options.step if options.step is not None else (0 if found is None else found.step)
    manager = CheckpointManager([Policy(options.target, 0, 0)], model_type=spec.model_type)
    manager.lock(advice="give another folder, or wait until that job has ended")
    try:
        folder, name = open_folder(options.target), folder_name(spec.model_type, step)
        if not options.overwrite and folder.has(name, COMMITTED):
            raise ConfigError(
                f"{os.path.join(folder.location, name)} is a committed checkpoint; give another --step or folder, or "
                "replace it with --overwrite 1"
            )
        model = build_meta(spec)
        materialise(model, "cpu")
        size = sum(parameter.nbytes for parameter in model.parameters())
        meta = {"model_config": spec.config.to_dict(), "imported": {"from": redacted(str(source)), **told}, "tokens": 0}
        how = "start from it with --finetune 1 --pretrained_checkpoint_file"
        if found is None or not found.has_moments:
            with Progress(f"read {source.name}", unit="B") as progress:
                load_weights(model, str(source if found is None else found.path), progress.at)
            state = gather_state(model)
        else:
            state = gather_state(model, torch.optim.AdamW(model.parameters()))
            found.load(state)
            size, how = 3 * size, "go on from it with --resume_from_checkpoint"
        print(f"writing {in_bytes(size)} to {options.target}", file=sys.stderr)
        for path in manager.save(step, state, meta, force=True):
            print(f"wrote {path}; {how} {path}")
    finally:
        manager.close()
    return 0


def prune(options: argparse.Namespace) -> int:
    """Delete all but a run's newest committed checkpoints of each model type, and what its interrupted saves left."""
    kinds = [kind for kind in (DAMAGED, ABANDONED) if getattr(options, kind)]
    for line in deleting(
        _folder(options.source), run_name=options.run_name, keep=options.keep, kinds=kinds, dry=bool(options.dry_run)
    ):
        print(line)
    return 0


def newest(location: str) -> str:
    """Return the path of the checkpoint at ``location``; in a folder, the newest one of the run that committed last.

    Raises `CheckpointError` where there is none.
    """
    place = normal(location)
    storage, only = _folder_and_name(location)
    if only:
        return place
    entries = committed(storage)
    if not entries and (samples := aws.checkpoint_names(place)):
        one = os.path.join(parent_of(place)[0] if aws.is_checkpoint(place) else place, samples[0])
        raise CheckpointError(
            f"{one} is of SMP's sample scripts; first `smp-train checkpoint import {one} FOLDER --model NAME_OR_FOLDER`"
        )
    if not entries:
        raise CheckpointError(f"{location} holds no committed checkpoint")
    run = last_run(entries)
    name = next(entry.name for entry in entries if entry.run == run)
    return os.path.join(storage.location, name)


def _check_target(folder: str) -> None:
    """Raise `ConfigError` unless a model may be written to a folder."""
    if not folder.strip():
        raise ConfigError("the folder to write is empty; give a folder for the model")
    if is_checkpoint_folder(folder):
        raise ConfigError(f"{folder} holds checkpoints; give another folder for the model")


def _dtype(options: argparse.Namespace) -> Any:
    import torch

    return options.dtype and getattr(torch, options.dtype)


def _weights(location: str) -> Place:
    source = place(location)
    if not source.exists():
        raise CheckpointError(f"{source} does not exist; give a folder or a file with weights")
    return source


def _folder_and_name(location: str) -> tuple[CheckpointFolder, str]:
    """Return a folder, and the name of the checkpoint in it that ``location`` is; empty where it is the folder."""
    place = normal(location)
    if is_one_checkpoint(place, other_programs=False):
        return open_folder(parent_of(place)[0]), parent_of(place)[1]
    return _folder(location), ""


def _folder(location: str) -> CheckpointFolder:
    problem = absent(normal(location))
    if problem is not None:
        raise CheckpointError(f"{location} {problem}; give a folder of checkpoints")
    return open_folder(location)


def in_bytes(number: float) -> str:
    """Return a size with its unit: 13.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
