"""The data path against its alternatives, alternating, in one process: loading, converting, reading from S3.

Peers: the way of the system this package replaces (a shard as a list of lines, `json.loads` and two tensors per row),
Hugging Face `datasets` with the torch format, and litdata. Ratios are of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smp_train.data import s3
from smp_train.data.convert import open_token_rows, write_group
from smp_train.data.files import DataFile, list_files
from smp_train.data.indexed import TrainingData
from smp_train.data.order import Order
from smp_train.data.rows import Recipe
from smp_train.data.samples import Samples
from smp_train.data.stream import Reading
from smp_train.data.streamed import StreamedData
from smp_train.data.token_file import TokenRows
from smp_train.data.tokenizer import train

VOCAB = 32_000
BATCH = 4
LATENCY_SECONDS = 0.025
BYTES_PER_SECOND = 85e6
"""Of one connection: what S3 gives."""
CUT_ROWS = 16_000
"""Rows read to compare few shards with many."""
STREAM_FILES, STREAM_RECORDS, STREAM_STEPS = 64, 1000, 20


def main(argv: Sequence[str]) -> int:
    """Measure, and print medians and ratios."""
    parser = argparse.ArgumentParser(prog="smp-train bench data", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default 7), after one to warm up")
    parser.add_argument("--rows", type=int, default=1000, help="rows of each of two shards (default 1000)")
    parser.add_argument("--seq_len", type=int, default=4096, help="tokens of a row (default 4096)")
    parser.add_argument("--objects", type=int, default=8, help="objects read from the S3-like server (default 8)")
    parser.add_argument("--shards", type=int, default=0, help="compare so many shards with 8 (default: not)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_shards(folder / "shards", options.rows, options.seq_len)
        tokens = 2 * options.rows * options.seq_len
        loaders: dict[str, Callable[[], Any]] = {
            "this package": ours(token_rows(folder / "shards"), options.seq_len, 2 * options.rows),
            "original": lambda: original(folder / "shards"),
        }
        peers = {"datasets, torch format": hugging_face(folder), "litdata": lit_data(folder, options.seq_len)}
        loaders |= {name: peer for name, peer in peers.items() if peer is not None}
        print_table("load batches of 4 rows, tokens/s", compare(loaders, options.rounds), tokens)
        files = list_files(str(folder / "shards"))
        maker, shard = Recipe(files.kind, VOCAB).open(), files.files[0]
        converters: dict[str, Callable[[], Any]] = {
            "this package": lambda: write_group(
                str(folder / "converted"), [shard], maker, VOCAB, lambda done: None, None
            ),
            "original, parsing alone": lambda: original_parse(shard.path),
        }
        print_table("convert one json.gz, tokens/s", compare(converters, options.rounds), tokens / 2)
        readers = from_s3(options.objects)
        if readers is not None:
            size = options.objects * OBJECT_BYTES
            title = f"read {options.objects} objects from an S3-like server (25 ms, 85 MB/s a connection), bytes/s"
            print_table(title, compare(readers, options.rounds), size)
        times = compare(streaming(folder / "text"), options.rounds)
        for name, seconds in times.items():
            wall, cpu = (statistics.median(values) for values in zip(*seconds, strict=True))
            print(f"stream {STREAM_FILES} json.gz files of text: {name} {wall:.2f} s, {cpu:.2f} s of CPU")
        if options.shards:
            cuts = {f"{count} shards": cut(folder / f"cut{count}", count) for count in (8, options.shards)}
            print_table("load batches of 4 rows of 512, tokens/s", compare(cuts, options.rounds), CUT_ROWS * 512)
    return 0


def write_shards(folder: Path, rows: int, seq_len: int) -> None:
    """Write two json.gz shards of Zipf-distributed tokens."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    mask = [1] * seq_len
    for number in range(2):
        with gzip.open(folder / f"{number}.json.gz", "wt", compresslevel=6) as file:
            for _ in range(rows):
                ids = np.minimum(rng.zipf(1.2, seq_len), VOCAB - 1).tolist()
                file.write(json.dumps({"input_ids": ids, "attention_mask": mask}) + "\n")


def token_rows(folder: Path) -> TokenRows:
    """Return the rows of a folder, converted first where necessary."""
    files = list_files(str(folder))
    return open_token_rows(files, Recipe(files.kind, VOCAB))


def ours(rows: TokenRows, seq_len: int, count: int) -> Callable[[], None]:
    """Return the reading of the next ``count`` rows in the global shuffle, without a thread, of a run that goes on."""
    samples = Samples(rows, seq_len)
    data = TrainingData(
        samples, Order(len(samples)), seq_len=seq_len, micro_batch=BATCH, accumulation=1, dp_rank=0, dp_size=1,
        prefetch=0, with_names=False,
    )  # fmt: skip
    batches = data.batches(0)

    def read() -> None:
        for _ in range(count // BATCH):
            next(batches)

    return read


def cut(folder: Path, shards: int) -> Callable[[], None]:
    """Return the reading of `CUT_ROWS` rows of 512 tokens from so many shards."""
    folder.mkdir()
    block = np.random.default_rng(0).integers(0, VOCAB, (-(-CUT_ROWS // shards), 512))
    lines = "".join(json.dumps({"input_ids": ids}) + "\n" for ids in block.tolist())
    for number in range(shards):
        (folder / f"{number:06}.json").write_text(lines)
    return ours(token_rows(folder), 512, CUT_ROWS)


def streaming(folder: Path) -> dict[str, Callable[[], None]]:
    """Return the first step of a streamed set of text like C4, and `STREAM_STEPS` more of the same run."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    words = ["".join(chr(97 + letter) for letter in draw.integers(0, 26, draw.integers(2, 9))) for _ in range(5000)]
    for number in range(STREAM_FILES):
        with gzip.open(folder / f"{number:05}.json.gz", "wt", compresslevel=6) as file:
            for size in draw.lognormal(5.3, 1.0, STREAM_RECORDS).astype(int) + 1:  # words of a page in C4
                indices = np.minimum(draw.zipf(1.2, size), len(words)) - 1
                file.write(json.dumps({"text": " ".join(words[index] for index in indices), "url": "x"}) + "\n")
    train((" ".join(words) for _ in range(20)), 8000).save(str(folder.parent / "tokenizer.json"))
    recipe = Recipe(list_files(str(folder)).kind, tokenizer=str(folder.parent / "tokenizer.json"))
    recipe.open()
    steps: list[Iterator[Any]] = []

    def first_step() -> None:
        reading = Reading([list_files(str(folder))], [recipe.open()], 4096)
        share: Any = {"seq_len": 4096, "micro_batch": BATCH, "accumulation": 1, "dp_rank": 0, "dp_size": 1}
        data = StreamedData(reading, prefetch=0, **share)
        data.check()
        steps[:] = [data.batches()]
        next(steps[0])

    def more_steps() -> None:
        for _ in range(STREAM_STEPS):
            next(steps[0])

    return {"first step": first_step, f"{STREAM_STEPS} steps": more_steps}


def original_parse(path: str) -> int:
    """Read a shard as the original does: all lines, then each by `json.loads` into two tensors; return the rows."""
    with gzip.open(path, "rt") as file:
        lines = file.readlines()
    for line in lines:
        record = json.loads(line)
        torch.tensor(record["input_ids"], dtype=torch.long)
        torch.tensor(record["attention_mask"], dtype=torch.long)
    return len(lines)


class _Lines(torch.utils.data.Dataset):
    def __init__(self, path: str) -> None:
        with gzip.open(path, "rt") as file:
            self.lines = file.readlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        record = json.loads(self.lines[index])
        return [torch.tensor(record[key], dtype=torch.long) for key in ("input_ids", "attention_mask")]


def original(folder: Path) -> None:
    """One epoch as the original makes it: shard by shard, a DataLoader without workers over the lines of each."""
    for path in sorted(folder.glob("*.json.gz")):
        for _ in torch.utils.data.DataLoader(_Lines(str(path)), batch_size=BATCH, drop_last=True):
            pass


def hugging_face(folder: Path) -> Callable[[], None] | None:
    """Return one shuffled epoch over the same rows in `datasets`; None when that is not installed."""
    try:
        from datasets import Dataset, disable_progress_bars, load_from_disk
    except ImportError:
        print("datasets is not installed: left out")
        return None
    disable_progress_bars()
    source = token_rows(folder / "shards")
    rows = [source.row(index).input_ids.astype(np.int32) for index in range(len(source))]
    Dataset.from_dict({"input_ids": rows}).save_to_disk(str(folder / "arrow"))
    found = load_from_disk(str(folder / "arrow")).with_format("torch", columns=["input_ids"])

    def epoch() -> None:
        order = np.random.default_rng(0).permutation(len(found))
        for start in range(0, len(found) - BATCH + 1, BATCH):
            found[order[start : start + BATCH].tolist()]["input_ids"].to(torch.int64)

    return epoch


def lit_data(folder: Path, seq_len: int) -> Callable[[], None] | None:
    """Return one shuffled epoch over the same rows in litdata; None when that is not installed."""
    try:
        from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
    except ImportError:
        print("litdata is not installed: left out")
        return None
    source = token_rows(folder / "shards")
    rows = np.concatenate([source.row(index).input_ids for index in range(len(source))]).astype(np.int32)
    np.save(folder / "rows.npy", rows)
    made = str(folder / "litdata")
    with contextlib.redirect_stdout(io.StringIO()):
        optimize(
            fn=_tokens, inputs=[str(folder / "rows.npy")], output_dir=made, chunk_size=seq_len * len(source) // 2,
            item_loader=TokensLoader(block_size=seq_len), num_workers=1,
        )  # fmt: skip
    found = StreamingDataset(made, item_loader=TokensLoader(block_size=seq_len), shuffle=True)
    loader = StreamingDataLoader(found, batch_size=BATCH, num_workers=0)

    def epoch() -> None:
        for batch in loader:
            batch.to(torch.int64)

    return epoch


def _tokens(path: str) -> Iterator[torch.Tensor]:
    for half in np.array_split(np.load(path), 2):
        yield torch.from_numpy(half)


OBJECT_BYTES = 8 << 20


def from_s3(objects: int) -> dict[str, Callable[[], None]] | None:
    """Return reading of the same objects with requests ahead, and one request at a time, from a server like S3."""
    try:
        import boto3  # noqa: F401
    except ImportError:
        print("boto3 is not installed: reading from S3 left out")
        return None
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Objects)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_address[1]}",
        AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none", AWS_DEFAULT_REGION="us-east-1",
    )  # fmt: skip
    files = [DataFile(f"s3://bucket/{n}", str(n), OBJECT_BYTES, "etag", "lines") for n in range(objects)]

    def reading(opened: Callable[[], Iterator[io.BufferedReader]]) -> Callable[[], None]:
        def read() -> None:
            for raw in opened():
                while raw.read(1 << 17):
                    pass

        return read

    ahead, by_one = (lambda: s3.open_in_sequence(files)), (lambda: map(s3.open_object, files))
    return {"this package": reading(ahead), "one at a time": reading(by_one)}


class _Objects(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    body = bytes(1 << 18)

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        time.sleep(LATENCY_SECONDS)
        start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(206)
        self.send_header("Content-Length", str(end + 1 - start))
        self.end_headers()
        began = time.perf_counter()
        for sent in range(0, end + 1 - start, len(self.body)):
            self.wfile.write(self.body[: end + 1 - start - sent])
            due = began + (sent + len(self.body)) / BYTES_PER_SECOND
            time.sleep(max(0.0, due - time.perf_counter()))


def compare(kinds: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (seconds, CPU seconds) of each kind in each round, one after the other in every round."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name, kind in kinds.items():
            began, worked = time.perf_counter(), time.process_time()
            kind()
            if number:
                seconds[name].append((time.perf_counter() - began, time.process_time() - worked))
    return seconds


def print_table(title: str, seconds: dict[str, list[tuple[float, float]]], amount: float) -> None:
    """Print the median speed of each kind, and how many times as fast the first is: by the clock, and in CPU time."""
    print(title)
    best, first = next(iter(seconds.items()))
    for name, times in seconds.items():
        text = f"  {name:<26}{amount / statistics.median(wall for wall, _ in times) / 1e6:>10.1f} M"
        if times is not first:
            wall, cpu = (
                sorted(other[kind] / mine[kind] for other, mine in zip(times, first, strict=True)) for kind in (0, 1)
            )
            text += f"   {best}: {statistics.median(wall):.1f} x ({wall[0]:.1f} to {wall[-1]:.1f})"
            text += f"; in CPU time {statistics.median(cpu):.1f} x ({cpu[0]:.1f} to {cpu[-1]:.1f})"
        print(text)
