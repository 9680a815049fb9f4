"""A few real steps of each of several settings, on all ranks, in processes that may run out of memory.

Each rank of a run starts one such process, and they form a group of their own. One that runs out of memory exits at
once, since its peers would block in a collective; the parent ranks notice and kill the other children.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smp_train import backends, distributed, train_utils
from smp_train.arguments import Arguments
from smp_train.arguments.chosen import words
from smp_train.data.batch import Batch
from smp_train.distributed import Runtime, child
from smp_train.distributed.host import free_port
from smp_train.errors import ConfigError, explained, no_memory
from smp_train.models.hub_names import canonical_name
from smp_train.models.hugging_face import trust_code
from smp_train.models.initialization import initialise, programs_of
from smp_train.models.recording import Step
from smp_train.models.resolve import ModelSpec, resolve, row_length
from smp_train.parallel import compile

log = logging.getLogger("smp_train")
STEPS = 3
"""Of each setting; the first one, which compiles, does not count."""
SOME = 2
"""Micro-batches of a step that are run, at most, here and in a plan: the last one, and one like all before it."""
POLL_SECONDS = 0.2
FASTER = 0.97
"""Another setting must take at most this fraction of the planned best's time; smaller gains are noise."""


def run(
    args: Arguments, ranks: Runtime, candidates: list[dict[str, Any]], planned: dict[str, Any], logs: Path
) -> dict[str, Any]:  # fmt: skip
    """Return ``flags``, those of ``candidates`` whose step is the fastest, and ``trial``, what each took; collective.

    ``planned``, the best of them by plan, is kept unless another is faster by more than noise. Candidates come by
    memory, the least first: behind one that runs out of it none is tried. Raises `ConfigError` where none makes a step.
    """
    what = "trying settings (--auto trial)"
    port = distributed.on_main(what, free_port)
    environ = {
        "RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.world_size), "LOCAL_RANK": str(ranks.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks.local_world_size), "MASTER_ADDR": ranks.master_addr, "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    written, errors = logs / f"trial-rank{ranks.rank}.jsonl", logs / f"trial-rank{ranks.rank}.log"
    request = {"args": asdict(args), "candidates": candidates}
    log.info("--auto trial: %d settings, %d steps of each; what they say is in %s", len(candidates), STEPS, errors)
    with ExitStack() as opened:
        with distributed.together(what):
            process = opened.enter_context(child.started("smp_train.trial", request, written, errors, **environ))
        tried = 0
        while True:
            states = distributed.gather(what, lambda: (process.poll(), _lines(written) if ranks.rank == 0 else 0))
            codes = [code for code, _ in states]
            if None not in codes or any(codes):
                break
            if states[0][1] > tried:
                tried = states[0][1]
                log.info("--auto trial: %d of %d settings tried", tried, len(candidates))
            time.sleep(POLL_SECONDS)
    found = judged(
        candidates, distributed.gather(what, lambda: [json.loads(line) for line in written.read_text().splitlines()])
    )
    for each in found:
        took = f"{each['step_seconds']:.3f} s a step" if "step_seconds" in each else each["failed"]
        log.info("--auto trial: %s: %s", words(each["flags"]), took)
    flags = fastest(found, planned)
    if flags is None:
        raise ConfigError(f"--auto trial: no setting made a step: {found[0]['failed']}; see {errors}")
    return {"flags": flags, "trial": found}


def fastest(found: list[dict[str, Any]], planned: dict[str, Any]) -> dict[str, Any] | None:
    """Return the flags of the fastest of what was `judged`, but ``planned`` where that is as fast; None of none."""
    steps = {index: each["step_seconds"] for index, each in enumerate(found) if "step_seconds" in each}
    if not steps:
        return None
    best = min(steps, key=lambda index: float(steps[index]))
    first = next((index for index in steps if found[index]["flags"] == planned), best)
    return dict(found[best if steps[best] <= FASTER * steps[first] else first]["flags"])


def judged(candidates: list[dict[str, Any]], lines: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return each candidate's flags with ``step_seconds`` of the slowest rank, or why it has ``failed``.

    ``lines`` are what each rank wrote, one for each candidate that it came to the end of.
    """
    found = []
    for index, flags in enumerate(candidates):
        reached = [rank[index] for rank in lines if len(rank) > index]
        failed = next((each["failed"] for each in reached if "failed" in each), None)
        if failed is None and len(reached) == len(lines):
            found.append({"flags": flags, "step_seconds": max(each["step_seconds"] for each in reached)})
        else:
            found.append({"flags": flags, "failed": failed or "not tried, or the process died without a message"})
    return found


def _lines(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def main() -> None:
    """Step the candidates of a request of `run`, and answer with a line for each."""
    request, answer = child.served()
    base, ranks = Arguments(**request["args"]), distributed.detect()
    trust_code(base.trust_remote_code)
    spec = resolve(base)
    device = distributed.start(
        ranks, distributed_backend=base.distributed_backend, timeout_seconds=60 * base.distributed_timeout_minutes
    )  # fmt: skip
    for flags in request["candidates"]:
        try:
            line: dict[str, Any] = {"step_seconds": seconds(replace(base, **flags), spec, ranks, device)}
        except Exception as failure:
            line = {"failed": no_memory(failure) or f"{type(failure).__name__}: {explained(failure)}"}
        answer(line)
        if "failed" in line:  # its peers wait for it: only its end lets them go on
            os._exit(1)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    distributed.stop()


def seconds(args: Arguments, spec: ModelSpec, ranks: Runtime, device: torch.device) -> float:
    """Return how long a step takes: the faster of those that count; collective."""
    length = row_length(args, spec)
    backend, _ = backends.select(args, ranks, device)
    backend.check(spec, seq_len=length)
    if backend.compiled and args.torch_compile_backend == compile.INDUCTOR:
        compile.prepare(args.run_dir, device)  # where the run will look for what it compiles
    # Weights are not read, which is slow, but where adapters need them; some models' initial weights cannot be drawn.
    model = backend.build(spec, seed=args.seed, seq_len=length, initial=False)
    fill(model, args.seed)
    optimizer = train_utils.build_optimizer(args, backend, model)
    random = torch.Generator().manual_seed(args.seed + backend.topology.dp_rank)
    shape, vocabulary = (args.train_batch_size, length), spec.config.vocab_size
    batches = some_batches(args, lambda: torch.randint(vocabulary, shape, generator=random))
    many = len(batches)
    tokens = torch.tensor(args.train_batch_size * length * many * backend.topology.dp_size, device=device)
    took = []
    for _ in range(STEPS):
        began = time.perf_counter()
        result = train_utils.train_step(
            backend, model, optimizer, batches, tokens=tokens, lr=args.lr, max_grad_norm=args.grad_clip
        )  # fmt: skip
        result.judged.tolist()  # waits for the backward pass
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return min(took[1:]) * args.gradient_accumulation_steps / many


def fill(model: nn.Module, seed: int) -> None:
    """Draw all parameters from one normal distribution: unset memory may hold NaN, and then no update is made."""
    programs_of(model).update(
        (canonical_name(name), [Step("normal_", (0.0, 0.02))]) for name, _ in model.named_parameters()
    )  # fmt: skip
    initialise(model, seed)


def some_batches(args: Arguments, draw: Callable[[], Tensor]) -> list[Batch]:
    """Return at most `SOME` micro-batches of a step, of ids that ``draw`` returns, int64 ``[micro_batch, seq_len]``."""
    drawn = [draw() for _ in range(min(args.gradient_accumulation_steps, SOME))]
    return [Batch(input_ids=ids, labels=ids) for ids in drawn]


if __name__ == "__main__":
    main()
