"""The command lines of the five systems, run: scaled down by what is appended, or refused by the flag's name."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.command import warm
from tests.tiers import core
from tests.training import SAMPLE

pytestmark = [pytest.mark.system, pytest.mark.slow]

SMALL = (
    "--vocab_size 1024 --hidden_width 32 --num_layers 2 --num_heads 4 --num_key_value_heads 2 --intermediate_size 48 "
    f"--max_context_width 32 --bf16 0 --max_steps 2 --logging_freq 1 --training_dir {SAMPLE}/train "
    f"--test_dir {SAMPLE}/test --checkpoint_dir ck --resume_from_checkpoint ck"
)
NO_KEY_VALUE_HEADS = SMALL.replace("--num_key_value_heads 2", "--num_key_value_heads 4")


@dataclass
class Line:
    """A documented command line.

    ``appended`` scales it down. ``refused`` is the flag that this version refuses in it, if any, and ``off`` takes
    back what is refused.
    """

    text: str
    refused: str = ""
    off: str = ""
    appended: str = SMALL


LLAMA_13B = (
    "--num_key_value_heads=40 --intermediate_size=13824 --max_context_width=4096 --hidden_width=5120 --num_layers=40 "
    "--num_heads=40 --model_type=llama_v2 --checkpoint_freq=1000 --validation_freq=500 --checkpoint_dir=./checkpoints "
    "--resume_from_checkpoint=./checkpoints"
)
SMP = (
    "--train_batch_size 4 --max_steps 100 --hidden_width 8192 --num_layers 80 --num_heads 64 "
    "--llama_intermediate_size 28672 --shard_degree 16 --model_type llama_v2 {nsys}--use_smp_implementation 1 "
    "--max_context_width 4096 --tensor_parallel_degree 1 --use_synthetic_data 1 --training_dir /fsx/train "
    "--test_dir /fsx/test {hf}--checkpoint_dir /fsx/checkpoints --checkpoint_freq 100"
)
SMALL_SMP = f"{SMALL} --shard_degree 1"

LINES: dict[str, Line] = {
    "000, 7B": Line(
        "--num_key_value_heads=32 --intermediate_size=11008 --max_context_width=4096 --hidden_width=4096 "
        "--num_layers=32 --num_heads=32 --model_type=llama_v2 --checkpoint_freq=1000 --validation_freq=500 "
        "--checkpoint_dir=./checkpoints --resume_from_checkpoint=./checkpoints"
    ),
    "000, 13B": Line(LLAMA_13B),
    "000, 70B": Line(
        "--num_key_value_heads=8 --intermediate_size=28672 --max_context_width=4096 --hidden_width=8192 "
        "--num_layers=80 --num_heads=64 --model_type=llama_v2 --checkpoint_freq=50 --validation_freq=500 "
        "--checkpoint_dir=./checkpoints --resume_from_checkpoint=./checkpoints"
    ),
    "000, Mixtral": Line(
        "--train_batch_size=4 --val_batch_size=4 --max_steps=5000 --seed=42 --bf16=1 --grad_clip=1.0 "
        "--weight_decay=0.2 --beta1=0.9 --beta2=0.95 --activation_checkpointing=1 --intermediate_size=14336 "
        "--num_key_value_heads=8 --logging_freq=1 --max_context_width=32768 --vocab_size=32000 --hidden_width=4096 "
        "--num_layers=32 --num_heads=32 --resid_pdrop=0.1 --embd_pdrop=0.1 --attn_pdrop=0.1 --summary_first_pdrop=0.1 "
        "--initializer_range=0.02 --model_type=mixtral --rotary_pct=0.25 --rotary_emb_base=10000 --lr=0.0001 "
        "--lr_decay_style=cosine --min_lr=1e-5 --warmup=0.0032 --plateau=0.0 --dataset=c4 "
        "--tokenizer=mistralai/mixtral-8x7B-v0.1 --epochs=3 --checkpoint_dir=./checkpoints/mixtral-8x7B "
        "--resume_from_checkpoint=./checkpoints/mixtral-8x7B --max_training_steps=5000 --validation_batches=10 "
        "--sliding_window=4096 --num_experts_per_tok=2 --num_local_experts=8",
        refused="--dataset",
        off="--dataset None --tokenizer None",
    ),
    "000, today": Line(
        "--max_context_width=8192 --num_key_value_heads=8 --intermediate_size=14336 --hidden_width=4096 "
        "--num_layers=32 --num_heads=32 --model_type=llama_v3 --tokenizer=hf-internal-testing/llama-tokenizer "
        "--checkpoint_freq=5000 --validation_freq=100 --max_steps=5000 --checkpoint_dir=./checkpoints "
        "--dataset=allenai/c4 --dataset_config_name=en --resume_from_checkpoint=./checkpoints "
        "--train_batch_size=1 --val_batch_size=1 --sharding_strategy=full --offload_activations=1",
        refused="--dataset",
        off="--dataset None --dataset_config_name None --tokenizer None",
    ),
    "001": Line(
        "--model_name=llama2_7b --ckpt_load_path=/fsx/llama2/pretrain/ckpt --ckpt_save_path=/fsx/llama2/pretrain/ckpt "
        "--data_path=/fsx/data/ --fsdp_activation_checkpointing=False --selective_checkpointing=1 "
        "--sharding_strategy=hsdp --low_cpu_fsdp=False --batch_size=2 --report_interval=200 "
        "--checkpoint_interval=20000 --use_torch_compile=False --use_profiler=True",
    ),
    "002": Line(
        "--environment pbs --model mingpt --run_name shakespeare --vocab_size 50257 --seq_len 256 --num_heads 8 "
        "--num_layers 8 --embed_size 512 --sharding hybrid-full-shard --precision bf16 --cpu_offload 0 "
        "--activation_checkpoints --meta_init --train_data data/train --val_data data/val --max_epochs 3 --lr 3e-4 "
        "--dropout 0.1 --batch_size 16",
        appended=NO_KEY_VALUE_HEADS,
    ),
    "003": Line(SMP.format(nsys="--profile_nsys 1 ", hf="--dataset_type hf "), appended=SMALL_SMP),
    "003, profiled": Line(SMP.format(nsys="--profile_nsys 1 ", hf=""), appended=SMALL_SMP),
    "003, resumed": Line(
        SMP.format(nsys="", hf="") + " --resume_from_checkpoint /fsx/checkpoints", appended=SMALL_SMP
    ),
    "003, fine-tuned by name": Line(
        SMP.format(nsys="", hf="") + " --finetune 1 --pretrained_model_name meta-llama/Llama-2-7b-hf "
        "--finetune_checkpoint_load_dir /fsx/pretrained",
        refused="finetune",
        off="--finetune 0 --pretrained_model_name None --finetune_checkpoint_load_dir None",
        appended=SMALL_SMP,
    ),
    "003, fine-tuned from a file": Line(
        SMP.format(nsys="", hf="") + " --finetune 1 --pretrained_checkpoint_file /fsx/llama/consolidated.pt",
        refused="--pretrained_checkpoint_file",
        off="--finetune 0 --pretrained_checkpoint_file None",
        appended=SMALL_SMP,
    ),
    "004, 1": Line(
        "--hf-model meta-llama/Llama-2-7b-hf --batch-size 4 --grad-accum-steps 2 --max-lr 2e-5 --warmup-steps 100 "
        "--max-steps 10000 --checkpoint-dir checkpoints/llama2-7b-finetuned --mixed-precision",
        refused="--hf_pretrained_model_name_or_dir",
        off="--hf-model model",
    ),
    "004, 2": Line(
        "--hf-model mistralai/Mistral-7B-v0.1 --seq-len 4096 --batch-size 2 --grad-accum-steps 4 --mixed-precision",
        refused="--hf_pretrained_model_name_or_dir",
        off="--hf-model model",
    ),
    "004, 3": Line(
        "--from-scratch --model-size 13B --vocab-size 32000 --seq-len 2048 --batch-size 2 --grad-accum-steps 4 "
        "--max-lr 3e-4 --mixed-precision",
    ),
    "004, 4": Line(
        "--hf-model meta-llama/Llama-2-70b-hf --batch-size 2 --grad-accum-steps 8",
        refused="--hf_pretrained_model_name_or_dir",
        off="--hf-model model",
    ),
    "004, 5 and quick start": Line(
        "--from-scratch --model-size 7B --batch-size 4 --grad-accum-steps 2 --mixed-precision",
    ),
    "004, fine-tuning": Line(
        "--hf-model meta-llama/Llama-2-7b-hf --max-lr 2e-5 --warmup-steps 100 --max-steps 5000",
        refused="--hf_pretrained_model_name_or_dir",
        off="--hf-model model",
    ),
    "004, from scratch": Line(
        "--from-scratch --model-size 7B --max-lr 3e-4 --warmup-steps 2000 --max-steps 100000",
    ),
    "004, its other flags": Line(
        "--from-scratch --model-size 350M --num-epochs 1 --steps-per-epoch 1000 --min-lr 3e-5 --weight-decay 0.1 "
        "--grad-clip 1.0 --use-flash-attn --checkpoint-interval 1000 --log-interval 10",
        refused="--attn_implementation",
        off="--use-flash-attn 0",
    ),
}


@pytest.fixture(autouse=True)
def model_folder(tmp_path: Path) -> None:
    """A folder with a configuration, where the documented lines name a model of the hub."""
    (tmp_path / "model").mkdir()
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))


CORE = {"000, Mixtral", "001", "002", "003, resumed", "004, its other flags"}
"""One of each system."""


@pytest.mark.parametrize("name", core(LINES, CORE.__contains__))
def test_trains(name: str, tmp_path: Path) -> None:
    line = LINES[name]
    words = shlex.split(f"{line.text} {line.appended} {line.off} --run_dir run")
    with warm(tmp_path, "train", *words) as command:
        assert command.code() == 0, command.err
        assert command.err == ""
        assert "Batch 2 Loss: " in command.out
    assert json.loads((tmp_path / "run" / "DONE").read_text())["step"] == 2
    assert list(tmp_path.glob("ck/*-2steps/COMMITTED"))


@pytest.mark.parametrize("name", core([name for name, line in LINES.items() if line.refused], CORE.__contains__))
def test_is_refused(name: str, tmp_path: Path) -> None:
    line = LINES[name]
    with warm(tmp_path, "train", *shlex.split(f"{line.text} {line.appended} --run_dir run")) as command:
        assert command.code() == 2
        (said,) = command.err.splitlines()
        assert line.refused in said
    assert not list(tmp_path.glob("ck/*"))


def test_evaluation_only(tmp_path: Path) -> None:
    words = shlex.split(f"{LINES['002'].text} {NO_KEY_VALUE_HEADS} --run_dir run")
    with warm(tmp_path, "train", *words) as command:
        assert command.code() == 0, command.err
    trained = command.out.splitlines()
    with warm(tmp_path, "train", *words, "--max_epochs", "-1") as command:
        assert command.code() == 0, command.err
    assert "Batch 2 Validation loss: " in command.out
    assert " Loss: " not in command.out
    assert len(list(tmp_path.glob("ck/*steps"))) == 1
    assert any("Finished: step 2" in line for line in trained)
