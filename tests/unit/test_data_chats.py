"""Chats, prompts with completions, and text as rows: the answers that carry loss are those that transformers marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_train.data import chats
from smp_train.data.bad_records import BadRecords
from smp_train.data.files import Selection, list_files
from smp_train.data.kinds import ALPACA, TEXTS, Kind
from smp_train.data.rows import Recipe, RowMaker, read_rows
from smp_train.data.source import Problem, Row
from smp_train.data.tokenizer import load
from smp_train.errors import ConfigError, DataError
from smp_train.models.hugging_face import load_tokenizer
from tests.chats import (
    CALLING,
    MARKED,
    PLAIN,
    TOOLS,
    by_transformers,
    chat,
    completion_by_transformers,
    turns,
    write_lines,
    write_tokenizer,
)

CHATS = Kind("chats", ("messages", "tools"))
PAIRS = Kind("completions", ("prompt", "completion"))
COUNT = 30
Tokens = tuple[list[int], list[int]]
"""Ids and labels of a row."""


@pytest.fixture(scope="module", params=["plain", "marked"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template marks the assistant's turns, or does not."""
    return write_tokenizer(tmp_path_factory.mktemp(request.param), MARKED if request.param == "marked" else PLAIN)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("one"))


def pair(number: int) -> dict[str, str]:
    return {"prompt": f"{number} plus {number} is", "completion": f" {2 * number}, é🙂"}


def put(folder: Path, form: str, rows: list[dict[str, Any]]) -> Path:
    """Write records in some form of file; return the location."""
    if form == "jsonl":
        write_lines(folder / "a.jsonl", rows)
    else:
        folder.mkdir(parents=True)
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(str(folder / "a.parquet"))
    return folder


def tokens(row: Row | Problem | None) -> Tokens:
    assert isinstance(row, Row), row
    assert row.labels is not None
    return row.input_ids.tolist(), row.labels.tolist()


def rows_in(location: Path, tokenizer: Path, column: str | None = None, **recipe: Any) -> list[Tokens]:
    """Return the rows of a location's records, as any run would make them."""
    fileset = list_files(str(location), Selection(column=column))
    maker = Recipe(fileset.kind, tokenizer=str(tokenizer), **recipe).open()
    return [tokens(row) for file in fileset.files for _, row in read_rows(file, maker, BadRecords())]


def maker_of(tokenizer: Path, kind: Kind = CHATS, **recipe: Any) -> RowMaker:
    return Recipe(kind, tokenizer=str(tokenizer), **recipe).open()


# --- equal to transformers


def sharegpt(number: int) -> dict[str, Any]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    said = [{"from": names[turn["role"]], "value": turn["content"]} for turn in chat(number)]
    return {"id": str(number), "conversations": said}


ALPACA_PROMPTS = {
    "": "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\nadd {1}\n\n### Response:\n",
    "2 and 3": "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\nadd {1}\n\n### Input:\n2 and 3"
    "\n\n### Response:\n",
}
ANSWER = "it is 5"
ALPACA_RECORDS = [{"instruction": "add {1}", "input": given, "output": ANSWER} for given in ALPACA_PROMPTS]
EQUAL: dict[str, tuple[list[dict[str, Any]], Callable[[Path], list[Tokens]]]] = {
    "chats": (
        [{"messages": chat(n), "id": n} for n in range(COUNT)],
        lambda made: [by_transformers(made, chat(n)) for n in range(COUNT)],
    ),
    "sharegpt": (
        [sharegpt(n) for n in range(COUNT)], lambda made: [by_transformers(made, chat(n)) for n in range(COUNT)],
    ),
    "pairs": (
        [pair(n) for n in range(COUNT)],
        lambda made: [completion_by_transformers(made, **pair(n)) for n in range(COUNT)],
    ),
    "alpaca": (  # with the prompt of the original, whatever the tokenizer's template is
        ALPACA_RECORDS,
        lambda made: [completion_by_transformers(made, prompt, ANSWER) for prompt in ALPACA_PROMPTS.values()],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", EQUAL)
def test_records_become_the_rows_of_transformers(tokenizer: Path, tmp_path: Path, kind: str, form: str) -> None:
    records, expected = EQUAL[kind]
    assert rows_in(put(tmp_path / "in", form, records), tokenizer) == expected(tokenizer)


def test_fields_of_sharegpt_and_alpaca(plain: Path, tmp_path: Path) -> None:
    record = {**sharegpt(1), "system": "be brief"}
    write_lines(tmp_path / "a.jsonl", [record, {**sharegpt(2), "system": ""}])
    expected = [[{"role": "system", "content": "be brief"}, *chat(1)], chat(2)]
    assert rows_in(tmp_path, plain) == [by_transformers(plain, messages) for messages in expected]
    for turn, reason in (({"from": "judge", "value": "a"}, "from is 'judge', not one of human, "),
                         ({"from": "human"}, 'has no "value" string')):  # fmt: skip
        write_lines(tmp_path / "a.jsonl", [sharegpt(1), {"conversations": [turn]}])
        with pytest.raises(DataError, match=rf"a\.jsonl:2: conversations\[0\].* {reason}"):
            rows_in(tmp_path, plain)
    write_lines(tmp_path / "a.jsonl", [{"conversations": chat(5)}])
    assert rows_in(tmp_path, plain) == [by_transformers(plain, chat(5))], "conversations of role and content"
    (row,) = maker_of(plain, ALPACA).rows([{"instruction": "add {1}", "output": ANSWER}])
    assert tokens(row) == EQUAL["alpaca"][1](plain)[0]
    write_lines(tmp_path / "a.jsonl", [{**ALPACA_RECORDS[0], "text": "x"}])
    with pytest.raises(ConfigError, match="--text_column instruction,output or text"):
        rows_in(tmp_path, plain)
    assert rows_in(tmp_path, plain, "instruction,output") == [tokens(row)]


def calling(content: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    return [
        {"role": "user", "content": content}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"}, {"role": "assistant", "content": "it is 2"},
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_tools_their_calls_and_content_in_parts(tmp_path: Path, form: str) -> None:
    """In a table, where all turns have all fields, nulls count as absent; tools may be JSON."""
    made = write_tokenizer(tmp_path / "tokenizer", CALLING)
    parts = [{"type": "text", "text": "what is"}, {"type": "text", "text": " 1 plus 1?"}]
    rows = [calling(parts if form == "jsonl" else "what is 2?"), chat(3)]
    tools = [TOOLS if form == "jsonl" else json.dumps(TOOLS), None]
    records = [{"messages": row, "tools": own} for row, own in zip(rows, tools, strict=True)]
    expected = [by_transformers(made, rows[0], TOOLS), by_transformers(made, rows[1])]
    assert rows_in(put(tmp_path / "in", form, records), made) == expected


# --- the fields that are read


KINDS: list[tuple[dict[str, Any], str | None, Kind]] = [
    ({"text": "a"}, None, TEXTS), ({"messages": [{"role": "user"}], "prompt": "a"}, None, CHATS),
    ({"prompt": "a", "completion": "b"}, None, PAIRS), ({"text": "a", "messages": []}, "text", TEXTS),
    ({"text": "a", "messages": [{"role": "user"}]}, "messages", CHATS),
    ({"turns": [{"role": "user"}]}, "turns", Kind("chats", ("turns", "tools"))),
    ({"turns": [{"from": "gpt"}]}, "turns", Kind("chats", ("turns", "tools", "system"), "sharegpt")),
    ({"q": "a", "a": "b"}, "q,a", Kind("completions", ("q", "a"))), ({"a,b": "c"}, "a,b", Kind("text", ("a,b",))),
]  # fmt: skip


@pytest.mark.parametrize(("record", "column", "kind"), KINDS)
def test_the_fields_decide_the_kind(tmp_path: Path, record: dict[str, Any], column: str | None, kind: Kind) -> None:
    (tmp_path / "a.jsonl").write_text("{broken\n" + json.dumps(record))  # a malformed record decides nothing
    assert list_files(str(tmp_path), Selection(column=column)).kind == kind


PREFERENCE = {"prompt": "a", "chosen": "b", "rejected": "c"}
REFUSED: list[tuple[Any, Any, str]] = [
    ({"text": "a", "prompt": "b", "completion": "c"}, ConfigError, r"--text_column prompt,completion or text"),
    (PREFERENCE, DataError, r"a\.jsonl:1: is a preference pair \(chosen, rejected\).*chosen answers as messages"),
    ({**PREFERENCE, "messages": chat(1)}, DataError, r"preference pair .*--text_column messages"),
    ({"question": "a"}, DataError, r"a\.jsonl:1: no field text, .*it has question.*--text_column"),
]


@pytest.mark.parametrize(("record", "error", "reason"), REFUSED)
def test_records_of_no_known_kind_are_refused(tmp_path: Path, record: Any, error: Any, reason: str) -> None:
    write_lines(tmp_path / "a.jsonl", [record])
    with pytest.raises(error, match=reason) as refused:
        list_files(str(tmp_path))
    assert "\n" not in str(refused.value)


# --- malformed records


CUT = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
MALFORMED: dict[Kind, list[tuple[Any, str]]] = {
    CHATS: [
        ({"messages": []}, "messages is empty"), ({"messages": "hi"}, '"messages" list'), ({}, '"messages" list'),
        ({"messages": [{"role": "user"}]}, r'\[0\] has no "content"'),
        ({"messages": [{"role": "user", "content": "a\0"}]}, "NUL"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\]: content\[0\] is 'image'"),
        ({"messages": [{"role": "user", "content": ["text"]}]}, r"messages\[0\]: content\[0\] is 'text', not a part"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"messages\[0\]: content\[0\] is 'text'"),
        ({"messages": chat(1), "tools": "{"}, '"tools" is no list'),
        ({"messages": chat(1), "tools": [1]}, '"tools" is no list'),
        ({"messages": [{"role": "user", "content": "a"}]}, "no turn of the assistant"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "first turn is the assistant's"),
        ({"messages": [*chat(2), {"role": "judge", "content": "a"}]}, "template refuses it .unknown role judge"),
    ],
    PAIRS: [
        ({"prompt": "a"}, 'no "completion"'), ({"prompt": "a", "completion": " "}, "is empty"),
        ({"prompt": 5, "completion": "a"}, 'no "prompt"'), ({"prompt": "a", "completion": "b\0"}, "NUL"),
    ],
    TEXTS: [
        ({"text": 5}, 'no "text" string'), (CUT, "byte 0 is not UTF-8"), ({"text": "a\0"}, "NUL"),
        ({"text": "\ud800"}, "surrogates"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", MALFORMED, ids=str)
def test_malformed_records_are_problems_of_one_line(plain: Path, kind: Kind) -> None:
    """A reader names the file and the line, and stops or leaves them out: `test_data_readers.py`."""
    records = [record if record is CUT else json.dumps(record).encode() for record, _ in MALFORMED[kind]]
    for problem, (record, reason) in zip(maker_of(plain, kind).rows(records), MALFORMED[kind], strict=True):
        assert isinstance(problem, Problem), record
        assert re.search(reason, problem), record
        assert "\n" not in problem


def test_a_completion_needs_no_prompt(plain: Path) -> None:
    (row,) = maker_of(plain, PAIRS).rows([{"prompt": "", "completion": "b"}])
    assert isinstance(row, Row)


# --- templates


@pytest.mark.parametrize(("template", "file", "reason"), [
    (None, None, r"has no chat template.*--chat_template FILE"), ("{% for %}", None, "line 1"),
    (PLAIN, "/absent", r"absent: cannot be read .*--chat_template"),
])  # fmt: skip
def test_an_unusable_template_is_refused_at_once(tmp_path: Path, template: Any, file: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        maker_of(write_tokenizer(tmp_path / "tokenizer", template), chat_template=file)


def test_a_template_from_a_file(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(MARKED)
    made = maker_of(plain, chat_template=str(tmp_path / "chat.jinja"))
    marked = write_tokenizer(tmp_path / "marked", MARKED)
    (row,) = made.rows([{"messages": chat(5)}])
    assert tokens(row) == by_transformers(marked, chat(5))
    assert made.identity not in (maker_of(plain).identity, maker_of(plain, PAIRS).identity)
    with pytest.raises(ConfigError, match="prompts with completions; leave it out"):
        maker_of(plain, PAIRS, chat_template="x")


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
BAD_TEMPLATES = {
    "drops the reasoning of all answers but the last": (
        PLAIN.replace("turn.content", "(turn.content if loop.last else 'short')"), "turn 2 .*--chat_template",
    ),
    "writes without end": (LOOP + PLAIN, "chat template takes over .*correct the template"),
    "one huge string": ("{{ 'x' * 10 ** 15 }}" + PLAIN, "chat template takes over .*correct the template"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TEMPLATES)
def test_a_bad_template_is_a_problem_of_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Bounded in time; the thread goes on to the next record."""
    monkeypatch.setattr(chats, "RENDER_SECONDS", 0.3)
    template, reason = BAD_TEMPLATES[case]
    good = "{% if messages | length < 3 %}" + PLAIN + "{% else %}" + template + "{% endif %}"
    before, bad, after = maker_of(write_tokenizer(tmp_path / "tokenizer", good)).rows(
        [{"messages": turns("a", "b")}, {"messages": turns("a", "b", "c", "d")}, {"messages": turns("a", "b")}]
    )
    assert isinstance(bad, Problem)
    assert re.search(reason, bad)
    assert tokens(before) == tokens(after)


def test_a_template_with_the_date_gives_the_same_rows_on_any_day(tmp_path: Path) -> None:
    made = write_tokenizer(tmp_path / "tokenizer", "{{ strftime_now('%d %b %Y') }}" + PLAIN)
    (row,) = maker_of(made).rows([{"messages": chat(5)}])
    assert load(str(made)).decode(tokens(row)[0]).startswith("26 Jul 2024")


# --- text


def test_text_rows(plain: Path) -> None:
    """The whole text and an end token; special tokens in a text are text."""
    fast, maker = load(str(plain)), maker_of(plain, TEXTS)
    good, blank, whole, special = maker.rows([b'{"text": "it is 5"}', {"text": " \n"}, "it is 5", {"text": "<|end|>"}])
    assert good.labels is None  # type: ignore[union-attr]
    ids = [*fast.encode("it is 5").ids, fast.token_to_id("<|endoftext|>")]
    assert good.input_ids.tolist() == whole.input_ids.tolist() == ids  # type: ignore[union-attr]
    assert (blank, special.input_ids.size > 2) == (None, True)  # type: ignore[union-attr]
    (named,) = maker_of(plain, TEXTS, eos_token="<|end|>").rows(["it is 5"])
    assert named.input_ids[-1] == fast.token_to_id("<|end|>")  # type: ignore[union-attr]


def test_tokenizers_that_do_not_fit(plain: Path, tmp_path: Path) -> None:
    for kind in (TEXTS, CHATS):
        with pytest.raises(ConfigError, match=r"ids up to 299.* vocabulary of 256"):
            maker_of(plain, kind, vocab_size=256)
    maker_of(plain, TEXTS, vocab_size=300)
    with pytest.raises(ConfigError, match=r"text, and no tokenizer .*--tokenizer"):
        Recipe(TEXTS).open()
    with pytest.raises(ConfigError, match="--eos_token <none>: "):
        maker_of(plain, TEXTS, eos_token="<none>")
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0b\x0c not JSON")
    for read in (load, load_tokenizer):
        with pytest.raises(ConfigError, match=r"tokenizer\.model: .*SentencePiece.*tokenizer\.json") as refused:
            read(str(tmp_path / "tokenizer.model"))
        assert "\n" not in str(refused.value)


def test_the_identity_is_that_of_the_content(plain: Path, tmp_path: Path) -> None:
    copy = write_tokenizer(tmp_path / "elsewhere")
    assert maker_of(copy).identity == maker_of(plain).identity == Recipe(CHATS, tokenizer=str(plain)).identity
    other = write_tokenizer(tmp_path / "other", MARKED)
    assert maker_of(other).identity != maker_of(plain).identity
    assert maker_of(other, TEXTS).identity == maker_of(plain, TEXTS).identity, "a text needs no template"
