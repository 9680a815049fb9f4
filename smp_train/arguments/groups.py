"""All training flags, combined in one flat `Arguments`.

A field's name is the flag's name, its type decides how text is read, and its `Flag` describes the rest. ``None`` means
"not set": a model's shape then has the preset's value, or the architecture's default.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from smp_train.arguments import checkpointing
from smp_train.arguments import model_flags as model
from smp_train.arguments import running_flags as running
from smp_train.arguments import training_flags as training
from smp_train.arguments.flag import Flag, flags_of
from smp_train.arguments.run_name import RUNS

GROUPS: tuple[type, ...] = (
    model.ModelArguments, model.ParallelArguments, training.OptimizerArguments, training.DataArguments,
    training.CheckpointArguments, model.FinetuneArguments, running.LoggingArguments, running.RuntimeArguments,
)  # fmt: skip
FOLLOWING = {
    "model_type": "--from_scratch", "model_size": "--from_scratch", "sharding_strategy": "--hybrid_shard_degree",
    "activation_checkpointing": "--selective_checkpointing", "validation_freq": "--max_steps", "run_dir": "--run_name",
}  # fmt: skip
"""Settings that may follow from another setting, and that setting's flag; `Arguments` has the rules."""


@dataclass(frozen=True)
class Arguments(
    running.RuntimeArguments, running.LoggingArguments, model.FinetuneArguments, training.CheckpointArguments,
    training.DataArguments, training.OptimizerArguments, model.ParallelArguments, model.ModelArguments,
):  # fmt: skip
    """All settings of a training run, flat and immutable. `smp_train.arguments.parse` makes them of a command line."""

    def __post_init__(self) -> None:
        """Set the settings that follow from other settings."""
        for name, value in self._following().items():
            object.__setattr__(self, name, value)

    def _following(self) -> dict[str, Any]:
        """Return the settings that follow from other settings; idempotent, so `dataclasses.replace` is safe."""
        model_type, model_size = self.model_type, self.model_size
        if self.from_scratch:
            model_type, model_size = model_type or "scratch", model_size or "7b"
        # SMP's rule (its reference, hybrid_shard_degree): 1 is no sharding; from 2 on, a strategy that is not
        # hybrid becomes hybrid_shard. `validate` refuses a degree above 1 with no_shard.
        strategy = self.sharding_strategy
        if self.hybrid_shard_degree == 1:
            strategy = "no_shard"
        elif self.hybrid_shard_degree and strategy in ("full_shard", "shard_grad_op"):
            strategy = "hybrid_shard"
        # `validate` refuses other values of --activation_checkpointing that contradict --selective_checkpointing.
        checkpointed = self.activation_checkpointing
        if checkpointed == checkpointing.FULL:
            checkpointed = checkpointing.of_layers(self.selective_checkpointing)
        keep_best = self.keep_best or self.load_best_model_at_end
        validates = keep_best or self.early_stopping or self.evaluate_first or self.test_dir or self.use_synthetic_data
        # A validation that never comes due needs no data.
        never = not (validates or self.epochs) and (self.validation_freq or 0) > self.max_steps
        return {
            "model_type": model_type, "model_size": model_size.lower() if model_size else None,
            # In SMP and SageMaker 0 means "not given".
            "hybrid_shard_degree": self.hybrid_shard_degree or None,
            "validation_freq": None if never else self.validation_freq or None,
            "sharding_strategy": strategy, "activation_checkpointing": checkpointed, "keep_best": keep_best,
            "run_dir": self.run_dir or (f"{RUNS}/{self.run_name}" if self.run_name else ""),
        }  # fmt: skip

    def computes_in_bf16(self, *, gpu: bool) -> bool:
        """Return whether to compute in bfloat16: by default on a GPU only, because most CPUs emulate it slowly."""
        return gpu if self.bf16 is None else self.bf16

    @property
    def label(self) -> str:
        """The model's type and size: the launchers' name for a run without a name, and the start of a fresh name."""
        pretrained = self.hf_pretrained_model_name_or_dir or (self.finetune and self.pretrained_model_name)
        if pretrained:
            return PurePosixPath(pretrained.removesuffix("/best")).name or "model"
        family = self.model_type or ("scratch" if self.model_size else "gpt_neox")
        return "-".join(part for part in (family, self.model_size) if part)


@functools.cache
def flags() -> dict[str, Flag]:
    """Return every flag by name, in the order of the groups."""
    return {flag.name: flag for group in GROUPS for flag in flags_of(group)}
