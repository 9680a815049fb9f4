"""Streams, events and page-locked memory of a GPU that only holds memory (`null_cuda.c`), on torch built for CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's build for CUDA: make test-cuda-dry")

COPIES = """
from benchmarks.parts.on_device import copies
print(copies("cuda"))
"""
BATCHES = """
import itertools, threading
import numpy as np, torch
from smp_train.data.batch import collate
from smp_train.data.samples import Sample
from smp_train.data.source import Row

def make():
    torch.cuda.set_device(0)
    made.append(collate([Sample(Row(np.arange(size)), str(size)) for size in (8, 5)], 8, pin_memory=True))

made = []
thread = threading.Thread(target=make)
thread.start()
thread.join()
batch, = made
assert batch.input_ids.is_pinned()
on_device = batch.input_ids.to("cuda", non_blocking=True)
assert on_device.tolist() == [[*range(8)], [0, 1, 2, 3, 4, 0, 0, 0]]
"""
TIMES = """
import torch
from smp_train import distributed
from smp_train.distributed import heartbeat
from smp_train.telemetry.step_times import StepTimes

times = StepTimes(distributed.detect(), torch.device("cuda", 0))
for step in range(3):
    for phase in (heartbeat.DATA, heartbeat.FORWARD, heartbeat.BACKWARD, heartbeat.OUTCOME):
        times.mark(phase)
times._read_marks()
assert times._sums[heartbeat.FORWARD] > 0 and len(times._unused) > 0
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.cuda.kernels import build_null_cuda

    return build_null_cuda(tmp_path_factory.mktemp("null"))


@pytest.mark.parametrize("program", [COPIES, BATCHES, TIMES], ids=["copies", "batches", "times"])
def test_copies_by_streams_bring_the_numbers(program: str, stub: Path) -> None:
    environ = {**os.environ, "LD_PRELOAD": str(stub), "NULL_CUDA_CAPABILITY": "90", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
