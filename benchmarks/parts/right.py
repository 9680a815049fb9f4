"""`right`: whether the numbers of a GPU are those of the CPU, and whether a run survives what happens to it there."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks import ledger
from benchmarks.cells import Cell, Skip, Wrong
from benchmarks.parts import Setting, on_device
from benchmarks.program import (
    STEADY,
    TINY,
    Flags,
    below,
    command,
    logged,
    numbers,
    opened,
    scratch,
    stepping,
    whole,
    words,
    write_rows,
)  # fmt: skip
from smp_train import api
from smp_train.telemetry.metrics import read_metrics

STEPS = 3
FP32, BF16, FP8 = 1e-5, 1e-2, 5e-2
"""Largest relative difference of a loss or a gradient norm."""
FULL: Flags = {
    **TINY, "hidden_width": 256, "num_layers": 4, "intermediate_size": 768, "max_context_width": 256,
    "torch_compile_backend": "inductor",
}  # fmt: skip
QUIET: Flags = {"attn_pdrop": 0, "resid_pdrop": 0}
"""No dropout: a GPU draws other numbers than a CPU."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": 1, "attn_pdrop": 0},
    "mistral": {"model_type": "mistral", "sliding_window": 24, "attn_pdrop": 0},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "attn_pdrop": 0},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": None, **QUIET},
    "gpt2": {"model_type": "gpt2", "num_key_value_heads": None, "embd_pdrop": 0, **QUIET},
    "phi": {"model_type": "phi", "rotary_pct": 0.5, "embd_pdrop": 0, **QUIET},
    "falcon": {"model_type": "falcon", "num_key_value_heads": 1, **QUIET},
}
PLAIN: Flags = {
    "activation_checkpointing": "none", "sm_activation_offloading": 0, "chunked_loss": 0, "use_torch_compile": 0,
}  # fmt: skip
DEFAULTS: Flags = dict.fromkeys(PLAIN)
MODES: dict[str, dict[str, Any]] = {
    **{f"checkpointing {kind}": {"activation_checkpointing": kind} for kind in ("full", "selective:op", "selective:2")},
    "chunked loss": {"chunked_loss": 1},
    "offload horizon 1": {"sm_activation_offloading": 1, "activation_loading_horizon": 1},
    "offload horizon 2, full": {
        "sm_activation_offloading": 1, "activation_loading_horizon": 2, "activation_checkpointing": "full"
    },
    "offload horizon 1, selective:op, chunked": {
        "sm_activation_offloading": 1, "activation_loading_horizon": 1, "activation_checkpointing": "selective:op",
        "chunked_loss": 1,
    },
    "compiled": {"use_torch_compile": 1},
    "compiled, full, chunked": {"use_torch_compile": 1, "activation_checkpointing": "full", "chunked_loss": 1},
    "compiled, selective:op, offload": {
        "use_torch_compile": 1, "activation_checkpointing": "selective:op", "sm_activation_offloading": 1,
        "activation_loading_horizon": 1,
    },
    "parameters in host memory": {"cpu_offload": 1},
    "two micro-batches": {"train_batch_size": 1, "gradient_accumulation_steps": 2},
}  # fmt: skip


def cells(setting: Setting) -> list[Cell]:
    """Return the cells: those that `LEDGER.md` names first; numbers, then what happens to a run."""
    base: Flags = {**(TINY if setting.rehearse else FULL), "lr": 1e-3, "train_batch_size": 2}
    found = [
        Cell(f"{family}, fp32", alike, {"flags": {**base, **PLAIN, **flags, "bf16": 0}, "limit": FP32}, 8)
        for family, flags in FAMILIES.items()
    ]
    llama = {**base, **PLAIN, **FAMILIES["llama"]}
    fp32, bf16 = {**llama, "bf16": 0}, {**llama, "bf16": 1}
    found.append(Cell("defaults, bf16", alike, {"flags": {**bf16, **DEFAULTS}, "limit": BF16, "plain": bf16}, 40))
    modes = [
        Cell(f"{name}, fp32", alike, {"flags": {**fp32, **mode}, "limit": FP32, "plain": fp32},
             40 if mode.get("use_torch_compile") else 5)
        for name, mode in MODES.items()
    ]  # fmt: skip
    several = setting.rehearse or torch.cuda.device_count() > 1
    happenings = [
        Cell("groups", on_device.groups, {"flags": llama}, 5),
        Cell("copies", on_device.copies, {"device": setting.device}, 5),
        Cell("profiled", on_device.profiled, {"flags": llama, "train": train}, 10),
        Cell("chosen by --auto", chosen, {"flags": llama}, 15),
        Cell("two GPUs", on_device.two_processes, {"flags": fp32, "limit": 10 * FP32, "compared": compared},
             90 if several else 1),
        Cell("initial weights", initial_weights, {"flags": llama}, 5),
        Cell("resume, bit for bit", resume, {"flags": {**llama, "bf16": int(setting.device == "cuda")}}, 15),
        *(Cell(f"no host wait: {name}", no_host_wait, {"flags": {**llama, **flags}}, 40 if name == "defaults" else 6)
          for name, flags in WAITS.items()),
        Cell("out of memory is one line", out_of_memory, {"device": setting.device}, 25),
        Cell("kill and resume", kill_and_resume, {"flags": {**llama, "bf16": 0}}, 45),
        Cell("save in the background, memory full", save_when_full, {"flags": {**base, **FAMILIES["llama"]}}, 15),
    ]  # fmt: skip
    found += [modes[0], *happenings, *modes[1:]]
    # In bf16 a GPU attends to each packed document alone, in float32 by a mask.
    for kind, flags, limit, seconds in (("fp32", fp32, FP32, 6), ("bf16", bf16, BF16, 6),
                                        ("defaults, bf16", {**bf16, **DEFAULTS}, BF16, 40)):  # fmt: skip
        for name, short in ROWS.items() if kind == "fp32" else [("packed", "pack")]:
            given = {"flags": {**flags, "short": short}, "limit": limit}
            found.append(Cell(f"{name}, {kind}", rows_alike, given, seconds))
    found += [
        Cell(f"{family}, bf16", alike, {"flags": {**base, **PLAIN, **flags, "bf16": 1}, "limit": BF16}, 8)
        for family, flags in FAMILIES.items()
    ]
    mixtral = {**base, **PLAIN, **FAMILIES["mixtral"], "bf16": 1}
    given = {"flags": {**mixtral, **DEFAULTS}, "limit": BF16, "plain": mixtral}
    found.append(Cell("mixtral, defaults, bf16", alike, given, 40))
    for version in ("2", "3"):
        flags = {**bf16, "attn_implementation": f"flash_attention_{version}"}
        found.append(Cell(f"flash attention {version}", flash, {"flags": flags, "plain": bf16, "version": version}, 8))
    found.append(Cell("fp8, compiled", fp8, {"flags": {**bf16, "fp8": 1, "use_torch_compile": 1}, "plain": bf16}, 45))
    return ledger.first_needed(found)


ROWS = {"padded": "pad", "packed": "pack", "joined": "concat"}
WAITS: dict[str, dict[str, Any]] = {
    "defaults": {**DEFAULTS}, "plain": {}, "padded": {"short": "pad"}, "packed": {"short": "pack"},
    "full, chunked, offload": {
        "activation_checkpointing": "full", "chunked_loss": 1, "sm_activation_offloading": 1,
        "activation_loading_horizon": 1, "gradient_accumulation_steps": 2,
    },
    "experts": {"model_type": "mixtral", "num_local_experts": 4, "tie_word_embeddings": None},
}  # fmt: skip


@cache
def on_cpu(command_line: tuple[tuple[str, Any], ...]) -> list[tuple[float, float]]:
    """Return the numbers of a run on the CPU, computed once."""
    return numbers({**dict(command_line), "distributed_backend": "gloo"}, STEPS)


def alike(flags: Flags, limit: float, plain: Flags | None = None) -> dict[str, Any]:
    """Compare a run on the device with the ``plain`` one on the CPU, by default the same."""
    if torch.backends.cuda.matmul.allow_tf32:
        raise Wrong("TF32 is on: float32 products are not of float32")
    return compared(numbers(flags, STEPS), on_cpu(tuple((plain or flags).items())), limit)


Numbers = Sequence[tuple[float, float]]


def compared(found: Numbers, expected: Numbers, limit: float) -> dict[str, Any]:
    """Return the largest relative difference of two runs' numbers; raise `Wrong` where it is more than ``limit``."""
    pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
    # A NaN is more than any limit.
    difference = max((abs(a - b) / abs(b) if a == a and b == b else float("inf")) for a, b in pairs)
    figures = {"loss": found[-1][0], "gradient norm": found[-1][1], "difference": difference, "limit": limit}
    if not difference <= limit:
        raise Wrong(f"expected {list(expected)}, found {list(found)}", **figures)
    return figures


def with_rows(flags: Flags, folder: Path) -> dict[str, Any]:
    """Return flags that read short rows, of several lengths, from a shard in ``folder``."""
    most = int(flags["max_context_width"])
    lengths = [most // 4 + (31 * row) % (most // 2) for row in range(64)]
    data = write_rows(folder / "rows", lengths, vocab=int(flags["vocab_size"]))
    return {**flags, "use_synthetic_data": None, "training_dir": data}


def rows_alike(flags: Flags, limit: float) -> dict[str, Any]:
    """Compare runs on short rows."""
    with scratch() as folder:
        given = with_rows(flags, folder)
        return compared(numbers(given, STEPS), numbers({**given, "distributed_backend": "gloo"}, STEPS), limit)


def flash(flags: Flags, plain: Flags, version: str) -> dict[str, Any]:
    """Compare flash attention's own package with the CPU."""
    package = {"2": "flash_attn", "3": "flash_attn_interface"}[version]
    if importlib.util.find_spec(package) is None or not torch.cuda.is_available():
        raise Skip(f"the package {package} is not installed" if torch.cuda.is_available() else "needs a GPU")
    return alike(flags, BF16, plain)


def fp8(flags: Flags, plain: Flags) -> dict[str, Any]:
    """Compare products in 8 bits with bf16 on the CPU."""
    if not torch.cuda.is_available() or importlib.util.find_spec("torchao") is None:
        raise Skip("torchao is not installed" if torch.cuda.is_available() else "needs a GPU")
    return alike(flags, FP8, plain)


def weights(flags: Flags) -> dict[str, torch.Tensor]:
    """Return a run's initial weights, on the host."""
    with scratch() as folder, opened(words({**STEADY, **below(folder), **flags})) as run:
        return {name: whole(parameter) for name, parameter in run.model.named_parameters()}


def initial_weights(flags: Flags) -> dict[str, Any]:
    """Compare initial weights with another run's, bit for bit, and their spread with the CPU's."""
    found, again, expected = weights(flags), weights(flags), weights({**flags, "distributed_backend": "gloo"})
    other = [
        name for name, value in found.items()
        if not torch.equal(value, again[name]) or abs(value.std() - expected[name].std()) > 0.1 * expected[name].std()
    ]  # fmt: skip
    if other:
        raise Wrong(f"{len(other)} of {len(found)} differ in a second run or from the CPU's spread: {other[:3]}")
    return {"tensors": len(found)}


def train(folder: Path, flags: Flags, **more: Any) -> list[tuple[float, float]]:
    """Train as the command does, checkpoints and all, and return the numbers of every step in the log."""
    chosen = {**STEADY, **below(folder), **flags, "logging_freq": 1, **more}
    given: Any = {name: value for name, value in chosen.items() if value is not None}
    api.train(**given)
    return [(record["loss"], record["grad_norm"]) for record in logged(folder)]


def chosen(flags: Flags) -> dict[str, Any]:
    """Train two steps with what ``--auto`` chooses for this machine."""
    with scratch() as folder:
        open_to_choice = dict.fromkeys(("activation_checkpointing", "sm_activation_offloading"))
        found = train(folder, {**flags, **open_to_choice}, max_steps=2, auto="plan")
        return {"loss": found[-1][0], "gradient norm": found[-1][1]}


def resume(flags: Flags) -> dict[str, Any]:
    """Compare a run that was stopped and resumed half-way with one that was not; deterministic kernels."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not with `warn_only`, which leaves attention on kernels that add up in any order.
    torch.use_deterministic_algorithms(True)
    try:
        with scratch() as one, scratch() as two:
            straight = train(one, flags, max_steps=2 * STEPS)
            train(two, flags, max_steps=STEPS)
            resumed = train(two, flags, max_steps=2 * STEPS, resume_from_checkpoint=str(two / "checkpoints"))
    finally:
        torch.use_deterministic_algorithms(False)
    if resumed != straight:
        raise Wrong(f"not the same bits: {straight[STEPS:]} in one go, {resumed[STEPS:]} resumed")
    return {"loss": straight[-1][0], "gradient norm": straight[-1][1], "difference": 0.0, "limit": 0.0}


def save_when_full(flags: Flags) -> dict[str, Any]:
    """Save in the background at every second step, with no more device memory than the run takes without saves."""
    with scratch() as one, scratch() as two:
        expected = train(one, flags, max_steps=6, checkpoint_freq=1000)
        if torch.cuda.is_available():
            there = torch.cuda.get_device_properties(0).total_memory
            most = torch.cuda.max_memory_reserved()
            torch.cuda.empty_cache()
            # The allocator refuses what is beyond it; blocks of 2 MiB leave some room.
            torch.cuda.set_per_process_memory_fraction(min(1.0, (1.05 * most + 2**25) / there))
        try:
            found = train(two, flags, max_steps=6, checkpoint_freq=2, num_kept_checkpoints=0)
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_per_process_memory_fraction(1.0)
        saves = sum(record.get("event") == "save" for record in read_metrics(two / "run"))
        if saves != 3:
            raise Wrong(f"{saves} of 3 checkpoints were saved")
        return {**compared(found, expected, BF16), "saves": saves}


def no_host_wait(flags: Flags) -> dict[str, Any]:
    """Make steps between two log lines in which the host may wait for nothing on the device."""
    with scratch() as folder:
        given = {**STEADY, **below(folder), **flags, "logging_freq": 1000}
        if "short" in flags:
            given = with_rows(given, folder)
        with opened(words(given)) as run, stepping(run) as one:
            for _ in range(STEPS):
                one()
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(STEPS):
                    one()
            except RuntimeError as failure:
                if "synchroniz" not in str(failure):
                    raise
                raise Wrong(f"the host waits: {failure}") from failure
            finally:
                if torch.cuda.is_available():
                    torch.cuda.set_sync_debug_mode("default")
    return {"steps": STEPS}


def out_of_memory(device: str) -> dict[str, Any]:
    """Run a command that needs more memory than there is, and read what it says."""
    # Attention over all tokens at once, whose scores no memory holds; on a CPU, where the system would rather kill than
    # refuse, an address space that is too small.
    flags = {
        **STEADY, **TINY, "attn_implementation": "eager", "max_context_width": 65536 if device == "cuda" else 8192,
        "num_heads": 32, "num_key_value_heads": 32, "activation_checkpointing": "none", "train_batch_size": 4,
        "memory_check": 0,
    }  # fmt: skip
    with scratch() as folder:
        process = command("train", *words({**flags, **below(folder)}), folder=folder)
        if device != "cuda":
            limit_memory(process.pid, 12 * 2**30)
        code = process.wait(150)
        told = [line for line in (folder / "stderr").read_text().splitlines() if line.startswith("smp-train: ")]
    if code != 1 or len(told) != 1 or "memory" not in told[0]:
        raise Wrong(f"exit code {code}, lines of ours: {told}")
    return {"exit code": code, "line": told[0][:160]}


def limit_memory(pid: int, most: int) -> None:
    """Let a process have no more address space than ``most`` bytes."""
    import resource

    resource.prlimit(pid, resource.RLIMIT_AS, (most, most))


def kill_and_resume(flags: Flags) -> dict[str, Any]:
    """Kill a run after its first save, start the same command again, and compare its end with an undisturbed run's."""
    last, every = 60, 10
    with scratch() as one, scratch() as two:
        expected = train(one, flags, max_steps=last, checkpoint_freq=1000)
        given = {**STEADY, **below(two), **flags, "max_steps": last, "checkpoint_freq": every, "logging_freq": 1}
        line = ["train", *words({**given, "resume_from_checkpoint": two / "checkpoints", "run_name": "killed"})]
        process = command(*line, folder=two)
        for _ in ticks(120):
            if saved(two) or process.poll() is not None:
                break
        process.send_signal(signal.SIGKILL)
        killed = process.wait() == -signal.SIGKILL
        process = command(*line, folder=two)
        try:
            code = process.wait(200)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        events = [record["event"] for record in read_metrics(two / "run") if "event" in record]
        if code != 0 or not killed or "resume" not in events:
            told = (two / "stderr").read_text()[-200:]
            raise Wrong(f"killed: {killed}; then exit code {code}, events {events}: {told}")
        newest = {record["step"]: (record["loss"], record["grad_norm"]) for record in logged(two)}
        # Steps after the checkpoint were made twice, the second time from what was saved.
        return {**compared([newest[n] for n in range(1, last + 1)], expected, 1e-3), "saves": events.count("save")}


def saved(folder: Path) -> bool:
    """Return whether a run has written of a save."""
    path = folder / "run" / "metrics.jsonl"
    return path.exists() and '"event": "save"' in path.read_text()


def ticks(seconds: float) -> Iterator[None]:
    """Yield every hundredth of a second, for so long."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        yield
        time.sleep(0.01)
