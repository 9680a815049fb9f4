"""Imported last by the server that forks the ranks: what each rank would do again for itself is done here once."""

import contextlib
import gc

import torch
from transformers import LlamaConfig, LlamaForCausalLM

with contextlib.suppress(ImportError):  # transformers 4 has no such table; its patterns take a while to compile
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
with torch.device("meta"):
    LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))

# A collection in a forked process would touch, and so copy, every page that holds an object of the server's.
gc.collect()
gc.freeze()
