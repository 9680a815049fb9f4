"""The command line's verbs, its one-line failures, and its exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_train import __version__, cli
from smp_train.errors import CheckpointError, ConfigError, DataError, SmpTrainError


def verb(monkeypatch: pytest.MonkeyPatch, name: str, main: Callable[..., Any]) -> None:
    """Put a stand-in where a verb's module would be imported from."""
    module = types.ModuleType(f"stand_in_{name}")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.VERBS, name, cli.Verb("stand-in", module.__name__))


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line whose verb `prepare` raises an error; return the exit code and stderr."""

    def run(error: BaseException, *words: str) -> tuple[int, str]:
        def main(*_: Any) -> int:
            raise error

        verb(monkeypatch, "prepare", main)
        return cli.main(words or ("prepare",)), capsys.readouterr().err

    return run


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert cli.main([]) == 2
    out = capsys.readouterr().out
    assert all(name in out for name in cli.VERBS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"smp-train {__version__}\n"
    assert cli.main(["train", "--help"]) == 0
    assert "--train_batch_size N" in capsys.readouterr().out
    assert cli.main(["trian", "--lr", "3"]) == 2
    assert capsys.readouterr().err == "smp-train: error: unknown verb 'trian'; did you mean train?\n"
    assert cli.main(["zzz"]) == 2
    verbs = "train, plan, launch, chaos, doctor, generate, evaluate, prepare, data, checkpoint, bench, report"
    assert f"the verbs are {verbs}" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["torch", "transformers"])
@pytest.mark.parametrize(("words", "code"), [(("train", "--backend", "smp"), 0), (("train",), 2), (("plan",), 2)])
def test_releases_too_old_for_the_native_backend_are_refused_before_torch_is_imported(
    package: str, words: tuple[str, ...], code: int, monkeypatch: Any, capsys: Any
) -> None:
    from smp_train.distributed import host

    monkeypatch.setitem(host.OLDEST, package, "99.1")
    imported = []
    done = types.SimpleNamespace(main=lambda *_: 0)
    monkeypatch.setattr(cli, "import_verb", lambda name: imported.append(name) or done)
    data = ("--devices", "2") if words == ("plan",) else ("--use_synthetic_data", "--memory_check=0")
    assert cli.main([*words, "--model_type", "llama_v2", "--model_size", "7b", *data]) == code
    error = capsys.readouterr().err
    assert (f"{package} 99.1" in error, bool(imported)) == (bool(code), not code)
    assert error.count("\n") <= 1


ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: 8 bytes"
LESS = (
    "lower --train_batch_size or --max_context_width, give --activation_checkpointing full or "
    "--sm_activation_offloading 1, or share the model among more GPUs"
)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SmpTrainError("broken"), 1, "error: broken"),
        (ConfigError("broken"), 2, "error: broken"),
        (DataError("shard.json:3: broken"), 3, "error: shard.json:3: broken"),
        (CheckpointError("broken"), 4, "error: broken"),
        (ConfigError("two\nlines"), 2, "error: two lines"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError("no room"), 1, f"error: out of memory: no room; {LESS}"),
        (RuntimeError(f"{ALLOCATOR}. Error code 12 (no memory)"), 1, f"error: out of memory: {ALLOCATOR}; {LESS}"),
        (KeyError("x"), 1, "internal error: KeyError: 'x' (run again with --debug 1 for the traceback)"),
    ],
)
def test_failures_are_one_line_and_a_code(error: BaseException, code: int, line: str, run: Run) -> None:
    assert run(error) == (code, f"smp-train: {line}\n")


LIBRARY = "libcudnn.so.9: cannot open shared object file: No such file or directory"


def wrapped(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("error", [
    ImportError(LIBRARY), OSError(LIBRARY),
    wrapped(RuntimeError("Failed to import transformers.x (look up to see it)"), ImportError(LIBRARY)),
])  # fmt: skip
def test_a_broken_installation_is_a_configuration_that_would_fail_again(error: Exception, run: Run) -> None:
    code, err = run(error)
    assert code == 2
    assert (err.count("\n"), LIBRARY in err, "transformers.x" in err) == (1, True, False)


@pytest.mark.parametrize("words", [["prepare", "--debug"], ["prepare", "--debug=1"], ["--debug", "prepare"]])
def test_debug_adds_the_traceback(words: list[str], run: Run) -> None:
    code, err = run(ConfigError("broken"), *words)
    assert (code, "Traceback" in err) == (2, True)
    assert err.endswith("smp-train: error: broken\n")


def test_verbs_get_their_words_and_train_what_was_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    for name in ("bench", "train"):
        verb(monkeypatch, name, lambda *given: seen.append(given) or 5)
    for words in (["step", "--x", "1"], ["step", "--debug", "1", "--x", "1"], ["step", "--debug", "--x", "1"]):
        assert cli.main(["bench", *words]) == 5
    assert seen == [(["step", "--x", "1"],)] * 3
    assert cli.main(["train", "--use_synthetic_data=1", "--max-steps", "7"]) == 5
    resolved, runtime = seen[-1]
    assert (resolved.args.max_steps, runtime.launcher, runtime.world_size) == (7, "python", 1)


def test_missing_package_says_what_to_install(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(cli.VERBS, "report", cli.Verb("stand-in", "a_package_that_is_not_there.module"))
    assert cli.main(["report"]) == 2
    assert re.search("needs the package a_package_that_is_not_there.*pip install", capsys.readouterr().err)


def test_nothing_advises_to_install_this_package_from_an_index() -> None:
    """It is on none: anyone could register its name."""
    root = Path(cli.__file__).parents[1]
    folders = [root / name for name in ("smp_train", "docs", "launchers")]
    files = [root / "README.md", *(path for folder in folders for path in folder.rglob("*.*"))]
    texts = {path: path.read_text(errors="replace") for path in files if path.suffix in (".py", ".md", ".sh", ".ipynb")}
    assert len(texts) > 100
    assert [path for path, text in texts.items() if "smp-train[" in text or "install smp-train" in text] == []


def test_as_a_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "smp_train", "train"]
    package_root = Path(cli.__file__).parents[1]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(package_root)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=240
        )

    wrong = run("--max_stepz", "3")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert "did you mean --max_steps?" in wrong.stderr
    shown = run("--print_config", "--fp8", "1", "--delayed_param", "0")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "# --delayed_param 0 has no effect" in shown.stdout
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in shown.stdout.splitlines() if line[:1].isalpha()}
    assert rows["fp8"] == ["1", "command line"]
    assert rows["run_name"] == ["-", "default: model type and number of parameters, such as llama_v2-6.7b"]
    assert (rows["run_dir"][1][:24], rows["checkpoint_dir"][0]) == ("default: runs/<run_name>", "checkpoints")
    assert list(tmp_path.iterdir()) == []
