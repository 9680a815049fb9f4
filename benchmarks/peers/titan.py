"""torchtitan 0.2.2: its Llama 3, its sharding, compilation, loss and clipping, in a loop as short as its own.

Its Trainer is not used, as it runs on GPUs alone and reads data of its own. Install with ``--no-deps`` beside it:
torchdata, tyro, tensorboard, einops. Newer releases need a nightly torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig

from benchmarks.peers.job import GRAD_CLIP, Clock, Job, skip


def drive(job: Job, clock: Clock) -> None:
    """Train with its parts."""
    if importlib.util.find_spec("torchtitan") is None:
        skip("torchtitan is not installed")
    config = AutoConfig.from_pretrained(job.model, local_files_only=True)
    if config.tie_word_embeddings:
        skip("torchtitan's Llama 3 has a head of its own; measure with --untied")
    job.start_group()
    infra = importlib.import_module("torchtitan.models.llama3.infra.parallelize")
    utils = importlib.import_module("torchtitan.distributed.utils")
    settings = importlib.import_module("torchtitan.config").JobConfig()
    settings.compile.enable = job.compiled
    model = build(job, config)
    if job.compiled:
        infra.apply_compile(model, settings.compile)
    mesh = init_device_mesh(job.device.type, (job.world,))
    infra.apply_fsdp(
        model, mesh, param_dtype=torch.bfloat16 if job.bf16 else torch.float32, reduce_dtype=torch.float32,
        pp_enabled=False,
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule) and not job.cuda:  # gloo has no reduction that divides
            module.set_force_sum_reduction_for_comms(True)
    loss_of = importlib.import_module("torchtitan.components.loss").build_cross_entropy_loss(settings)
    optimizer = job.optimizer(model)
    rows = job.all_rows()
    tokens = job.batch * job.world * (job.seq_len - 1)
    for step in range(job.steps):
        ids = job.batch_of(rows, step)
        labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
        optimizer.zero_grad()
        loss = loss_of(model(ids), labels) / tokens
        loss.backward()
        utils.clip_grad_norm_(model.parameters(), GRAD_CLIP, foreach=True)
        optimizer.step()
        clock.step(loss * job.world)
    clock.write("FSDP2" + ", layers and loss compiled" * job.compiled)
    dist.destroy_process_group()


def build(job: Job, config: Any) -> nn.Module:
    """Return its model with the job's weights, under its own names and in its order of a head's rows."""
    llama = importlib.import_module("torchtitan.models.llama3")
    scaling = importlib.import_module("torchtitan.models.llama3.model.args").RoPEScalingArgs
    rope = dict(getattr(config, "rope_parameters", None) or {})
    made = scaling(
        scaling_factor=rope.get("factor", 1.0), low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 4.0),
        original_max_position_embeddings=rope.get("original_max_position_embeddings", config.max_position_embeddings),
    )  # fmt: skip
    args = llama.TransformerModelArgs(
        dim=config.hidden_size, n_layers=config.num_hidden_layers, n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads, vocab_size=config.vocab_size, norm_eps=config.rms_norm_eps,
        rope_theta=rope.get("rope_theta", 10000.0), rope_scaling_args=made, max_seq_len=job.seq_len,
        # Its width is a share of the model's, rounded up to a multiple: less than one, of the width itself.
        multiple_of=config.intermediate_size, ffn_dim_multiplier=config.intermediate_size / (8 * config.hidden_size),
    )  # fmt: skip
    model: nn.Module = llama.Transformer(args)
    adapter = llama.Llama3StateDictAdapter(args, None)
    model.load_state_dict(adapter.from_hf(dict(job.load().state_dict())))
    return model.to(job.device)
