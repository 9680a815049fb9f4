"""setup_conda_env.sh with doubles of python, conda and pip: what is made where, again and with either tool."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launchers/hyperpod_slurm/setup_conda_env.sh"
# A python that can make an environment: what it puts there writes down what it is asked to install.
PYTHON = """#!/bin/bash
echo "python $*" >> "{calls}"
[ "$1 $2" != "-m venv" ] || {{ mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; }}
[ "$1" != -c ] || exit "${{OLD_PYTHON:-0}}"
"""
CONDA = """#!/bin/bash
echo "conda $*" >> "{calls}"
while [ "$1" != --prefix ]; do shift; done
mkdir -p "$2/bin"; cp "{python}" "$2/bin/python"
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("python3", PYTHON), ("conda", CONDA)):
        (folder / name).write_text(text.format(calls=tmp_path / "calls", python=folder / "python3"))
        (folder / name).chmod(0o755)
    return folder


def setup(tools: Path, *words: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    done = subprocess.run(
        ["bash", SCRIPT, *words], capture_output=True, text=True, check=False,
        env={"PATH": f"{tools}:/usr/bin:/bin", "TARGET": str(tools.parent / "env"), **environ},
    )  # fmt: skip
    calls = tools.parent / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("words", [(), ("--conda",)])
def test_made_once_and_updated_after(tools: Path, words: tuple[str, ...]) -> None:
    done, calls = setup(tools, *words, EXTRAS="train")
    assert done.returncode == 0, done.stderr
    target = tools.parent / "env"
    made = f"conda create --yes --prefix {target} python=3.11 pip" if words else f"python -m venv {target}"
    install = f"python -m pip install --upgrade --editable {ROOT}[train]"
    assert [call for call in calls if not call.startswith("python -c")] == [made, install]
    assert "launch_training_conda.sh" in done.stdout
    _, calls = setup(tools, *words, EXTRAS="train")
    assert [call for call in calls if not call.startswith("python -c")] == [made, install, install]


@pytest.mark.parametrize(
    ("words", "environ", "code", "said"),
    [
        (["--mamba"], {}, 2, "unknown option --mamba; the only one is --conda"),
        (["--conda"], {"PATH": "/usr/bin:/bin"}, 2, "no conda here; install Miniconda, or leave --conda out"),
        ([], {"OLD_PYTHON": "1"}, 1, ""),
    ],
)
def test_refused(tools: Path, words: list[str], environ: dict[str, str], code: int, said: str) -> None:
    done, calls = setup(tools, *words, **environ)
    assert done.returncode == code
    assert said in done.stderr
    assert not [call for call in calls if "pip install" in call]
