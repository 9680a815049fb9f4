"""Chats, and prompts with completions: what is counted is what transformers says, from every kind of file, once."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smp_train.arguments import parse
from smp_train.cli import main
from smp_train.data.bad_rows import LeftOut
from smp_train.data.open_data import open_place
from smp_train.data.pipelines.text_data import TextData, TextRows
from smp_train.data.prepare import pipeline
from smp_train.data.prepare.cli import main as prepare_main
from smp_train.data.source import IGNORED
from smp_train.data.survey import look
from smp_train.data.text import opening
from smp_train.data.text.detect import find_fields
from smp_train.data.text.fields import TEXTS, Fields
from smp_train.data.text.files import find_files
from smp_train.data.text.opening import open_tokenizer
from smp_train.data.text.stream import Reading, span
from smp_train.errors import ConfigError, DataError
from tests.chats import (
    CALLING,
    MARKED,
    PLAIN,
    TAIL,
    TOOLS,
    by_transformers,
    chat,
    completion_by_transformers,
    turns,
    write_lines,
    write_tokenizer,
)

CHATS = Fields(("messages",), chat=True)
PAIRS = Fields(("prompt", "completion"))
COUNT = 30
VOCABULARY = 300
Tokens = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids and labels of a row."""


@pytest.fixture(scope="module", params=["plain", "marked"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template marks the assistant's turns, or does not."""
    folder = tmp_path_factory.mktemp(request.param)
    return write_tokenizer(folder, MARKED if request.param == "marked" else PLAIN)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("one"))


def pair(number: int) -> dict[str, str]:
    return {"prompt": f"{number} plus {number} is", "completion": f" {2 * number}, é🙂"}


def records(kind: str) -> list[dict[str, Any]]:
    return [{"messages": chat(n), "id": n} if kind == "chats" else pair(n) for n in range(COUNT)]


def expected(tokenizer: Path, kind: str) -> list[Tokens]:
    """Return the rows of `records`, as transformers alone makes them, sorted."""
    made = [
        by_transformers(tokenizer, one["messages"]) if kind == "chats" else completion_by_transformers(tokenizer, **one)
        for one in records(kind)
    ]
    return sorted((tuple(ids), tuple(labels)) for ids, labels in made)


def put(folder: Path, form: str, kind: str = "chats") -> Path:
    """Write `records` in some form of file; return what to give for them."""
    rows = records(kind)
    if form == "jsonl":
        write_lines(folder / "a.jsonl", rows[:10])
        write_lines(folder / "b.json", rows[10:])
    elif form == "gz":
        folder.mkdir(parents=True)
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(write_lines(folder / "x", rows).read_bytes()))
        (folder / "x").unlink()
    else:
        datasets = pytest.importorskip("datasets")
        made = datasets.Dataset.from_list(rows)
        folder.mkdir(parents=True)
        made.to_parquet(str(folder / "a.parquet")) if form == "parquet" else made.save_to_disk(str(folder / "d"))
        return folder if form == "parquet" else folder / "d"
    return folder


def rows_of(place: Path) -> list[Tokens]:
    """Return the rows of prepared data, sorted."""
    source = open_place(str(place), vocab_size=VOCABULARY)
    rows = [source.row(index) for index in range(len(source))]
    assert all(row.labels is not None for row in rows)
    return sorted((tuple(row.input_ids.tolist()), tuple(row.labels.tolist())) for row in rows)


def prepare(source: Path | str, output: Path, tokenizer: Path, *more: str) -> int:
    words = ["--input", str(source), "--output", str(output), "--tokenizer", str(tokenizer), "--rows_per_shard", "7"]
    return prepare_main([*words, "--validation_fraction", "0", *more])


@pytest.mark.parametrize("form", ["jsonl", "gz", "parquet", "save_to_disk"])
def test_chats_become_the_rows_that_transformers_makes(tokenizer: Path, tmp_path: Path, form: str) -> None:
    assert prepare(put(tmp_path / "in", form), tmp_path / "out", tokenizer) == 0
    assert rows_of(tmp_path / "out" / "train") == expected(tokenizer, "chats")
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    totals, rows = manifest["splits"]["train"], expected(tokenizer, "chats")
    counted = sum(label != IGNORED for _, labels in rows for label in labels)
    assert (totals["rows"], totals["tokens"]) == (COUNT, sum(len(ids) for ids, _ in rows))
    assert (totals["counted_tokens"], manifest["seq_len"]) == (counted, max(len(ids) for ids, _ in rows))


def calling(content: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    return [
        {"role": "user", "content": content}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"}, {"role": "assistant", "content": "it is 2"},
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("marked", [False, True])
def test_tools_their_calls_and_content_in_parts(tmp_path: Path, marked: bool, form: str) -> None:
    """As transformers has them; where a table must have one form for all, its nulls and JSON say nothing more."""
    behind = "{{ '<|' + turn.role + '|>' }}"
    begin = behind + "{% if turn.role == 'assistant' %}{% generation %}"
    twice, end = CALLING.split(behind)[1].split(TAIL)[0], "{% endgeneration %}{% else %}"
    template = CALLING.replace(behind + twice, begin + twice + end + twice + "{% endif %}") if marked else CALLING
    made = write_tokenizer(tmp_path / "tokenizer", template)
    parts = [{"type": "text", "text": "what is"}, {"type": "text", "text": " 1 plus 1?"}]
    rows = [calling(parts), calling("what is 2?"), chat(3)] if form == "jsonl" else [calling("what is 2?"), chat(3)]
    wanted = [by_transformers(made, row, TOOLS if len(row) == 4 else None) for row in rows]
    records = [{"messages": row, "tools": TOOLS if len(row) == 4 else None} for row in rows]
    if form == "jsonl":
        write_lines(tmp_path / "a.jsonl", records)
    else:
        datasets = pytest.importorskip("datasets")
        records[0]["tools"] = json.dumps(TOOLS)
        datasets.Dataset.from_list(records).to_parquet(str(tmp_path / "a.parquet"))
    assert prepare(tmp_path / f"a.{form}", tmp_path / "out", made) == 0
    assert rows_of(tmp_path / "out" / "train") == sorted((tuple(ids), tuple(labels)) for ids, labels in wanted)


def test_a_template_that_would_write_parts_as_python_does(tmp_path: Path) -> None:
    made = write_tokenizer(tmp_path / "tokenizer", PLAIN.replace("turn.content + '<|end|>\n'", "turn.content"))
    rows = [{"messages": turns("a", "b")}, {"messages": calling([{"type": "text", "text": "a"}])[:1] + chat(1)[1:]}]
    write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:2: .* parts"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", made)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_of_prompts_with_completions_the_completion_and_its_end_are_counted(
    plain: Path, tmp_path: Path, form: str
) -> None:
    assert prepare(put(tmp_path / "in", form, "pairs"), tmp_path / "out", plain) == 0
    assert rows_of(tmp_path / "out" / "train") == expected(plain, "pairs")


@pytest.mark.parametrize("kind", ["cache", "arrow"])
def test_every_kind_of_output_holds_the_same_rows(plain: Path, tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets") if kind == "arrow" else None
    place = put(tmp_path / "in", "jsonl")
    assert prepare(place, tmp_path / "out", plain, "--output_type", kind) == 0
    assert rows_of(tmp_path / "out" / "train") == expected(plain, "chats")
    assert look(str(tmp_path / "out" / "train"), VOCABULARY).problems == []
    if datasets is not None:
        loaded = datasets.load_from_disk(str(tmp_path / "out" / "train"))
        assert sorted((tuple(one["input_ids"]), tuple(one["labels"])) for one in loaded) == expected(plain, "chats")


@pytest.mark.slow
def test_a_data_set_of_the_hub(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    load, place = datasets.load_dataset_builder, put(tmp_path / "in", "parquet")
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, config, **more: load(str(place), config, **more))
    assert prepare("acme/chats", tmp_path / "out", plain) == 0
    assert rows_of(tmp_path / "out" / "train") == expected(plain, "chats")


class Killed(Exception):
    pass


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and ".smp" not in str(path)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_the_same_bytes_from_more_processes_and_after_a_kill(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, split = put(tmp_path / "in", "jsonl"), ["--validation_fraction", "0.3"]
    assert prepare(place, tmp_path / "whole", plain, *split) == 0
    whole = contents(tmp_path / "whole")
    assert len([name for name in whole if name.endswith(".json.gz")]) == 5
    monkeypatch.setattr(pipeline, "BATCH_CHARACTERS", 200)
    assert prepare(place, tmp_path / "two", plain, *split, "--processes", "2") == 0
    assert contents(tmp_path / "two") == whole
    monkeypatch.setattr(pipeline, "SAVE_SECONDS", 0.0)
    write, done = pipeline.write_block, []

    def killed(*given: Any) -> Any:
        if len(done) == 2:
            raise Killed
        done.append(given[2])
        return write(*given)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_block", killed)
        with pytest.raises(Killed):
            prepare(place, tmp_path / "cut", plain, *split)
    again: list[str] = []
    monkeypatch.setattr(pipeline, "write_block", lambda *given: again.append(given[2]) or write(*given))
    assert prepare(place, tmp_path / "cut", plain, *split) == 0
    assert not set(done) & set(again)
    assert contents(tmp_path / "cut") == whole


def test_a_tokenizer_trained_here_takes_a_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(MARKED)
    place = put(tmp_path / "in", "jsonl")
    words = ["--input", str(place), "--output", str(tmp_path / "out"), "--train_tokenizer", "290"]
    with pytest.raises(ConfigError, match="--chat_template FILE"):
        prepare_main([*words, "--validation_fraction", "0"])
    words += ["--special_tokens", "<|user|>", "<|end|>", "--chat_template", str(tmp_path / "chat.jinja")]
    assert prepare_main([*words, "--validation_fraction", "0"]) == 0
    assert rows_of(tmp_path / "out" / "train") == expected(tmp_path / "out", "chats")
    (tmp_path / "chat.jinja").write_text(PLAIN)
    with pytest.raises(ConfigError, match="other input or flags"):
        prepare_main([*words, "--validation_fraction", "0"])


# --- which fields are read ---------------------------------------------------------------------------

FOUND = [
    ({"text": "a"}, None, TEXTS), ({"messages": [], "prompt": "a"}, None, CHATS),
    ({"prompt": "a", "completion": "b"}, None, PAIRS), ({"text": "a", "messages": []}, "messages", CHATS),
    ({"text": "a", "messages": []}, "text", TEXTS), ({"turns": []}, "turns", Fields(("turns",), chat=True)),
    ({"q": "a", "a": "b"}, "q,a", Fields(("q", "a"))), ({"a,b": "c"}, "a,b", Fields(("a,b",))),
]  # fmt: skip


@pytest.mark.parametrize(("record", "column", "fields"), FOUND)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_the_fields_tell_what_is_read(
    tmp_path: Path, record: dict[str, Any], column: str | None, fields: Fields, form: str
) -> None:
    if form == "jsonl":
        write_lines(tmp_path / "a.jsonl", [record])
        with (tmp_path / "a.jsonl").open("r+") as file:  # what is broken decides nothing
            content = file.read()
            file.seek(0)
            file.write("{broken\n" + content)
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({name: [value] for name, value in record.items()}), tmp_path / "a.parquet")
    assert find_fields(find_files([str(tmp_path)], column=column), column) == fields


def test_fields_that_cannot_be_told_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"text": "a", "prompt": "b", "completion": "c"}])
    with pytest.raises(ConfigError, match=r"a\.jsonl: .*--text_column text or prompt,completion"):
        find_fields(find_files([str(tmp_path)]), None)
    write_lines(tmp_path / "a.jsonl", [{"messages": chat(1)}])
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(DataError, match=r"b\.txt: is text"):
        find_fields(find_files([str(tmp_path)]), None)


# --- what is wrong -----------------------------------------------------------------------------------

GOOD = {"messages": chat(2)}
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is empty"), ({"messages": "hi"}, '"messages" list'), ({}, '"messages" list'),
    ({"messages": ["hi"]}, r'messages\[0\] has no "role"'),
    ({"messages": [{"role": "user"}]}, r'\[0\] has no "content"'),
    ({"messages": [{"role": "user", "content": 5}]}, r'\[0\] has no "content"'),
    ({"messages": [{"from": "human", "value": "a"}]}, r'\[0\] has no "role"'),
    ({"messages": [{"role": "user", "content": "a\0"}]}, "NUL"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\]: content\[0\] is 'image'"),
    ({"messages": chat(1), "tools": "{"}, '"tools" is no list'), ({"messages": chat(1), "tools": [1]}, '"tools" is no'),
    ({"messages": [{"role": "user", "content": "a"}]}, "no turn of the assistant"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "first turn is the assistant's"),
    ({"messages": turns(*"ab" * 300)}, "600 turns are more than 512"),
    ({"messages": [*chat(2), {"role": "judge", "content": "a"}]}, "template refuses it .unknown role judge"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "reason"), MALFORMED, ids=[reason for _, reason in MALFORMED])
def test_a_malformed_chat_is_named_or_left_out(
    plain: Path, tmp_path: Path, record: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [GOOD, record, GOOD])
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{reason}.*--bad_rows skip") as refused:
        prepare(tmp_path / "in", tmp_path / "out", plain)
    assert "\n" not in str(refused.value)
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{reason}"):
        streamed(tmp_path / "in", plain, 4)
    assert prepare(tmp_path / "in", tmp_path / "out", plain, "--bad_rows", "skip") == 0
    assert len(rows_of(tmp_path / "out" / "train")) == 2
    how = reading(plain, CHATS, left_out=LeftOut())
    assert {name for step in streamed(tmp_path / "in", plain, 6, how=how) for name, _ in step} == whole_names(
        tmp_path / "in", plain, [1, 3]
    )
    assert re.search(rf"left out 1 documents .*a\.jsonl:2: .*{reason}", caplog.text)


def whole_names(place: Path, tokenizer: Path, numbers: list[int]) -> set[str]:
    size = len(by_transformers(tokenizer, GOOD["messages"])[0])
    return {span(f"a.jsonl:{number}", 0, size) for number in numbers}


def test_of_chats_that_are_all_malformed_there_is_no_end_without_a_message(plain: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(DataError, match=r"a\.jsonl: too few"):
        streamed(tmp_path, plain, 1, how=reading(plain, CHATS, left_out=LeftOut()))
    with pytest.raises(DataError, match="too few chats"):
        prepare(tmp_path, tmp_path / "out", plain, "--bad_rows", "skip")


def test_a_row_that_the_context_cuts_to_nothing_counted(plain: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [GOOD, {"messages": [{"role": "user", "content": "why " * 200}, *chat(1)[1:]]}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: none of its first 64 .*--max_context_width"):
        streamed(tmp_path, plain, 4, how=reading(plain, CHATS, seq_len=64))
    with pytest.raises(DataError, match=r"a\.jsonl:2: \d+ tokens are more than the 64 .*--max_context_width"):
        streamed(tmp_path, plain, 4, how=reading(plain, CHATS, seq_len=64, long="error"))


TEMPLATES = {
    "none": (None, r"has no chat template.*--chat_template FILE"), "broken": ("{% for %}", "line 1"),
    "not there": ("absent", r"--chat_template .*absent"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEMPLATES)
def test_an_unusable_template_is_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    template, reason = TEMPLATES[case]
    made = write_tokenizer(tmp_path / "tokenizer", None if case == "not there" else template)
    more = ["--chat_template", str(tmp_path / "absent")] if case == "not there" else []
    with pytest.raises(ConfigError, match=reason):
        prepare(put(tmp_path / "in", "jsonl"), tmp_path / "out", made, *more)
    assert not (tmp_path / "out").exists()


def test_a_template_that_rewrites_earlier_turns_is_refused_for_chats_of_several(tmp_path: Path) -> None:
    """As templates do that drop the reasoning of all answers but the last."""
    rewriting = PLAIN.replace("turn.content", "(turn.content if loop.last else 'short')")
    made = write_tokenizer(tmp_path / "tokenizer", rewriting)
    write_lines(tmp_path / "a.jsonl", [GOOD, {"messages": chat(1)}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*turn 2 .*--chat_template"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", made)


def test_a_template_with_the_date_gives_the_same_rows_on_any_day(tmp_path: Path) -> None:
    made = write_tokenizer(tmp_path / "tokenizer", "{{ strftime_now('%d %b %Y') }}" + PLAIN)
    assert prepare(put(tmp_path / "in", "jsonl"), tmp_path / "out", made) == 0
    tokens = np.array(rows_of(tmp_path / "out" / "train")[0][0])
    _, _, rows = open_tokenizer(str(made), None, CHATS)
    assert rows is not None
    assert rows.tokenizer.decode(tokens).startswith("26 Jul 2024")


FLAGS = {
    "--short concat": "--short concat", "--long split": "--long split",
    "--chat_template x --dataset PAIRS": "--chat_template x", "--short pack --dataset TEXT": "--short pack",
}  # fmt: skip


@pytest.mark.parametrize("words", FLAGS)
def test_flags_that_do_not_fit_the_documents(tmp_path: Path, plain: Path, words: str) -> None:
    for name, record in (("CHATS", GOOD), ("PAIRS", pair(1)), ("TEXT", {"text": "a"})):
        write_lines(tmp_path / name / "a.jsonl", [record])
    words = words if "--dataset" in words else f"{words} --dataset CHATS"
    words = re.sub(r"--dataset (\w+)", rf"--dataset {tmp_path}/\1", words)
    args = parse([*words.split(), "--tokenizer", str(plain), "--max_steps", "1"], {}).args
    files = find_files([str(args.dataset)])
    with pytest.raises(ConfigError, match=FLAGS[next(k for k in FLAGS if k.split(" --dataset")[0] in words)]):
        opening._refuse_layout(args, find_fields(files, None))
    with pytest.raises(ConfigError, match="--seq_len 64"):
        prepare(tmp_path / "CHATS", tmp_path / "out", plain, "--seq_len", "64")


# --- on the fly --------------------------------------------------------------------------------------


def reading(tokenizer: Path, fields: Fields, **changes: Any) -> Reading:
    opened, end, rows = open_tokenizer(str(tokenizer), None, fields)
    options = {"seq_len": 128, "seed": 1, "shuffled": True, "conversations": rows, **changes}
    return Reading(opened, end, fields=fields, **options)


def streamed(
    place: Path, tokenizer: Path, steps: int, *, how: Reading | None = None, size: int = 1, mb: int = 1,
    streams: int = 1, saved: dict[str, Any] | None = None, save: list[dict[str, Any]] | None = None,
) -> list[list[tuple[str, Any]]]:  # fmt: skip
    """Return, of each step, (name, batch row) of all samples in the global order; append the state at the end."""
    how = how or reading(tokenizer, CHATS)
    share = {"micro_batch": mb, "accumulation": 1, "dp_size": size, "seq_len": how.seq_len, "prefetch": 0}
    files = find_files([str(place)])
    ranks = [TextData(files, how, identity="t", streams=streams, dp_rank=rank, **share) for rank in range(size)]
    at = {rank.check_state(saved) for rank in ranks}.pop() if saved else 0
    coming, found = [rank.batches(at) for rank in ranks], []
    for _ in range(steps):
        batches = [next(one)[0] for one in coming]
        found.append([(name, (b, row)) for b in batches for row, name in enumerate(b.samples)])
        at += ranks[0].global_batch
    known: list[list[int]] = []
    for rank in ranks:
        rank._merge = lambda rows: known.append(list(rows)) or [1] * len(rows)
        rank.state(at)
    for rank in ranks:
        rank._merge = lambda rows: np.max(np.array(known), axis=0).tolist()
    if save is not None:
        save.append(json.loads(json.dumps(ranks[0].state(at))))
    return found


def names(steps: list[list[tuple[str, Any]]]) -> list[str]:
    return [name for step in steps for name, _ in step]


@pytest.mark.parametrize("packed", [False, True], ids=["pad", "pack"])
def test_one_order_and_exact_resumes_on_any_number_of_ranks(plain: Path, tmp_path: Path, packed: bool) -> None:
    place, how = put(tmp_path / "in", "jsonl"), reading(plain, CHATS, packed=packed)
    alone = names(streamed(place, plain, 80, how=how, mb=1, streams=4))
    saved: list[dict[str, Any]] = []
    found = names(streamed(place, plain, 7, how=how, size=2, mb=2, streams=4, save=saved))
    found += names(streamed(place, plain, 5, how=how, size=4, saved=saved[-1], save=saved))
    found += names(streamed(place, plain, 16, how=how, size=1, mb=2, saved=saved[-1]))
    assert found == alone
    assert all(len(cursor) == 5 for cursor in saved[-1]["cursors"])
    other = reading(plain, CHATS, packed=not packed)
    with pytest.raises(DataError, match="--short"):
        streamed(place, plain, 1, how=other, saved=saved[-1])


@pytest.mark.parametrize("packed", [False, True], ids=["pad", "pack"])
def test_each_chat_once_in_an_epoch_of_a_stream(plain: Path, tmp_path: Path, packed: bool) -> None:
    place, how = put(tmp_path / "in", "jsonl"), reading(plain, CHATS, packed=packed)
    steps = streamed(place, plain, 90, how=how)
    used = [name.partition("[")[0] for one in names(steps) for name in one.split("+")]
    documents = {f"a.jsonl:{n}" for n in range(1, 11)} | {f"b.json:{n}" for n in range(1, 21)}
    assert len(used) >= 90
    for epoch in range(len(used) // COUNT):
        assert set(used[epoch * COUNT : (epoch + 1) * COUNT]) == documents
    assert (max(len(one.split("+")) for one in names(steps)) > 1) == packed


@pytest.mark.parametrize("kind", ["chats", "pairs"])
@pytest.mark.parametrize("packed", [False, True], ids=["pad", "pack"])
def test_samples_are_the_rows_and_do_not_see_each_other(plain: Path, tmp_path: Path, packed: bool, kind: str) -> None:
    place = put(tmp_path / "in", "jsonl", kind)
    how = reading(plain, CHATS if kind == "chats" else PAIRS, packed=packed)
    wanted, seen = expected(plain, kind), set()
    for step in streamed(place, plain, 3 * COUNT, how=how):
        ((name, (batch, at)),) = step
        ids, labels = batch.input_ids[at].numpy(), batch.labels[at].numpy()
        sizes = [int(end) for end in re.findall(r":(\d+)\]", name)]
        positions = None if batch.position_ids is None else batch.position_ids[at].numpy()
        ends = np.cumsum(sizes)
        if len(sizes) > 1:
            assert positions is not None
            assert np.concatenate([np.arange(size) for size in sizes]).tolist() == positions[: ends[-1]].tolist()
        for end, size in zip(ends, sizes, strict=True):
            row = tuple(ids[end - size : end].tolist()), tuple(labels[end - size : end].tolist())
            assert row in wanted
            seen.add(row)
        assert (labels[ends[-1] :] == IGNORED).all()
    assert seen == set(wanted)


def test_rows_of_a_validation_are_whole_and_in_stored_order(plain: Path, tmp_path: Path) -> None:
    rows = TextRows(find_files([str(put(tmp_path / "in", "jsonl"))]), reading(plain, CHATS, shuffled=False), 12)
    for index in range(12):
        ids, labels = by_transformers(plain, chat(index))
        assert rows.row(index).input_ids.tolist() == ids
        assert rows.row(index).labels is not None
        assert rows.row(index).labels.tolist() == labels


# --- inspect -----------------------------------------------------------------------------------------


def test_inspect_marks_what_is_counted(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [GOOD, {"messages": []}])
    text = "".join(
        f"<|{turn['role']}|>" + (f"[[{turn['content']}<|end|>\n]]" if turn["role"] == "assistant" else
                                 f"{turn['content']}<|end|>\n")
        for turn in GOOD["messages"]
    )  # fmt: skip
    assert prepare(tmp_path / "in", tmp_path / "out", plain, "--bad_rows", "skip") == 0
    for place, problems in ((tmp_path / "in", 1), (tmp_path / "out" / "train", 0)):
        capsys.readouterr()
        assert main(["data", "inspect", str(place), "--tokenizer", str(plain)]) == 0
        said = capsys.readouterr().out
        assert repr(text) in said
        assert f"problems: {problems}" in said
        assert "labels: in 1 of 1 rows" in said
    assert "a.jsonl:2: messages is empty" not in said
