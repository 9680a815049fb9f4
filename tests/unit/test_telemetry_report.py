"""The page of a run: what it says of it, that a browser draws it, and its refusals."""

import json
import math
import re
import shutil
import subprocess
import sys
import time

import pytest

from smp_train.errors import ConfigError
from smp_train.telemetry import report, run_data
from smp_train.telemetry.metrics import MetricsWriter
from smp_train.telemetry.report import main
from smp_train.telemetry.run_data import POINTS, RunData, duration, read_runs, smooth, thinned, three
from smp_train.telemetry.run_folder import RunFolder


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        *((three, value, text) for value, text in (
            (0, "0"), (4.3, "4.30"), (1e-4, "0.0001"), (123456, "123k"), (9999, "10k"), (1234, "1230"), (999.9e3, "1M"),
        )),
        *((duration, seconds, text) for seconds, text in (
            (0, "0 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (90_000, "1 d 1 h"),
        )),
        (lambda values: smooth(values, 3), [1, 2, 3, 4, 9], pytest.approx([1.5, 2, 3, 16 / 3, 6.5])),
        (lambda values: smooth(values, 1), [3.0, 1.0], [3.0, 1.0]),
    ],
)  # fmt: skip
def test_numbers_of_the_page(function, given, expected):
    assert function(given) == expected


def of_page(path):
    """Return what a page draws."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(data)


def write_run(folder, name, *, lr=1e-3, kill_at=40, last=60, **facts):
    """Write a run that was killed, resumed from an earlier checkpoint, and goes on."""
    run = RunFolder(folder)
    run.create()
    for first, end in ((0, kill_at), (kill_at - 10, last)):
        config = {"run_name": name, "lr": lr, "max_steps": end, "training_dir": "s3://key:planted@b/x?sig=planted"}
        run.write_run(config={**config, **facts}, mesh={"shard": 2}, total_steps=last, sources={"lr": "command line"})
        writer = MetricsWriter(folder)
        writer.event("resume" if first else "start", step=first)
        for step in range(first + 1, end + 1):
            shares = {"step_sec": 2.0, "data_wait_sec": 0.1}
            parts = {"time_shares": {"compute": 0.9, "data": 0.1}, "communication_share": 0.3}
            shares = parts if first else shares
            writer.step({"step": step, "loss": 8 - step / 20, "lr": lr, "tokens": step, "grad_norm": 1.0, **shares})
            if step % 20 == 0:
                writer.event("evaluate", step=step, loss=8 - step / 25)
                writer.event("save", step=step, checkpoint="c")
        writer.close()
    return run


def test_the_page_holds_what_counts_of_a_killed_run_and_no_secret(tmp_path):
    run = write_run(tmp_path, "</script><b>mine", remark="<script>alert(1)</script>")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "lo')  # killed while it wrote
    path = report.write_page(read_runs([str(tmp_path)]), tmp_path / "report.html")
    assert b"planted" not in path.read_bytes()
    assert not re.search(r"(src|href)=[\"'](?!data:)|url\(|@import|fetch\(", path.read_text()), "nothing from elsewhere"
    (found,) = of_page(path)["runs"]
    assert found["name"] == "</script><b>mine"
    assert found["columns"]["step"] == [*range(1, 61)]
    assert found["columns"]["share data"] == [5.0] * 30 + [10.0] * 30
    assert found["columns"]["share compute"] == [None] * 30 + [90.0] * 30
    assert [name for name in found["columns"] if name.startswith("share ")] == ["share data", "share compute"]
    assert "communication (in forward and backward) 30 %" in found["facts"]["parts of a step"]
    assert [(each["first"], each["last"], each["how"]) for each in found["attempts"]] == [
        (0, 40, "killed or failed"), (30, 60, "running"),
    ]  # fmt: skip
    assert [(each["event"], each["step"]) for each in found["events"]] == [
        ("start", 0), ("evaluate", 20), ("save", 20), ("resume", 30),
        *((event, step) for step in (40, 60) for event in ("evaluate", "save")),
    ]  # fmt: skip
    assert found["starts"][1]["changes"] == {"max_steps": [40, 60]}
    assert found["given"] == ["lr"]
    assert (found["headline"]["state"], found["headline"]["step"]) == ("running", "60 of 60")
    run.mark_done(60)
    assert of_page(report.write_page(read_runs([str(tmp_path)]), path))["runs"][0]["headline"]["state"] == "finished"


def test_several_runs_lie_over_each_other(tmp_path, capsys):
    for name in ("one", "two"):
        write_run(tmp_path / name, "same", lr={"one": 1e-3, "two": 2e-3}[name])
    folders, out = [str(tmp_path / name) for name in ("one", "two")], tmp_path / "out.html"
    assert main([*folders, "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
    assert [run["name"] for run in of_page(out)["runs"]] == folders
    with pytest.raises(ConfigError, match="twice"):
        main([folders[0], folders[0]])


def test_many_steps_are_thinned_to_those_that_matter():
    numbers = range(100_000)
    steps = [{"step": step, "loss": 5.0 - (step == 70_001), "grad_norm": 1.0 + (step == 5_555)} for step in numbers]
    kept = [record["step"] for record in thinned(steps)]
    assert kept == sorted(set(kept))
    assert {5_555, 70_001, 99_999} <= set(kept)
    assert POINTS / 5 <= len(kept) <= 2 * POINTS
    assert thinned(steps[:POINTS]) == steps[:POINTS]


def test_a_live_page_follows_the_run_to_its_end(tmp_path, monkeypatch, capsys):
    run, out, seen = write_run(tmp_path, "mine"), tmp_path / "report.html", []

    def meanwhile(seconds):
        found = of_page(out)
        seen.append((found["live"], found["runs"][0]["columns"]["step"][-1]))
        writer = MetricsWriter(tmp_path)
        writer.step({"step": 60 + len(seen), "loss": 5.0})
        writer.close()
        if len(seen) == 3:
            run.mark_stopped(63)

    monkeypatch.setattr(report.time, "sleep", meanwhile)
    assert main([str(tmp_path), "--live", "2"]) == 0
    assert seen == [(2, 60), (2, 61), (2, 62)]
    assert of_page(out)["live"] == 0
    assert of_page(out)["runs"][0]["columns"]["step"][-1] == 63
    assert capsys.readouterr().out.splitlines()[0] == str(out)


def test_a_live_page_ends_some_time_after_a_process_that_was_killed(tmp_path, monkeypatch):
    run = write_run(tmp_path, "mine")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    facts = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**facts, "pid": gone.pid}))
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(report.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    report.follow([str(tmp_path)], tmp_path / "report.html", 7.0)
    assert report.GRACE_SECONDS <= now[0] < report.GRACE_SECONDS + 7
    found = of_page(tmp_path / "report.html")
    assert (found["live"], found["runs"][0]["attempts"][-1]["how"]) == (0, "killed or failed")


def test_the_first_facts_are_state_time_and_losses(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    run.create()
    run.write_run(config={"run_name": "mine"}, total_steps=100)
    now = run.run_json.stat().st_mtime
    monkeypatch.setattr(run_data.time, "time", lambda: now + 124)
    records = [{"event": "start", "step": 0, "time": now}]
    records += [{"step": step, "time": now + 2 * step, "loss": 9 - 0.123456 * step} for step in range(1, 61)]
    records += [{"event": "evaluate", "step": step, "time": now + 2 * step, "loss": 4 - step / 50} for step in (30, 60)]
    path = tmp_path / "metrics.jsonl"

    def read():
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
        return RunData(tmp_path)

    found = read()
    assert found.headline().pop("ends about").endswith("UTC")
    assert {**found.headline(), "ends about": ""} == {
        "state": "running", "step": "60 of 100", "elapsed": "2 min 4 s", "time left": "1 min 16 s", "ends about": "",
        "loss": "1.84", "validation loss": "2.80",
    }  # fmt: skip
    # The losses of the sentences are those above them.
    assert (found.health()["well"], "to 1.84" in found.health()["sentences"]) == (True, True)
    records[-1]["loss"] = 3.41  # 3.40 was lower
    assert ("at its lowest" in read().health()["sentences"], read().health()["well"]) == (False, True)
    records.append({"event": "diverged", "step": 60, "time": now + 120, "loss": 50.0, "first": 9.0, "lr": 3.0})
    assert not read().health()["well"]
    assert "--lr 3" in read().health()["sentences"]
    del records[-1]
    records.append({"event": "recovery", "step": 60, "time": now + 123, "seconds": 3.0, "reason": "rank 1 was killed"})
    assert "Recovered in place 1 time, the last at step 60." in read().health()["sentences"]
    assert read().facts()["goodput"] == "97.6% (lost: 3.0 s recoveries)"
    del records[-1]
    records[60] |= {"truncated_rows": 12, "truncated_targets": 1776}
    assert "12 rows longer than the context lost 1,776 tokens to learn" in read().health()["sentences"]
    # Silent for 15 minutes, here and on another host; then its process is gone.
    monkeypatch.setattr(run_data.time, "time", lambda: now + 1020)
    assert (read().state, "time left" in read().headline()) == ("hung", False)
    facts = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**facts, "host": "elsewhere"}))
    assert (read().state, read().attempts()[-1]["how"], read().health()["well"]) == ("hung", "hung", False)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run.run_json.write_text(json.dumps({**facts, "pid": gone.pid}))
    assert (read().state, read().attempts()[-1]["how"]) == ("died", "killed or failed")
    assert read().headline()["last record"].endswith("UTC")
    # A run that saves for long is not hung as soon.
    run.run_json.write_text(json.dumps(facts))
    for record in records[30:]:
        record["time"] += 800
    monkeypatch.setattr(run_data.time, "time", lambda: now + 1820)
    assert read().state == "running"


def test_a_run_without_a_step_or_a_loss_has_a_page(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        main([str(tmp_path)])
    run = RunFolder(tmp_path)
    run.create()
    run.write_run(config={"run_name": "mine"})
    for last in ("", "start", "evaluate", "step"):
        writer = MetricsWriter(tmp_path) if last else None
        if last == "step":
            writer.step({"step": 1, "loss": math.nan, "time_shares": {"data": 1.0}})
        elif last:
            writer.event(last, step=0, loss=5.0)
        assert main([str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
        found = of_page(tmp_path / "report.html")["runs"][0]
        assert found["columns"]["step"] == [1] * (last == "step")
        events = {"": [], "start": ["start"]}.get(last, ["start", "evaluate"])
        assert [each["event"] for each in found["events"]] == events


# Choose axes, point at each chart, drag over one, switch a run off and on; and leave the page as it was.
USE = """
function point(svg, kind, share) {
  const box = svg.getBoundingClientRect();
  const where = { clientX: box.left + share * box.width, clientY: box.top + 50 };
  svg.dispatchEvent(new PointerEvent("pointer" + kind, where));
}
for (const part of document.querySelectorAll("details")) part.open = true;
for (const axis of ["time", "tokens", "step"]) {
  $("axis").value = axis; $("log").checked = axis === "time"; $("axis").onchange();
  for (const svg of document.querySelectorAll("figure svg")) {
    point(svg, "move", 0.5);
    document.body.dataset.tips = (document.body.dataset.tips || "") + $("tip").textContent + ";";
  }
  const svg = document.querySelector("figure svg");
  for (const [kind, share] of [["down", 0.4], ["move", 0.6], ["up", 0.7]]) point(svg, kind, share);
  document.body.dataset.zoomed = (document.querySelector("path.line")?.getAttribute("d") || "").split("L").length;
  document.querySelector("figure svg").dispatchEvent(new MouseEvent("dblclick"));
}
for (const box of document.querySelectorAll("#runs input")) { box.click(); box.click(); }
document.body.dataset.cut = [document.documentElement, ...document.querySelectorAll("section")].filter(
  each => each.scrollWidth > each.clientWidth).map(each => each.id || each.parentNode.id);
"""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (400, "dark")])
@pytest.mark.parametrize("count", [1, 2])
def test_a_browser_draws_the_page_without_an_error(tmp_path, width, theme, count):
    folders = [str(write_run(tmp_path / name, name).path) for name in "ab"[:count]]
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        death = {"event": "recovery", "step": 52, "time": time.time(), "seconds": 3.0, "reason": "rank 1 was killed"}
        other = {"event": "spike", "step": 50, "time": time.time(), "loss": None, "samples": {"0": ["x.json:1"]}}
        profile = {"event": "profile", "step": 55, "time": time.time(), "verdict": "Bound.", "operators": ["9 %  mm"]}
        slow = {"step": 61, "time": time.time(), "loss": 5.0, "slowest_share": 0.05, "slowest_rank": 3, "toString": 1.0}
        file.write("".join(json.dumps(each) + "\n" for each in (other, death, profile, slow)))
    path = report.write_page(read_runs(folders), tmp_path / "report.html")
    path.write_text(path.read_text().replace("</body>", f"<script>{USE}</script></body>"))
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
        f"--user-data-dir={tmp_path / 'browser'}", f"--window-size={width},900", "--virtual-time-budget=2000",
        f"--blink-settings=preferredColorScheme={int(theme == 'light')}",
        "--host-resolver-rules=MAP * ~NOTFOUND", path.as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "CONSOLE" not in shown.stderr
    titles = re.findall(r"<figcaption>([^<]+)<", shown.stdout)
    shares = [f"Shares of a step's time{end}" for end in ([", a", ", b"] if count > 1 else [""])]
    common = ["Loss", "Gradient norm", "Learning rate", "Step time"]
    assert titles == [*common, *shares, "Communication in forward and backward", "Slowest rank", "toString"]
    # Of each run: the loss, its mean, validation, rate, norm, step time, communication, two shares; two more.
    assert f'data-drawn="{9 * count + 2}"' in shown.stdout
    assert shown.stdout.count('class="line"') == 9 * count + 2
    assert shown.stdout.count('class="attempt"') == 2 * count
    assert re.search(r'data-cut="([^"]*)"', shown.stdout)[1] == "", "nothing is wider than its frame"
    assert 10 < int(re.search(r'data-zoomed="(\d+)"', shown.stdout)[1]) < 30, "of 60 steps those in the window"
    assert all(said in shown.stdout for said in ("<p>Bound.</p>", "<pre>9 %  mm</pre>", '{"0":["x.json:1"]}'))
    tips = re.search(r'data-tips="([^"]*)"', shown.stdout)[1].split(";")
    assert len(tips) == 3 * len(titles) + 1
    assert all("Slowest rank 5, rank 3" in tip for tip in tips[-3 : -1 : len(titles)]), tips
    assert "max_steps 40 → 60" in shown.stdout
