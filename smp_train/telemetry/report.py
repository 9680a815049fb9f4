"""``smp-train report``: a page and pictures of runs, drawn from what is in their folders alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from smp_train.arguments.verb_parser import VerbParser
from smp_train.errors import ConfigError, install
from smp_train.telemetry import page
from smp_train.telemetry.run_data import RunData, read_runs, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE_NAME = "report.png"
LIVE_SECONDS = 10.0

_INK, _MUTED, _GRID = "#22303c", "#6b7885", "#e3e7eb"
_TRAIN, _VALIDATION, _SPEED, _REFERENCE, _SAVE = "#1f6fb4", "#d1495b", "#2a8c6e", "#8a6d3b", "#22303c"
_DASHED = (0, (5, 3))
_RUNS = (_TRAIN, _VALIDATION, _SPEED, "#c07f1e", "#7b5ea7", "#1799a8", _REFERENCE, _SAVE)
_SHARE, _NOT_FROM_ZERO = "share ", ("loss_mean", "lr", "grad_norm")
_PANELS = (
    ("Loss (nats per token)", "loss_mean", 1), ("Learning rate", "lr", 1), ("Gradient norm", "grad_norm", 1),
    ("Throughput (tokens/s)", "tokens_per_sec", 1), ("MFU (%)", "mfu", 100), ("Memory (GiB)", "memory_gib", 1),
    ("Step time (s)", "step_sec", 1), ("Shares of a step's time (%)", _SHARE, 1),
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
    figure = _figure()
    columns = [run.columns() for run in runs]
    keys = dict.fromkeys(key for each in columns for key in each)
    drawn = [(title, [key for key in keys if _of_panel(key, of)], scale) for title, of, scale in _PANELS]
    panels = [panel for panel in drawn if panel[1]]
    for place, (title, shown, scale) in enumerate(panels, 1):
        axes = figure.add_subplot(-(-len(panels) // 2), 2, place)
        axes.set_title(title, loc="left", fontsize=10, color=_INK)
        for number, (run, found) in enumerate(zip(runs, columns, strict=True)):
            for part, key in enumerate(shown):
                values = zip(found["step"], found.get(key, ()), strict=False)
                points = [(x, y * scale) for x, y in values if y is not None]
                color = _RUNS[(number if len(runs) > 1 else part) % len(_RUNS)]
                label, dash = run.name, "-"
                if key.startswith(_SHARE):
                    label, dash = key.removeprefix(_SHARE), ("-", "--", ":", "-.")[part % 4]
                label = "_" if label in {line.get_label() for line in axes.lines} else label  # unnamed in the legend
                if points:
                    axes.plot(*zip(*points, strict=True), dash, color=color, linewidth=1.2, label=label)
            if shown == ["loss_mean"]:
                color = _RUNS[(number if len(runs) > 1 else 1) % len(_RUNS)]
                evaluations = [each for each in run.events if each["event"] == "evaluate"]
                points = [(each["step"], each["loss"]) for each in evaluations if each.get("loss") is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), "o", color=color, markersize=4)
            for event in run.events:
                if event["event"] == "resume":
                    axes.axvline(event["step"], color=_MUTED, linestyle=":", linewidth=1)
        if shown[0] not in _NOT_FROM_ZERO:
            axes.set_ylim(bottom=0)
        if axes.lines and (place == 1 or shown[0].startswith(_SHARE)):
            axes.legend(fontsize=8, framealpha=0.9, edgecolor=_GRID)
        _dress(axes)
    return _save(figure, path)


def _of_panel(key: str, of: str) -> bool:
    return key == of or (of == _SHARE and key.startswith(_SHARE))


def _figure() -> Figure:
    try:
        # Not pyplot: no display, no global state. A PNG is drawn with Agg.
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"report.png needs matplotlib: {install('report')}") from None
    figure = Figure(figsize=(12, 8), dpi=100, layout="constrained", facecolor="white")
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
    if saves:
        # In axis units: the ticks sit on the lower edge whatever the losses are.
        axes.plot(
            saves, [0.012] * len(saves), linestyle="none", marker="^", markersize=6, color=_SAVE,
            transform=axes.get_xaxis_transform(), label="checkpoint saved", clip_on=False,
        )  # fmt: skip
    axes.set_ylabel("Loss (nats per token)", color=_INK)
    if axes.lines:
        axes.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor=_GRID, labelcolor=_INK)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``smp-train report RUN...``: write page and pictures, and print their paths."""
    parser = VerbParser(prog="smp-train report", description="Write a page and pictures of one run or several.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder: what --run_dir was, or runs/<run_name>")
    parser.add_argument("--out", help="the page, with pictures beside it (default: RUN/report.html)")
    parser.add_argument(
        "--live", nargs="?", type=float, const=LIVE_SECONDS, metavar="SECONDS",
        help=f"write the page again every so often (default {LIVE_SECONDS:g} s) until the run ends",
    )  # fmt: skip
    options = parser.parse_args(argv)
    alone = len(options.runs) == 1
    out = Path(options.out or (Path(options.runs[0]) / page.FILE_NAME if alone else page.FILE_NAME))
    if options.live is not None:
        if options.live <= 0:
            raise ConfigError(f"--live {options.live:g}: must be above 0 seconds")
        print(out, flush=True)
        page.follow(options.runs, out, options.live)
    runs = read_runs(options.runs)
    if not any(run.steps for run in runs):
        raise ConfigError(f"{', '.join(options.runs)}: no step has been logged there yet")
    page.write_page(runs, out)
    try:
        if alone:
            print(write_report(options.runs[0]))
        print(write_panels(runs, out.with_name(f"{out.stem}-panels.png")))
    except ConfigError as failure:
        if install("report") not in str(failure):
            raise
        print(f"smp-train: {failure}", file=sys.stderr)
    if options.live is None:
        print(out)
    return 0
