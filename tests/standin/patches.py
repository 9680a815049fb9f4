"""What SMP's own build of torch accepts beyond the stock one, and what FSDP1 lacks on CPUs."""

from __future__ import annotations

import enum
import functools
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests import standin

_applied = False


def apply() -> None:
    """Patch once per process."""
    global _applied
    if _applied:
        return
    _applied = True
    import torch.distributed.fsdp as fsdp
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    stock = fsdp.FullyShardedDataParallel
    original = stock.__init__

    def init(self: Any, module: nn.Module, *args: Any, post_param_init_fn: Any = None, **kwargs: Any) -> None:
        import torch.sagemaker as tsm

        if _inside:  # a layer of the root's
            original(self, module, *args, **kwargs)
            return
        settings = dict(kwargs, post_param_init_fn=post_param_init_fn)
        strategy, groups = _strategy(tsm.state, kwargs.get("sharding_strategy"), settings)
        standin.record(
            "FSDP", positional=len(args), meta=any(p.is_meta for p in module.parameters()), given=_plain(settings),
        )  # fmt: skip
        dtypes = {p.dtype for p in module.parameters()}
        assert dtypes == {torch.float32}, f"parameters must be float32 when FSDP wraps them: {dtypes}"
        kwargs["sharding_strategy"] = strategy
        if groups is not None:
            kwargs["process_group"] = groups
        if kwargs.get("device_id") is None and not torch.cuda.is_available():
            kwargs["device_id"] = torch.device("cpu")
        with _ties(post_param_init_fn):
            _inside.append(True)
            try:
                original(self, module, *args, **kwargs)
            finally:
                _inside.pop()

    stock.__init__ = init  # type: ignore[method-assign]
    if not torch.cuda.is_available():
        from torch.distributed.fsdp import _init_utils

        # Stock FSDP1 broadcasts from rank 0 on GPUs only; gloo does it as well.
        _init_utils._check_module_states_for_sync_module_states = lambda states: None
    _patch_wrappers(wrappers)
    _patch_state_dicts(fsdp)
    optimizer = torch.optim.Optimizer.__init__

    def optimizer_init(self: Any, *args: Any, **kwargs: Any) -> None:
        standin.record("optimizer")
        optimizer(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = optimizer_init  # type: ignore[method-assign]
    barrier = dist.barrier

    def recorded_barrier(*args: Any, **kwargs: Any) -> Any:
        standin.record("barrier")
        return barrier(*args, **kwargs)

    dist.barrier = recorded_barrier


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return FSDP's arguments as plain values: functions by whether they are there, groups by their ranks."""

    def plain(value: Any) -> Any:
        if isinstance(value, functools.partial):
            classes = value.keywords.get("transformer_layer_cls", ())
            return (value.func.__name__, sorted(each.__name__ for each in classes))
        if isinstance(value, dist.ProcessGroup):
            return dist.get_process_group_ranks(value)
        if isinstance(value, tuple):
            return [plain(each) for each in value]
        if isinstance(value, enum.Enum):
            return value.name
        if callable(value):
            return "function"
        return value if isinstance(value, bool | int | str | None) else repr(value)

    return {name: plain(value) for name, value in settings.items()}


_inside: list[bool] = []


def _strategy(state: Any, wanted: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Rewrite the strategy as SMP does, and return it with the groups to shard over."""
    from torch.distributed.fsdp import ShardingStrategy as S

    if not state.ready:
        raise RuntimeError("torch.sagemaker.init has not been called")
    state.sharded = True
    if state.native and state.hybrid_shard_degree == 0:
        state.sharded = wanted != S.NO_SHARD
        return wanted, None
    for name in ("process_group", "device_mesh"):
        if settings.get(name) is not None:
            raise RuntimeError(f"SMP shards over groups of its own: pass no {name}")
    if state.shard == 1:
        state.sharded = False
        return S.NO_SHARD, state.group("replica")
    shard, replica = state.group("shard"), state.group("replica")
    hybrid = wanted if wanted in (S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2) else S.HYBRID_SHARD
    return hybrid, (shard, replica)


@contextmanager
def _ties(post: Any) -> Any:
    """Call ``post`` once FSDP has given every parameter memory, and before it flattens them."""
    from torch.distributed.fsdp import _init_utils as utils

    original = utils._materialize_with_param_init_fn

    def materialise(root: nn.Module, *args: Any, **options: Any) -> None:
        original(root, *args, **options)
        if post is not None:
            post(root)

    utils._materialize_with_param_init_fn = materialise
    try:
        yield
    finally:
        utils._materialize_with_param_init_fn = original


def _patch_state_dicts(fsdp: Any) -> None:
    """Let full state dicts be translated to Hugging Face's names."""
    Config = fsdp.FullStateDictConfig
    config_init, state_dict = Config.__init__, fsdp.FullyShardedDataParallel.state_dict

    def init(self: Any, *args: Any, translate_on_save: bool = True, **kwargs: Any) -> None:
        config_init(self, *args, **kwargs)
        self.translate_on_save = translate_on_save

    Config.__init__ = init

    def translated(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = state_dict(self, *args, **kwargs)
        if self._is_root is not False and type(self.module).__name__ == "TransformerLMHead":
            from torch.sagemaker.state_handler import state
            from torch.sagemaker.tensor_parallel import transformer

            config = self._state_dict_config
            if isinstance(config, Config) and config.translate_on_save:
                standin.record("full_state_dict", entries=len(found))
                found = transformer.translated(found)
                return {} if config.rank0_only and state.rank else found
        return found

    fsdp.FullyShardedDataParallel.state_dict = translated


def _patch_wrappers(wrappers: Any) -> None:
    apply_stock, offload_stock, wrap_stock = (
        wrappers.apply_activation_checkpointing, wrappers.offload_wrapper, wrappers.checkpoint_wrapper,
    )  # fmt: skip
    seen: dict[str, Any] = {"impl": None, "own": False}

    def wrap(module: nn.Module, checkpoint_impl: Any = wrappers.CheckpointImpl.NO_REENTRANT, **kwargs: Any) -> Any:
        seen["impl"], seen["own"] = checkpoint_impl, "checkpoint_fn" in kwargs
        return wrap_stock(module, checkpoint_impl=checkpoint_impl, **kwargs)

    def checkpointing(model: nn.Module, **kwargs: Any) -> None:
        classes = {type(m).__name__ for m in model.modules() if kwargs["check_fn"](m)}
        apply_stock(model, **kwargs)
        standin.record(
            "activation_checkpointing", classes=sorted(classes), impl=seen["impl"].name, root=type(model).__name__,
            own=seen["own"],
        )

    def offload(model: nn.Module) -> nn.Module:
        import torch.sagemaker as tsm

        standin.record("offload_wrapper", root=type(model).__name__, impl=seen["impl"] and seen["impl"].name)
        if seen["impl"] is None:
            raise RuntimeError("offload_wrapper needs activation checkpointing")
        if tsm.state.sm_activation_offloading and seen["impl"] is not wrappers.CheckpointImpl.REENTRANT:
            raise RuntimeError("SMP's offloading needs the reentrant implementation of checkpointing")
        return offload_stock(model) if torch.cuda.is_available() else _OnCpu(model)

    class _OnCpu(wrappers.OffloadWrapper):
        """Stock offloading pins memory, which needs a GPU: here activations are where they are to go already."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._checkpoint_wrapped_module(*args, **kwargs)

    _OnCpu.__name__ = "OffloadWrapper"
    wrappers.checkpoint_wrapper = wrap
    wrappers.apply_activation_checkpointing = checkpointing
    wrappers.offload_wrapper = offload


