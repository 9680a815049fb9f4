"""The train step of this package against the same model in a bare FSDP2 loop, alternating, in one run.

The bare loop has no data, no logging and no stop request: it trains on one batch that is already on the device. What
is left is what the loop of this package adds: order and prefetch of the data, the vote of the ranks, the seed of the
step, the loss as a sum over the global batch, the log line and the metrics file at every step. With ``--report_to`` the
same steps without trackers take turns too, and with ``--minimal_rounds`` the same steps as with --telemetry minimal, by
the clock and in CPU time; the watcher's thread, which looks once a second, runs in both.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from benchmarks.peers.bare import shard, update
from smp_train import arguments, distributed, losses, train_lib
from smp_train.build_run import build_run
from smp_train.distributed import heartbeat
from smp_train.models.build import build_meta, materialise
from smp_train.models.initialization import initialise
from smp_train.parallel import compile, loss_head
from smp_train.run.state import Run
from smp_train.storage.paths import private_folder
from smp_train.telemetry.logging_utils import get_logger

log = get_logger()


def main(argv: Sequence[str]) -> int:
    """Measure, and print the ratio on rank 0; run it under torchrun for several processes."""
    parser = argparse.ArgumentParser(prog="smp-train bench step", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each kind, alternating (default 40)")
    parser.add_argument(
        "--steps", type=int, default=1, help="steps per round (default 1; give 10 on a GPU, so that it is never idle)"
    )
    parser.add_argument(
        "--head", choices=("plain", "chunked"), default="plain", help="the bare loop's loss, of all logits or by chunks"
    )
    parser.add_argument("--minimal_rounds", type=int, default=0, help="rounds with telemetry and without, in turn")
    options, flags = parser.parse_known_args(argv)

    ranks = distributed.detect()
    with scratch_of(ranks) as scratch:
        resolved = arguments.parse([*defaults(scratch), *flags])
        arguments.validate(resolved.args, ranks.world_size, ranks.local_world_size)
        device = distributed.start(ranks, distributed_backend=resolved.args.distributed_backend, timeout_seconds=600)
        run = build_run(resolved, ranks, device, ExitStack())
        train_lib.track(run)
        tracked = run.metrics.trackers is not None
        ours = our_steps(run)
        ratios, seconds, with_trackers = [], [], []
        compare_telemetry(run, ours, options.minimal_rounds, options.steps)
        if device.type == "cuda":  # one model after the other: two with their optimizers may not fit
            seconds = [(value, 0.0) for value in rounds(ours, options.rounds, options.steps)]
            run.model = run.optimizer = ours = None  # type: ignore[assignment]
            gc.collect()
            torch.cuda.empty_cache()
            others = rounds(bare_steps(run, options.head), options.rounds, options.steps)
            seconds = [(mine, other) for (mine, _), other in zip(seconds, others, strict=True)]
            ratios = [mine / other for mine, other in seconds]
        else:
            bare = bare_steps(run, options.head)
            for kind in (ours, bare):  # warm up: allocator, caches, compilation
                kind(3 * options.steps)
        for _ in range(0 if ratios else options.rounds):
            pair = ours(options.steps), bare(options.steps)
            ratios.append(pair[0] / pair[1])
            seconds.append(pair)
            if tracked:
                trackers, run.metrics.trackers = run.metrics.trackers, None
                with_trackers.append(pair[0] / ours(options.steps))
                run.metrics.trackers = trackers
        log.info(
            "bench step: %d ranks, %s: bare FSDP2 loop %.1f ms, this package %.1f ms, ratio of the same round: "
            "median %.3f (lowest %.3f, highest %.3f) over %d rounds of %d steps",
            ranks.world_size,
            run.spec.name,
            1000 * statistics.median(s[1] for s in seconds),
            1000 * statistics.median(s[0] for s in seconds),
            statistics.median(ratios),
            min(ratios),
            max(ratios),
            options.rounds,
            options.steps,
        )
        if with_trackers:
            log.info("with trackers against without: median %.3f", statistics.median(with_trackers))
        run.close()
    return 0


@contextmanager
def scratch_of(ranks: distributed.Runtime) -> Iterator[Path]:
    """Yield one folder for all ranks of this node, which have one parent; several nodes need a --checkpoint_dir."""
    folder = Path(private_folder(f"smp-train-bench-{os.getppid()}"))
    try:
        yield folder
    finally:
        if ranks.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def defaults(scratch: Path) -> list[str]:
    """Return a model of about 10 M parameters on synthetic data, whose step takes 100 ms or more on one core."""
    return [
        *("--model_type", "llama_v2", "--vocab_size", "4096", "--hidden_width", "256", "--num_layers", "4"),
        *("--num_heads", "4", "--intermediate_size", "768", "--max_context_width", "256", "--bf16", "0"),
        *("--activation_checkpointing", "0"),
        *("--use_synthetic_data", "1", "--train_batch_size", "2", "--max_steps", "1000000", "--logging_freq", "1"),
        *("--run_dir", str(scratch / "run"), "--checkpoint_dir", str(scratch / "checkpoints")),
    ]


def rounds(steps: Callable[[int], float], count: int, size: int) -> list[float]:
    """Return the seconds of a step in each of ``count`` rounds of ``size``, after three to warm up."""
    return [steps(size) for _ in range(3 + count)][3:]


def compare_telemetry(run: Run, ours: Callable[[int], float], count: int, steps: int) -> None:
    """Log how much longer rounds of ``steps`` take than without heartbeat and times of phases; collective."""
    if not count or run.times is None:
        return
    ours(3 * steps)
    ratios = []
    for number in range(count):
        both: dict[bool, tuple[float, float]] = {}
        for minimal in (True, False) if number % 2 else (False, True):  # neither always follows the other
            cpu = time.process_time()
            with telemetry_off(run) if minimal else nullcontext():
                clock = ours(steps)
            both[minimal] = clock, time.process_time() - cpu
        ratios.append(tuple(full / less for full, less in zip(both[False], both[True], strict=True)))
    clock, cpu = (statistics.median(each) for each in zip(*ratios, strict=True))
    log.info("telemetry full against minimal: median %.4f by the clock, %.4f in CPU time", clock, cpu)


@contextmanager
def telemetry_off(run: Run) -> Iterator[None]:
    """Leave out what --telemetry minimal does."""
    kept = run.times, heartbeat.board, list(heartbeat.listeners), heartbeat.collective
    run.times = heartbeat.board = None
    heartbeat.listeners.clear()
    heartbeat.collective = nullcontext
    try:
        yield
    finally:
        run.times, heartbeat.board, listeners, heartbeat.collective = kept
        heartbeat.listeners.extend(listeners)


def our_steps(run: Run) -> Callable[[int], float]:
    """Return a function that makes n steps as `train_lib` does and returns the seconds of one."""
    run.read_from_here()

    def steps() -> None:
        train_lib.step(run)

    return timed(steps, run.backend.topology.device)


def bare_steps(run: Run, head: str) -> Callable[[int], float]:
    """Return the same for the shortest FSDP2 loop that trains the same model, averaging over ranks as FSDP2 does.

    ``head``: the loss of all logits (plain), or by chunks as this package's.
    """
    args, device = run.args, run.backend.topology.device
    model = build_meta(run.spec, attn_implementation=args.attn_implementation)
    shard(model, bf16=args.computes_in_bf16(gpu=device.type == "cuda"), compiled=run.backend.compiled)
    kernels = compile.loss_kernels(args.torch_compile_backend) if run.backend.compiled else losses.EAGER
    loss_head.attach(model, chunked=head == "chunked", tensor=None, kernels=kernels)
    materialise(model, device)
    initialise(model, args.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(args.beta1, args.beta2), weight_decay=args.weight_decay, fused=True
    )
    shape = (args.train_batch_size, run.train_data.seq_len)
    ids = torch.randint(run.spec.config.vocab_size, shape, device=device)

    def chunked() -> None:
        optimizer.zero_grad(set_to_none=True)
        (model.loss_sum(ids, losses.shift(ids)) / ids[:, 1:].numel()).backward()  # type: ignore[operator]
        nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()

    return timed(chunked if head == "chunked" else lambda: update(model, optimizer, ids, args.grad_clip), device)


def timed(step: Callable[[], object], device: torch.device) -> Callable[[int], float]:
    """Return a function that makes n steps and returns the mean seconds of one, the device's work included."""

    def measure(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / count

    return measure
