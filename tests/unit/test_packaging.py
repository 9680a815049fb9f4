"""What the built package says of itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
METADATA = "import sys; from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"


def test_the_licence_is_in_the_package(tmp_path: Path) -> None:
    (tmp_path / "smp_train").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "smp_train/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "out").mkdir()
    subprocess.run([sys.executable, "-c", METADATA, "out"], cwd=tmp_path, check=True, capture_output=True)
    (info,) = (tmp_path / "out").glob("*.dist-info")
    assert "License-Expression: Apache-2.0" in (info / "METADATA").read_text()
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
