"""What is refused before anything starts, and that the refusal says the way out."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from smp_train.arguments import Arguments, ineffective, parse, validate
from smp_train.arguments.groups import flags
from smp_train.errors import ConfigError

READY = "--use_synthetic_data 1 "


def check(line: str, world: int = 8) -> None:
    validate(parse(shlex.split(line), {}).args, world)


ALLOWED = [
    "--sharding_strategy _hybrid_shard_zero2", "--sharding_strategy no_shard", "--hybrid_shard_degree 1",
    "--hybrid_shard_degree 8", "--grad_clip 0", "--lr_decay_style wsd --plateau 0.5", "--warmup 100 --max_steps 10",
    "--lr 1e-6 --lr_decay_style constant", "--validation_freq 5", "--evaluate_only 1", "--epochs 2 --steps_per_epoch 3",
    "--finetune 1 --pretrained_model_name n --finetune_checkpoint_load_dir d",
    "--finetune 1 --pretrained_checkpoint_file f --model_type llama_v2", "--finetune 1 --hf_model m",
    "--activation_checkpointing selective:op", "--activation_checkpointing selective:2 --selective_checkpointing 2",
    "--fsdp_activation_checkpointing 1 --selective_checkpointing 1/3", "--selective_checkpointing 0",
    "--activation_checkpointing 0 --selective_checkpointing 0.5", "--fp8 1", "--attn_implementation flash_attention_2",
    "--run_name x-1000steps-more --checkpoint_dir d", "--run_name best-7b",
    "--finetune 1 --pretrained_model_name a/m --save_final_model 1 --model_dir a",
    "--finetune 1 --hf_model m --pretrained_checkpoint_file a/m --save_final_model 1 --model_dir a",
]
ALLOWED_DATA = [
    "--training_dir d --test_dir t --validation_freq 5", "--dataset d --tokenizer t --bad_rows skip",
    "--dataset allenai/c4 --dataset_config_name en --tokenizer t --validation_freq 5",
    "--dataset s3://b/text --hf_model folder --test_dir t --validation_freq 5 --short concat --shuffle none",
]  # fmt: skip


@pytest.mark.parametrize("line", [READY, *(READY + line for line in ALLOWED), *ALLOWED_DATA])
def test_allowed(line: str) -> None:
    check(line)


COMBINATIONS = {
    "--run_name x-1000steps": "--run_name 'x-1000steps': is the name of a checkpoint",
    "--run_name x-1000steps-3f --checkpoint_dir d": "is the name of a checkpoint",
    "--run_name a/best": "--run_name 'a/best': ",
    "--resume_from_checkpoint True": "--resume_from_checkpoint True: give the folder to resume from, here checkpoints;",
    "--resume_from_checkpoint 1 --output_dir o": "here o/checkpoints;",
    "--hybrid_shard_degree 3": "does not divide the 8 processes of this run; 1, 2, 4, 8 would",
    "--shard_degree 16": "1, 2, 4, 8 would",
    "--backend smp --tensor_parallel_degree 2 --expert_parallel_degree 2": "cannot both be above 1",
    "--train_batch_size 0": "--train_batch_size 0: must be at least 1",
    "--lr=-1": "--lr -1: must be at least 0",
    "--beta2 1": "--beta2 1: must be at least 0 and below 1",
    "--adam_epsilon 0": "must be above 0",
    "--rotary_pct 1.5": "at most 1",
    "--max_context_width 1": "must be at least 2",
    "--min_lr 1e-3": "--min_lr 0.001 is above --lr 0.0001",
    "--warmup 1.5": "--warmup 1.5: must be a share",
    "--warmup 0.5 --plateau 0.6": "together at most 1",
    "--plateau 2": "must be a fraction",
    "--checkpoint_dir a b": "--checkpoint_dir and --checkpoint_freq have 2 and 1 values",
    "--checkpoint_dir a b --checkpoint_freq 1 2": "--checkpoint_dir and --num_kept_checkpoints",
    "--checkpoint_dir a a/ --checkpoint_freq 1 2 --num_kept_checkpoints 1 2": "names one folder twice",
    "--sharding_strategy no_shard --hybrid_shard_degree 4": "contradict each other",
    "--selective_checkpointing 1.5": "--selective_checkpointing 1.5: must be a share",
    "--activation_checkpointing sometimes": "is not none, full, selective:op",
    "--activation_checkpointing selective:1.5": "is not none, full, selective:op",
    "--activation_checkpointing selective:op --selective_checkpointing 0.5": "contradict each other",
    "--use_profiler 1 --recovery in_place": "does not go with --recovery in_place",
    "--fp8 1 --bf16 0": "--fp8 1 does not compute in float32; give --bf16 1",
    "--attn_implementation flash_attention_2 --bf16 0": "does not compute in float32",
    "--hf-model x --from-scratch": "both choose the model",
    "--hf-model x --model_size 7b": "both choose the model",
    "--save_final_model 1": "--save_final_model 1 needs --model_dir",
    "--hf_model m --save_final_model 1 --model_dir ./m": "holds the weights that the run starts from (m)",
    "--finetune 1 --pretrained_model_name a/m --save_final_model 1 --model_dir a/../a/m/": "give another folder",
    "--finetune 1 --hf_model m --pretrained_checkpoint_file a/f.pt --save_final_model 1 --model_dir a": "from (a)",
    "--finetune 1 --pretrained_model_name m --finetune_checkpoint_load_dir a --save_final_model 1 --model_dir a/m":
        "starts from (a/m)",
    "--finetune 1": "--finetune 1 needs weights: give --pretrained_model_name",
    "--pretrained_model_name n": "--pretrained_model_name n needs --finetune 1",
    "--pretrained_checkpoint_file f": "needs --finetune 1",
    "--finetune 1 --hf_model m --finetune_checkpoint_load_dir d --pretrained_checkpoint_file f": "choose the weights",
    "--finetune 1 --pretrained_checkpoint_file f --finetune_checkpoint_load_dir d": "choose the weights",
    "--finetune 1 --pretrained_model_name n --hf_model m": "both choose the model",
    **{f"--{flag.name} s3://b/x": f"--{flag.name} s3://b/x: " for flag in flags().values() if flag.must == "folder"},
}

DATA = {
    "": "--training_dir",
    "--training_dir /d --validation_freq 5": "--validation_freq 5 needs --test_dir",
    "--training_dir /d --max_epochs -1": "--evaluate_only needs --test_dir",
    "--training_dir /d --short concat --long truncate": "--short concat joins whole rows",
    "--training_dir /d --short pack --long crop": "--long crop leaves tokens out",
    "--training_dir /d:1 /e": "/e: has no weight",
    "--training_dir /d:1 /e:2 --streaming 1": "leave out the weights",
    "--training_dir /d --streaming 1 --epochs 2 --steps_per_epoch 9": "--steps_per_epoch does not go with streamed",
    "--training_dir /d --dataset allenai/c4": "choose with --streaming 1 or --streaming 0",
}


@pytest.mark.parametrize(
    ("line", "said"), [*((READY + line, said) for line, said in COMBINATIONS.items()), *DATA.items()]
)
def test_combinations_are_refused(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(line)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


ONLY_SMP = {"limit_all_gathers": False, "backward_fetch_policy": "backward_post", "moe_load_balancing": "sinkhorn"}


@pytest.mark.parametrize("name", [name for name, flag in flags().items() if flag.only_natively])
def test_a_value_that_only_smp_supports_is_refused_natively(name: str) -> None:
    refused = Arguments(use_synthetic_data=True, moe=True, **{"moe_load_balancing": "none", name: ONLY_SMP[name]})
    with pytest.raises(ConfigError, match=f"^--{name} "):
        validate(refused, 8)
    validate(dataclasses.replace(refused, backend="smp"), 8)
    for value in (flags()[name].only_natively or ())[0]:
        validate(dataclasses.replace(refused, **{name: value}), 8)


SYNTHETIC = "--use_synthetic_data 1 trains on random tokens"
INEFFECTIVE = {
    "": [],
    "--delayed_param 0 --lr 1": [
        "--delayed_param 0 has no effect: this is always done",
    ],
    "--use_synthetic_data 1 --training_dir /a /b": [f"--training_dir /a /b has no effect: {SYNTHETIC}"],
    "--use_synthetic_data 1 --training_dir d --short pack": [
        f"--{flag} has no effect: {SYNTHETIC}" for flag in ("training_dir d", "short pack")
    ],
    "--dataset allenai/c4 --data_cache_dir x": ["--data_cache_dir x has no effect: streamed data is not cached"],
    "--training_dir /d --text_column body --data_cache_dir x": [],
    "--training_dir d --max_bad 1%": ["--max_bad 0.01 has no effect: it needs --bad_rows skip"],
    "--training_dir d --max_bad 1% --bad_rows skip --test_dir t --validation_freq 9": [],
    "--training_dir d --test_dir t": ["--test_dir t has no effect: nothing is validated without --validation_freq"],
}


@pytest.mark.parametrize("line", INEFFECTIVE)
def test_what_has_no_effect_is_answered_when_given(line: str) -> None:
    assert ineffective(parse(shlex.split(line), {})) == INEFFECTIVE[line]
    if "synthetic" in line:
        channel = {"SM_CHANNEL_TRAIN": "/opt/ml/input/data/train"}
        assert ineffective(parse(["--use_synthetic_data", "1"], channel)) == [], "the platform gave it"
