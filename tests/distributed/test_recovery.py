"""Ranks die at every point of a run: the others wait, replacements take their places, and no number changes."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from smp_train.distributed import heartbeat
from smp_train.distributed.generation import STUCK
from smp_train.launch import coordinator
from smp_train.launch.coordinator import End
from tests import dying
from tests.harness import run
from tests.recovering import Death, Recovering
from tests.system.command import write_shard
from tests.tiers import core
from tests.training import TINY, flags, read_checkpoint, records, same, steps, train

HYBRID: dict[str, Any] = {
    "sharding_strategy": "hybrid_shard", "hybrid_shard_degree": 2, "attn_pdrop": 0.1, "lr_decay_style": "constant",
    "distributed_timeout_minutes": 3,
}  # fmt: skip
REPLICATED: dict[str, Any] = {**HYBRID, "sharding_strategy": "no_shard", "hybrid_shard_degree": None}
COMPILED = {"use_torch_compile": 1, "torch_compile_backend": "aot_eager"}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "moe": 1, "moe_load_balancing": "aux_loss"}
EXACT = ("loss", "grad_norm", "lr", "tokens", "consumed")
STEP = [heartbeat.PHASES[phase] for phase in sorted(heartbeat.IN_A_STEP)]


def last_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the entries of the checkpoint of the last step of a run below ``folder``."""
    last = max(record["step"] for record in steps(folder))
    saved = (folder / "checkpoints" / TINY["run_name"]).glob(f"*-{last}steps*/COMMITTED")
    return read_checkpoint(max(saved, key=lambda marker: marker.stat().st_mtime).parent)


def check(
    folder: Path, deaths: list[Death], *, world: int = 4, number: int = signal.SIGKILL, replaced: int | None = None,
    **changes: Any,
) -> Recovering:  # fmt: skip
    """Train without and with ``deaths``; all logged steps, and the last checkpoint, must be equal bit for bit.

    If gloo keeps a rank waiting, that rank ends too, perhaps as the last replica: then the run is made again.
    """
    options = {**HYBRID, **changes}
    run(train, world, flags(folder / "straight", **options), timeout=300)
    words = flags(folder, recovery="in_place", **options)
    for _ in range(3):
        with Recovering(folder / "log", world, *words, deaths=deaths, number=number) as ranks:
            end = ranks.until_the_end()
        if STUCK not in ranks.err:
            break
        for part in ("run", "checkpoints", "log"):
            shutil.rmtree(folder / part)
    assert end == End(None), f"{end}\n{ranks.err}"
    assert sum(len(each.replaced) for each in ranks.generations) == (len(deaths) if replaced is None else replaced)
    expected = {record["step"]: [record[name] for name in EXACT] for record in steps(folder / "straight")}
    ours = steps(folder)
    assert {record["step"] for record in ours} == expected.keys()
    for record in ours:
        assert [record[name] for name in EXACT] == expected[record["step"]], record["step"]
    same(last_checkpoint(folder), last_checkpoint(folder / "straight"))
    return ranks


def recoveries(folder: Path) -> list[dict[str, Any]]:
    """Return the events of recovery that a run below ``folder`` wrote."""
    return [record for record in records(folder) if record.get("event") == "recovery"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "phases"),
    core([(0, ["backward", "the update"]), *((rank, STEP) for rank in range(4))], lambda case: case[1] != STEP),
    ids=["two points", *map(str, range(4))],
)
def test_a_rank_that_dies_at_any_point_of_a_step_is_replaced(tmp_path: Path, victim: int, phases: list[str]) -> None:
    deaths = [(victim, 3 + 2 * index, phase) for index, phase in enumerate(phases)]
    check(tmp_path, deaths, max_steps=5 + 2 * len(phases))
    assert [each["replaced"] for each in recoveries(tmp_path)] == [[victim]] * len(phases)
    assert all(each["seconds"] > 0.1 for each in recoveries(tmp_path))  # a replacement's start is part of it


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["async_sharded", "sharded", "full"])
def test_a_death_in_a_save_or_a_validation_loses_neither(tmp_path: Path, kind: str) -> None:
    write_shard(tmp_path / "data" / "rows.json", 64)
    deaths = [(0, 4, "a save"), (3, 6, "a validation"), (1, 8, "a save"), (0, 10, "a validation"), (2, 12, "a save")]
    check(
        tmp_path, deaths, max_steps=12, checkpoint_freq=4, validation_freq=2, test_dir=tmp_path / "data",
        training_dir=tmp_path / "data", use_synthetic_data=0, num_kept_checkpoints=0, checkpoint_type=kind, keep_best=1,
    )  # fmt: skip
    validations = {
        folder: {record["step"]: record["loss"] for record in records(folder) if record.get("event") == "evaluate"}
        for folder in (tmp_path, tmp_path / "straight")
    }
    assert validations[tmp_path] == validations[tmp_path / "straight"]
    markers = (tmp_path / "checkpoints" / "run").glob("*/COMMITTED")
    assert {path.parent.name.split("-")[1] for path in markers} >= {"4steps", "8steps", "12steps"}


@pytest.mark.slow
def test_ranks_that_die_together_are_replaced_together(tmp_path: Path) -> None:
    check(tmp_path, [(0, 3, "forward"), (1, 3, "forward"), (2, 6, "clipping"), (1, 6, "clipping")], max_steps=8)


@pytest.mark.slow
def test_a_death_during_a_recovery_begins_another(tmp_path: Path) -> None:
    deaths = [(1, 3, "forward"), (2, 3, "the start"), (0, 6, "backward"), (0, 0, "the start")]
    ranks = check(tmp_path, deaths, max_steps=8, replaced=4)
    assert len(ranks.generations) >= 3


@pytest.mark.slow
def test_the_last_save_is_repeated_if_a_rank_dies_in_it(tmp_path: Path) -> None:
    """The third entry is the wait for the save's end."""
    check(tmp_path, [(2, 4, "a save 3")], max_steps=4, checkpoint_type="async_sharded")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_failed_callback_still_ends_the_run_if_a_rank_dies_in_the_last_save(tmp_path: Path, victim: int) -> None:
    words = flags(tmp_path, recovery="in_place", **HYBRID | {"max_steps": 50, "checkpoint_type": "sharded"})
    deaths: list[Death] = [(victim, 3, "a save")]
    with Recovering(tmp_path / "log", 4, *words, deaths=deaths, **{dying.CALLBACK: 3}) as ranks:
        end = ranks.until_the_end()
    assert end.failure is not None
    assert (end.failure.code, len(ranks.generations)) == (1, 1), ranks.err
    assert "fail_at.<locals>.burst failed at step 3" in end.why
    assert [record["step"] for record in steps(tmp_path)] == [1, 2, 3]
    assert len([*(tmp_path / "checkpoints" / "run").glob("*-3steps*/COMMITTED")]) == 1


@pytest.mark.slow
def test_a_replaced_rank_0_keeps_the_runs_id(tmp_path: Path) -> None:
    check(tmp_path, [(0, 2, "forward")], world=2, max_steps=3, number=0, **REPLICATED)
    started = json.loads((tmp_path / "run" / "run.json").read_text())
    (saved,) = (tmp_path / "checkpoints" / "run").glob("*-3steps*/meta.json")
    assert json.loads(saved.read_text())["run"] == started["run"]
    assert len((tmp_path / "run" / "attempts.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("second", [(1, 0, "the groups"), (2, 3, "the groups")], ids=["replacement", "other rank"])
def test_a_death_while_groups_are_formed_begins_another(tmp_path: Path, second: Death) -> None:
    ranks = check(tmp_path, [(1, 3, "forward"), second], max_steps=6)
    assert len(ranks.generations) == 2


@pytest.mark.slow
def test_a_frozen_rank_is_replaced(tmp_path: Path) -> None:
    deaths = [(3, 6, "forward"), (0, 12, "the vote")]
    check(tmp_path, deaths, number=signal.SIGSTOP, max_steps=16, hang_report_seconds=1, train_timeout_seconds=1)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {}, {"sharding_strategy": "full_shard", "hybrid_shard_degree": None}, {"streaming": 1},
], ids=["replicas lost", "no replicas", "streamed"])  # fmt: skip
def test_without_a_replica_all_go_back_to_the_newest_checkpoint(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_shard(tmp_path / "data" / "rows.json", 64)
    data = {"training_dir": tmp_path / "data", "use_synthetic_data": 0}
    deaths: list[Death] = [(1, 7, "backward"), (3, 7, "backward")]
    check(tmp_path, deaths, max_steps=9, checkpoint_freq=2, checkpoint_type="sharded", **data, **changes)
    assert [each["step"] for each in recoveries(tmp_path)] == [6]


@pytest.mark.slow
def test_a_save_to_the_nodes_own_memory_is_gone_back_to(tmp_path: Path) -> None:
    """The parts of ranks that died are still in the node's files, and newer than the last durable checkpoint."""
    folders = {"checkpoint_dir": None, "checkpoint_type": "sharded", "max_steps": 9}
    run(train, 4, [*flags(tmp_path / "straight", **HYBRID | folders), f"--checkpoint_dir={tmp_path / 'one'}"])
    words = [
        *flags(tmp_path, recovery="in_place", **HYBRID | folders), "--checkpoint_dir", str(tmp_path / "durable"),
        f"local:{tmp_path / 'memory'}", "--checkpoint_freq", "4", "1", "--num_kept_checkpoints", "2", "2",
    ]  # fmt: skip
    with Recovering(tmp_path / "log", 4, *words, deaths=[(1, 8, "forward"), (3, 8, "forward")]) as ranks:
        assert ranks.until_the_end() == End(None), ranks.err
    assert [each["step"] for each in recoveries(tmp_path)] == [7]
    expected = {record["step"]: record["loss"] for record in steps(tmp_path / "straight")}
    assert all(record["loss"] == expected[record["step"]] for record in steps(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "async_sharded"])
def test_a_lost_nodes_state_comes_from_copies_on_another_node(tmp_path: Path, kind: str) -> None:
    """Without a replica, all go back to a step after the last durable checkpoint.

    The run has resumed from a node-local step whose parts are deleted before the nodes are lost.
    """
    options = HYBRID | {"sharding_strategy": "full_shard", "hybrid_shard_degree": None, "checkpoint_type": kind}
    run(train, 4, flags(tmp_path / "straight", **options, max_steps=10))
    words = [
        *flags(tmp_path, **options | {"checkpoint_dir": None, "max_steps": None}),
        *("--checkpoint_dir", str(tmp_path / "checkpoints"), f"local:{tmp_path / 'near'}"),
        *("--checkpoint_freq", "6", "1", "--num_kept_checkpoints", "2", "2"),
    ]
    run(train, 4, [*words, "--max_steps=3"])
    words += [f"--resume_from_checkpoint={tmp_path / 'checkpoints'}", "--recovery=in_place", "--max_steps=10"]

    def lose(rank: int) -> None:
        shutil.rmtree(tmp_path / "near" / "run" / f"rank{rank:05d}")

    deaths: list[Death] = [(2, 9, "forward"), (3, 9, "forward")]
    with Recovering(tmp_path / "log", 4, *words, deaths=deaths, lose=lose, nodes=2) as ranks:
        assert ranks.until_the_end() == End(None), ranks.err
    assert ["near" in each["checkpoint"] for each in records(tmp_path) if each.get("event") == "resume"] == [True]
    (event,) = recoveries(tmp_path)
    assert event["step"] == 8 or (event["step"] == 7 and kind == "async_sharded")
    expected = {record["step"]: [record[name] for name in EXACT] for record in steps(tmp_path / "straight")}
    assert all([record[name] for name in EXACT] == expected[record["step"]] for record in steps(tmp_path))
    same(last_checkpoint(tmp_path), last_checkpoint(tmp_path / "straight"))


@pytest.mark.slow
def test_a_run_without_replica_and_checkpoint_ends(tmp_path: Path) -> None:
    words = flags(tmp_path, **HYBRID | {"sharding_strategy": "full_shard", "hybrid_shard_degree": None, "max_steps": 9})
    with Recovering(tmp_path / "log", 2, *words, "--recovery=in_place", deaths=[(1, 3, "forward")]) as ranks:
        end = ranks.until_the_end()
    assert end.failure is not None
    assert end.why == "no replica of its state lives, and there is no checkpoint yet"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "changes"), [
    (4, {**REPLICATED, "tensor_parallel_degree": 2}),
    (4, {**REPLICATED, "context_parallel_degree": 2, "attn_pdrop": 0}),
    (4, {**REPLICATED, **MIXTRAL, "expert_parallel_degree": 2}),
    (4, {"sm_activation_offloading": 1, "activation_checkpointing": "full"}),
    (4, COMPILED),
    (4, {**REPLICATED, **COMPILED, "tensor_parallel_degree": 2, "activation_checkpointing": "full"}),
    (4, {"gradient_accumulation_steps": 2, "sharding_strategy": "_hybrid_shard_zero2"}),
    (2, {**REPLICATED, "lora_rank": 2, "checkpoint_type": "sharded"}),
    (2, {**REPLICATED, "streaming": 1, "use_synthetic_data": 0, "checkpoint_freq": 2}),
], ids=["tensor", "context", "experts", "offloaded", "compiled", "compiled-tensor", "accumulated", "lora", "streamed"])
def test_every_kind_of_run_recovers(tmp_path: Path, world: int, changes: dict[str, Any]) -> None:
    if "streaming" in changes:
        write_shard(tmp_path / "data" / "rows.json", 64)
        changes = {**changes, "training_dir": tmp_path / "data"}
    if "lora_rank" in changes:
        run(train, 1, flags(tmp_path / "base", max_steps=1, save_final_model=1, model_dir=tmp_path / "hf"), timeout=300)
        changes = {**changes, "hf_pretrained_model_name_or_dir": tmp_path / "hf"}
    deaths = [(1, 3, "backward"), (0, 5, "forward"), (world - 1, 7, "the update")]
    check(tmp_path, deaths, world=world, max_steps=9, **changes)


@pytest.mark.slow
def test_a_failure_of_all_ranks_is_not_answered_by_replacements(tmp_path: Path) -> None:
    words = flags(tmp_path, recovery="in_place", **HYBRID | {"max_steps": 50, "lr": 1e9, "checkpoint_freq": 100})
    with Recovering(tmp_path / "log", 4, *words) as ranks:
        end = ranks.until_the_end()
    assert end.failure is not None
    assert end.failure.code == 1
    assert "the loss is" in end.why
    assert ranks.generations == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "changes", "deaths"),
    [
        (2, {"checkpoint_type": "async_sharded", "data_audit": 1}, []),
        (2, {"hybrid_shard_degree": 1, "tensor_parallel_degree": 2, **COMPILED}, []),
        (4, {**REPLICATED, "gradient_accumulation_steps": 3}, [(0, 0, "the groups")]),
    ],
    ids=["shards", "tensor, compiled", "three of four, a death"],
)
def test_a_run_goes_on_with_fewer_replicas_and_with_more_again(
    tmp_path: Path, nodes: int, changes: dict[str, Any], deaths: list[Death]
) -> None:
    """No sample is lost or repeated; sums are in another order, so losses are equal within float32's precision."""
    options = {**HYBRID, "checkpoint_freq": 5, "max_steps": 1000, **changes, "attn_pdrop": 0.0}

    words = flags(tmp_path, recovery="in_place", **options)
    with Recovering(tmp_path / "log", 4, *words, nodes=nodes, deaths=deaths) as ranks:
        ranks.attend(lambda: last_step(tmp_path) >= 3, "step 3")
        ranks.lose_node(1)
        ranks.attend(lambda: len(recoveries(tmp_path)) == 1, "the smaller run")
        smaller, after = ranks.world_size, last_step(tmp_path)
        ranks.attend(lambda: last_step(tmp_path) > after + 3, "its steps")
        if smaller == 3:  # of two ranks, none has a replica
            ranks.ranks[1][1].kill()
            ranks.attend(lambda: len(recoveries(tmp_path)) == 2, "the replacement")
        known = len(recoveries(tmp_path))
        ranks.find_node(1)
        ranks.attend(lambda: ranks.world_size == 4 and len(recoveries(tmp_path)) > known, "all ranks")
        after = last_step(tmp_path)
        ranks.attend(lambda: last_step(tmp_path) > after + 3, "their steps")
        (tmp_path / "run" / "STOP").touch()
        end = ranks.until_the_end()
    assert end == End(None), f"{end}\n{ranks.err}"
    assert smaller == (2 if nodes == 2 else 3)
    check_within_precision(tmp_path, options)


@pytest.mark.slow
def test_a_host_without_memory_for_the_copies_ends_the_run(tmp_path: Path) -> None:
    words = flags(tmp_path, recovery="in_place", **HYBRID | {"max_steps": 1000})
    with Recovering(tmp_path / "log", 4, *words, nodes=2, **{dying.FREE_BYTES: 1000}) as ranks:
        ranks.attend(lambda: last_step(tmp_path) >= 3, "step 3")
        ranks.lose_node(1)
        end = ranks.until_the_end()
    assert end.failure is not None
    assert "0.0 GiB of memory free" in end.why


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cannot write", "is killed"])
def test_a_node_whose_ranks_fail_while_the_run_grows_is_sent_away(tmp_path: Path, way: str) -> None:
    options = {**HYBRID, "max_steps": 1000, "attn_pdrop": 0.0, "checkpoint_dir": None}
    folders = ["--checkpoint_dir", str(tmp_path / "checkpoints"), f"local:{tmp_path / 'near'}"]
    folders += ["--checkpoint_freq", "5", "5", "--num_kept_checkpoints", "2", "2"]
    words = [*flags(tmp_path, recovery="in_place", **options), *folders]
    deaths: list[Death] = [(2, 0, "the groups")] if way == "is killed" else []
    with Recovering(tmp_path / "log", 4, *words, nodes=2, deaths=deaths) as ranks:
        assert ranks.attend(lambda: last_step(tmp_path) >= 3, "step 3") is None, ranks.err
        ranks.lose_node(1)
        ranks.attend(lambda: len(recoveries(tmp_path)) == 1, "the smaller run")
        if way == "cannot write":
            shutil.rmtree(tmp_path / "near" / "run" / "rank00002", ignore_errors=True)
            (tmp_path / "near" / "run" / "rank00002").touch()
        ranks.find_node(1)
        end = ranks.attend(lambda: len(recoveries(tmp_path)) == 2, "the smaller run again")
        assert end is None, f"{end}\n{ranks.err}"
        assert [len(each.world or []) for each in ranks.generations] == [2, 4, 2]
        assert "is sent away" in ranks.generations[-1].reason
        after = last_step(tmp_path)
        ranks.attend(lambda: last_step(tmp_path) > after + 3, "its steps")
        (tmp_path / "run" / "STOP").touch()
        assert ranks.until_the_end() == End(None), ranks.err
    assert len(ranks.generations) == 3
    check_within_precision(tmp_path, options | {"checkpoint_dir": tmp_path / "checkpoints-straight"})


@pytest.mark.slow
@pytest.mark.parametrize("first", ["the end", "the growth"])
def test_a_node_joins_before_or_after_the_end_of_training_but_not_in_it(
    tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator has decided to grow when training ends, and has or has not said so."""
    words, last = flags(tmp_path, recovery="in_place", **HYBRID | {"max_steps": 100}), threading.Event()
    begins, asked = coordinator.Coordinator._begins, list[bool]()

    def late(self: coordinator.Coordinator) -> bool:
        if self.members.generation == 2 and first == "the end":
            self.store.wait(["after/2"], timedelta(seconds=120))
        asked.append(begins(self))
        return asked[-1] and (self.members.generation == 1 or last.wait(120))

    monkeypatch.setattr(coordinator.Coordinator, "_begins", late)
    with Recovering(tmp_path / "log", 4, *words, nodes=2) as ranks:
        ranks.attend(lambda: last_step(tmp_path) >= 3, "step 3")
        ranks.lose_node(1)
        ranks.attend(lambda: len(recoveries(tmp_path)) == 1, "the smaller run")
        ranks.find_node(1)
        if first == "the growth":
            ranks.attend(lambda: last_step(tmp_path) == 100, "the last step")
        last.set()
        assert ranks.until_the_end() == End(None), ranks.err
    assert asked == [True, first == "the growth"]
    assert len(ranks.generations) == sum(asked), ranks.err
    assert (tmp_path / "run" / "DONE").exists()


def last_step(folder: Path) -> int:
    """Return the last step that a run below ``folder`` has logged; 0 before the first one."""
    written = folder / "run" / "metrics.jsonl"
    return max((record["step"] for record in steps(folder)), default=0) if written.exists() else 0


def check_within_precision(folder: Path, options: dict[str, Any]) -> None:
    """Train undisturbed on four ranks; the run below ``folder`` must have the same samples and rounded losses."""
    ours = steps(folder)
    run(train, 4, flags(folder / "straight", **{**options, "max_steps": ours[-1]["step"]}), timeout=300)
    expected = steps(folder / "straight")
    for name in ("step", "lr", "tokens", "consumed"):
        assert [record[name] for record in ours] == [record[name] for record in expected], name
    for name in ("loss", "grad_norm"):
        assert [record[name] for record in ours] == pytest.approx([record[name] for record in expected], rel=1e-5), name
    assert consumed_samples(folder / "run") == consumed_samples(folder / "straight" / "run")


def consumed_samples(run_folder: Path) -> dict[int, set[str]]:
    """Return the samples of each step, from the audits of a run's ranks."""
    samples: dict[int, set[str]] = {}
    for path in run_folder.glob("data_audit-*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            if "step" in record:
                samples.setdefault(record["step"], set()).update(record.get("samples", []))
    return samples
