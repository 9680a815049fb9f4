"""The commands of the README's first screen, read from it and run in order, in a clean clone without a network."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.command import ROOT, Command, warm

README = (ROOT / "README.md").read_text()
# A proxy that does not answer: libraries that ignore HF_HUB_OFFLINE fail too.
OFFLINE = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
}


def first_screen() -> tuple[list[str], str]:
    """Return the commands of the first section, and the output that the README shows of the last one."""
    section = README.split("\n## ")[1]
    install, commands = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    assert "pip install " in install
    (output,) = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
    return commands.strip().split("\n\n"), output


def clone(folder: Path) -> None:
    """Copy the files that git knows, as they are in this checkout: without caches, runs and what git ignores."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.core
def test_the_first_commands_run_as_they_stand(tmp_path: Path) -> None:
    commands, output = first_screen()
    assert [re.findall(r"^smp-train (\w+)", command, re.MULTILINE) for command in commands] == [
        ["train"], ["train"], ["generate"]
    ]  # fmt: skip
    folder = tmp_path / "clone"
    clone(folder)
    search = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environ = {**OFFLINE, "PYTHONPATH": str(folder), "PATH": search, "HOME": str(tmp_path)}
    for number, command in enumerate(commands):
        # The first in an interpreter of its own, from the clone's package; the others without a start's imports.
        program, *words = shlex.split(command.replace("\\\n", " "), comments=True)
        assert program == "smp-train"
        started = Command(folder, [program, *words], environ) if number == 0 else warm(folder, *words, environ=OFFLINE)
        with started as running:
            assert running.code() == 0, f"{command}\n{running.out}\n{running.err}"
            # Nothing but the answer's speed: no warning of a library or of this program.
            assert "arning" not in running.err
            assert " W [" not in running.out
    assert running.out == output


def test_its_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", README) if "://" not in link]
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert [test for test in re.findall(r"`(tests/\S+\.py)`", README) if not (ROOT / test).exists()] == []
