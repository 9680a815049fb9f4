"""``smp-train data``: what it says of good data, of bad data, and of runs that used data once or not."""

import gzip
import json
import shutil

import numpy as np
import pytest

from smp_train.cli import main
from smp_train.data import cli
from smp_train.data.blend import BLOCK, apportion, sources_of
from smp_train.data.open_data import open_place
from smp_train.data.order import Order
from smp_train.data.token_cache import BESIDE
from smp_train.errors import ConfigError
from smp_train.telemetry.audit import DataAudit
from tests.training import SAMPLE

ROWS = 10


def test_inspect_the_sample(capsys):
    tokenizer = SAMPLE / "tokenizer.json"
    words = ["data", "inspect", str(SAMPLE / "train")] + (["--tokenizer", str(SAMPLE)] if tokenizer.exists() else [])
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "JSON-lines shards: " in said
    assert "problems: 0" in said
    assert "token ids: " in said
    assert ("as text: '" in said) == tokenizer.exists()
    assert not (SAMPLE / "train" / BESIDE / "x").exists()


def test_verify_names_every_problem(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"input_ids": [1, 2, 3]}\n{}\n\n{"input_ids": [1, 99]}\n{"input_ids": [7]}\n')
    (tmp_path / "b.json").write_text("\n")
    (tmp_path / "c.json.gz").write_bytes(b"\x1f\x8bnot gzip at all")
    assert main(["data", "verify", str(tmp_path), "--vocab_size", "50"]) == 3
    said = capsys.readouterr().out.splitlines()
    for line, wanted in zip(
        said,
        ["a.json:2: no input_ids", "a.json:4: token id 99 is outside", "a.json:5: a row of one token",
         "b.json: empty shard", "c.json.gz:1: gzip stream is damaged", "1 rows in 3 files, 5 problems"],
        strict=True,
    ):  # fmt: skip
        assert wanted in line
    assert not (tmp_path / BESIDE).exists(), "looking writes nothing"
    assert main(["data", "inspect", str(tmp_path), "--vocab_size", "50"]) == 0
    assert "length: 3 to 3, median 3" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_text_and_chats_are_one_line(verb, tmp_path, capsys):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pq.write_table(pa.table({"text": ["é🙂"] * 5}), tmp_path / "more.parquet")
    for name in ("chats.jsonl", "chats.json"):
        (tmp_path / name).write_text('{"messages": [{"role": "user", "content": "?"}]}\n' * 5)
    (tmp_path / "other.jsonl").write_text('{"conversations": []}\n' * 5)
    (tmp_path / "a.txt").write_text("a story\n" * 5)
    for name in ("more.parquet", "chats.jsonl", "chats.json", "other.jsonl", "a.txt", ""):
        assert main(["data", verb, str(tmp_path / name)]) == 3
        said = capsys.readouterr()
        assert said.out == ""
        (line,) = (line for line in said.err.splitlines() if "error" in line)
        assert "--tokenizer" in line
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "a.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    (tmp_path / "tokens" / "README.md").write_text("of tokens")
    assert main(["data", verb, str(tmp_path / "tokens")]) == 0
    assert "left out" not in capsys.readouterr().err
    assert main(["data", verb, str(SAMPLE)]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_verify_prepared(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"input_ids": [1, 2, 3]}\n' * 5)
    open_place(str(tmp_path), vocab_size=9)
    here = tmp_path / BESIDE
    assert main(["data", "verify", str(here)]) == 0
    tok = next(here.glob("*.tok"))
    content = bytearray(tok.read_bytes())
    content[13] ^= 1
    tok.write_bytes(content)
    assert main(["data", "verify", str(here)]) == 3
    assert "row 2 (a.json:3) does not match its checksum" in capsys.readouterr().out


def test_verify_holds_a_preparation_against_its_manifest(tmp_path, capsys):
    # Other tests train on the sample meanwhile: files in the cache beside it come and go.
    shutil.copytree(SAMPLE, tmp_path / "sample", ignore=shutil.ignore_patterns(BESIDE))
    train = tmp_path / "sample" / "train"
    assert cli.main(["verify", str(train)]) == 0
    shutil.copy(train / "train-00000.json.gz", train / "more.json.gz")
    (train / "train-00001.json.gz").unlink()
    content = gzip.decompress((train / "train-00002.json.gz").read_bytes())
    (train / "train-00002.json.gz").write_bytes(gzip.compress(content[: content.index(b"\n") + 1]))
    capsys.readouterr()
    assert cli.main(["verify", str(train)]) == 3
    said = capsys.readouterr().out
    assert "train-00001.json.gz is missing" in said
    assert "train-00002.json.gz has " in said
    assert "more.json.gz is not listed" in said
    assert said.endswith(", 3 problems\n")


def test_mistakes_of_use(tmp_path, capsys):
    assert main(["data", "verify", str(tmp_path / "none")]) == 3
    assert main(["data", "verfy", "x"]) == 2
    assert main(["data", "audit", str(tmp_path)]) == 2
    assert "--data_audit 1" in capsys.readouterr().err


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
    code, said = audited(rows=ROWS)
    assert code == 0
    assert "steps 1 to 8, 32 samples, 10 different: each once per epoch" in said


def test_audit_of_ranks_that_share_a_model(tmp_path, audited):
    audited(sequence(5), peers=2)
    second = tmp_path / "data_audit-rank1.jsonl"
    second.write_text(second.read_text() + '{"step": 6, "sam')  # the last line of a run that was killed
    assert audited(rows=ROWS)[0] == 0
    first, *others = second.read_text().splitlines()
    second.write_text("\n".join([json.dumps(json.loads(first) | {"samples": ["a:0"] * 4}), *others]))
    code, said = audited(rows=ROWS)
    assert code == 3
    assert "step 1: rank 1 read other samples than the ranks they share a model with" in said


def test_audit_counts_rows_where_windows_of_them_are_drawn(audited):
    steps = [["a:1[0:4]", "a:2[3:7]"], ["a:1[2:6]", "a:2[0:4]"]]
    code, said = audited(steps, world=1, facts={"config": {"long": "crop"}})
    assert code == 0
    assert "4 samples, 2 different" in said


def test_audit_finds_samples_that_are_never_used(audited):
    assert audited(sequence(8))[0] == 0
    code, said = audited(facts={"samples": {"": ROWS + 1}})
    assert (code, "1 of 11 samples were never used" in said) == (3, True)
    steps, config = [["a/x:0", "b/y:0"], ["a/x:1", "b/y:1"]] * 2, {"training_dir": ["a:0.5", "b:0.5"]}
    assert audited(steps, facts={"config": config, "samples": {"a": 2, "b": 2}})[0] == 0
    code, said = audited(facts={"config": config, "samples": {"a": 2, "b": 3}})
    assert (code, "b: 1 of 3 samples were never used" in said) == (3, True)


def test_audit_of_epochs(audited):
    facts = {"config": {"epochs": 2, "max_steps": 5}, "total_steps": 5, "samples": {"": ROWS}}
    assert audited(sequence(5), facts=facts)[0] == 0
    code, said = audited(sequence(4), facts={**facts, "total_steps": 4})
    assert code == 3, "the run says that it is at its end"
    assert f"{2 * ROWS - 16} of {ROWS} samples" in said
    assert all(name in said for name in sequence(5)[4])
    for excuse in (
        {"total_steps": 5},
        {"total_steps": 4, "config": {"epochs": 2, "max_steps": 4}, "sources": {"max_steps": "command line"}},
        {"total_steps": 4, "config": {"epochs": 2, "max_steps": 5000, "steps_per_epoch": 2}},
    ):
        code, said = audited(facts={**facts, **excuse})
        assert code == 0, excuse
        assert f"{2 * ROWS - 16} of {ROWS} samples" in said
    code, said = audited(facts={**facts, "config": {"epochs": 4}, "total_steps": 4})
    assert (code, "2 of 4 epochs" in said) == (3, True)
    assert audited(sequence(5)[2:], start=3, facts=facts)[0] == 0, "nothing is known of the first steps"


@pytest.mark.parametrize("count", [40, BLOCK + 40])
def test_audit_knows_how_often_each_place_of_a_blend_comes(tmp_path, audited, count):
    slots = apportion([0.7, 0.299, 0.001], BLOCK)
    whose = np.concatenate([sources_of(block, slots, 5) for block in range(2)])[:count]
    taken, samples = [0, 0, 0], []
    for place in whose.tolist():
        samples.append(f"{'abc'[place]}/x:{taken[place]}")
        taken[place] += 1
    config = {"training_dir": ["a:0.7", "b:0.299", "c:0.001"], "seed": 5}
    facts = {"config": config, "samples": dict.fromkeys("abc", count)}
    code, said = audited([samples], world=1, facts=facts)
    assert code == 0
    assert f"drawn from a: {taken[0]}, b: {taken[1]}, c: {taken[2]}\n" in said
    # As if b were no place of the run: its share came from a.
    others = [name if name[0] != "b" else f"a/more:{name}" for name in samples]
    code, said = audited([others], world=1, facts=facts)
    assert code == 3
    assert f"b: was drawn from 0 times, its weight gives it {taken[1]}\n" in said
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
    code, said = audited(rows=ROWS)
    assert code == 0
    assert "steps 1 to 6, 28 samples, 10 different: each once per epoch" in said
    (tmp_path / "data_audit-rank3.jsonl").unlink()
    code, said = audited(rows=ROWS)
    assert (code, "step 2: the records of some ranks are missing" in said) == (3, True)


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
    code, said = audited(rows=ROWS)
    assert (code, wanted in said) == (3, True)


GOOD_TEXT = [
    ["a:1[0:5]+b+c:2[0:3]"], ["b+c:2[3:9]"], ["b+c:2[9:10]+a:1[0:5]+b+c:2[0:2]"], ["b+c:2[2:4]", "b+c:2[4:10]"],
]  # fmt: skip


@pytest.mark.parametrize(("step", "samples", "problem"), [
    (0, GOOD_TEXT[0], None),
    (1, ["b+c:2[4:9]"], r"step 2: b+c:2 goes on at token 4, but was left at 3"),
    (1, ["b+c:2[2:9]"], r"step 2: b+c:2 goes on at token 2, but was left at 3"),
    (2, ["b+c:2[9:10]+a:1[1:5]+b+c:2[0:2]"], r"step 3: a:1 goes on at token 1, but was left at 5"),
    (3, ["b+c:2[0:4]", "b+c:2[4:10]"], r"step 4: b+c:2 goes on at token 0, but was left at 2"),
])  # fmt: skip
def test_audit_of_streamed_text(audited, step, samples, problem):
    steps = [*GOOD_TEXT[:step], samples, *GOOD_TEXT[step + 1 :]]
    code, said = audited(steps, world=1, facts={"config": {"dataset": "x"}})
    assert code == (3 if problem else 0)
    assert (problem or "no token of a document twice or left out, no step left out") in said
