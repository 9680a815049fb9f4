"""``smp-train data``: reports on good data and bad data, and on runs that used data once or not."""

import json
import subprocess
import sys

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


def test_data_verbs_import_no_torch():
    """Nor what takes long to import."""
    code = "import sys; from smp_train.data import cli; from smp_train.data.prepare import cli; " + (
        "cli; print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


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


def test_audit_of_a_good_run(tmp_path, audited):
    with pytest.raises(ConfigError, match="--data_audit 1"):
        cli.audit(tmp_path)
    (tmp_path / "data_audit-rank0.jsonl").touch()
    assert audited() == (0, f"{tmp_path}: no step was recorded yet\n")
    audited(sequence(8))
    write(tmp_path, sequence(8)[5:], start=6, attempt=2)  # resumed from step 5: those steps are written again
    code, output = audited(rows=ROWS)
    assert code == 0
    assert "steps 1 to 8, 32 samples, 10 different: each once per epoch" in output


def test_audit_of_ranks_that_share_a_model(tmp_path, audited):
    audited(sequence(5), peers=2)
    second = tmp_path / "data_audit-rank1.jsonl"
    second.write_text(second.read_text() + '{"step": 6, "sam')  # the last line of a run that was killed
    assert audited(rows=ROWS)[0] == 0
    second.write_text(second.read_text().replace("a:", "b:", 1))
    code, output = audited(rows=ROWS)
    assert (code, "step 1: rank 1 read other samples than the ranks they share a model with" in output) == (3, True)


def test_audit_finds_samples_that_are_never_used(audited):
    assert audited(sequence(8))[0] == 0
    code, output = audited(facts={"samples": {"": ROWS + 1}})
    assert (code, "1 of 11 samples were never used" in output) == (3, True)
    steps, config = [["a/x:0", "b/y:0"], ["a/x:1", "b/y:1"]] * 2, {"training_dir": ["a:0.5", "b:0.5"]}
    assert audited(steps, facts={"config": config, "samples": {"a": 2, "b": 2}})[0] == 0
    code, output = audited(facts={"config": config, "samples": {"a": 2, "b": 3}})
    assert (code, "b: 1 of 3 samples were never used" in output) == (3, True)


def test_audit_of_epochs(audited):
    facts = {"config": {"epochs": 2, "max_steps": 5}, "total_steps": 5, "samples": {"": ROWS}}
    assert audited(sequence(5), facts=facts)[0] == 0
    code, output = audited(sequence(4), facts={**facts, "total_steps": 4})
    assert code == 3, "the run says that it is at its end"
    assert f"{2 * ROWS - 16} of {ROWS} samples" in output
    assert all(name in output for name in sequence(5)[4])
    for excuse in (
        {"total_steps": 5},
        {"total_steps": 4, "config": {"epochs": 2, "max_steps": 4}, "sources": {"max_steps": "command line"}},
        {"total_steps": 4, "config": {"epochs": 2, "max_steps": 5000, "steps_per_epoch": 2}},
    ):
        code, output = audited(facts={**facts, **excuse})
        assert code == 0, excuse
        assert f"{2 * ROWS - 16} of {ROWS} samples" in output
    code, output = audited(facts={**facts, "config": {"epochs": 4}, "total_steps": 4})
    assert (code, "2 of 4 epochs" in output) == (3, True)
    assert audited(sequence(5)[2:], start=3, facts=facts)[0] == 0, "nothing is known of the first steps"


@pytest.mark.parametrize("count", [40, BLOCK + 40])
def test_audit_knows_how_often_each_place_of_a_blend_comes(tmp_path, audited, count):
    slots = apportion([0.7, 0.299, 0.001], BLOCK)
    whose = np.concatenate([sources_of_block(block, slots, 5) for block in range(2)])[:count]
    taken, samples = [0, 0, 0], []
    for place in whose.tolist():
        samples.append(f"{'abc'[place]}/x:{taken[place]}")
        taken[place] += 1
    config = {"training_dir": ["a:0.7", "b:0.299", "c:0.001"], "seed": 5}
    facts = {"config": config, "samples": dict.fromkeys("abc", count)}
    code, output = audited([samples], world=1, facts=facts)
    assert code == 0
    assert f"drawn from a: {taken[0]}, b: {taken[1]}, c: {taken[2]}\n" in output
    # As if b were no place of the run: its share came from a.
    others = [name if name[0] != "b" else f"a/more:{name}" for name in samples]
    code, output = audited([others], world=1, facts=facts)
    assert code == 3
    assert f"b: was drawn from 0 times, its weight gives it {taken[1]}\n" in output
    assert audited([samples], world=1, start=7, facts=facts)[0] == 0
    # Killed when one rank of two had written its part of the last step.
    audited([samples[: count // 2], samples[count // 2 :]], facts=facts)
    lines = (tmp_path / "data_audit-rank0.jsonl").read_text().splitlines()
    (tmp_path / "data_audit-rank0.jsonl").write_text(lines[0] + "\n")
    assert audited(facts=facts)[0] == 0


def test_audit_after_a_kill_and_a_resume_on_another_mesh(tmp_path, audited):
    # Four ranks, killed after step 6; from step 4 on two, which share a model; from step 6 on one, in larger steps.
    audited(sequence(8)[:6], world=4)
    write(tmp_path, sequence(8)[3:7], attempt=2, start=4, world=2, peers=2)
    flat = [name for step in sequence(9) for name in step][20:]
    write(tmp_path, [flat[:8]], attempt=3, start=6, world=1)
    code, output = audited(rows=ROWS)
    assert code == 0
    assert "steps 1 to 6, 28 samples, 10 different: each once per epoch" in output
    (tmp_path / "data_audit-rank3.jsonl").unlink()
    code, output = audited(rows=ROWS)
    assert (code, "step 2: the records of some ranks are missing" in output) == (3, True)


@pytest.mark.parametrize(("kind", "wanted"), [
    ("repeat", "comes again before the epoch"), ("gap", "epoch of 10 samples"), ("lost step", "step 4 is missing"),
])  # fmt: skip
def test_audit_finds(tmp_path, audited, kind, wanted):
    steps = sequence(8)
    if kind == "repeat":
        steps[1][0] = steps[0][0]
    elif kind == "gap":
        # What the original does on resume: some rows of an epoch are passed over.
        flat = [name for step in steps for name in step]
        del flat[3:7]
        steps = [flat[k : k + 4] for k in range(0, 28, 4)]
    audited(steps if kind != "lost step" else steps[:3])
    if kind == "lost step":
        write(tmp_path, steps[4:], start=5)
    code, output = audited(rows=ROWS)
    assert (code, wanted in output) == (3, True)


STREAMED = [
    ["a:1[0:5]+b+c:2[0:3]"], ["b+c:2[3:9]"], ["b+c:2[9:10]+a:1@1[0:5]+b+c:2@1[0:2]"],
    ["b+c:2@1[2:4]", "b+c:2@1[4:10]+d:1@1"],
]  # fmt: skip
"""Samples of four steps; the second epoch begins in the third step."""


@pytest.mark.parametrize(("step", "samples", "problem"), [
    (0, STREAMED[0], None),
    (1, ["b+c:2[4:9]"], "step 2: b+c:2 goes on at token 4, but epoch 0 left it at token 3"),
    (1, ["b+c:2[2:9]"], "step 2: b+c:2 goes on at token 2, but epoch 0 left it at token 3"),
    (1, ["b+c:2[3:9]", "a:1[0:5]"], "step 2: a:1 goes on at token 0, but epoch 0 left it at token 5"),
    (2, ["b+c:2[9:10]+a:1@1[1:5]+b+c:2@1[0:2]"], "step 3: a:1 goes on at token 1, but epoch 1 left it at token 0"),
    (3, ["b+c:2@1[0:4]", "b+c:2@1[4:10]"], "step 4: b+c:2 goes on at token 0, but epoch 1 left it at token 2"),
])  # fmt: skip
def test_audit_of_streams(audited, step, samples, problem):
    steps = [*STREAMED[:step], samples, *STREAMED[step + 1 :]]
    code, output = audited(steps, world=1, facts={"streams": 1})
    assert code == (3 if problem else 0)
    assert (problem or "no token twice, no record left in its middle, no step left out") in output
