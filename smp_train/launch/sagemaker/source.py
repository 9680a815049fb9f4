"""The source archive for the container: the package, an entry script, and requirements."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from pathlib import Path

from smp_train.launch.spec import CODE_DIR

ENTRY = "train.py"
ENTRY_SCRIPT = '''"""SageMaker's entry script: its toolkit starts this on every process, hyperparameters as flags."""

import sys

from smp_train.launch.entry import main

if __name__ == "__main__":
    sys.exit(main())
'''
REQUIREMENTS = (
    "transformers>=4.44.2,<6", "tokenizers", "safetensors", "orjson>=3.9", "pysimdjson>=6", "isal>=1.5", "tqdm",
    "pyyaml>=6",
)  # fmt: skip


def stage(folder: Path) -> Path:
    """Write the files that the container needs into ``folder``, and return it."""
    package = CODE_DIR / "smp_train"
    shutil.copytree(package, folder / "smp_train", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    (folder / ENTRY).write_text(ENTRY_SCRIPT, encoding="utf-8")
    (folder / "requirements.txt").write_text("\n".join(REQUIREMENTS) + "\n", encoding="utf-8")
    return folder


def archive(folder: Path) -> bytes:
    """Return a staged folder as ``sourcedir.tar.gz``, the same bytes for the same contents."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return gzip.compress(plain.getvalue(), mtime=0)
