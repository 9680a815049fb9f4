"""``smp-train data``: look at a data set, name all that is wrong with it, prove that a run used it exactly once."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from smp_train.data import formats, hf_dataset, manifest, s3
from smp_train.data.blend import BLOCK, apportion, read_weights, sources_of
from smp_train.data.index import own_folder, refuse_mixed
from smp_train.data.rows import RowParser
from smp_train.data.source import Row, Source, trimmed
from smp_train.data.utils import Progress, list_shards, read_lines
from smp_train.errors import ConfigError, DataError

ANY_VOCABULARY = 1 << 31
SHOWN = 100
SHOWN_NAMES = 10
SPAN = re.compile(r"(.+?)\[(\d+):(\d+)\](?:\+|$)")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of this verb's flags."""
    found = _Parser(prog="smp-train data", description=__doc__, allow_abbrev=False)
    verbs = found.add_subparsers(dest="verb", required=True, parser_class=_Parser)
    for name, about in (
        ("inspect", "counts, lengths, range of the vocabulary, a sample"),
        ("verify", "every problem, with file and line; exit code 3 when there is one"),
    ):
        one = verbs.add_parser(name, help=about, description=about)
        one.add_argument("path", help="folder or file of shards, Hugging Face data set, or prepared tokens; or s3://")
        one.add_argument("--vocab_size", type=int, default=ANY_VOCABULARY, help="ids must be below it")
        one.add_argument("--max_context_width", type=int, help="rows that it cuts to nothing to learn are problems")
        one.add_argument("--cache_dir", help="where objects of S3 are put for a while")
        if name == "inspect":
            one.add_argument("--tokenizer", help="to show a sample as text: tokenizer.json, or a folder with one")
    one = verbs.add_parser("audit", help="check the data_audit files of a run for repeats and gaps")
    one.add_argument("run", help="run folder of a run with --data_audit 1")
    one.add_argument("--rows", type=int, help="samples in the data set; default: as run.json says")
    return found


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Raises ConfigError and DataError."""
    args = parser().parse_args(list(argv))
    if args.verb == "audit":
        return audit(Path(args.run), args.rows)
    survey = look(args.path, args.vocab_size, args.cache_dir, args.max_context_width)
    if args.verb == "verify":
        survey.problems += [
            f"{args.path}: {problem} (by {manifest.MANIFEST})"
            for problem in manifest.differences(args.path, checksums=True)
        ]
    for problem in survey.problems[:SHOWN]:
        print(problem)
    if len(survey.problems) > SHOWN:
        print(f"... and {len(survey.problems) - SHOWN} more")
    if args.verb == "inspect":
        print(survey.text(args.tokenizer))
    else:
        print(f"{args.path}: {survey.rows} rows in {survey.shards} files, {len(survey.problems)} problems")
    return DataError.exit_code if survey.problems and args.verb == "verify" else 0


@dataclass
class Survey:
    """What was seen of a data set."""

    kind: str
    seq_len: int | None = None
    """Context length at which rows must have something to learn."""
    shards: int = 0
    rows: int = 0
    tokens: int = 0
    counted: int = 0
    labelled: int = 0
    """Rows with labels."""
    lowest: int = ANY_VOCABULARY
    highest: int = -1
    left_out: int = 0
    """Lines that were left out when prepared tokens were made."""
    lengths: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    sample: list[int] = field(default_factory=list)
    sample_name: str = ""

    def add(self, name: str, row: Row, folder: str = "") -> None:
        """Count one row; the first is the sample."""
        ids, targets, most = row.input_ids, row.targets(), self.seq_len
        self.rows += 1
        self.tokens += ids.size
        self.counted += ids.size if targets is None else int(targets.sum())
        self.labelled += row.labels is not None
        if most is not None and ids.size > most and not trimmed(row).cut(0, most).has_target():
            self.problems.append(f"{folder}{name}: none of its first {most} tokens is counted: nothing to learn")
        self.lowest, self.highest = min(self.lowest, int(ids.min())), max(self.highest, int(ids.max()))
        self.lengths[ids.size] += 1
        if not self.sample:
            self.sample, self.sample_name = ids[:64].tolist(), name

    def quantile(self, part: float) -> int:
        """Return the length that ``part`` of all rows do not exceed."""
        wanted, seen = part * self.rows, 0
        for length in sorted(self.lengths):
            seen += self.lengths[length]
            if seen >= wanted:
                return length
        return 0

    def text(self, tokenizer: str | None) -> str:
        """Return the survey in words."""
        lines = [f"{self.kind}: {self.rows} rows, {self.tokens} tokens in {self.shards} files"]
        if self.rows:
            lines += [
                f"counted: {self.counted} tokens ({self.counted / self.tokens:.2%})",
                f"labels: in {self.labelled} of {self.rows} rows",
                f"length: {self.quantile(0)} to {self.quantile(1)}, median {self.quantile(0.5)}, "
                f"95 % up to {self.quantile(0.95)}",
                f"token ids: {self.lowest} to {self.highest}: --vocab_size must be at least {self.highest + 1}",
                f"{self.sample_name} begins: {' '.join(map(str, self.sample[:24]))} ...",
            ]
        if tokenizer and self.sample:
            from smp_train.data.prepare.tokenizer import load

            lines.append(f"as text: {load(tokenizer).decode(self.sample)!r}")
        if self.left_out:
            lines.append(f"left out when this was made, as no rows: {self.left_out} lines")
        lines.append(f"problems: {len(self.problems)}")
        return "\n".join(lines)


def look(path: str, vocab_size: int, cache_dir: str | None = None, seq_len: int | None = None) -> Survey:
    """Read a whole data set, going on after each problem. Raises DataError when it cannot even be listed."""
    manifest.refuse_root(path)
    survey = Survey(formats.kind_of(path), seq_len)
    if survey.kind == formats.SHARDS:
        _look_at_shards(survey, path, vocab_size, cache_dir)
        return survey
    here = formats.bring(path, cache_dir)[0] if s3.is_s3(path) else path
    if survey.kind == formats.ARROW:
        source: Source | None = _check_hf_dataset(survey, here, vocab_size)
    else:
        source = prepared = formats.open_prepared(here, vocab_size, max_bad=1)
        survey.shards = len(prepared.files)
        survey.left_out = sum(header.skipped for header in prepared.headers)
    if source is None:
        return survey
    for index in range(len(source)):
        try:
            survey.add(source.name(index), source.row(index))
        except DataError as error:
            survey.problems.append(str(error))
    return survey


def _check_hf_dataset(survey: Survey, folder: str, vocab_size: int) -> Source | None:
    """Look for problems in a Hugging Face data set; return its good rows, or None when it cannot be opened."""
    files, indices = hf_dataset.files_of(folder)
    checked = []
    for shard in files:
        survey.shards += 1

        def bad(row: int, why: str, path: str = shard.path) -> None:
            survey.problems.append(f"{path}: row {row}: {why}")

        try:
            checked.append(hf_dataset.check(shard.path, vocab_size, bad))
        except DataError as error:
            survey.problems.append(str(error))
    return hf_dataset.HfRows(files, checked, indices) if len(checked) == len(files) else None


def _look_at_shards(survey: Survey, path: str, vocab_size: int, cache_dir: str | None) -> None:
    shards = list_shards(path)
    folder = cache_dir or own_folder()
    if s3.is_s3(path):
        Path(folder).mkdir(parents=True, exist_ok=True)
    coming = s3.staged(shards, folder) if s3.is_s3(path) else ((shard, None) for shard in shards)
    labelled: list[tuple[str, bool]] = []
    with Progress("reading", sum(shard.size for shard in shards), "B") as progress:
        for shard, copy in coming:
            survey.shards += 1
            rows = survey.rows
            try:
                parse = RowParser(vocab_size)
                for number, line in read_lines(copy or shard.path, progress.update, shown=shard.path):
                    try:
                        survey.add(f"{shard.name}:{number}", parse(line), shard.path[: -len(shard.name)])
                    except ValueError as error:
                        survey.problems.append(f"{shard.path}:{number}: {error}")
                if survey.rows == rows:
                    survey.problems.append(f"{shard.path}: empty shard (no row in it); write it again or remove it")
                if parse.labelled is not None:
                    refuse_mixed([*labelled[:1], (shard.path, parse.labelled)])
                    labelled.append((shard.path, parse.labelled))
            except DataError as error:
                survey.problems.append(str(error))
            finally:
                if copy:
                    Path(copy).unlink()


@dataclass(frozen=True)
class _Record:
    """What one rank consumed in one step."""

    rank: int
    attempt: int
    dp_rank: int
    dp_size: int | None
    samples: list[str]


def _records(run: Path, peers: int) -> dict[int, list[_Record]]:
    """Return, by step, what each rank consumed in it, by rank: of the newest attempt that it is of.

    ``peers`` neighbouring ranks share a model where the records do not say who does.
    """
    files = sorted(run.glob("data_audit-rank*.jsonl"))
    if not files:
        raise ConfigError(f"{run}: no data_audit-rank*.jsonl in it; train with --data_audit 1")
    steps: dict[int, dict[int, _Record]] = {}
    begins: dict[int, int] = {}
    found: list[tuple[int, _Record]] = []
    for path in files:
        rank = int(path.stem.rpartition("rank")[2])
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
                step, samples = int(record["step"]), list(record["samples"])
                attempt, dp_rank = int(record.get("attempt", 0)), int(record.get("dp_rank", rank // peers))
            except (ValueError, KeyError, TypeError):
                # The last line of a run that was killed.
                continue
            begins[attempt] = min(step, begins.get(attempt, step))
            found.append((step, _Record(rank, attempt, dp_rank, record.get("dp_size"), samples)))
    for step, one in found:
        # An attempt voids all that earlier ones have done from its first step on.
        if not any(attempt > one.attempt and step >= first for attempt, first in begins.items()):
            steps.setdefault(step, {})[one.rank] = one
    return {step: [ranks[rank] for rank in sorted(ranks)] for step, ranks in steps.items()}


def _of_step(ranks: list[_Record]) -> list[str]:
    """Return each sample of a step once for ranks that share a model and read the same rows."""
    firsts = {one.dp_rank: one.samples for one in reversed(ranks)}
    return [sample for dp_rank in sorted(firsts) for sample in firsts[dp_rank]]


def _disagreeing(ranks: list[_Record]) -> list[str]:
    """Return the names of ranks that did not read what the first of their peers read."""
    firsts = {one.dp_rank: one.samples for one in reversed(ranks)}
    return [f"rank {one.rank}" for one in ranks if one.samples != firsts[one.dp_rank]]


def _absent(ranks: list[_Record]) -> bool:
    """Tell whether nothing is known of what some data-parallel rank read."""
    return ranks[0].dp_size is not None and len({one.dp_rank for one in ranks}) < ranks[0].dp_size


def audit(run: Path, rows: int | None = None) -> int:
    """Check that a run used each sample once per epoch and left no step out; print it, and return the exit code.

    Of a run with --epochs that came to its end, each sample must have been used so many times.
    """
    config, mesh, sizes = _config(run, "config"), _config(run, "mesh"), _config(run, "samples")
    steps = _records(run, int(mesh.get("tensor", 1)) * int(mesh.get("context", 1)))
    if not steps:
        print(f"{run}: no step was recorded yet")
        return 0
    problems = [
        f"step {step} is missing" for step in range(min(steps), max(steps) + 1) if step not in steps
    ]
    for step, ranks in sorted(steps.items()):
        # Of a run that was killed, a rank's last step may be missing.
        if _absent(ranks) and step < max(steps):
            problems.append(f"step {step}: the records of some ranks are missing")
        if strays := _disagreeing(ranks):
            who = ", ".join(strays)
            problems.append(f"step {step}: {who} read other samples than the ranks they share a model with")
    streams: dict[str, list[tuple[int, int, str]]] = {}
    said: list[str] = []
    consumed, different = 0, set()
    places, weights = read_weights(config.get("training_dir") or [""])
    for step in sorted(steps):
        samples = _of_step(steps[step])
        for sample in samples:
            name = sample.rpartition("[")[0] or sample if config.get("long") == "crop" else sample
            place = max((p for p in places if name.startswith(p + "/")), key=len, default="") if weights else ""
            streams.setdefault(place, []).append((step, consumed, name))
            different.add(name)
        consumed += len(samples)
    if config.get("dataset"):
        problems += torn({step: _of_step(ranks) for step, ranks in steps.items()})
        streams, consumed_as = {}, "no token of a document twice or left out"
    else:
        consumed_as = "each once per epoch"
    for place, seen in streams.items():
        problems += _repeats(place, seen, (rows if not place else None) or sizes.get(place))
    size = rows or sizes.get("")
    if size and "" in streams and not weights and min(steps) == 1:
        times = Counter(name for _, _, name in streams[""])
        left_over, consumed_as = _left_over(times, size, config.get("epochs"))
        # No fault where a flag has ended the run before, or where it is not at its end.
        (problems if _used_all_epochs(run, max(steps)) else said).extend(left_over)
    if weights:
        # Not of a last step that only some ranks wrote down: its samples are no beginning of the order.
        whole = max(steps) - _absent(steps[max(steps)])
        drawn = {place: sum(step <= whole for step, _, _ in streams.get(place, ())) for place in places}
        problems += _shares(drawn, weights, config.get("seed") if min(steps) == 1 else None)
        print(f"{run}: drawn from " + ", ".join(f"{place}: {number}" for place, number in drawn.items()))
    for line in said + problems[:SHOWN]:
        print(line)
    verdict = f"{len(problems)} problems" if problems else f"{consumed_as}, no step left out"
    print(f"{run}: steps {min(steps)} to {max(steps)}, {consumed} samples, {len(different)} different: {verdict}")
    return DataError.exit_code if problems else 0


def _run_json(run: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run / "run.json").read_text()))
    except (OSError, ValueError):
        return {}


def _config(run: Path, part: str) -> dict[str, Any]:
    return dict(_run_json(run).get(part) or {})


def _used_all_epochs(run: Path, last_step: int) -> bool:
    """Tell whether a run says that it is at the end of its --epochs, and no other flag has ended it."""
    config, total = _config(run, "config"), _run_json(run).get("total_steps")
    epochs = config.get("epochs")
    ended_by = [config["max_steps"]] if _config(run, "sources").get("max_steps", "default") != "default" else []
    if epochs and config.get("steps_per_epoch"):
        ended_by.append(epochs * config["steps_per_epoch"])
    return bool(epochs and total and last_step >= total and total not in ended_by)


def _left_over(times: Counter[str], size: int, epochs: int | None) -> tuple[list[str], str]:
    """Return which samples were not used as often as others, and how often all were, in words.

    Args:
        times: how often each sample was used.
        size: samples of an epoch.
        epochs: how many there were to be; None for whatever there are.
    """
    begun = -(-times.total() // size)
    short = begun * size - times.total()
    found = []
    if short:
        # Of samples that were never used, the names are not known.
        names = sorted(name for name, number in times.items() if number < begun) if len(times) == size else []
        which = f": {', '.join(names[:SHOWN_NAMES])}{', ...' if len(names) > SHOWN_NAMES else ''}" if names else ""
        found.append(f"epoch {begun} is not whole: {short} of {size} samples were not used in it{which}")
    if epochs and epochs > begun:
        found.append(f"{epochs - begun} of {epochs} epochs were not begun")
    return found, "each once per epoch" if short else f"each {begun} times" if begun > 1 else "each once"


def _repeats(place: str, seen: list[tuple[int, int, str]], rows: int | None) -> list[str]:
    """Return what contradicts one use per epoch, where an epoch is ``rows`` samples (default: the different ones)."""
    size = rows or len({name for _, _, name in seen})
    steps = np.array([step for step, _, _ in seen])
    times: Counter[str] = Counter()
    problems = []
    for step, _, name in seen:
        epoch = times[name]
        times[name] += 1
        # Within a step the ranks' order is not recorded: only its first and last position are known.
        first = int(np.searchsorted(steps, step, side="left"))
        last = int(np.searchsorted(steps, step, side="right")) - 1
        if last < epoch * size:
            problems.append(f"step {step}: {name} comes again before the epoch of {size} samples is over")
        elif first >= (epoch + 1) * size:
            problems.append(f"step {step}: {name} comes late: it was left out of an epoch of {size} samples")
    full = len(seen) // size
    if rows is not None and full and len(times) < rows:
        problems.append(f"{place or 'the data'}: {rows - len(times)} of {rows} samples were never used")
    return problems


def _shares(drawn: dict[str, int], weights: list[float], seed: int | None) -> list[str]:
    """Return which places of a blend were drawn from less or more often than its order says.

    Every block of positions has equally many of each place. With the ``seed`` of a run that is audited from its
    beginning, the rest is known too; without, not even where in a block the audit begins.
    """
    blocks, rest = divmod(sum(drawn.values()), BLOCK)
    slots = apportion(weights, BLOCK)
    least, most = [max(0, blocks - 1) * n for n in slots], [(blocks + 2) * n for n in slots]
    if seed is not None:
        within = np.bincount(sources_of(blocks, slots, seed)[:rest], minlength=len(slots))
        least = most = [blocks * n + int(more) for n, more in zip(slots, within, strict=True)]
    return [
        f"{place}: was drawn from {number} times, its weight gives it "
        + (f"{low}" if low == high else f"{low} to {high}")
        for (place, number), low, high in zip(drawn.items(), least, most, strict=True)
        if not low <= number <= high
    ]


def torn(steps: dict[int, list[str]]) -> list[str]:
    """Return where documents of streamed text do not go on where they were cut.

    Samples are ``document[begin:end]``, joined by ``+``. A document may begin again when it was read to its end, which
    is known when another has followed it in a sample.
    """
    pieces: dict[int, dict[str, list[tuple[int, int]]]] = {}
    ends: dict[str, int] = {}
    for step, samples in steps.items():
        for sample in samples:
            spans = [(name, int(begin), int(end)) for name, begin, end in SPAN.findall(sample)]
            ends.update((name, end) for name, _, end in spans[:-1])
            for name, begin, end in spans:
                pieces.setdefault(step, {}).setdefault(name, []).append((begin, end))
    problems = []
    at: dict[str, int] = {}
    known_from_start = min(steps) == 1
    for step in sorted(pieces):
        for name, places in pieces[step].items():
            # Within a step the order of ranks is not recorded; of one document it is that of its places, but that a
            # short one may end and begin again.
            waiting = sorted(places)
            while waiting:
                left = at.get(name, 0)
                again = left == ends.get(name, left)
                fits = [p for p in waiting if p[0] == left] or [p for p in waiting if again and p[0] == 0] or waiting
                begin, end = fits[0]
                waiting.remove((begin, end))
                if begin != left and not (again and begin == 0) and (name in at or known_from_start):
                    problems.append(f"step {step}: {name} goes on at token {begin}, but was left at {left}")
                at[name] = end
    return problems
