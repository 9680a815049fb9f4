"""``smp-train generate``: continue a prompt with the model of a checkpoint, on one device or sharded over all ranks."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smp_train import distributed
from smp_train.arguments.verb_parser import VerbParser
from smp_train.errors import ConfigError
from smp_train.inference import open_model as inference
from smp_train.models.hugging_face import trust_code
from smp_train.models.tokenizer import tokenizer_from
from smp_train.parallel import compile

if TYPE_CHECKING:
    from smp_train.arguments import Arguments

NUM_TOKENS = 64
TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        num_tokens: of the continuation, at most; it ends before with the end token or the model's last position.
        temperature: of the distribution that is drawn from; 0 takes the most probable token.
        top_k: draw from so many of the most probable tokens; 0: from all.
        top_p: draw from the most probable tokens that together have this probability.
        seed: of the draws.
    """

    num_tokens: int = NUM_TOKENS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 42

    def __post_init__(self) -> None:
        for flag, fine, rule in (
            ("num_tokens", self.num_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not fine:
                raise ConfigError(f"--{flag} {getattr(self, flag)}: must be {rule}")


def options() -> argparse.ArgumentParser:
    """Return the parser of this verb's flags."""

    found = VerbParser(prog="smp-train generate", description=__doc__, allow_abbrev=False)
    add = found.add_argument
    add("--checkpoint", required=True, help="checkpoint, a run's folder of checkpoints, or Hugging Face model; also s3://")
    add("--prompt", nargs="+", default=[], help="text to continue; several are continued one after another")
    add("--prompt_file", help="file with one prompt; - for standard input")
    add("--num_tokens", type=int, default=NUM_TOKENS, help=f"new tokens at most (default: {NUM_TOKENS})")
    add("--temperature", type=float, default=0.0, help="0: the most probable token (default); above: draw")
    add("--top_k", type=int, default=0, help="draw from the k most probable tokens; 0: from all (default)")
    add("--top_p", type=float, default=1.0, help="draw from the tokens that together have this probability")
    add("--seed", type=int, default=42, help="seed of the draws (default: 42)")
    add("--stream", type=int, choices=(0, 1), help="print tokens as they come (default: on a terminal)")
    add("--chat", type=int, choices=(0, 1), default=0, help="the prompt is a user's turn of a chat")
    add("--tokenizer", help="folder, tokenizer.json or name on the hub; default: the checkpoint's")
    add("--model", help="configuration of a checkpoint of AWS's sample: folder, config.json or name on the hub")
    add("--dtype", choices=sorted(inference.DTYPES), help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--attn_implementation", default="sdpa", help="attention kernel (default: sdpa)")
    add("--trust_remote_code", type=int, choices=(0, 1), default=0, help="run code that comes with the model")
    return found


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Raises `ConfigError` and `CheckpointError`; collective under a launcher."""
    args = options().parse_args(list(argv))
    sampling = Sampling(args.num_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    prompts = read_prompts(args.prompt, args.prompt_file)
    trust_code(bool(args.trust_remote_code))
    stream = sys.stdout.isatty() if args.stream is None else bool(args.stream)
    with distributed.started(distributed.detect(), timeout_seconds=TIMEOUT_SECONDS) as device:
        continue_prompts(
            inference.describe(args.checkpoint, args.model), device, prompts, sampling, tokenizer=args.tokenizer,
            dtype=inference.dtype_of(args.dtype, device), attn_implementation=args.attn_implementation,
            chat=bool(args.chat), stream=stream,
        )  # fmt: skip
    return 0


def with_flags(args: Arguments, device: torch.device) -> None:
    """Continue --prompt with the checkpoint that the flags of ``train`` name. Collective."""
    names = ("resume_from_checkpoint", "pretrained_checkpoint_file", "hf_pretrained_model_name_or_dir")
    location = next((found for name in (*names, "pretrained_model_name") if (found := getattr(args, name))), None)
    if location is None:
        raise ConfigError("--prompt with --evaluate_only 1 needs --resume_from_checkpoint, the model to put it through")
    continue_prompts(
        inference.describe(location), device, [args.prompt or ""], Sampling(args.num_tokens, seed=args.seed),
        tokenizer=args.tokenizer, attn_implementation=args.attn_implementation,
    )  # fmt: skip


def continue_prompts(
    described: inference.Described,
    device: torch.device,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    tokenizer: str | None = None,
    dtype: torch.dtype | None = None,
    attn_implementation: str = "sdpa",
    chat: bool = False,
    stream: bool = False,
    show: bool = True,
) -> list[str]:
    """Load the model, print what follows each prompt unless not to ``show`` it, and return it on all ranks; collective.

    ``tokenizer`` stands for the one beside the weights; ``dtype`` is bfloat16 on a GPU and float32 on a CPU by default.
    """
    if dtype is None:
        dtype = inference.dtype_of(None, device)
    with ExitStack() as opened:
        found = None
        with distributed.together("reading the tokenizer"):
            if distributed.rank() == 0:
                found = opened.enter_context(described.opened_tokenizer(tokenizer))
                if found is None:
                    raise ConfigError(f"{described.location} has no tokenizer; give --tokenizer")
        config = described.spec.config
        encoded = [encode(found, prompt, config, chat=chat) for prompt in prompts]
        model = inference.load(described, device, dtype, attn_implementation=attn_implementation)
        with distributed.together("reading how the model generates"):
            model.generation_config = described.generation_config()
        shown = [None if not show else "" if chat else prompt for prompt in prompts]
        texts = [
            answer(model, found, each, ids, sampling, stream=stream) for each, ids in zip(shown, encoded, strict=True)
        ]
        return distributed.on_main("generating", lambda: texts)


def continue_prompt(model: Any, files: Mapping[str, bytes], prompt: str, config: Any, sampling: Sampling) -> None:
    """Print what a trained model makes of a prompt; collective. ``files`` are the tokenizer's; rank 0 alone has any."""
    model.eval()
    with ExitStack() as opened:
        tokenizer: Any = None
        with distributed.together("reading the tokenizer"):
            tokenizer = opened.enter_context(tokenizer_from(files))
        opened.enter_context(compile.disabled())
        ids = encode(tokenizer, prompt, config)
        logging.getLogger("smp_train").info("The prompt and what follows it:")
        answer(model, tokenizer, prompt, ids, sampling)


def read_prompts(given: Sequence[str], file: str | None) -> list[str]:
    """Return the prompts. Raises `ConfigError` where there is none."""
    prompts = list(given)
    if file is not None:
        try:
            prompts.append(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt_file {file}: {getattr(error, 'strerror', None) or error}") from None
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("the prompt is no text; give a string, or a list of strings (chat=True: of users' turns)")
    if not prompts or not all(prompts):
        raise ConfigError("there is no prompt; give --prompt or --prompt_file")
    return prompts


def encode(tokenizer: Any, prompt: str, config: Any, *, chat: bool = False) -> list[int]:
    """Return `inference.ids_of` on every rank; only rank 0 needs the tokenizer. Collective."""

    return distributed.on_main("reading the prompt", lambda: inference.ids_of(tokenizer, prompt, config, chat=chat))


def answer(
    model: Any, tokenizer: Any, shown: str | None, ids: Sequence[int], sampling: Sampling, *, stream: bool = False
) -> str:
    """Generate what follows ``ids``, print it on rank 0 after ``shown``, and return it there. Collective.

    None prints nothing. ``stream`` prints each word once it is whole. The speed goes to stderr.
    """
    streamer = None
    if tokenizer is not None and shown is not None:
        print(shown, end="", flush=True)
        if stream:
            from transformers import TextStreamer

            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ends = distributed.on_main("reading the tokenizer", lambda: _ends(model, tokenizer))
    began = time.perf_counter()
    tokens = generate(model, ids, sampling, ends, streamer)
    seconds = time.perf_counter() - began
    if tokenizer is None:
        return ""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    if shown is None:
        return text
    if not stream:
        print(text)
    sys.stdout.flush()
    took = f"{seconds:.{1 if seconds >= 1 else 3}f} s"
    print(f"{len(tokens)} tokens in {took} ({len(tokens) / seconds:.1f} tokens/s)", file=sys.stderr)
    return text


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text: those of generation_config.json, else the tokenizer's."""
    found = model.generation_config.eos_token_id
    found = tokenizer.eos_token_id if found is None else found
    return found if isinstance(found, list) else [] if found is None else [found]


def generate(
    model: Any, ids: Sequence[int], sampling: Sampling, ends: Sequence[int], streamer: Any = None
) -> list[int]:
    """Return the tokens after ``ids``, up to one of ``ends`` or the last position, by transformers' ``generate``.

    Collective.

    Ranks of a sharded model draw from the same seed, and so the same tokens.
    """
    settings: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if sampling.temperature > 0:
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        settings = {"do_sample": True, **drawn}
    torch.manual_seed(sampling.seed)
    prompt = torch.tensor([list(ids)], device=next(model.parameters()).device)
    padding = model.generation_config.pad_token_id
    if padding is None:
        padding = ends[0] if ends else 0
    with torch.no_grad():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=min(sampling.num_tokens, inference.positions(model.config) - len(ids)),
            eos_token_id=list(ends) or None,
            pad_token_id=padding,
            use_cache=True,
            synced_gpus=distributed.world_size() > 1,
            streamer=streamer,
            **settings,
        )
    found: list[int] = out[0, len(ids) :].tolist()
    return found
