"""``smp-train report``: a page and pictures of runs, drawn from what is in their folders alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from smp_train.arguments.verb_parser import VerbParser, positive
from smp_train.errors import ConfigError, install
from smp_train.telemetry import page
from smp_train.telemetry.run_data import PALETTE, RunData, read_runs, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE_NAME = "report.png"
LIVE_SECONDS = 10.0

_INK, _MUTED, _GRID = "#22303c", "#6b7885", "#e3e7eb"
_TRAIN, _VALIDATION, _SPEED, _REFERENCE, _SPIKE = *PALETTE[:3], "#8a6d3b", "#cc2222"
_DASHED = (0, (5, 3))
_SHARE, _NOT_FROM_ZERO = "share ", ("loss_mean", "lr", "grad_norm")
_PANELS = (
    ("Loss (nats per token)", "loss_mean", 1), ("Learning rate", "lr", 1), ("Gradient norm", "grad_norm", 1),
    ("Throughput (tokens/s)", "tokens_per_sec", 1), ("MFU (%)", "mfu", 100), ("Memory (GiB)", "memory_gib", 1),
    ("Step time (s)", "step_sec", 1), ("Communication in forward and backward (%)", "communication_share", 100),
    ("The slowest rank costs the others (% of a step)", "slowest_share", 100),
)  # fmt: skip


def write_report(run_dir: str | Path) -> Path:
    """Draw ``<run_dir>/report.png`` (1200 x 800 pixels) and return its path.

    Raises:
        ConfigError: when the run has no logged step, the file cannot be written, or matplotlib is missing.
    """
    data = RunData(run_dir)
    folder, run, steps = data.folder, data.run, data.steps
    records = [*steps, *data.events]
    figure = _figure()
    if not steps:
        raise ConfigError(f"{folder.path}: no step has been logged there yet")
    losses, speed = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    figure.suptitle(_title(folder.path, run, steps), x=0.015, ha="left", fontsize=14, color=_INK)
    _draw_losses(losses, records, unigram_entropy(run))
    _draw_speed(speed, steps)
    for axes in (losses, speed):
        _dress(axes)
    _mark_attempts(losses, speed, records)
    speed.set_xlim(0, max(record["step"] for record in steps) * 1.01 + 1)
    speed.set_xlabel("Optimizer step", color=_INK)

    return _save(figure, folder.path / FILE_NAME)


def write_panels(runs: Sequence[RunData], path: Path) -> Path:
    """Draw all numbers of runs, over each other, into a PNG. Raises `ConfigError` as `write_report` does."""
    columns = [run.columns() for run in runs]
    panels = [panel for panel in _PANELS if any(panel[1] in each for each in columns)]
    parts = [[key for key in each if key.startswith(_SHARE)] for each in columns]
    rows = -(-(len(panels) + sum(map(bool, parts))) // 2)
    figure = _figure(max(8.0, 2.0 * rows))
    places = iter(range(1, 2 * rows + 1))

    def drawn(title: str) -> Axes:
        axes = figure.add_subplot(rows, 2, next(places))
        axes.set_title(title, loc="left", fontsize=10, color=_INK)
        _dress(axes)
        return axes

    for title, key, scale in panels:
        axes = drawn(title)
        for number, (run, found) in enumerate(zip(runs, columns, strict=True)):
            color = PALETTE[number % len(PALETTE)]
            values = zip(found["step"], found.get(key, ()), strict=False)
            _plot(axes, [(x, y * scale) for x, y in values if y is not None], "-", color=color, label=run.name)
            if key == "loss_mean":
                evaluations = [each for each in run.events if each["event"] == "evaluate"]
                points = [(each["step"], each["loss"]) for each in evaluations if each.get("loss") is not None]
                color = color if len(runs) > 1 else _VALIDATION
                _plot(axes, points, "o", color=color, label="_" if number else "validation")
            _mark_events(axes, run)
        if key not in _NOT_FROM_ZERO:
            axes.set_ylim(0, 1.08 * max(0.0, axes.dataLim.y1) or 1)
        if key == panels[0][1] and axes.lines:
            axes.legend(fontsize=8, framealpha=0.9, edgecolor=_GRID)
    for run, found, keys in zip(runs, columns, parts, strict=True):
        if keys:
            axes = drawn(f"Shares of a step's time{f', {run.name}' if len(runs) > 1 else ''} (%)")
            steps, shares = found["step"], [[share or 0 for share in found[key]] for key in keys]
            labels = [key.removeprefix(_SHARE) for key in keys]
            axes.stackplot(steps, shares, colors=PALETTE, labels=labels)
            axes.set_ylim(0, 100)
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
            _mark_events(axes, run)
    return _save(figure, path)


def _plot(axes: Axes, points: list[tuple[float, float]], form: str, **look: Any) -> None:
    if points:  # a line of one point would not be seen
        form = "o" if len(points) == 1 else form
        axes.plot(*zip(*points, strict=True), form, linewidth=1.2, markersize=4, **look)


def _mark_events(axes: Axes, run: RunData) -> None:
    """Draw a dotted line where the run was resumed, a red one at a spike, and a tick at a checkpoint."""
    for event in run.events:
        if event["event"] in ("resume", "spike"):
            color, line = {"resume": (_MUTED, ":"), "spike": (_SPIKE, "-")}[event["event"]]
            axes.axvline(event["step"], color=color, linestyle=line, linewidth=1)
    saves = [event["step"] for event in run.events if event["event"] == "save"]
    _mark_saves(axes, saves, markersize=3)


def _mark_saves(axes: Axes, saves: list[int], **look: Any) -> None:
    if saves:  # in axis units: the ticks sit on the lower edge whatever is drawn above
        axes.plot(
            saves, [0.012] * len(saves), linestyle="none", marker="^", color=_INK, clip_on=False,
            transform=axes.get_xaxis_transform(), **look,
        )  # fmt: skip


def _figure(height: float = 8) -> Figure:
    try:
        # Not pyplot: no display, no global state. A PNG is drawn with Agg.
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"report.png needs matplotlib: {install('report')}") from None
    figure = Figure(figsize=(12, height), dpi=100, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    return figure


def _save(figure: Figure, path: Path) -> Path:
    scratch = path.with_name(f".{path.name}")
    try:
        figure.savefig(scratch, format="png")
        scratch.replace(path)
    except OSError as failure:
        raise ConfigError(f"{path}: cannot write the report ({failure.strerror})") from None
    return path


def unigram_entropy(run: dict[str, Any]) -> float | None:
    """Return the entropy in the manifest of ``smp-train prepare``, in the training folder or the one above it."""
    folders = (run.get("config") or {}).get("training_dir")
    folder = folders[0] if isinstance(folders, list) and len(folders) == 1 else folders
    for candidate in [Path(folder), Path(folder).parent] if isinstance(folder, str) else []:
        with suppress(OSError, ValueError, KeyError):
            return float(json.loads((candidate / "_manifest.json").read_bytes())["unigram_entropy_nats"]["train"])
    return None


def _draw_losses(axes: Axes, records: list[dict[str, Any]], entropy: float | None) -> None:
    train = [(r["step"], r["loss"]) for r in records if "event" not in r and r.get("loss") is not None]
    evaluations = [r for r in records if r.get("event") == "evaluate"]
    validation = [(r["step"], r["loss"]) for r in evaluations if r.get("loss") is not None]
    saves = [r["step"] for r in records if r.get("event") == "save"]
    if train:
        at, loss = zip(*train, strict=True)
        window = max(1, len(loss) // 40) | 1
        axes.plot(at, loss, color=_TRAIN, alpha=0.35, linewidth=1)
        label = "train" if window == 1 else f"train (mean of {window} records)"
        axes.plot(at, smooth(loss, window), color=_TRAIN, linewidth=2, label=f"{label}: last {loss[-1]:.3f}")
    if validation:
        at, loss = zip(*validation, strict=True)
        axes.plot(
            at, loss, color=_VALIDATION, linewidth=1.2, marker="o", markersize=5, markeredgecolor="white",
            label=f"validation: last {loss[-1]:.3f}",
        )  # fmt: skip
    if entropy is not None:
        label = f"unigram entropy: {entropy:.3f}"
        axes.axhline(entropy, color=_REFERENCE, linestyle=_DASHED, linewidth=1.3, label=label)
    _mark_saves(axes, saves, markersize=6, label="checkpoint saved")
    for number, step in enumerate(r["step"] for r in records if r.get("event") == "spike"):
        axes.axvline(step, color=_SPIKE, linewidth=1, zorder=1, label="_" if number else "spike")
    axes.set_ylabel("Loss (nats per token)", color=_INK)
    if axes.lines:
        axes.legend(frameon=True, framealpha=0.9, edgecolor=_GRID, labelcolor=_INK)


def _draw_speed(axes: Axes, steps: list[dict[str, Any]]) -> None:
    speed = [(r["step"], r["tokens_per_sec"]) for r in steps if r.get("tokens_per_sec") is not None]
    if speed:
        at, rate = zip(*speed, strict=True)
        middle = median(rate)
        axes.plot(at, rate, color=_SPEED, linewidth=1, alpha=0.6, label="tokens/s, all devices")
        axes.axhline(middle, color=_SPEED, linestyle=_DASHED, linewidth=1.3, label=f"median: {middle:,.0f}")
        axes.set_ylim(0, max(rate) * 1.15)
        axes.legend(loc="lower right", ncols=2, framealpha=0.9, edgecolor=_GRID, labelcolor=_INK)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("Throughput (tokens/s)", color=_INK)


def _mark_attempts(losses: Axes, speed: Axes, records: list[dict[str, Any]]) -> None:
    """Draw a line over both panels where the run stopped or was resumed, named above the upper one."""
    names: dict[int, list[str]] = {}
    for record in records:
        name = {"stop": "stopped", "resume": "resumed"}.get(record.get("event", ""))
        if name and name not in names.setdefault(record["step"], []):
            names[record["step"]].append(name)
    for step, what in names.items():
        for axes in (losses, speed):
            axes.axvline(step, color=_MUTED, linestyle=":", linewidth=1.3, zorder=1)
        losses.annotate(
            f"{', '.join(what)} at {step}", (step, 1), xycoords=("data", "axes fraction"),
            xytext=(0, 5), textcoords="offset points", ha="center", fontsize=9, color=_MUTED,
        )  # fmt: skip


def _dress(axes: Axes) -> None:
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_MUTED)
    axes.tick_params(colors=_INK)


def _title(path: Path, run: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    config = run.get("config") or {}
    parts = [str(config.get("run_name") or path.resolve().name)]
    for name in ("model_type", "model_size"):
        if config.get(name) and str(config[name]) not in parts[0]:
            parts.append(str(config[name]))
    if "world_size" in (run.get("mesh") or {}):
        parts.append(f"{run['mesh']['world_size']} processes")
    parts.append(f"{steps[-1]['step']:,} steps")
    if steps[-1].get("tokens"):
        parts.append(f"{steps[-1]['tokens']:,} tokens")
    return "  ·  ".join(parts)


def draw(runs: Sequence[RunData], out: Path) -> None:
    """Draw the pictures beside the page ``out`` and print their paths; without matplotlib a line on stderr."""
    try:
        if len(runs) == 1:
            print(write_report(runs[0].folder.path))
        print(write_panels(runs, out.with_name(f"{out.stem}-panels.png")))
    except ConfigError as failure:
        if install("report") not in str(failure):
            raise
        print(f"smp-train: {failure}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``smp-train report RUN...``: write page and pictures, and print their paths."""
    parser = VerbParser(prog="smp-train report", description="Write a page and pictures of one run or several.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder: what --run_dir was, or runs/<run_name>")
    parser.add_argument("--out", help="the page, with pictures beside it (default: RUN/report.html)")
    parser.add_argument(
        "--live", nargs="?", type=positive, const=LIVE_SECONDS, metavar="SECONDS",
        help=f"write the page again every so often (default {LIVE_SECONDS:g} s) until the run ends",
    )  # fmt: skip
    options = parser.parse_args(argv)
    alone = len(options.runs) == 1
    out = Path(options.out or (Path(options.runs[0]) / page.FILE_NAME if alone else page.FILE_NAME))
    if options.live is not None:
        print(out, flush=True)
        page.follow(options.runs, out, options.live)
    runs = read_runs(options.runs)
    page.write_page(runs, out)
    if not any(run.steps for run in runs):
        print(f"{', '.join(options.runs)}: no picture, as no step has been logged there yet", file=sys.stderr)
    else:
        draw(runs, out)
    if options.live is None:
        print(out)
    return 0
