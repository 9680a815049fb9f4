"""Training, evaluation and generation from Python: `train`, `evaluate`, `generate`, `load_model`.

Settings are the flags of the command, by name. Failures are `smp_train.errors.SmpTrainError`, whose ``exit_code`` is
that of the command. Each function works in one process, such as a notebook's, and on every rank of a launcher.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

from smp_train import distributed, train_lib
from smp_train.arguments import Arguments, validate
from smp_train.arguments.own import Own
from smp_train.arguments.parse import from_keywords
from smp_train.arguments.validation import prompts_only
from smp_train.data.source import Source
from smp_train.distributed import Runtime
from smp_train.distributed.agree import is_alone
from smp_train.distributed.group import device_of
from smp_train.errors import ConfigError
from smp_train.failure_report import FailureReporter, report_uncaught
from smp_train.inference import evaluation, generation, open_model
from smp_train.inference.evaluation import Evaluation
from smp_train.models.hugging_face import trust_code
from smp_train.models.lora import merge_adapters
from smp_train.models.resolve import settled_flags
from smp_train.telemetry.metrics import history, read_metrics

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings(Own, Arguments):
    """Every keyword of `train`: what a program gives, and all flags of ``smp-train train``."""


@dataclass(frozen=True)
class Trained:
    """How a run ended.

    Attributes:
        run_name: its name, given or of the model.
        run_dir: its folder, with ``metrics.jsonl``, ``run.json`` and logs.
        step: updates done, in all starts.
        stopped: whether it ended on request, before its last step.
        checkpoint: location of its newest checkpoint, or its best with ``load_best_model_at_end``; None where there is
            none.
        loss: of the last logged step, in nats per counted token; None where none was logged.
        validation_loss: of the last validation; None where there was none.
        best_step: step of the lowest validation loss; None without validation.
    """

    run_name: str
    run_dir: str
    step: int
    stopped: bool
    checkpoint: str | None
    loss: float | None
    validation_loss: float | None
    best_step: int | None

    def history(self) -> list[dict[str, Any]]:
        """Return the records of ``metrics.jsonl``, without those that a resume superseded; steps have no ``event``."""
        return history(read_metrics(self.run_dir))


def _with_keywords_of(settings: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the keywords of a dataclass, for type checkers, ``help`` and completion."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        own = inspect.signature(function)
        found = inspect.signature(settings).parameters.values()
        keywords = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in found]
        function.__signature__ = own.replace(parameters=keywords)  # type: ignore[attr-defined]
        return function

    return decorate


@_with_keywords_of(Settings)
def train(**settings: Any) -> Trained:
    """Train as ``smp-train train`` does, and return how the run ended.

    Keywords are those of `Settings`: every flag by name, as docs/flags.md lists them, under the same rules, and what
    `Own` describes: ``training_data``, ``validation_data``, ``loss``, ``on_step``, ``on_validation``, ``on_save``.
    ``SM_HP_*`` are not read. Collective under a launcher; in the main thread, which takes requests to stop.

    Raises:
        SmpTrainError: as the command fails. A callback that raises is named, with the step; its exception is the cause.
    """
    given = {each.name for each in dataclasses.fields(Own)}
    own = Own(**{name: value for name, value in settings.items() if name in given})
    with _called(debug=bool(settings.get("debug"))) as ranks:
        resolved = from_keywords({name: value for name, value in settings.items() if name not in given}, own)
        args = resolved.args
        if args.print_config:
            raise ConfigError("--print_config is for the command; the settings of a run are in its run.json")
        if prompts_only(args) and own.validation_data is None:
            raise ConfigError("--prompt with --evaluate_only 1: call smp_train.generate")
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("train runs in the main thread, which takes requests to stop; call it there")
        validate(args, ranks.world_size, ranks.local_world_size, own)
        settled_flags(args)
        run = train_lib.train(resolved, ranks)
    return Trained(
        run_name=run.args.run_name, run_dir=run.args.run_dir, step=run.progress.step, stopped=run.stopped,
        checkpoint=run.saved_path, loss=run.losses.get("loss"), validation_loss=run.losses.get("validation_loss"),
        best_step=run.best.step,
    )  # fmt: skip


def evaluate(
    checkpoint: str,
    data: str | Source | Sequence[str] | Mapping[str, str | Source],
    *,
    batches: int | None = None,
    model: str | None = None,
    **flags: Any,
) -> Evaluation:
    """Return loss, perplexity and tokens of a checkpoint on data sets, as ``smp-train evaluate`` does; collective.

    Args:
        checkpoint: checkpoint, a run's folder of checkpoints (the newest), or Hugging Face model; also ``s3://``.
        data: one or several places (token shards, Arrow data sets, text), or places and `Source` objects by name.
        batches: of a data set at most, per data-parallel rank; None for all.
        model: configuration of a checkpoint of AWS's sample: folder, config.json or name on the hub.
        flags: of ``smp-train train``, by name; by default those of the checkpoint's run.
    """
    if isinstance(data, Source):
        data = {"data": data}
    with _called(debug=bool(flags.get("debug"))):
        resolved = from_keywords(flags, environ={})
        places = data if isinstance(data, Mapping) else [data] if isinstance(data, str) else list(data)
        return evaluation.run(resolved, checkpoint, places, batches=batches, model=model)


@overload
def generate(checkpoint: str, prompt: str, **options: Any) -> str: ...


@overload
def generate(checkpoint: str, prompt: Sequence[str], **options: Any) -> list[str]: ...


def generate(  # type: ignore[misc]
    checkpoint: str, prompt: str | Sequence[str], *, num_tokens: int = generation.NUM_TOKENS, temperature: float = 0.0,
    top_k: int = 0, top_p: float = 1.0, seed: int = 42, chat: bool = False, tokenizer: str | None = None,
    model: str | None = None, dtype: str | None = None, attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> str | list[str]:  # fmt: skip
    """Return what follows a prompt, or each of several, as ``smp-train generate`` does; collective.

    Args:
        checkpoint: checkpoint, a run's folder of checkpoints (the newest), or Hugging Face model; also ``s3://``.
        prompt: text, or several.
        num_tokens: of the continuation, at most.
        temperature: of the distribution that is drawn from; 0 takes the most probable token.
        top_k: draw from so many of the most probable tokens; 0: from all.
        top_p: draw from the most probable tokens that together have this probability.
        seed: of the draws.
        chat: the prompt is a user's turn, put through the tokenizer's chat template.
        tokenizer: folder, tokenizer.json or name; by default the checkpoint's.
        model: configuration of a checkpoint of AWS's sample: folder, config.json or name on the hub.
        dtype: float32, bfloat16 or float16; by default bfloat16 on a GPU, float32 on a CPU.
        attn_implementation: attention kernel.
        trust_remote_code: run code that comes with the model.
    """
    with _called() as ranks:
        sampling = generation.Sampling(num_tokens, temperature, top_k, top_p, seed)
        prompts = generation.read_prompts([prompt] if isinstance(prompt, str) else prompt, None)
        trust_code(trust_remote_code)
        with distributed.started(ranks, timeout_seconds=generation.TIMEOUT_SECONDS) as device:
            texts = generation.continue_prompts(
                open_model.describe(checkpoint, model), device, prompts, sampling, tokenizer=tokenizer,
                dtype=open_model.dtype_of(dtype, device), attn_implementation=attn_implementation, chat=chat,
                show=False,
            )  # fmt: skip
    return texts[0] if isinstance(prompt, str) else texts


def load_model(
    location: str, *, device: Any = None, dtype: str | None = None, attn_implementation: str = "sdpa",
    model: str | None = None, tokenizer: str | None = None, trust_remote_code: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Return the transformers model of any checkpoint or folder, in evaluation mode, and its tokenizer or None.

    Each process has the whole model, with adapters added into its weights; not collective.

    Args:
        location: checkpoint, a run's folder of checkpoints (the newest), or Hugging Face model; also ``s3://``.
        device: of torch; by default this process's GPU, or the CPU.
        dtype: float32, bfloat16 or float16; by default bfloat16 on a GPU, float32 on a CPU.
        attn_implementation: attention kernel.
        model: configuration of a checkpoint of AWS's sample: folder, config.json or name on the hub.
        tokenizer: folder, tokenizer.json or name; by default the one beside the weights.
        trust_remote_code: run code that comes with the model.
    """
    import torch

    trust_code(trust_remote_code)
    where = device_of(distributed.detect(), "auto") if device is None else torch.device(device)
    with distributed.alone():
        described = open_model.describe(location, model)
        loaded = open_model.load(
            described, where, open_model.dtype_of(dtype, where), attn_implementation=attn_implementation
        )
        if described.spec.lora is not None:
            merge_adapters(loaded)
        loaded.generation_config = described.generation_config()
        with described.opened_tokenizer(tokenizer) as found:
            return loaded, found


@contextmanager
def _called(*, debug: bool = False) -> Iterator[Runtime]:
    """Yield this process's place; of several ranks, a failure that nobody catches ends one as it ends the command."""
    if not is_alone():
        raise ConfigError(
            "a process group is there already, of this program's own or of a call that failed; call smp_train before "
            "torch.distributed.init_process_group, or after destroy_process_group"
        )
    ranks = distributed.detect()
    try:
        yield ranks
    except Exception:
        if ranks.world_size > 1:
            report_uncaught(FailureReporter(debug, ranks))
        raise
