"""Memory figures against what this process really holds."""

import subprocess
import sys
from pathlib import Path

import torch

from smp_train.telemetry.memory_tracker import memory_gib, memory_report

ROOT = Path(__file__).resolve().parents[2]

GROWS = """
from types import SimpleNamespace
import numpy as np
from smp_train.telemetry.memory_tracker import memory_gib
cpu = SimpleNamespace(type="cpu")
before = memory_gib(cpu)
held = np.ones(2**25)  # 256 MiB, touched
print(memory_gib(cpu) - before)
"""


def test_resident_memory_grows_with_what_is_held():
    """In a process of its own: what other tests have left in this one may go back to the system at any moment."""
    done = subprocess.run([sys.executable, "-c", GROWS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0.2 < float(done.stdout) < 0.4


def test_the_peak_of_a_gpu_is_since_the_last_call(monkeypatch):
    books = {"peak": 3 * 2**30}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: books["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: books.update(peak=2**30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * 2**30)
    gpu = torch.device("cuda", 0)
    row = memory_report(gpu, "a")
    assert "allocated     1.00 | reserved     4.00 | peak     3.00 |" in row
    assert (memory_gib(gpu), memory_gib(gpu)) == (3, 1)
