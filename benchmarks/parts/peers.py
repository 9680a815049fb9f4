"""`peers`: the same training by this package and by others, each in fresh processes, in turn, round after round."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import OK, Cell, Skip, Wrong
from benchmarks.parts import Setting
from benchmarks.peers.job import Job
from benchmarks.program import ROOT, STEADY, TINY, Flags, below, opened, scratch, whole, words, write_rows
from smp_train.models.flops import flops_per_token
from smp_train.telemetry.metrics import peak_flops

SAME_LOSS = 2e-2
"""Largest relative difference of a driver's losses from ours, in bf16; `SAME_LOSS_FP32` in float32."""
SAME_LOSS_FP32 = 1e-4
ROUNDS = 3
SMALL: Flags = {
    "model_type": "llama_v2", "vocab_size": 4096, "hidden_width": 256, "num_layers": 4, "num_heads": 4,
    "intermediate_size": 768, "max_context_width": 256, "tie_word_embeddings": 0,
}  # fmt: skip
"""5.9 M parameters: the model of `bench step`, whose step takes 100 ms or more on one core."""
LARGE: Flags = {"model_type": "llama_v3", "model_size": "1b", "max_context_width": 4096}
VARIANTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    # name: driver, compiled, our own flags
    "this package, defaults": ("ours", False, {}),
    "Trainer, compiled": ("trainer", True, {}),
    "bare FSDP2": ("bare", False, {}),
    "this package, no checkpointing": ("ours", False, {"activation_checkpointing": "none"}),
    "bare FSDP2, compiled": ("bare", True, {}),
    "torchtitan, compiled": ("titan", True, {}),
    "Trainer": ("trainer", False, {}),
    "accelerate": ("accelerated", False, {}),
    "accelerate, compiled": ("accelerated", True, {}),
    "torchtitan": ("titan", False, {}),
    "this package, eager": ("ours", False, {"activation_checkpointing": "none", "use_torch_compile": 0}),
}


def cells(setting: Setting) -> list[Cell]:
    """Return the cell that makes model and rows, then each driver, round after round."""
    folder = Path(setting.scratch) / "peers"
    cuda = setting.device == "cuda"
    model = {**TINY, "tie_word_embeddings": 0} if setting.rehearse else LARGE if cuda else SMALL
    model = {**model, **({"tie_word_embeddings": 0} if setting.untied else {})}
    job = {
        "steps": 4 if setting.rehearse else 16, "warm": 2 if setting.rehearse else 6, "batch": 2,
        "seq_len": model["max_context_width"], "bf16": cuda, "lr": 1e-3 if not cuda else 1e-4, "cuda": cuda,
    }  # fmt: skip
    given = {"folder": str(folder), "job": job, "processes": setting.processes}
    found = [Cell("model and rows", make, {"model": dict(model), **given}, 60, needed=True)]
    # On a CPU a compilation takes a minute and gains nothing, and this package does without by default.
    variants = [name for name in VARIANTS if cuda or not (VARIANTS[name][1] or name == "this package, eager")]
    for turn in range(1 if setting.rehearse else ROUNDS):
        found += [Cell(f"{name}, round {turn + 1}", driven, {"name": name, **given}, 45) for name in variants]
    return found


def make(model: Flags, folder: str, job: dict[str, Any], processes: int) -> dict[str, Any]:
    """Write the initial weights as a Hugging Face folder, and the rows of all steps."""
    from transformers import AutoModelForCausalLM

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    rows = job["steps"] * job["batch"] * processes
    with scratch() as out, opened(words({**STEADY, **below(out), **model, "bf16": 0, "memory_check": 0})) as run:
        vocab = run.spec.config.vocab_size
        made = AutoModelForCausalLM.from_config(run.spec.config)
        made.load_state_dict({name: whole(value) for name, value in run.model.state_dict().items()})
        made.save_pretrained(place / "model")
        parameters = sum(p.numel() for p in made.parameters())
        flops = flops_per_token(run.spec.config, job["seq_len"])
    (place / "flops").write_text(str(flops))
    # Fewer tokens than the vocabulary has, so that a few steps teach something, and losses tell rows apart.
    write_rows(place / "rows", [int(model["max_context_width"])] * rows, vocab=min(vocab, 512))
    return {"parameters": parameters, "rows": rows, "FLOP per token": flops}


def driven(name: str, folder: str, job: dict[str, Any], processes: int) -> dict[str, Any]:
    """Run one driver in processes of its own, and hold its losses against the first driver's."""
    driver, compiled, flags = VARIANTS[name]
    with scratch() as out:
        path, result = out / "job.json", out / "result.json"
        chosen = Job(
            model=f"{folder}/model", rows=f"{folder}/rows", compiled=compiled, began=time.time(),
            out=str(result), flags=flags, **job,
        )  # fmt: skip
        chosen.write(path)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        line = [sys.executable, *(launcher if processes > 1 else []), "-m", "benchmarks.peers", driver, str(path)]
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(line, cwd=out, env=environ, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr, flush=True)
        if done.returncode and not result.exists():  # figures count, however a peer takes down its process group
            last = [text for text in done.stderr.splitlines() if text.strip()] or [""]
            said = next((text for text in last if text.startswith("skip: ")), None)
            if said is not None:
                raise Skip(said.removeprefix("skip: "))
            error = [text for text in last if "Error" in text and "ChildFailedError" not in text]
            error = error or [text for text in last if "exitcode" in text] or last  # a signal, in torchrun's report
            raise RuntimeError(f"{driver} ended with code {done.returncode}: {error[-1]}")
        figures = json.loads(result.read_text())
    if job["cuda"] and (peak := peak_flops(torch.cuda.get_device_name(0))):
        figures["MFU"] = figures["tokens/s/GPU"] * float(Path(folder, "flops").read_text()) / peak
    first = expected(folder, tuple(figures["losses"]))
    difference = max(abs(a - b) / abs(b) for a, b in zip(figures["losses"], first, strict=True))
    losses = [f"{loss:.5f}" for loss in figures["losses"]]
    figures |= {"loss of step 1": losses[0], "of the last": losses[-1], "difference": difference}
    if not difference <= (SAME_LOSS if job["bf16"] else SAME_LOSS_FP32):
        raise Wrong("not the same losses as the first driver: other work", **figures)
    return figures


def expected(folder: str, losses: tuple[float, ...]) -> tuple[float, ...]:
    """Return the losses of the first driver, which are these where there is none before."""
    kept = Path(folder) / "losses.json"
    if not kept.exists():
        kept.write_text(json.dumps(losses))
    return tuple(json.loads(kept.read_text()))


def summary(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each driver its medians over the rounds, and those of its ratios to our defaults of the same round.

    On a machine that others use too, CPU time tells more than the clock.
    """
    by_round: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        name, _, turn = record["cell"].rpartition(", round ")
        if record["state"] == OK and name:
            by_round.setdefault(name, {})[turn] = record
    ours = by_round.get(next(iter(VARIANTS)), {})
    for name, rounds in by_round.items():
        figures: dict[str, Any] = {"driver": name, "rounds": len(rounds)}
        for what in ("tokens/s/GPU", "MFU", "peak GiB"):
            values = [record[what] for record in rounds.values() if record.get(what) is not None]
            figures[what] = statistics.median(values) if values else None
        for what in ("step ms", "CPU ms", "start to first step s"):
            ratios = [record[what] / ours[turn][what] for turn, record in rounds.items() if turn in ours]
            figures[what] = statistics.median(record[what] for record in rounds.values())
            if ratios:
                figures[f"{what}, of ours"] = statistics.median(ratios)
                figures[f"{what}, range"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
        last = next(iter(rounds.values()))
        yield {**figures, **{what: last[what] for what in ("settings", "loss of step 1", "of the last")}}
