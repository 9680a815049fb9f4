"""What every driver is given, and how every driver is timed."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

BETAS, EPSILON, WEIGHT_DECAY, GRAD_CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclass(frozen=True)
class Job:
    """One training: step k of rank r takes rows ``k * batch * world + r * batch`` and the next."""

    model: str
    """Hugging Face folder with the initial weights."""
    rows: str
    """Folder with the shard, in this package's format."""
    steps: int
    warm: int
    """Steps before the clock starts: allocator, compilation, autotuning."""
    batch: int
    """Rows of a rank."""
    seq_len: int
    bf16: bool
    """Compute in bfloat16 with float32 weights and optimizer; else all in float32."""
    lr: float
    compiled: bool
    cuda: bool
    began: float
    """When the driver's processes were started, in seconds since 1970."""
    out: str
    """File of the results."""
    flags: dict[str, Any]
    """Of our own program, beyond what all drivers share; it alone recomputes activations, by its defaults."""

    @classmethod
    def read(cls, path: str) -> Job:
        """Return the job of a file."""
        return cls(**json.loads(Path(path).read_text()))

    def write(self, path: Path) -> None:
        """Write the job to a file."""
        path.write_text(json.dumps(asdict(self)))

    @property
    def rank(self) -> int:
        """The place of this process."""
        return int(os.environ.get("RANK", "0"))

    @property
    def world(self) -> int:
        """Number of processes."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if self.cuda else torch.device("cpu")

    def all_rows(self) -> Tensor:
        """Return the ids of all rows, ``[rows, seq_len]``, in the order of the shard."""
        lines = (Path(self.rows) / "rows.jsonl").read_text().splitlines()
        return torch.from_numpy(np.array([json.loads(line)["input_ids"] for line in lines], dtype=np.int64))

    def batch_of(self, rows: Tensor, step: int) -> Tensor:
        """Return this rank's rows of a step, on its device."""
        first = (step * self.world + self.rank) * self.batch
        return rows[first : first + self.batch].to(self.device, non_blocking=True)

    def load(self) -> nn.Module:
        """Return the model with its float32 weights, on the device."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            self.model, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        model.config.use_cache = False  # type: ignore[union-attr]
        return model.to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the fused AdamW that all drivers but Trainer, which makes the same, share."""
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=BETAS, eps=EPSILON, fused=True)

    def start_group(self) -> None:
        """Form the process group that torchrun described, also in a world of one."""
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
            os.environ.setdefault(name, value)
        if self.cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo")


def skip(why: str) -> NoReturn:
    """End the driver, which cannot run here."""
    sys.exit(f"skip: {why}")


class Clock:
    """Times the steps after the warm ones as a whole, so that no step waits for the device."""

    def __init__(self, job: Job) -> None:
        self.job, self.done = job, 0
        self.losses: list[Tensor | float] = []
        self.first = self._began = self._cpu = 0.0

    def step(self, loss: Tensor | float) -> None:
        """Count a step that has been queued; its loss is read at the end."""
        self.done += 1
        self.losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        if self.done in (1, self.job.warm, self.job.steps):
            if self.job.cuda:
                torch.cuda.synchronize()
            now = time.time()
            if self.done == 1:
                self.first = now - self.job.began
                if self.job.rank == 0:
                    Path(f"{self.job.out}.first").touch()
            if self.done == self.job.warm:
                self._began, self._cpu = now, time.process_time()
                if self.job.cuda:
                    torch.cuda.reset_peak_memory_stats()
            if self.done == self.job.steps:
                self.seconds = (now - self._began) / (self.job.steps - self.job.warm)
                self.cpu_seconds = (time.process_time() - self._cpu) / (self.job.steps - self.job.warm)

    def write(self, settings: str, *, mean: bool = True) -> None:
        """Write the results on rank 0; ``mean``: of the ranks' own losses, their mean. Collective."""
        losses = torch.tensor([float(loss) for loss in self.losses], dtype=torch.float64)
        if mean and self.job.world > 1:
            losses = losses.to(self.job.device, torch.float32)
            dist.all_reduce(losses)
            losses /= self.job.world
        if self.job.rank == 0:
            peak = torch.cuda.max_memory_allocated() / 2**30 if self.job.cuda else None
            figures = {
                "step ms": 1000 * self.seconds, "CPU ms": 1000 * self.cpu_seconds,
                "tokens/s/GPU": self.job.batch * self.job.seq_len / self.seconds,
                "peak GiB": peak, "start to first step s": self.first, "settings": settings, "losses": losses.tolist(),
            }  # fmt: skip
            Path(self.job.out).write_text(json.dumps(figures))
