"""``smp-train data``: reports on good data and bad data, and on runs that used data once or not."""

import json

import numpy as np
import pytest

from smp_train.data import cli
from smp_train.data.blend import BLOCK, apportion, sources_of_block
from smp_train.data.order import Order
from smp_train.errors import ConfigError
from smp_train.telemetry.audit import DataAudit
from tests.chats import turns, write_lines, write_tokenizer
from tests.training import SAMPLE

ROWS = 10


def test_inspect_the_sample(capsys):
    assert cli.main(["inspect", str(SAMPLE / "train"), "--tokenizer", str(SAMPLE), "--max_context_width", "64"]) == 0
    output = capsys.readouterr().out
    for part in ("Rows of tokens: ", "problems: 0", "token ids: ", "as text: '", "longer than 64 tokens: "):
        assert part in output
    assert cli.main(["inspect", str(SAMPLE)]) == 0, "a preparation is read for its split"
    for split in ("train", "test"):
        assert cli.main(["verify", str(SAMPLE), "--split", split]) == 0, "the manifest has its checksums"


def test_verify_reports_every_problem(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"input_ids": [1, 2, 3]}\n{}\n\n{"input_ids": [1, 99]}\n{"input_ids": [7]}\n')
    (tmp_path / "b.json").write_text("\n")
    (tmp_path / "c.json.gz").write_bytes(b"\x1f\x8bnot gzip at all")
    assert cli.main(["verify", str(tmp_path), "--vocab_size", "50"]) == 3
    output = capsys.readouterr().out.splitlines()
    for line, part in zip(
        output,
        ["a.json:2: no input_ids", "a.json:4: token id 99 is outside", "a.json:5: a row of one token",
         "b.json: no row", "c.json.gz:", "1 rows in 3 files, 5 problems"],
        strict=True,
    ):  # fmt: skip
        assert part in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json", "c.json.gz"], "nothing is written"
    assert cli.main(["inspect", str(tmp_path), "--vocab_size", "50"]) == 3
    assert "length: 3 to 3, median 3" in capsys.readouterr().out


def test_verify_reads_text_and_chats(tmp_path, capsys):
    made = ["--tokenizer", str(write_tokenizer(tmp_path / "tokenizer"))]
    records = [{"messages": turns("?", "an answer")}, {"messages": turns("?")}]
    words = ["verify", str(write_lines(tmp_path / "chats.jsonl", records)), *made]
    assert cli.main(words) == 3
    output = capsys.readouterr().out
    assert "chats.jsonl:2: no turn of the assistant" in output
    assert "1 rows in 1 files, 1 problems" in output
    assert cli.main(["inspect", *words[1:], "--max_context_width", "4"]) == 3
    output = capsys.readouterr().out
    assert "[[" in output
    assert "chats.jsonl:1: none of its first 4 tokens" in output
    text = str(write_lines(tmp_path / "text.jsonl", [{"text": "good"}, {"text": 5}]))
    with pytest.raises(ConfigError, match="--tokenizer"):
        cli.main(["verify", text])
    assert cli.main(["verify", text, *made]) == 3
    assert "text.jsonl:2: " in capsys.readouterr().out


def sequence(steps, batch=4, size=ROWS):
    names = [f"a:{row}" for row in Order(size, 3).rows(np.arange(steps * batch))[1]]
    return [names[k * batch : (k + 1) * batch] for k in range(steps)]


def write(folder, steps, *, attempt=1, start=1, world=2, peers=1):
    """Write what ``world`` ranks, of which ``peers`` share a model, record of steps of these samples."""
    for rank in range(world):
        audit = DataAudit(folder, rank, attempt=attempt, dp_rank=rank // peers, dp_size=world // peers)
        for number, samples in enumerate(steps, start):
            share = len(samples) // (world // peers)
            audit.step(number, samples[rank // peers * share :][:share])
        audit.close()


@pytest.fixture
def audited(tmp_path, capsys):
    """Return a function that writes steps anew, and run.json, and returns (exit code, output) of the audit."""

    def run(steps=None, rows=None, facts=None, **how):
        if steps is not None:
            for file in tmp_path.glob("*.jsonl"):
                file.unlink()
            write(tmp_path, steps, **how)
        (tmp_path / "run.json").write_text(json.dumps(facts or {}))
        capsys.readouterr()
        return cli.audit(tmp_path, rows), capsys.readouterr().out

    return run


def test_audit_of_nothing(tmp_path, audited):
    with pytest.raises(ConfigError, match="--data_audit 1"):
        cli.audit(tmp_path)
    (tmp_path / "data_audit-rank0.jsonl").touch()
    assert audited() == (0, f"{tmp_path}: no step was recorded yet\n")


def repeated():
    steps = sequence(8)
    steps[1][0] = steps[0][0]
    return steps


def gap():
    """Return steps in which some rows of an epoch are passed over."""
    flat = [name for step in sequence(8) for name in step]
    del flat[3:7]
    return [flat[k : k + 4] for k in range(0, 28, 4)]


EPOCHS = {"config": {"epochs": 2, "max_steps": 5}, "total_steps": 5, "samples": {"": ROWS}}
AT_ITS_END = {**EPOCHS, "total_steps": 4}
SHORT = f"{2 * ROWS - 16} of {ROWS} samples"
BLEND = [["a/x:0", "b/y:0"], ["a/x:1", "b/y:1"]] * 2
WEIGHTS = {"training_dir": ["a:0.5", "b:0.5"]}
STREAMED = [
    ["a:1[0:5]+b+c:2[0:3]"], ["b+c:2[3:9]"], ["b+c:2[9:10]+a:1@1[0:5]+b+c:2@1[0:2]"],
    ["b+c:2@1[2:4]", "b+c:2@1[4:10]+d:1@1"],
]  # fmt: skip
"""Samples of four steps; the second epoch begins in the third step."""
AUDITS = {
    "good": (sequence(8), {}, 0, "steps 1 to 8, 32 samples, 10 different: each once per epoch"),
    "repeat": (repeated(), {}, 3, "comes again before the epoch"), "gap": (gap(), {}, 3, "comes late"),
    "an unused sample": (sequence(8), {"samples": {"": ROWS + 1}}, 3, "1 of 11 samples were never used"),
    "blend": (BLEND, {"config": WEIGHTS, "samples": {"a": 2, "b": 2}}, 0, "no step left out"),
    "one unused in a blend": (
        BLEND, {"config": WEIGHTS, "samples": {"a": 2, "b": 3}}, 3, "b: 1 of 3 samples were never used",
    ),
    "windows of rows": (
        [["a:1[0:4]", "a:2[3:7]"], ["a:1[2:6]", "a:2[0:4]"]], {"config": {"long": "crop"}}, 0, "4 samples, 2 different",
    ),
    "epochs": (sequence(5), EPOCHS, 0, "each 2 times"), "epochs cut short": (sequence(4), AT_ITS_END, 3, SHORT),
    "not at its end": (sequence(4), EPOCHS, 0, SHORT),
    "ended by --max_steps": (sequence(4), {**AT_ITS_END, "sources": {"max_steps": "command line"}}, 0, SHORT),
    "ended by --steps_per_epoch": (
        sequence(4), {**AT_ITS_END, "config": {"epochs": 2, "steps_per_epoch": 2}}, 0, SHORT,
    ),
    "epochs not begun": (sequence(4), {**AT_ITS_END, "config": {"epochs": 4}}, 3, "2 of 4 epochs"),
    "streams": (STREAMED, {"streams": 1}, 0, "no token twice, no record left in its middle, no step left out"),
    **{problem: ([*STREAMED[:step], samples, *STREAMED[step + 1 :]], {"streams": 1}, 3, problem)
       for step, samples, problem in (
           (1, ["b+c:2[4:9]"], "step 2: b+c:2 goes on at token 4, but epoch 0 left it at token 3"),
           (1, ["b+c:2[2:9]"], "step 2: b+c:2 goes on at token 2, but epoch 0 left it at token 3"),
           (1, ["b+c:2[3:9]", "a:1[0:5]"], "step 2: a:1 goes on at token 0, but epoch 0 left it at token 5"),
           (3, ["b+c:2@1[0:4]", "b+c:2@1[4:10]"], "step 4: b+c:2 goes on at token 0, but epoch 1 left it at token 2"),
       )},
}  # fmt: skip


@pytest.mark.parametrize("case", AUDITS)
def test_audit(audited, case):
    steps, facts, code, words = AUDITS[case]
    found, output = audited(steps, None if facts else ROWS, facts, world=1)
    assert (found, words in output) == (code, True), output


def test_audit_of_ranks_that_share_a_model(tmp_path, audited):
    audited(sequence(5), peers=2)
    second = tmp_path / "data_audit-rank1.jsonl"
    second.write_text(second.read_text() + '{"step": 6, "sam')  # the last line of a run that was killed
    assert audited(rows=ROWS)[0] == 0
    write(tmp_path, sequence(7)[5:], attempt=2, start=6, peers=2)
    assert audited(rows=ROWS)[0] == 0, "the next attempt's first line is not joined to the cut line"
    second.write_text(second.read_text().replace("a:", "b:", 1))
    code, output = audited(rows=ROWS)
    assert (code, "step 1: rank 1 read other samples than the ranks they share a model with" in output) == (3, True)


@pytest.mark.parametrize("count", [40, BLOCK + 40])
def test_audit_knows_how_often_each_source_of_a_blend_comes(audited, count):
    slots = apportion([0.7, 0.299, 0.001], BLOCK)
    sources = np.concatenate([sources_of_block(block, slots, 5) for block in range(2)])[:count].tolist()
    samples = [f"{'abc'[source]}/x:{sources[:number].count(source)}" for number, source in enumerate(sources)]
    a, b, c = (sources.count(source) for source in range(3))
    config = {"training_dir": ["a:0.7", "b:0.299", "c:0.001"], "seed": 5}
    facts = {"config": config, "samples": dict.fromkeys("abc", count)}
    code, output = audited([samples], world=1, facts=facts)
    assert (code, f"drawn from a: {a}, b: {b}, c: {c}\n" in output) == (0, True)
    # As if b were no source of the run: its share came from a.
    others = [name if name[0] != "b" else f"a/more:{name}" for name in samples]
    code, output = audited([others], world=1, facts=facts)
    assert (code, f"b: was drawn from 0 times, its weight gives it {b}\n" in output) == (3, True)


def test_audit_after_a_kill_and_a_resume_on_another_mesh(tmp_path, audited):
    # Four ranks, killed after step 6; from step 4 on two, which share a model; from step 6 on one, in larger steps.
    audited(sequence(8)[:6], world=4)
    write(tmp_path, sequence(8)[3:7], attempt=2, start=4, world=2, peers=2)
    flat = [name for step in sequence(9) for name in step][20:]
    write(tmp_path, [flat[:8]], attempt=3, start=6, world=1)
    code, output = audited(rows=ROWS)
    assert (code, "steps 1 to 6, 28 samples, 10 different: each once per epoch" in output) == (0, True)
    (tmp_path / "data_audit-rank3.jsonl").unlink()
    code, output = audited(rows=ROWS)
    assert (code, "step 2: the records of some ranks are missing" in output) == (3, True)
    for path in tmp_path.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"step": 3' not in line))
    assert "step 3 is missing" in audited(rows=ROWS)[1]


def test_audit_counts_what_rows_lost(tmp_path, audited):
    """Rows and counted tokens that --long truncate cut off: they were in the data, and not in the training."""
    audited([["a:1[0:4]", "a:2"]], world=2)
    for rank, lost in enumerate([(1, 7), (2, 5)]):
        record = {"step": 2, "samples": [f"a:{3 + rank}"], "attempt": 1, "dp_rank": rank, "dp_size": 2}
        record |= dict(zip(("truncated", "truncated_targets"), lost, strict=True))
        with (tmp_path / f"data_audit-rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    code, output = audited()
    assert (code, "3 rows lost their end, and with it 12 tokens" in output) == (0, True)
