"""`smp-train chaos`: which processes it disturbs, what it reports and refuses, its proxy, and whole drills."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from smp_train.errors import ConfigError
from smp_train.launch import chaos, disturb
from smp_train.launch.s3_proxy import Proxy
from tests.s3_server import Proxy as Server
from tests.training import flags

SUPERVISOR = '''
import json, os, subprocess, sys, time
RANK = """
import os, sys, time
while os.getppid() == int(sys.argv[2]):
    with open(sys.argv[1] + "/written-by-%d" % os.getpid(), "w") as file:
        file.write("x")
    time.sleep(0.02)
"""
def start():
    return subprocess.Popen([sys.executable, "-c", RANK, sys.argv[1], str(os.getpid())], stderr=subprocess.DEVNULL)
ranks, step = [start(), start()], 0
metrics = open(sys.argv[1] + "/metrics.jsonl", "a", buffering=1)
metrics.write('{"step": 1, "ti\\n')  # a line that a kill has cut
while True:
    step += 1
    metrics.write(json.dumps({"step": step, "time": time.time(), "step_sec": 0.01}) + "\\n")
    time.sleep(0.01)
    for rank, process in enumerate(ranks):
        if open("/proc/%d/stat" % process.pid).read().split()[2] == "T":
            metrics.write(json.dumps({"event": "finish", "step": step, "time": time.time()}) + "\\n")
            process.wait()
        if process.poll() is not None:
            ranks[rank], step = start(), step - 2 if len(sys.argv) == 2 else 0  # 0: none is due before the end
            event = {"event": "recovery", "step": step, "time": time.time(), "seconds": 0.5, "replaced": [rank]}
            metrics.write(json.dumps(event | {"reason": "rank %d was killed" % rank}) + "\\n")
            if len(sys.argv) > 2:
                sys.exit(1)
'''


@pytest.fixture
def supervisor(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A stand-in that replaces two processes; they are in its session and end with it."""
    (tmp_path / "run.json").write_text(json.dumps({"total_steps": 10**6, "config": {"recovery": "in_place"}}))
    words = [sys.executable, "-c", SUPERVISOR, str(tmp_path), *getattr(request, "param", [])]
    process = subprocess.Popen(words, start_new_session=True)
    yield process
    for pid in [*disturb.ranks(process.pid), process.pid]:
        subprocess.run(["kill", "-KILL", str(pid)], check=False)
    process.wait()


def test_each_disturbance_is_followed_to_its_recovery(tmp_path: Path, supervisor: subprocess.Popen[bytes]) -> None:
    found = disturb.disturb(tmp_path, supervisor.pid, 3, ["kill"], random.Random(1))
    assert len({each["pid"] for each in found}) == 3
    for each in found:
        assert each["after_step"] >= disturb.FIRST_STEP
        assert each["repeated"] == 2
        assert each["reason"] == f"rank {each['replaced'][0]} was killed"
        assert each["down_sec"] < 30
    assert [each["after_step"] for each in found] == sorted(each["after_step"] for each in found)
    assert len(disturb.ranks(supervisor.pid)) == 2


def test_a_rank_that_a_failed_write_ends_is_replaced(tmp_path: Path, supervisor: subprocess.Popen[bytes]) -> None:
    training = disturb.Training([], tmp_path / "log", {})
    found = disturb.disturb(tmp_path, supervisor.pid, 2, ["disk"], random.Random(1), training)
    assert [each["repeated"] for each in found] == [2, 2]
    assert len({each["pid"] for each in found}) == 2


def test_a_run_that_ends_while_s3_is_cut_off_is_not_disturbed_again(
    tmp_path: Path, supervisor: subprocess.Popen[bytes]
) -> None:
    class Ends:
        refused, restored = 1.0, 2.0

        def cut(self, seconds: float) -> None:
            supervisor.kill()
            supervisor.wait()
            with (tmp_path / "metrics.jsonl").open("a") as metrics:
                metrics.write('{"step": 1000}\n')

    ends: Any = Ends()
    found = disturb.disturb(tmp_path, supervisor.pid, 2, ["s3"], random.Random(1), proxy=ends)
    assert [each["step"] for each in found] == [1000]


@pytest.mark.parametrize("supervisor", [["ends"]], indirect=True)
def test_a_run_that_ends_is_not_disturbed_again(tmp_path: Path, supervisor: subprocess.Popen[bytes]) -> None:
    found = disturb.disturb(tmp_path, supervisor.pid, 3, ["kill"], random.Random(1))
    assert len(found) == 1


def test_a_run_that_has_finished_ends_though_a_rank_was_frozen(
    tmp_path: Path, supervisor: subprocess.Popen[bytes]
) -> None:
    assert disturb.disturb(tmp_path, supervisor.pid, 2, ["freeze"], random.Random(1)) == []
    assert len(disturb.ranks(supervisor.pid)) == 2  # neither is frozen


def test_the_report_names_what_was_not_recovered_or_differs() -> None:
    recovered = {"kind": "kill", "after_step": 7, "replaced": [3], "down_sec": 1.25, "step": 5, "repeated": 2}
    result: dict[str, Any] = {
        "disturbances": [
            recovered, {"kind": "freeze", "after_step": 9},
            {"kind": "disk", "after_step": 9, "rank": 0, "down_sec": 9.0, "step": 6, "repeated": 3},
            {"kind": "s3", "after_step": 9, "unnoticed": True},
        ], "steps": 9, "different_steps": [8], "ok": False,
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in chaos.report(result).splitlines()]
    assert lines[2:] == [
        "7 rank 3 was killed 1.2 s 5 2", "9 rank ? was frozen not recovered", "9 rank 0 had a full disk 9.0 s 6 3",
        "9 S3 was cut off not noticed", "",
        "1 of 9 steps differ from the undisturbed run, first 8", "FAILED: recovered from 2 of 4 disturbances",
    ]  # fmt: skip
    result |= {"disturbances": [recovered], "different_steps": [], "last_loss": 5.5, "ok": True}
    assert "bit for bit" in chaos.report(result)
    assert chaos.report(result).endswith("ok: recovered from 1 of 1 disturbances")


@pytest.mark.parametrize(("words", "message"), [
    (["--kinds", "kill,all", "--", "--nproc=2"], "--kinds all: is not kill, freeze, disk or s3; give"),
    (["--kinds", "kill,disk", "--run", "somewhere"], "--kinds disk: needs a run that this verb starts"),
    (["--kinds", "s3", "--run", "somewhere"], "--kinds s3: needs a run that this verb starts"),
    (["--kinds", "disk", "--", "--use_synthetic_data=1", "--checkpoint_dir=s3://b/c"], "fails no save to s3://"),
    (["--kinds", "s3", "--", "--use_synthetic_data=1"], "neither --checkpoint_dir nor the data is in s3://"),
    (["--kinds", "s3", "--", "--training_dir=s3://b/c"], "HTTPS_PROXY is set, .*; unset HTTPS_PROXY"),
    ([], "give -- and the flags"),
    (["--run", "somewhere"], "somewhere: is no folder of a run with --recovery in_place"),
    (["--", "--nnodes=2", "--use_synthetic_data=1"], "--nnodes"),
    (["--", "--max_stepz=2"], "unknown flag --max_stepz"),
])  # fmt: skip
def test_mistakes_are_refused_before_anything_starts(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=message):
        chaos.main(words)
    assert not [*tmp_path.rglob("*.log")]


def test_a_run_without_recovery_in_place_is_left_alone(tmp_path: Path, supervisor: subprocess.Popen[bytes]) -> None:
    assert disturb.Follower(tmp_path, supervisor.pid).reaches(step=1)
    with pytest.raises(ConfigError, match="none of its ranks is on this machine"):
        chaos.main(["--run", str(tmp_path)])
    (tmp_path / "run.json").write_text(json.dumps({"total_steps": 10**6, "config": {"recovery": "off"}}))
    with pytest.raises(ConfigError, match="is no folder of a run with --recovery in_place"):
        chaos.main(["--run", str(tmp_path)])
    assert len(disturb.ranks(supervisor.pid)) == 2


@pytest.mark.slow
def test_a_drill_shows_that_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = flags(tmp_path, max_steps=30, sharding_strategy="no_shard", run_name="unused", distributed_backend="gloo")
    assert chaos.main(["--kills", "2", "--seed", "1", "--json", "--", "--nproc=2", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["steps"], result["different_steps"]) == (True, 30, [])
    assert [each["repeated"] for each in result["disturbances"]] == [0, 0]
    assert result["goodput"]["disturbed"]["recovery_sec"] > 0
    assert not (tmp_path / "run").exists()


class _Hello(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")


@pytest.fixture
def hello() -> Iterator[str]:
    """The address of a server that answers each request alike."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hello)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def connected(proxy: Proxy, server: str, tunnel: bool) -> http.client.HTTPConnection:
    """Return a connection to a server through the proxy, over which one request was answered."""
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=30)
    if tunnel:
        connection.set_tunnel(server)
    ask(connection, server)
    return connection


def ask(connection: http.client.HTTPConnection, server: str) -> None:
    connection.request("GET", f"http://{server}/a?b")
    assert connection.getresponse().read() == b"hello"


def cut_off(proxy: Proxy, server: str, tunnel: bool) -> bool:
    try:
        connected(proxy, server, tunnel).close()
    except (OSError, http.client.HTTPException):
        return True
    return False


@pytest.mark.parametrize("tunnel", [False, True])
def test_a_cut_closes_and_refuses_connections_to_s3_alone_and_ends(hello: str, tunnel: bool) -> None:
    proxy, other = Proxy(f"http://{hello}"), Proxy("http://127.0.0.1:9")
    with closing(connected(proxy, hello, tunnel)) as open_one, closing(connected(other, hello, tunnel)) as not_s3:
        ask(open_one, hello)
        for each in (proxy, other):
            each.cut(1.0)
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(open_one, hello)
        assert cut_off(proxy, hello, tunnel)
        assert proxy.restored is None
        while cut_off(proxy, hello, tunnel):
            assert time.time() < (proxy.refused or 0) + 30
        assert proxy.refused
        assert proxy.restored
        assert proxy.restored - proxy.refused >= 1.0
        ask(not_s3, hello)
        assert not cut_off(other, hello, tunnel)
        assert other.refused is None


def test_s3_is_known_by_its_name() -> None:
    usual, own = Proxy("https://s3.us-east-1.amazonaws.com"), Proxy("http://minio.lan:9000")
    assert usual._is_s3("bucket.s3.eu-west-3.amazonaws.com", 443)
    assert not usual._is_s3("sts.us-east-1.amazonaws.com", 443)
    assert not usual._is_s3("huggingface.co", 443)
    assert own._is_s3("bucket.minio.lan", 9000)
    assert not own._is_s3("minio.lan", 5000)


@pytest.mark.slow
def test_a_drill_on_a_full_disk_repeats_the_steps_after_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = flags(tmp_path, max_steps=30, distributed_backend="gloo", checkpoint_freq=3, checkpoint_type="sharded")
    assert chaos.main(["--kinds=disk", "--kills=2", "--seed=3", "--json", "--", "--nproc=2", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["steps"], result["different_steps"]) == (True, 30, [])
    assert {each["rank"] for each in result["disturbances"]} == {0, 1}
    for each in result["disturbances"]:
        after = each["after_step"]
        assert each["exit_code"] == 4
        assert each["step"] in (after - after % 3, after - after % 3 + 3), "a step may end before the limit is set"
        assert each["repeated"] == 3
        assert each["down_sec"] > 0
    saved = {path.name for path in tmp_path.glob("checkpoints/*-disturbed/*steps")}
    assert "llama_v2-30steps" in saved


@pytest.mark.slow
def test_a_drill_without_s3_for_some_seconds_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bucket: str, server: Server
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")  # the server's address: only the drill overrides it
    words = flags(tmp_path, max_steps=30, distributed_backend="gloo", checkpoint_freq=3, checkpoint_dir=bucket)
    assert chaos.main(["--kinds=s3", "--kills=1", "--seed=1", "--json", "--", "--nproc=2", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["steps"], result["different_steps"]) == (True, 30, [])
    (cut,) = result["disturbances"]
    assert cut["repeated"] == 0
    assert cut["down_sec"] >= disturb.CUT_SECONDS[0]
    logs = {path.stem: path.read_text() for path in Path(result["folder"]).glob("*.log")}
    assert f"{server.url} does not answer" in logs["disturbed"]
    assert "does not answer" not in logs["undisturbed"]
