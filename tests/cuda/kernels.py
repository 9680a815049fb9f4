"""Compiles, without a GPU, every kernel that a run compiles for one: ``python -m tests.cuda.kernels --out FILE.md``.

The model, the checkpoints, the loss and `torch.compile` are the package's own, on fake tensors that claim to be on the
GPU. Inductor generates its kernels, Triton and ptxas compile them to cubins, and nothing runs them: in place of the
compiled graph its operations are applied to fake tensors, so that the backward pass is traced and compiled too. It
needs a build of torch for CUDA, whose few calls of the driver `null_cuda.c` answers.

The exit code is 1 where anything does not compile or takes more than an architecture has.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KIB = 1024
SEQUENCE = 8192
REGISTERS, REGISTERS_OF_A_THREAD = 65536, 255
"""At most, of a block and of a thread, on all architectures."""


@dataclass(frozen=True)
class Architecture:
    """A GPU, as far as inductor asks for it."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    """Bytes of shared memory that one block may have at most."""


ARCHITECTURES = {
    80: Architecture("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * KIB),
    90: Architecture("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * KIB),
    100: Architecture("NVIDIA B200", (10, 0), 148, 227 * KIB),
}
LLAMA = {"model_type": "llama_v3", "model_size": "8b"}
CASES: dict[str, dict[str, Any]] = {
    "llama_v3-8b": LLAMA,
    "llama_v3-8b, selective:op": {**LLAMA, "activation_checkpointing": "selective:op"},
    "llama_v3-8b, not checkpointed": {**LLAMA, "activation_checkpointing": "none"},
    "llama_v3-8b, packed rows": {**LLAMA, "short": "pack"},
    "llama_v3-1b, head tied": {"model_type": "llama_v3", "model_size": "1b"},
    "mistral-7b, window": {"model_type": "mistral", "model_size": "7b", "sliding_window": 4096},
    "mixtral-8x7b, experts": {"model_type": "mixtral", "model_size": "8x7b"},
    "gpt_neox-20b": {"model_type": "gpt_neox", "model_size": "20b"},
    "gpt2-1.5b, dropout": {"model_type": "gpt2", "model_size": "1.5b"},
    "falcon-7b": {"model_type": "falcon", "model_size": "7b"},
    "phi-2.7b": {"model_type": "phi", "model_size": "2.7b"},
}
"""By name the flags of a run, its other flags left at their defaults."""


def main() -> int:
    """Compile all cases for each architecture in a process of its own, and write a table of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="file of the table, in Markdown")
    parser.add_argument("--architectures", type=int, nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--only", default="", help="the cases whose name contains this")
    options = parser.parse_args()
    began, results = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="smp-train-kernels-") as folder:
        build_null_cuda(Path(folder))
        for architecture in options.architectures:
            results[architecture] = of_architecture(architecture, folder, options.only)
    command = ["python", "-m", "tests.cuda.kernels", *sys.argv[1:]]
    text = report(results, shlex.join(command), (time.monotonic() - began) / 60)
    print(text)
    if options.out:
        Path(options.out).write_text(text)
    return int(any(problems(architecture, record) for architecture, of in results.items() for record in of))


def build_null_cuda(folder: Path) -> Path:
    """Return the library to preload, in place of CUDA's driver and of a part of its runtime."""
    library, source = folder / "null_cuda.so", Path(__file__).with_name("null_cuda.c")
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]  # torch finds the driver loaded already
    subprocess.run([os.environ.get("CC", "cc"), *options, "-o", library, source], check=True)
    return library


def of_architecture(architecture: int, folder: str, only: str) -> list[dict[str, Any]]:
    """Return the records of all cases of an architecture."""
    out = Path(folder, f"{architecture}.json")
    caches = Path(folder, str(architecture))
    environ = {
        **os.environ, "LD_PRELOAD": f"{folder}/null_cuda.so", "NULL_CUDA_CAPABILITY": str(architecture),
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    code = f"from tests.cuda.kernels import compile_all; compile_all({architecture}, {only!r}, {str(out)!r})"
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    return json.loads(out.read_text())


def problems(architecture: int, record: dict[str, Any]) -> list[str]:
    """Return what is wrong with a case."""
    if "failure" in record:
        return [record["failure"]]
    gpu, found = ARCHITECTURES[architecture], []
    if "reads" in record:
        found.append("the host reads values from the device, and so waits for it in every layer")
    for each in ("forward", "backward"):
        if not any(kernel["pass"] == each for kernel in record["kernels"]):
            found.append(f"no kernel in the {each} pass")
    for kernel in record["kernels"]:
        if kernel["registers"] > REGISTERS_OF_A_THREAD or kernel["registers"] * kernel["threads"] > REGISTERS:
            found.append(f"{kernel['name']}: {kernel['registers']} registers x {kernel['threads']} threads")
        if kernel["shared"] > gpu.shared:
            found.append(f"{kernel['name']}: {kernel['shared']} bytes of shared memory of {gpu.shared}")
    return found


def report(results: dict[int, list[dict[str, Any]]], command: str, minutes: float) -> str:
    """Return the tables: what each case takes at most on each architecture, then every spill and every problem."""
    import torch
    import transformers
    import triton

    lines = [
        f"### torch {torch.__version__}, Triton {triton.__version__}, transformers {transformers.__version__}", "",
        f"{time.strftime('%Y-%m-%d')}, {minutes:.0f} minutes, no GPU: `{command}`", "",
        "| case | " + " | ".join(f"sm_{architecture}" for architecture in results) + " |",
        "|---|" + "---|" * len(results),
    ]  # fmt: skip
    for row in zip(*results.values(), strict=True):
        cells = [_cell(record) for record in row]
        lines.append(f"| {row[0]['case']} | " + " | ".join(cells) + " |")
    for architecture, records in results.items():
        for record in records:
            of = f"- sm_{architecture}, {record['case']}"
            lines += [f"{of}: {problem}" for problem in problems(architecture, record)]
            lines += [
                f"{of}, {kernel['pass']}: {kernel['name']} ({kernel['config']}) spills {kernel['spilled']} bytes"
                for kernel in record.get("kernels", ()) if kernel["spilled"]
            ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _cell(record: dict[str, Any]) -> str:
    kernels = record.get("kernels")
    if not kernels:
        return "failed" if "failure" in record else "no kernel"
    count = {each: len({k["name"] for k in kernels if k["pass"] == each}) for each in ("forward", "backward")}
    registers, shared = (max(kernel[what] for kernel in kernels) for what in ("registers", "shared"))
    spilled = sum(kernel["spilled"] > 0 for kernel in kernels)
    return (
        f"{count['forward']} + {count['backward']} kernels, {registers} registers, {shared / KIB:.1f} KiB, "
        f"{spilled} of {len(kernels)} spill"
    )


def compile_all(architecture: int, only: str, out: str) -> None:
    """Compile the cases in this process and write their records."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.testing._internal.distributed.fake_pg import FakeStore

    pretend(architecture)
    compiler, records = Compiler(), []
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    for name, flags in CASES.items():
        if only not in name:
            continue
        record: dict[str, Any] = {"case": name}
        compiler.kernels = []
        try:
            step(flags)
            record["kernels"] = compiler.kernels
        except DataDependentOutputException:  # where fake tensors end, and the host would wait for the device
            record |= {"kernels": compiler.kernels, "reads": True}
        except Exception as failure:
            traceback.print_exc()
            record["failure"] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        records.append(record)
        print(f"sm_{architecture} {name}: {_cell(record)}", flush=True)
    Path(out).write_text(json.dumps(records))


def pretend(architecture: int) -> None:
    """Let torch, inductor and Triton in this process take the architecture's GPU for present."""
    import torch
    import triton
    from torch._dynamo import device_interface
    from torch._inductor import config
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver

    def answer(value: Any) -> Any:
        return lambda *args, **kwargs: value

    config.joint_graph_constant_folding = False  # constants are computed on the GPU
    config.use_static_cuda_launcher = False

    gpu = ARCHITECTURES[architecture]
    properties = SimpleNamespace(
        name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1], multi_processor_count=gpu.multiprocessors,
        regs_per_multiprocessor=REGISTERS, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        warp_size=32, total_memory=80 << 30, L2_cache_size=50 << 20, shared_memory_per_block=48 * KIB, gcnArchName="",
        shared_memory_per_block_optin=gpu.shared, shared_memory_per_multiprocessor=gpu.shared + KIB, is_integrated=0,
    )  # fmt: skip
    shared = {"get_device_properties": properties, "current_device": 0, "set_device": None}
    torch.cuda.get_device_properties = answer(properties)
    interface = device_interface.CudaInterface
    worker = {name: staticmethod(answer(value)) for name, value in shared.items()}
    interface.Worker = type("Worker", (interface.Worker,), worker)
    for name, value in {**shared, "get_compute_capability": architecture, "get_raw_stream": 0}.items():
        setattr(interface, name, staticmethod(answer(value)))

    class Driver(driver.CudaDriver):
        def __init__(self) -> None: ...

    of_triton = {"get_current_target": GPUTarget("cuda", architecture, 32), "get_current_device": 0, "is_active": True}
    for name, value in of_triton.items():
        setattr(Driver, name, staticmethod(answer(value)))
    Driver.utils = SimpleNamespace(get_device_properties=answer({"max_shared_mem": gpu.shared}))
    Driver.get_device_interface = staticmethod(answer(torch.cuda))
    triton.runtime.driver.set_active(Driver())


class Compiler:
    """Inductor in this process, with a record of every kernel that it compiles."""

    def __init__(self) -> None:
        from torch._inductor import async_compile, compile_fx

        self.kernels: list[dict[str, Any]] = []
        self._pass = ""
        self._known: dict[str, list[dict[str, Any]]] = {}
        compile_fx.compile_fx = functools.partial(self._compile, compile_fx.compile_fx)
        async_compile.AsyncCompile.triton = lambda _, name, source, device_str="cuda": self._triton(name, source)

    def _compile(self, compile_fx: Any, graph: Any, inputs: Any, **options: Any) -> Any:
        """Compile a graph of TorchDynamo's for the fake tensors with which it was traced, in place of the step's."""
        from torch._guards import TracingContext, detect_fake_mode

        examples = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        context = TracingContext.get()
        context.fake_mode = None
        context.fake_mode = detect_fake_mode(examples)
        return compile_fx(graph, examples, **{"inner_compile": self._compile_inner, **options})

    def _compile_inner(self, graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._guards import detect_fake_mode
        from torch._inductor.compile_fx import compile_fx_inner
        from torch.fx import GraphModule

        self._pass = "backward" if options.get("is_backward") else "forward"
        uncompiled = GraphModule(graph, copy.deepcopy(graph.graph))  # which inductor changes
        compile_fx_inner(graph, inputs, **options)

        def call(arguments: list[Any]) -> Any:
            with detect_fake_mode(arguments):
                return uncompiled(*arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _triton(self, name: str, source: str) -> Any:
        """Compile each configuration of a kernel, as at its first launch."""
        from torch._inductor.codecache import PyCodeCache

        kernel = getattr(PyCodeCache.load(source), name)
        if source not in self._known:
            self._known[source] = [
                {
                    "name": name, "config": ", ".join(f"{key} {value}" for key, value in config.kwargs.items()),
                    **resources(kernel._precompile_config(config).kernel),
                }
                for config in kernel.configs
            ]  # fmt: skip
        self.kernels += [{**each, "pass": self._pass} for each in self._known[source]]
        return kernel


def resources(kernel: Any) -> dict[str, int]:
    """Return what a compiled kernel takes of the GPU, by its cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        line = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return {
        "threads": 32 * kernel.metadata.num_warps, "registers": found["REG"],
        "shared": max(kernel.metadata.shared, found["SHARED"]), "spilled": max(found["LOCAL"], found["STACK"]),
    }  # fmt: skip


def step(flags: dict[str, Any]) -> None:
    """Build one layer of a model as a run does, and compute the loss of a row forward and backward."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from smp_train import arguments
    from smp_train.backends.native import NativeBackend
    from smp_train.data.batch import Batch
    from smp_train.distributed import Runtime
    from smp_train.models.resolve import resolve
    from smp_train.parallel import fsdp

    class FakeBackend(NativeBackend):
        def _allocate(self, model: Any) -> None:
            with mode:
                super()._allocate(model.to("meta"))  # its buffers too

    torch._dynamo.reset()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # FSDP2 gathers parameters as such a copy before a layer is called; it would ask the driver for streams.
    fsdp.shard = lambda model, *_, param_dtype, **__: model.to(param_dtype)
    words = {**flags, "num_layers": 1, "train_batch_size": 1, "training_dir": "unused"}
    args = arguments.parse([f"--{name}={value}" for name, value in words.items()], {}).args
    ranks = Runtime("kernels", 0, 1, 0, 1, 0, 1, "localhost", 0, "localhost", False)
    backend, spec = FakeBackend(args, ranks, torch.device("cuda", 0)), resolve(args)
    assert backend.compiled
    seq = min(SEQUENCE, spec.config.max_position_embeddings)
    backend.check(spec, seq_len=seq)
    model = backend.build(backend.check(spec, seq_len=seq), seed=0, initial=False)
    with mode:
        ids = torch.zeros(1, seq, dtype=torch.int64, device="cuda")
        positions, documents = None, None
        if flags.get("short") == "pack":
            positions = torch.zeros_like(ids)
            documents = torch.zeros(9, dtype=torch.int32, device="cuda"), seq // 4
        loss, _ = backend.loss(model, Batch(ids, ids, position_ids=positions, documents=documents))
    loss.backward()  # AOTAutograd copies a graph's constants first, which are no fake tensors


if __name__ == "__main__":
    sys.exit(main())
