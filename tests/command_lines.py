"""Command lines as the documentation of five systems has them: what they mean here, and what of them is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Line:
    """A documented command line and the values that it must set.

    To run it, ``off`` takes back what this version refuses in it by the name of the flag ``refused``.
    """

    text: str
    means: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    off: str = ""


def llama_of_000(kv: int, intermediate: int, hidden: int, layers: int, heads: int, freq: int) -> str:
    return (
        f"--num_key_value_heads={kv} --intermediate_size={intermediate} --max_context_width=4096 "
        f"--hidden_width={hidden} --num_layers={layers} --num_heads={heads} --model_type=llama_v2 "
        f"--checkpoint_freq={freq} --validation_freq=500 --checkpoint_dir=./checkpoints "
        "--resume_from_checkpoint=./checkpoints"
    )


SMP = (
    "--train_batch_size 4 --max_steps 100 --hidden_width 8192 --num_layers 80 --num_heads 64 "
    "--llama_intermediate_size 28672 --shard_degree 16 --model_type llama_v2 {nsys}--use_smp_implementation 1 "
    "--max_context_width 4096 --tensor_parallel_degree 1 --use_synthetic_data 1 --training_dir /fsx/train "
    "--test_dir /fsx/test {hf}--checkpoint_dir /fsx/checkpoints --checkpoint_freq 100"
)
HUB = {"refused": "--hf_pretrained_model_name_or_dir", "off": "--hf-model model"}
LINES: dict[str, Line] = {
    "000, 7B": Line(
        llama_of_000(32, 11008, 4096, 32, 32, 1000),
        {
            "num_key_value_heads": 32, "intermediate_size": 11008, "max_context_width": 4096, "checkpoint_freq": [1000],
            "hidden_width": 4096, "checkpoint_dir": ["./checkpoints"], "sharding_strategy": "full_shard",
        },
    ),
    "000, 70B": Line(llama_of_000(8, 28672, 8192, 80, 64, 50), {"num_layers": 80, "num_key_value_heads": 8}),
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
        {"model_type": "mixtral", "num_local_experts": 8, "sliding_window": 4096, "max_steps": 5000, "epochs": 3},
        refused="--streaming", off="--dataset None --tokenizer None",
    ),
    "000, today": Line(
        "--max_context_width=8192 --num_key_value_heads=8 --intermediate_size=14336 --hidden_width=4096 "
        "--num_layers=32 --num_heads=32 --model_type=llama_v3 --tokenizer=hf-internal-testing/llama-tokenizer "
        "--checkpoint_freq=5000 --validation_freq=100 --max_steps=5000 --checkpoint_dir=./checkpoints "
        "--dataset=allenai/c4 --dataset_config_name=en --resume_from_checkpoint=./checkpoints "
        "--train_batch_size=1 --val_batch_size=1 --sharding_strategy=full --offload_activations=1",
        {
            "dataset": ["allenai/c4"], "dataset_config_name": "en", "tokenizer": "hf-internal-testing/llama-tokenizer",
            "sharding_strategy": "full_shard", "sm_activation_offloading": True,
        },
        refused="--streaming", off="--dataset None --dataset_config_name None --tokenizer None",
    ),
    "001": Line(
        "--model_name=llama2_7b --ckpt_load_path=/fsx/llama2/pretrain/ckpt --ckpt_save_path=/fsx/llama2/pretrain/ckpt "
        "--data_path=/fsx/data/ --fsdp_activation_checkpointing=False --selective_checkpointing=1 "
        "--sharding_strategy=hsdp --low_cpu_fsdp=False --batch_size=2 --report_interval=200 "
        "--checkpoint_interval=20000 --use_torch_compile=False --use_profiler=True",
        {
            "model_type": "llama_v2", "model_size": "7b", "resume_from_checkpoint": "/fsx/llama2/pretrain/ckpt",
            "checkpoint_dir": ["/fsx/llama2/pretrain/ckpt"], "training_dir": ["/fsx/data/"],
            "activation_checkpointing": "none", "selective_checkpointing": 1.0, "sharding_strategy": "hybrid_shard",
            "delayed_param": False, "train_batch_size": 2, "logging_freq": 200, "checkpoint_freq": [20000],
            "use_torch_compile": False, "use_profiler": True,
        },
    ),
    "001, in its log": Line(
        "--ckpt_load_path=/fsx/llama2/pretrain/ckpt --ckpt_save_path=/fsx/llama2/pretrain/ckpt --model_name=llama2_13b "
        "--dataset_path=/fsx/data/examples_datasets/wikicorpus_llama2_7B_tokenized_4k --selective_checkpointing=1",
        {
            "model_type": "llama_v2", "model_size": "13b",
            "training_dir": ["/fsx/data/examples_datasets/wikicorpus_llama2_7B_tokenized_4k"],
        },
    ),
    "002": Line(
        "--environment pbs --model mingpt --run_name shakespeare --vocab_size 50257 --seq_len 256 --num_heads 8 "
        "--num_layers 8 --embed_size 512 --restart_checkpoint_file ckpt --sharding hybrid-grad-shard --precision bf16 "
        "--cpu_offload 0 --activation_checkpoints --meta_init --train_data data/train --val_data data/val "
        "--max_epochs 3 --lr 3e-4 --dropout 0.1 --batch_size 16",
        {
            "model_type": "gpt2", "run_name": "shakespeare", "run_dir": "runs/shakespeare",
            "max_context_width": 256, "hidden_width": 512, "resume_from_checkpoint": "ckpt",
            "sharding_strategy": "_hybrid_shard_zero2", "bf16": True, "cpu_offload": False,
            "activation_checkpointing": "full", "training_dir": ["data/train"], "test_dir": "data/val", "epochs": 3,
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "train_batch_size": 16,
        },
    ),
    "003": Line(
        SMP.format(nsys="--profile_nsys 1 ", hf="--dataset_type hf "),
        {
            "intermediate_size": 28672, "hybrid_shard_degree": 16, "sharding_strategy": "hybrid_shard",
            "profile_nsys": True, "use_smp_implementation": True, "checkpoint_freq": [100],
        },
    ),
    "003, resumed": Line(
        SMP.format(nsys="", hf="") + " --resume_from_checkpoint /fsx/ckpt/llama_v2-100steps",
        {"resume_from_checkpoint": "/fsx/ckpt/llama_v2-100steps"},
    ),
    "003, fine-tuned by name": Line(
        SMP.format(nsys="", hf="") + " --finetune 1 --pretrained_model_name meta-llama/Llama-2-7b-hf "
        "--finetune_checkpoint_load_dir /fsx/pretrained",
        {
            "finetune": True, "pretrained_model_name": "meta-llama/Llama-2-7b-hf",
            "finetune_checkpoint_load_dir": "/fsx/pretrained",
        },
        refused="finetune", off="--finetune 0 --pretrained_model_name None --finetune_checkpoint_load_dir None",
    ),
    "003, fine-tuned from a file": Line(
        SMP.format(nsys="", hf="") + " --finetune 1 --pretrained_checkpoint_file /fsx/llama/consolidated.pt",
        {"pretrained_checkpoint_file": "/fsx/llama/consolidated.pt"},
        refused="--pretrained_checkpoint_file", off="--finetune 0 --pretrained_checkpoint_file None",
    ),
    "004, 1": Line(
        "--hf-model meta-llama/Llama-2-7b-hf --batch-size 4 --grad-accum-steps 2 --max-lr 2e-5 --warmup-steps 100 "
        "--max-steps 10000 --checkpoint-dir checkpoints/llama2-7b-finetuned --mixed-precision",
        {
            "hf_pretrained_model_name_or_dir": "meta-llama/Llama-2-7b-hf", "train_batch_size": 4,
            "gradient_accumulation_steps": 2, "bf16": True, "label": "Llama-2-7b-hf", "lr": 2e-5, "warmup": 100.0,
            "max_steps": 10000, "checkpoint_dir": ["checkpoints/llama2-7b-finetuned"],
        },
        **HUB,
    ),
    "004, 2": Line(
        "--hf-model mistralai/Mistral-7B-v0.1 --seq-len 4096 --batch-size 2 --grad-accum-steps 4 --mixed-precision",
        **HUB,
    ),
    "004, 3": Line(
        "--from-scratch --model-size 13B --vocab-size 32000 --seq-len 2048 --batch-size 2 --grad-accum-steps 4 "
        "--max-lr 3e-4 --mixed-precision",
        {"model_type": "scratch", "model_size": "13b", "vocab_size": 32000, "lr": 3e-4},
    ),
    "004, quick start": Line(
        "--from-scratch --model-size 7B --batch-size 4 --grad-accum-steps 2 --mixed-precision",
        {"model_type": "scratch", "model_size": "7b", "label": "scratch-7b"},
    ),
    "004, from scratch": Line("--from-scratch --model-size 7B --max-lr 3e-4 --warmup-steps 2000 --max-steps 100000"),
    "004, its other flags": Line(
        "--from-scratch --model-size 350M --num-epochs 2 --steps-per-epoch 1000 --min-lr 3e-5 --weight-decay 0.1 "
        "--grad-clip 1.0 --use-flash-attn --checkpoint-interval 1000 --log-interval 10",
        {
            "model_size": "350m", "epochs": 2, "steps_per_epoch": 1000, "min_lr": 3e-5, "weight_decay": 0.1,
            "attn_implementation": "flash_attention_2", "checkpoint_freq": [1000], "logging_freq": 10,
        },
        refused="--attn_implementation", off="--use-flash-attn 0",
    ),
}  # fmt: skip
