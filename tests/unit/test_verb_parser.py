"""Numbers of the verbs' own flags: those that make no sense are refused before anything is read or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_train.cli import main


@pytest.mark.parametrize("verb", ["generate", "evaluate", "prepare", "data", "checkpoint", "plan"])
def test_help_has_no_markup_of_docstrings(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert f"`smp-train {verb}`:" in (said := capsys.readouterr().out)
    assert "``" not in said


@pytest.mark.parametrize(
    ("words", "flag", "values"),
    [
        ("checkpoint import SOURCE TARGET", "--step", ["-1", "1.5"]),
        ("checkpoint export SOURCE TARGET", "--max_shard_gb", ["0", "nan", "inf"]),
        ("checkpoint convert SOURCE TARGET", "--max_shard_gb", ["-5"]),
        ("checkpoint prune SOURCE", "--keep", ["0", "-1"]),
        ("data verify SOURCE", "--vocab_size", ["0"]),
        ("data inspect SOURCE", "--max_context_width", ["1"]),
        ("data audit SOURCE", "--rows", ["-1"]),
        ("prepare --input SOURCE --output TARGET", "--train_tokenizer", ["0"]),
        ("prepare --input SOURCE --output TARGET --tokenizer SOURCE", "--seq_len", ["1"]),
        ("prepare --input SOURCE --output TARGET --tokenizer SOURCE", "--max_rows", ["0"]),
        ("report SOURCE", "--live", ["0", "nan"]),
        ("generate --checkpoint SOURCE --prompt a", "--num_tokens", ["0"]),
        ("generate --checkpoint SOURCE --prompt a", "--top_p", ["2"]),
        ("evaluate --checkpoint SOURCE --data SOURCE", "--batches", ["0"]),
        ("evaluate --checkpoint SOURCE --data SOURCE", "--val_batch_size", ["0"]),
        ("doctor", "--network", ["-1"]),
    ],
)
def test_numbers_out_of_range_are_refused(
    words: str, flag: str, values: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").mkdir()
    line = words.replace("SOURCE", str(tmp_path / "source")).replace("TARGET", str(tmp_path / "target")).split()
    for value in values:
        assert main([*line, f"{flag}={value}"]) == 2
        assert f"{flag}" in (said := capsys.readouterr().err)
        assert value in said
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_list_that_is_given_twice_has_all_values() -> None:
    from smp_train.inference.generation import options

    words = ["--checkpoint", "c", "--prompt", "a", "--prompt", "b", "c"]
    assert options().parse_args(words).prompt == ["a", "b", "c"]
