"""Python and its packages, for training and for optional features."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator

from smp_train import __version__
from smp_train.distributed import smp_installed
from smp_train.distributed.host import OLDEST, missing_for_kernels, older
from smp_train.errors import install
from smp_train.launch.command import ask
from smp_train.launch.doctor.finding import Finding, fail, ok, warn
from smp_train.launch.images import SMP_RELEASES, SMP_TORCH
from smp_train.launch.instances import release
from smp_train.launch.spec import CODE_DIR

SMP_TRANSFORMERS = "4.44.2"
# Purpose and distributions of each extra of the package.
EXTRAS = {
    "train": ("training", ("transformers", "tokenizers", "safetensors", "numpy", "orjson", "tqdm")),
    "s3": ("s3:// places, SageMaker", ("boto3",)),
    "hf": ("Hugging Face data sets on disk", ("pyarrow",)),
    "text": ("text of the Hugging Face hub", ("datasets",)),
    "fast": ("faster reading of shards", ("pysimdjson",)),
    "tracking": ("TensorBoard", ("tensorboard",)),
    "wandb": ("Weights & Biases", ("wandb",)),
    "mlflow": ("MLflow", ("mlflow-skinny",)),
}
TORCH_SECONDS = 60
"""Limit for the import of torch, which is slow the first time on a shared file system."""
ASK_TORCH = """
import json, torch
print(json.dumps({"cuda": torch.version.cuda, "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
                  "nccl": torch.distributed.is_nccl_available()}))
"""


def version(name: str) -> str | None:
    """Return the version of an installed distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def python() -> Iterator[Finding]:
    """Report the interpreter and this package."""
    yield ok("python", f"{platform.python_version()} for {platform.machine()}, {sys.executable}")
    yield ok("smp-train", f"{__version__} in {CODE_DIR}")


def torch() -> Iterator[Finding]:
    """Check whether torch is installed, importable, and built for the GPUs of this machine."""
    installed = version("torch")
    if installed is None:
        yield warn("torch", "is not here: this machine can launch and check runs, not train", install("train"))
        return
    print(f"smp-train: importing torch {installed} (up to {TORCH_SECONDS} s)", file=sys.stderr, flush=True)
    code, output = ask(sys.executable, "-c", ASK_TORCH, seconds=TORCH_SECONDS)
    last = (output.splitlines() or [f"exit code {code}"])[-1]
    if code:
        fix = "install it again, for this machine's CUDA"
        yield fail("torch", f"{installed} cannot be imported: {last[:200]}", fix)
        return
    built = json.loads(last)
    seen = f"{installed} with {'CUDA ' + built['cuda'] if built['cuda'] else 'no CUDA'}, {built['gpus']} GPUs"
    code, driver = ask("nvidia-smi", "-L")
    has = 0 if code else sum(line.startswith("GPU ") for line in driver.splitlines())
    if has and not built["gpus"]:
        fix = "install a torch for CUDA, unset CUDA_VISIBLE_DEVICES, or look at the driver's release"
        yield fail("torch", f"{seen}, and the driver has {has}", fix)
    elif built["gpus"] and not built["nccl"]:
        yield fail("torch", f"{seen}, but no NCCL", "install a torch that has it: GPUs reach each other through it")
    else:
        yield ok("torch", seen, "" if built["gpus"] else "trains on the CPU (gloo)")
    if not smp_installed() and older(installed, OLDEST["torch"]):
        fix = f"needs {OLDEST['torch']} or newer: pip install --upgrade torch"
        yield fail("torch for --backend native", installed, fix)


def compilation() -> Iterator[Finding]:
    """Check for a compiler of kernels: `--use_torch_compile` is on by default on GPUs if there is a compiler."""
    if version("torch") is None or smp_installed():
        return
    missing = missing_for_kernels()
    fix = "apt install gcc python3-dev; until then models run uncompiled, and a fifth slower or more"
    fine = ok("compilation", "a C compiler and Python's headers are here")
    yield warn("compilation", missing, fix) if missing else fine


def transformers() -> Iterator[Finding]:
    """Check the release of transformers for the backend that would run here."""
    installed = version("transformers")
    if installed is None:
        return  # `extras` reports it
    if smp_installed() and installed != SMP_TRANSFORMERS:
        fix = f"SMP is made for {SMP_TRANSFORMERS}: pip install transformers=={SMP_TRANSFORMERS}"
        yield warn("transformers", installed, fix)
    elif not smp_installed() and older(installed, OLDEST["transformers"]):
        fix = f"--backend native needs {OLDEST['transformers']} or newer: pip install --upgrade transformers"
        yield fail("transformers", installed, fix)
    else:
        yield ok("transformers", installed)


def smp() -> Iterator[Finding]:
    """Check the release of SMP v2, which exists in AWS' containers only."""
    if not smp_installed():
        yield ok("SMP v2", "is not here: --backend native is used", "docker_build.sh makes an image that has it")
        return
    installed = (version("torch") or "0").partition("+")[0]
    if release(installed)[:3] in SMP_TORCH:
        yield ok("SMP v2", f"torch.sagemaker in torch {installed}")
    else:
        yield fail("SMP v2", f"torch.sagemaker in torch {installed}", f"take SMP's image of torch {SMP_RELEASES}")


def extras() -> Iterator[Finding]:
    """Report the optional extras, and check for two packages that exclude each other."""
    missing = {extra: [name for name in names if version(name) is None] for extra, (_, names) in EXTRAS.items()}
    if missing["train"] and version("torch"):
        yield fail("packages", f"without {', '.join(missing['train'])}", install("train"))
    absent = [extra for extra in EXTRAS if missing[extra]]
    seen = ", ".join(extra for extra in EXTRAS if not missing[extra]) or "none"
    if absent:
        seen += "; not " + ", ".join(f"{extra} ({EXTRAS[extra][0]})" for extra in absent)
    yield ok("extras", seen, install(",".join(absent)) if absent else "")
    second, third = version("sagemaker"), version("sagemaker-train")
    if second and third and int(second.partition(".")[0]) < 3:
        fix = "they share a Python package: keep one, each in an environment of its own"
        yield fail("SageMaker's SDK", f"v2 ({second}) and v3 ({third}) are both here", fix)
    elif second or third:
        yield ok("SageMaker's SDK", f"v2 {second}" if second and not third else f"v3 {third or second}")
