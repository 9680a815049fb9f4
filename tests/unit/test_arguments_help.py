"""Help, the resolved configuration, and the reference of the flags."""

from __future__ import annotations

import re
from pathlib import Path

from smp_train.arguments import help_text, parse, print_config
from smp_train.arguments.aliases import ALIASES
from smp_train.arguments.document import markdown, title
from smp_train.arguments.groups import GROUPS, flags

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "flags.md"
# Read where the flags themselves are settled: they shape other flags, or the command line's own behaviour.
SETTLED_AT_PARSING = {"config", "from_scratch", "run_name", "selective_checkpointing", "smp_config"}


def test_help_names_everything_and_fits() -> None:
    text = help_text()
    assert max(map(len, text.splitlines())) <= 100
    for name in flags():
        assert f"--{name} " in text or f"--{name}\n" in text
    for alias in ALIASES:
        assert f"--{alias.name}" in text
    for group in GROUPS:
        assert f"\n{title(group)}: " in text
    assert all(flag.help for flag in flags().values())


def test_help_shows_defaults_choices_and_what_is_not_available() -> None:
    words = " ".join(help_text().split())
    assert "--lr X Peak learning rate [0.0001] (= --max_lr --learning_rate)" in words
    assert "(constant, linear, cosine, exponential, plateau, wsd) [cosine]" in words
    assert "--data_type NAME Kind of model the data is for (gpt, bert) [gpt] (only gpt)" in words


def test_print_config_gives_every_value_its_source() -> None:
    resolved = parse(["--batch-size=7", "--model_name", "llama2_7b"], {"SM_HP_LR": "0.25"})
    rows = [line for line in print_config(resolved).splitlines() if line and not line.startswith("#")]
    assert len(rows) == len(flags())
    table = {row.split()[0]: row.split(maxsplit=2)[1:] for row in rows}
    assert table["train_batch_size"] == ["7", "command line, --batch-size"]
    assert table["lr"] == ["0.25", "SM_HP_LR"]
    assert table["model_size"] == ["7b", "command line, --model_name"]
    assert table["beta1"] == ["0.9", "default"]
    assert table["hidden_width"] == ["-", "default: the preset's, else 768"]
    columns = {row.index(table[row.split()[0]][1], 48) for row in rows if row.split()[0] in ("lr", "beta1", "bf16")}
    assert len(columns) == 1


def test_reference_table_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == markdown(), "run: python -m smp_train.arguments > docs/flags.md"


def test_every_flag_is_read_refused_or_said_to_have_no_effect() -> None:
    files = [path for path in (ROOT / "smp_train").rglob("*.py") if "arguments" not in path.relative_to(ROOT).parts]
    # args.NAME, or NAME as a string where flags are looped over (the model's widths are).
    pattern = re.compile(r"(?:args|arguments)\.(\w+)|[\"'](\w+)[\"']")
    read = {name for path in files for found in pattern.findall(path.read_text(encoding="utf-8")) for name in found}
    effective = {name for name, flag in flags().items() if not (flag.only or flag.idle)}
    assert effective - SETTLED_AT_PARSING - read == set()
