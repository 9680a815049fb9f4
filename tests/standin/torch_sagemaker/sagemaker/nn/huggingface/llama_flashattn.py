"""Llama's attention with SMP's kernel; transformers' own here."""

from transformers.models.llama.modeling_llama import LlamaAttention


class LlamaFlashAttention(LlamaAttention):
    """As `transformers` has it, made of the configuration alone."""

    def __init__(self, config: object) -> None:
        super().__init__(config, layer_idx=0)
