"""torch.compile for each decoder layer and for the loss: layers of one kind share one compilation."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import nn

from smp_train import losses
from smp_train.distributed import ALL_RANKS
from smp_train.distributed.host import missing_for_kernels
from smp_train.errors import ConfigError
from smp_train.storage.paths import private_folder

INDUCTOR = "inductor"
CACHE = "TORCHINDUCTOR_CACHE_DIR"
RECOMPILE_LIMIT = 64  # 32 are needed: four kinds of layers, checkpointed or not, training or not, masked or not
_kept_in: str | None = None
"""The folder that this process chose for compiled code."""

logger = logging.getLogger("smp_train.native")
F = TypeVar("F", bound=Callable[..., Any])


def enabled(asked: bool | None, *, device: torch.device, backend: str, training: bool) -> bool:
    """Return whether to compile: as the flag says; without it, if this is a GPU and its compilers are installed.

    Args:
        asked: --use_torch_compile; None if it is not given. The decision is then logged with its reason.
        device: This rank's device.
        backend: --torch_compile_backend.
        training: False for an evaluation alone, which ends before compilation pays off.

    Raises:
        ConfigError: this torch has no compiler of that name.
    """
    if asked is False or not training:
        return False
    if asked is None and (reason := _why_not(device)):
        logger.info("Compilation: off (%s)", reason)
        return False
    known = [INDUCTOR] if backend == INDUCTOR else torch.compiler.list_backends(exclude_tags=())  # imports all backends
    if backend not in known:
        offered = [name for name in known if "TESTING_ONLY" not in name]
        raise ConfigError(f"--torch_compile_backend {backend}: this torch has {', '.join(offered)}")
    if asked is None:
        logger.info("Compilation: on, of each decoder layer and of the loss; --use_torch_compile 0 does without")
    return True


def _why_not(device: torch.device) -> str:
    if device.type != "cuda":
        return "on a CPU it takes longer than it saves; --use_torch_compile 1 compiles all the same"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return missing_for_kernels()


def prepare(run_dir: str | os.PathLike[str], device: torch.device) -> None:
    """Put inductor's cache into the run folder, and compute its cache keys in a thread while the model is built.

    Restarts, and other nodes that see the folder, reuse the compiled code. The cache folder is readable by this user
    alone, because its code is executed. If it cannot be made, or if the user has set a cache folder, inductor's own
    setting stays.
    """
    global _kept_in
    from torch._inductor import codecache, cpu_vec_isa
    from torch._inductor.runtime import cache_dir_utils, triton_compat

    # inductor itself may have set the variable to its default.
    if os.environ.get(CACHE) in (None, cache_dir_utils.default_cache_dir(), _kept_in):
        try:
            _kept_in = os.environ[CACHE] = private_folder("compiled", os.fspath(run_dir))
        except ConfigError as failure:
            logger.info("Compiled code is not kept for restarts: %s", failure)

    def keys() -> None:
        with suppress(Exception):  # the first step computes the same keys, and would raise the failure
            codecache.torch_key()  # a hash of torch's files
            if device.type == "cuda":
                triton_compat.triton_key()  # a hash of Triton's files
            else:
                cpu_vec_isa.pick_vec_isa()  # runs a process per instruction set to see what this CPU has

    threading.Thread(target=keys, name="inductor-keys", daemon=True).start()


def disabled() -> AbstractContextManager[Any]:
    """Return a context in which compiled layers run eagerly: each new length of a text would compile them again."""
    if hasattr(torch.compiler, "set_stance"):  # missing from the torch in SMP's containers
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def apply(layers: list[nn.Module], *, backend: str) -> None:
    """Compile the ``forward`` of every decoder layer in place; parameter names do not change.

    Layers are compiled, not the whole model: equal layers share one compilation of some seconds, and FSDP2 communicates
    between layers. Two kinds of layers, such as checkpointed and plain ones, take two compilations. Code that cannot be
    traced breaks a layer's graph, but does not stop the run.

    Args:
        layers: The decoder layers, checkpointed or not.
        backend: A compiler's name in `torch.compile`.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_report_limit)
    for layer in layers:
        # Static shapes: a training run has one, and a validation run with another batch compiles once more.
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)


def _report_limit(record: logging.LogRecord) -> bool:
    """Replace dynamo's paragraph about a function that it no longer compiles by one warning."""
    limit, *details = record.getMessage().splitlines() or [""]
    limited = limit.startswith("torch._dynamo hit config.")
    if limited:
        why = " ".join(map(str.strip, details[:2]))
        logger.warning("Compilation: %s and goes on uncompiled, slower: %s", limit, why, extra=ALL_RANKS)
    return not limited


def loss_kernels(backend: str) -> losses.Kernels:
    """Return the chunked loss's compiled kernels: the first reduces the logits, the second computes their gradient.

    The number of tokens is dynamic, because the last chunk may have fewer, and validation may have other batches.
    """
    return losses.Kernels(
        _dynamic_rows(torch.compile(losses.log_sum_exp, backend=backend)),
        _dynamic_rows(torch.compile(losses.softmax, backend=backend)),
        fused=True,
    )


def _dynamic_rows(compiled: F) -> F:
    def call(*inputs: Any) -> Any:
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor) and tensor.shape[0] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*inputs)

    return call  # type: ignore[return-value]
