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
from typing import TYPE_CHECKING, Any, overload

import torch

from smp_train import distributed
from smp_train.arguments.flag import RULES
from smp_train.arguments.verb_parser import VerbParser
from smp_train.errors import ConfigError
from smp_train.inference.open_model import DTYPES, SavedModel, open_model, sharded_model
from smp_train.models.hugging_face import trust_code
from smp_train.models.tokenizer import tokenizer_from
from smp_train.parallel import compile

if TYPE_CHECKING:
    from smp_train.arguments import Arguments

TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; `generate` describes the fields."""

    num_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 42

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value out of range."""
        for name, rule in (("num_tokens", ">=1"), ("temperature", ">=0"), ("top_k", ">=0"), ("top_p", ">0 <=1")):
            complaint, accepts = RULES[rule]
            if not accepts(getattr(self, name)):
                raise ConfigError(f"--{name} {getattr(self, name)}: {complaint}")


def options() -> argparse.ArgumentParser:
    """Return the parser of this verb's flags; `generate` has the defaults."""
    parser = VerbParser(
        prog="smp-train generate", description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="checkpoint, a run's folder of checkpoints, or Hugging Face model; also s3://")
    add("--prompt", nargs="+", help="text to continue; several are continued one after another")
    add("--prompt_file", help="file with one prompt; - for standard input")
    add("--num_tokens", type=int, help=f"new tokens at most (default: {Sampling.num_tokens})")
    add("--temperature", type=float, help="0: the most probable token (default); above: draw")
    add("--top_k", type=int, help="draw from the k most probable tokens; 0: from all (default)")
    add("--top_p", type=float, help="draw from the tokens that together have this probability")
    add("--seed", type=int, help=f"seed of the draws (default: {Sampling.seed})")
    add("--chat", type=int, choices=(0, 1), help="the prompt is a user's turn of a chat")
    add("--tokenizer", help="folder, tokenizer.json or name on the hub; default: the checkpoint's")
    add("--model", help="configuration of a checkpoint of AWS's sample: folder, config.json or name on the hub")
    add("--dtype", choices=sorted(DTYPES), help="default: bfloat16 on a GPU, float32 on a CPU")
    add("--attn_implementation", help="attention kernel (default: sdpa)")
    add("--trust_remote_code", type=int, choices=(0, 1), help="run the model's own Python code")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Collective under a launcher; raises what `generate` raises."""
    arguments = vars(options().parse_args(list(argv)))
    prompts = arguments.pop("prompt", [])
    if (file := arguments.pop("prompt_file", None)) is not None:
        prompts = [*prompts, read_prompt(file)]
    generate(prompt=prompts, printed=True, **arguments)
    return 0


def read_prompt(file: str) -> str:
    """Return the prompt in a file, or on standard input for "-"."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise ConfigError(f"--prompt_file {file}: {getattr(failure, 'strerror', None) or failure}") from None


@overload
def generate(checkpoint: str, prompt: str, **options: Any) -> str: ...


@overload
def generate(checkpoint: str, prompt: Sequence[str], **options: Any) -> list[str]: ...


def generate(  # type: ignore[misc]
    checkpoint: str, prompt: str | Sequence[str], *, num_tokens: int = Sampling.num_tokens,
    temperature: float = Sampling.temperature, top_k: int = Sampling.top_k, top_p: float = Sampling.top_p,
    seed: int = Sampling.seed, chat: bool = False, tokenizer: str | None = None, model: str | None = None,
    dtype: str | None = None, attn_implementation: str = "sdpa", trust_remote_code: bool = False,
    printed: bool = False,
) -> str | list[str]:  # fmt: skip
    """Return the continuation of a prompt, or of each of several prompts, as ``smp-train generate`` does; collective.

    Raises `ConfigError` and `CheckpointError`.

    Args:
        checkpoint: checkpoint, a run's folder of checkpoints (the newest), or Hugging Face model; also ``s3://``.
        prompt: a text, or several texts.
        num_tokens: maximal number of new tokens; the end token or the model's last position may end the text earlier.
        temperature: temperature of the distribution to draw from; 0 takes the most probable token.
        top_k: draw from the k most probable tokens; 0: from all.
        top_p: draw from the most probable tokens that together have this probability.
        seed: seed of the draws.
        chat: the prompt is a user's turn, rendered by the tokenizer's chat template.
        tokenizer: folder, tokenizer.json or name; by default the checkpoint's.
        model: configuration of a checkpoint of AWS's sample: folder, config.json or name on the hub.
        dtype: float32, bfloat16 or float16; by default bfloat16 on a GPU, float32 on a CPU.
        attn_implementation: attention kernel.
        trust_remote_code: run the model's own Python code.
        printed: whether rank 0 prints prompts and continuations as the tokens come.
    """
    sampling = Sampling(num_tokens, temperature, top_k, top_p, seed)
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not all(isinstance(text, str) for text in prompts):
        raise ConfigError("the prompt is no text; give a string, or a list of strings (chat=True: of users' turns)")
    if not prompts or not all(prompts):
        raise ConfigError("there is no prompt; give --prompt or --prompt_file")
    trust_code(trust_remote_code)
    with distributed.started(distributed.detect(), timeout_seconds=TIMEOUT_SECONDS) as device:
        texts = load_and_continue(
            open_model(checkpoint, model), device, prompts, sampling, printed=printed, tokenizer=tokenizer, dtype=dtype,
            attn_implementation=attn_implementation, chat=chat,
        )  # fmt: skip
    return texts[0] if isinstance(prompt, str) else texts


def generate_with_flags(args: Arguments, device: torch.device) -> None:
    """Print the continuation of --prompt by the checkpoint or model that the flags of ``train`` name; collective."""
    flags = ("resume_from_checkpoint", "pretrained_checkpoint_file", "hf_pretrained_model_name_or_dir")
    locations = filter(None, (getattr(args, flag) for flag in (*flags, "pretrained_model_name")))
    if (location := next(locations, None)) is None:
        raise ConfigError("--prompt with --evaluate_only 1 needs --resume_from_checkpoint, the model to put it through")
    load_and_continue(
        open_model(location), device, [args.prompt or ""], Sampling(args.num_tokens, seed=args.seed), printed=True,
        tokenizer=args.tokenizer, attn_implementation=args.attn_implementation,
    )  # fmt: skip


def load_and_continue(
    saved: SavedModel, device: torch.device, prompts: Sequence[str], sampling: Sampling, *, printed: bool,
    tokenizer: str | None = None, dtype: str | None = None, attn_implementation: str = "sdpa", chat: bool = False,
) -> list[str]:  # fmt: skip
    """Load a saved model and return the continuation of each prompt, on all ranks; collective."""
    with ExitStack() as opened:
        opened_tokenizer: Any = None
        with distributed.together("reading the tokenizer"):
            if distributed.rank() == 0:
                opened_tokenizer = opened.enter_context(saved.tokenizer(tokenizer))
                if opened_tokenizer is None:
                    raise ConfigError(f"{saved.location} has no tokenizer; give --tokenizer")
        ids_of_prompts = distributed.on_main(
            "reading the prompts",
            lambda: [prompt_ids(opened_tokenizer, prompt, saved.spec.config, chat=chat) for prompt in prompts],
        )
        model = sharded_model(saved, device, dtype, attn_implementation)
        return [
            continue_prompt(model, opened_tokenizer, "" if chat else prompt, ids, sampling, printed=printed)
            for prompt, ids in zip(prompts, ids_of_prompts, strict=True)
        ]


def continue_with_trained_model(
    model: Any, files: Mapping[str, bytes], prompt: str, config: Any, sampling: Sampling
) -> None:
    """Print a trained model's continuation of a prompt; collective. Only rank 0 needs the tokenizer's ``files``."""
    model.eval()
    with ExitStack() as opened:
        with distributed.together("reading the tokenizer"):
            tokenizer = opened.enter_context(tokenizer_from(files))
        opened.enter_context(compile.disabled())
        ids = distributed.on_main("reading the prompt", lambda: prompt_ids(tokenizer, prompt, config))
        logging.getLogger("smp_train").info("The prompt and what follows it:")
        continue_prompt(model, tokenizer, prompt, ids, sampling, printed=True)


def prompt_ids(tokenizer: Any, prompt: str, config: Any, *, chat: bool = False) -> list[int]:
    """Return the ids of a prompt; with ``chat``, of a user's turn and the beginning of the answer. Not collective.

    Raises `ConfigError` if the model lacks an id or has too few positions.
    """
    if chat:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError("--chat: the tokenizer has no chat template; leave --chat out")
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ConfigError(f"--prompt {prompt!r}: the tokenizer makes no token of it")
    if max(ids) >= config.vocab_size:
        raise ConfigError(
            f"--prompt {prompt!r}: has token {max(ids)} and the model a vocabulary of {config.vocab_size}; give "
            "the tokenizer that the model was trained with"
        )
    if len(ids) >= max_positions(config):
        raise ConfigError(f"--prompt: has {len(ids)} tokens and the model {max_positions(config)} positions")
    return list(map(int, ids))


def max_positions(config: Any) -> int:
    """Return the maximal number of tokens in a text of this model."""
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def continue_prompt(
    model: Any, tokenizer: Any, prompt: str, ids: Sequence[int], sampling: Sampling, *, printed: bool
) -> str:
    """Return the continuation of ``ids`` by transformers' ``generate``, on all ranks; collective.

    Only rank 0 needs the tokenizer. If ``printed``, it prints the continuation after ``prompt``, each word once it is
    complete, and the speed to stderr. Ranks of a sharded model draw the same tokens, as they use the same seed.
    """
    end_tokens, padding = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    if end_tokens is None:
        end_tokens = distributed.on_main("reading the tokenizer", lambda: tokenizer.eos_token_id)
    if padding is None:
        padding = end_tokens[0] if isinstance(end_tokens, list) else end_tokens or 0
    draws = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    streamer = None
    if printed and distributed.rank() == 0:
        from transformers import TextStreamer

        print(prompt, end="", flush=True)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    torch.manual_seed(sampling.seed)
    inputs = torch.tensor([list(ids)], device=next(model.parameters()).device)
    began = time.perf_counter()
    with torch.no_grad():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(sampling.num_tokens, max_positions(model.config) - len(ids)),
            eos_token_id=end_tokens,
            pad_token_id=padding,
            use_cache=True,
            synced_gpus=distributed.world_size() > 1,
            streamer=streamer,
            do_sample=sampling.temperature > 0,
            **(draws if sampling.temperature > 0 else dict.fromkeys(draws)),
        )
    tokens: list[int] = output[0, len(ids) :].tolist()
    if streamer is not None:
        seconds = time.perf_counter() - began
        sys.stdout.flush()
        print(f"{len(tokens)} tokens in {seconds:.3g} s ({len(tokens) / seconds:.1f} tokens/s)", file=sys.stderr)
    return distributed.on_main("generating", lambda: str(tokenizer.decode(tokens, skip_special_tokens=True)))
