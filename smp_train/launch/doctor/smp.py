"""`smp-train doctor --smp`: train two layers on SMP, and compare numbers and names with plain PyTorch.

The learning rate is 1e-30, so the weights stay: the loss of every step is known, and the values of a parameter in a
checkpoint show its name.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from smp_train import arguments, distributed
from smp_train.distributed.agree import is_alone
from smp_train.errors import CheckpointError, first_few
from smp_train.launch.doctor.finding import FAIL, Finding, fail, ok, warn

SETTINGS: dict[str, Any] = {
    "backend": "smp", "model_type": "llama_v2", "hidden_width": 256, "intermediate_size": 512, "num_layers": 2,
    "num_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_context_width": 64, "train_batch_size": 2,
    "use_synthetic_data": 1, "seed": 1, "data_audit": 1, "max_steps": 2, "warmup": 0, "lr": 1e-30, "min_lr": 0,
    "weight_decay": 0, "checkpoint_freq": 1, "num_kept_checkpoints": 9, "save_final_model": 1, "finetune": 1,
    "moe_load_balancing": "none",
}  # fmt: skip
PATHS = {
    "run_dir": "run", "checkpoint_dir": "checkpoints", "model_dir": "model", "pretrained_checkpoint_file": "weights",
}  # fmt: skip
TOLERANCES = {"loss": 0.003, "grad_norm": 0.03}  # relative, for bfloat16


def main(folder: Path, out: Path, flags: Sequence[str]) -> int:
    """Examine SMP without and with tensor parallelism, or with ``--name=value`` flags; return 2 after a failure."""
    ranks = distributed.detect()
    split = "--use_smp_implementation=1" if ranks.world_size % 2 else "--tensor_parallel_degree=2"
    report: dict[str, Any] = {"findings": {}, "names": {}}
    levels: set[str] = set()
    for case in [flags] if flags else [[], [split]]:
        findings: list[Finding] = []
        try:
            findings += examine(folder / "smp-doctor", case, report["names"])
        except Exception as problem:  # the library is closed source: any exception is possible
            findings.append(fail("run", f"{type(problem).__name__}: {problem}"))
        levels |= {finding.level for finding in findings}
        report["findings"][" ".join(case)] = lines = [finding.line() for finding in findings]
        if ranks.is_main:
            print("\n".join([f"SMP {' '.join(case)}", *lines]), flush=True)
            out.write_text(json.dumps(report, indent=1), encoding="utf-8")
        if not is_alone():  # training failed on all ranks; after a mere failed comparison, the next case runs
            break
    return 2 if FAIL in levels else 0


def examine(folder: Path, flags: Sequence[str], names: dict[str, list[str]]) -> Iterator[Finding]:
    """Train, save, resume and export; yield findings on rank 0, and add to the table of ``names``. Collective."""
    from smp_train import train_lib
    from smp_train.backends.smp_choices import refusals
    from smp_train.checkpoints.find import open_verified
    from smp_train.models.weight_files import WeightFiles

    ranks = distributed.detect()
    settings = SETTINGS | {name: folder / path for name, path in PATHS.items()}
    settings |= dict(flag.removeprefix("--").split("=", 1) for flag in flags)

    def parse(**changes: Any) -> arguments.Resolved:
        return arguments.parse([f"--{name}={value}" for name, value in (settings | changes).items()], {})

    models: list[Any] = []
    with distributed.started(ranks, timeout_seconds=600):
        distributed.on_main("drawing weights", lambda: models.append(_drawn(folder, parse(finetune=0).args)))
    resumed = {"resume_from_checkpoint": folder / "checkpoints", "checkpoint_type": "async_sharded"}
    for resolved in parse(max_steps=1), parse(**resumed):
        arguments.validate(resolved.args, ranks.world_size)
        if "torch.sagemaker" in sys.modules:  # SMP's groups belong to a process group that has ended
            sys.modules["torch.sagemaker"].state.reset()
        train_lib.train(resolved, ranks)
    if not ranks.is_main:
        return
    for assumption, refusal in refusals.items():
        yield warn(assumption, f"called as AWS's sample does: {refusal}") if refusal else ok(assumption, "held")
    records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    steps = [record for record in records if "event" not in record]
    if len(steps) != 2:
        yield fail("steps", f"{len(steps)} in {folder / 'run' / 'metrics.jsonl'}, expected 2")
    for step, expected in zip(steps[:2], _expected(models[0], folder), strict=False):
        for key, value in expected.items():
            close = abs(step[key] - value) <= TOLERANCES[key] * value
            yield (ok if close else fail)(f"{key} of step {step['step']}", f"{step[key]:.4f}, expected {value:.4f}")
    with ExitStack() as opened:
        files = [WeightFiles(folder / name, opened) for name in ("weights", "model")]
        weights, exported = ({name: file.tensor(name)[...] for name in file.files} for file in files)
    wrong = [name for name, value in weights.items() if not exported.get(name, value[:0]).equal(value)]
    yield fail("export", f"other values of {first_few(wrong)}") if wrong else ok("export", "held")
    for path in sorted(folder.glob("checkpoints/*/*steps")):
        yield _names(open_verified(path), weights, names)


def _drawn(folder: Path, args: arguments.Arguments) -> Any:
    """Return and write a model in which attention depends on positions, and norms and biases are random too."""
    import torch
    from transformers import AutoModelForCausalLM

    from smp_train.models.resolve import resolve

    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(resolve(args).config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
        parameter.data[parameter == 0] = 0.1  # even a tiny step would change a weight of 0
    model.save_pretrained(folder / "weights")
    return model


def _expected(model: Any, folder: Path) -> Iterator[dict[str, float]]:
    """Yield plain PyTorch's loss and gradient norm of each step, from the rows that all ranks read in this step."""
    import torch

    from smp_train.data.synthetic import Synthetic

    length, vocabulary = model.config.max_position_embeddings, model.config.vocab_size
    data = Synthetic(seq_len=length, vocab_size=vocabulary, seed=SETTINGS["seed"])
    audits = [json.loads(line) for path in folder.glob("run/data_audit-*") for line in path.open(encoding="utf-8")]
    for step in itertools.count(1):
        rows = {name for audit in audits if audit.get("step") == step for name in audit["samples"]}
        ids = torch.stack([torch.from_numpy(data.row(int(name.partition(":")[2])).input_ids) for name in rows])
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        yield {"loss": loss.item(), "grad_norm": torch.stack(norms).norm().item()}


def _names(checkpoint: Any, weights: dict[str, Any], names: dict[str, list[str]]) -> Finding:
    """Add each parameter of a checkpoint, and the weights with its values, to ``names``; return whether it is readable.

    The checkpoint is read without and with the table of names. SMP may join several tensors along their rows, or this
    tensor rank's even shares of rows or columns.
    """
    import torch

    from smp_train.checkpoints.dcp.trees import read_tensor, saved_entries
    from smp_train.models import smp_names

    def unread() -> list[str]:
        state = {"model": {name: torch.zeros_like(value) for name, value in weights.items()}}
        try:
            with distributed.alone():
                checkpoint.load(state)
        except CheckpointError as failure:
            return [str(failure)]
        return [name for name, value in state["model"].items() if not value.equal(weights[name])]

    problems = unread()
    for part, ranks in checkpoint.trees.items():
        reader = checkpoint.reader(part)
        shares = [(name, share) for name, value in weights.items() for dim in range(value.ndim)
                  for share in (value, value.tensor_split(ranks.tensors, dim)[ranks.tensor])]  # fmt: skip
        for key in saved_entries(reader):
            rows: Any = read_tensor(reader, key) if key.startswith("model.") else []
            recognised = [key.removeprefix("model.")]
            while len(rows):
                equal = (entry for entry in shares if entry[1].equal(rows[: len(entry[1])]))
                name, share = next(equal, ("", rows))
                recognised.append(name)
                rows = rows[len(share) :]
            if len(recognised) > 1 and all(recognised):
                pattern, *tensors = (functools.reduce(_numbered, ("{layer}", "{expert}"), name) for name in recognised)
                names[pattern] = tensors
    if not problems:
        return ok(f"names after step {checkpoint.step}", "held")
    smp_names.table.update(names)
    level = fail if unread() else warn
    smp_names.table.clear()
    return level(f"names after step {checkpoint.step}", first_few(problems), "give this report as --smp_names")


def _numbered(name: str, placeholder: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", placeholder, name, count=1)
