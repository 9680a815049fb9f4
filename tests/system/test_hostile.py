"""Files that somebody else made, and meant badly: what smp-train reads runs no code, stays in its folder and in memory.

Each row makes a hostile input and names the command that meets it. The command has ``y`` on its standard input and
`MEMORY` more address space than its imports take; it must end with the exit code of the design and one line.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chats import PLAIN, write_tokenizer
from tests.system.command import warm, write_shard
from tests.tiers import core
from tests.training import NO_MODEL, flags

pytestmark = [pytest.mark.system, pytest.mark.slow]

CONFIG, DATA, CHECKPOINT = 2, 3, 4
MEMORY = 1 << 30
SECRET = "kept-outside-the-folder"
Case = Callable[[Path], list[str]]
CASES: dict[str, tuple[int, Case]] = {}
ENVIRON: dict[Path, dict[str, str]] = {}
"""What the command of a case finds in its environment, by the folder of the case."""


def row(code: int, name: str, read: Case, damage: Callable[[Path], object] = lambda folder: None) -> None:
    """Enter a case: ``damage`` makes the input, ``read`` returns the command that reads it and ends with ``code``."""

    def case(folder: Path) -> list[str]:
        damage(folder)
        return read(folder)

    CASES[name] = (code, case)


def link(path: Path, target: Path | str) -> None:
    """Put a link in the place of what is there."""
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with warm(folder, "train", *flags(folder, max_steps=1, checkpoint_freq=1)) as command:
        assert command.code() == 0, command.err
    (path,) = [path.parent for path in folder.glob("checkpoints/**/COMMITTED")]
    return path


# --- checkpoints: COMMITTED, meta.json ---------------------------------------------------------------


def of(folder: Path) -> Path:
    return folder / "ckpt" / "llama_v2-1steps"


def commit(folder: Path, add: dict[str, int] | None = None, **changes: Any) -> None:
    """Write COMMITTED as it would be for the files that are there now, with ``changes``."""
    path = of(folder)
    committed = json.loads((path / "COMMITTED").read_text())
    committed.pop("crc32", None)
    for name in committed["files"]:
        if (path / name).is_file():
            data = (path / name).read_bytes()
            committed["files"][name] = {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    for name, size in (add or {}).items():
        data = (path / name).read_bytes()[:size]
        committed["files"][name] = {"size": size, "crc32": f"{zlib.crc32(data):08x}"}
    committed |= changes
    committed["crc32"] = f"{zlib.crc32(json.dumps(committed, indent=1).encode()):08x}"
    (path / "COMMITTED").write_text(json.dumps(committed, indent=1))


def verify(folder: Path) -> list[str]:
    return ["checkpoint", "verify", str(of(folder))]


def resume(folder: Path) -> list[str]:
    return ["train", *flags(folder, max_steps=2, resume_from_checkpoint=of(folder))]


def export(folder: Path) -> list[str]:
    return ["checkpoint", "export", str(of(folder)), str(folder / "out")]


def show(folder: Path) -> list[str]:
    return ["checkpoint", "show", str(of(folder))]


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def link_file(folder: Path) -> None:
    link(of(folder) / "linked", folder / "secret")
    commit(folder, {"linked": len(SECRET)})


def link_shard(folder: Path) -> None:
    (of(folder) / "__0_0.distcp").rename(folder / "elsewhere")
    link(of(folder) / "__0_0.distcp", folder / "elsewhere")


def meta(folder: Path, content: Any) -> None:
    (of(folder) / "meta.json").write_text(content if isinstance(content, str) else json.dumps(content))
    commit(folder)


DEEP = "[" * 1_000_000
FOREIGN_CODE = {"model_type": "foreign", "auto_map": {"AutoConfig": "code.Config"}}
row(CHECKPOINT, "committed_names_a_file_above_its_folder", verify,
    lambda at: commit(at, {"../../secret": len(SECRET)}))
row(CHECKPOINT, "committed_names_a_link", verify, link_file)
row(CHECKPOINT, "a_shard_is_a_link", resume, link_shard)
row(CHECKPOINT, "committed_is_a_link_to_an_endless_device", show, lambda at: link(of(at) / "COMMITTED", "/dev/zero"))
row(CHECKPOINT, "committed_is_very_large", verify, lambda at: os.truncate(of(at) / "COMMITTED", 1 << 40))
row(CHECKPOINT, "committed_is_nested_very_deep", verify, lambda at: (of(at) / "COMMITTED").write_text(DEEP))
row(CHECKPOINT, "committed_says_another_step_than_meta", resume, lambda at: commit(at, step=7))
row(CHECKPOINT, "committed_says_an_endless_step", verify, lambda at: commit(at, step=float("inf")))
row(CHECKPOINT, "meta_is_a_list", export, lambda at: meta(at, [1]))
row(CHECKPOINT, "meta_is_nested_very_deep", resume, lambda at: meta(at, DEEP))
row(
    CHECKPOINT, "meta_is_not_what_was_committed", show,
    lambda at: replace(of(at) / "meta.json", '"step": 1', '"step": 7')
)
row(CHECKPOINT, "meta_says_a_model_that_is_none", export, lambda at: meta(at, {"step": 1, "model_config": [1]}))
row(CHECKPOINT, "meta_says_a_model_with_code", export, lambda at: meta(at, {"step": 1, "model_config": FOREIGN_CODE}))


# --- checkpoints: the index, which is a pickle -------------------------------------------------------


def index(folder: Path, data: bytes | Any) -> None:
    """Replace the checkpoint's index, which becomes its only one, and commit it."""
    data = data if isinstance(data, bytes) else pickle.dumps(data)
    (of(folder) / ".metadata").write_bytes(data)
    (of(folder) / "index.bin").write_bytes(b"another program's")
    commit(folder)


def indexed(folder: Path) -> Any:
    return pickle.loads((of(folder) / ".metadata").read_bytes())


class Code:
    """Its pickle runs code where it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import os; open(os.environ['CANARY'], 'w')",)


def built(target: bytes, state: bytes) -> bytes:
    """Return a pickle that sets attributes on what ``target`` puts on the stack."""
    return b"\x80\x02" + target + b"N" + state + b"\x86" + b"b" + b"."


OVERWRITE = b"}X\x04\x00\x00\x00openNs"


def with_files_at(folder: Path, path: str, copy: Path | None = None) -> None:
    """Let the index name another file, a copy of the shard that lies at ``copy``."""
    if copy is not None:
        shutil.copy(of(folder) / "__0_0.distcp", copy)
    found = indexed(folder)
    for info in found.storage_data.values():
        info.relative_path = path
    index(folder, found)


def foreign_tree(folder: Path) -> None:
    with_files_at(folder, "../elsewhere", folder / "elsewhere")
    shutil.copytree(of(folder), folder / "tree", ignore=lambda *_: ["COMMITTED", "meta.json"])


def finetune(folder: Path) -> list[str]:
    return ["train", *flags(folder, finetune=1, pretrained_checkpoint_file=folder / "tree")]


for _name, _read, _data in (
    ("index_calls_a_function", resume, Code()),
    ("index_sets_attributes_of_a_class", export, built(b"cpathlib\nPath\n", OVERWRITE)),
    ("index_sets_attributes_of_a_function", export, built(b"ctorch.serialization\n_get_layout\n", OVERWRITE)),
    # LONG_BINPUT: the memo gets two thousand million places
    ("index_asks_for_much_memory", verify, b"\x80\x04Nr\xff\xff\xff\x7f."),
    ("index_is_not_an_index", export, {"state_dict_metadata": {}}),
):  # fmt: skip
    row(CHECKPOINT, _name, _read, lambda at, data=_data: index(at, data))  # type: ignore[misc]
row(
    CHECKPOINT, "index_names_a_file_above_its_folder", verify,
    lambda at: with_files_at(at, "../../elsewhere", at / "elsewhere")
)
row(
    CHECKPOINT, "index_names_a_file_that_is_not_committed", export,
    lambda at: with_files_at(at, "more.distcp", of(at) / "more.distcp")
)
row(CHECKPOINT, "anothers_tree_names_a_file_above_its_folder", finetune, foreign_tree)


# --- configurations and tokenizers -------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"intermediate_size": 48, "vocab_size": 256, "max_position_embeddings": 16}
RUNS = "import os\nopen(os.environ['CANARY'], 'w')\n"


def model(folder: Path, **config: Any) -> Path:
    """Write the folder of a model whose code leaves a mark where it runs."""
    there = folder / "model"
    there.mkdir(parents=True)
    (there / "config.json").write_text(json.dumps(config))
    (there / "code.py").write_text(
        f"{RUNS}from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class Config(LlamaConfig):\n    model_type = 'foreign'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
        "class Tokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    return there


CODE = {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
FOREIGN = LLAMA | {"model_type": "foreign"} | CODE


def train_on(folder: Path, path: Path, **changes: Any) -> list[str]:
    return ["train", *flags(folder, **NO_MODEL, hf_pretrained_model_name_or_dir=path, **changes)]


for _name, _config in {
    "brings_code": FOREIGN,
    "names_a_kernel_of_the_hub": {**LLAMA, "attn_implementation": "foreign/kernel"},
    "has_no_heads": {**LLAMA, "num_attention_heads": 0},
    "is_of_an_enormous_model": {**LLAMA, "vocab_size": 10**12},
    "has_text_for_a_width": {**LLAMA, "hidden_size": "wide"},
}.items():
    row(CONFIG, f"configuration_{_name}", lambda at, config=_config: train_on(at, model(at, **config)))  # type: ignore[misc]
for _name, _text in {"is_a_list": "[1]", "is_nested_very_deep": '{"a":' * 1_000_000}.items():
    row(
        CONFIG, f"configuration_{_name}", lambda at: train_on(at, at / "model"),
        lambda at, text=_text: (model(at) / "config.json").write_text(text)  # type: ignore[misc]
    )
row(
    CONFIG, "configuration_beside_weights_brings_code",
    lambda at: ["checkpoint", "import", str(model(at, **FOREIGN)), str(at / "imported")]
)


def tokenizer(folder: Path, **settings: Any) -> Path:
    there = model(folder, **LLAMA)
    (there / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | settings))
    return there


TOKENIZER_CODE = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}


def prepare(folder: Path, name: str, data: bytes, *options: str) -> list[str]:
    """Return the command that prepares one file of text."""
    (folder / "text").mkdir()
    (folder / "text" / name).write_bytes(data)
    return ["prepare", f"--input={folder / 'text'}", f"--output={folder / 'out'}", *options]


row(
    CONFIG, "tokenizer_brings_code_to_an_export",
    lambda at: [*export(at), f"--tokenizer={tokenizer(at, **TOKENIZER_CODE)}"]
)
row(
    CONFIG, "tokenizer_brings_code_to_prepare",
    lambda at: prepare(at, "a.txt", b"some words\n", f"--tokenizer={tokenizer(at, **TOKENIZER_CODE)}")
)
row(
    CONFIG, "tokenizer_names_a_file_outside",
    lambda at: [*export(at), f"--tokenizer={tokenizer(at, tokenizer_file=str(at / 'secret'))}"]
)


def test_code_of_a_model_runs_when_it_is_trusted(tmp_path: Path) -> None:
    """And a model that transformers has a class for needs no trust, whatever else its configuration names."""
    foreign = model(tmp_path, **FOREIGN)
    canary = {"CANARY": str(tmp_path / "ran"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    with warm(tmp_path, *train_on(tmp_path, foreign, trust_remote_code=1), environ=canary) as command:
        assert command.code() == 0, command.err
        assert "--trust_remote_code" in command.err + command.out
    assert (tmp_path / "ran").exists()
    known = model(tmp_path / "known", **LLAMA | CODE)
    with warm(tmp_path / "known", *train_on(tmp_path / "known", known), environ=canary) as command:
        assert command.code() == 0, command.err


# --- data: shards, archives, caches ------------------------------------------------------------------


def read(folder: Path, **changes: Any) -> list[str]:
    return ["train", *flags(folder, **{"use_synthetic_data": None, "training_dir": folder / "data", **changes})]


def shard(folder: Path, name: str, data: bytes) -> list[str]:
    (folder / "data").mkdir()
    (folder / "data" / name).write_bytes(data)
    return read(folder)


def bomb(gibibytes: int) -> bytes:
    """Return a small gzip file of spaces in one line."""
    return gzip.compress(b" " * (64 << 20), 1) * (16 * gibibytes)


row(DATA, "a_line_of_a_zipped_shard_never_ends", lambda folder: shard(folder, "a.json.gz", bomb(3)))
row(
    DATA, "a_line_of_a_shard_is_nested_very_deep",
    lambda folder: shard(folder, "a.json", b'{"input_ids":' + b"[" * 1_000_000 + b"\n")
)


row(
    DATA, "a_zipped_text_is_endless", lambda folder: prepare(folder, "a.txt.gz", bomb(3), "--train_tokenizer=300")
)


def on_a_chat(folder: Path, template: str) -> list[str]:
    """Return the command that prepares a chat by a tokenizer with some chat template."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = write_tokenizer(folder / "chat_tokenizer", template)
    return prepare(folder, "a.jsonl", json.dumps({"messages": chat}).encode(), f"--tokenizer={made}")


row(
    DATA, "a_chat_template_runs_a_command",
    lambda folder: on_a_chat(folder, "{{ cycler.__init__.__globals__.os.system('touch $CANARY') }}" + PLAIN)
)
row(DATA, "a_chat_template_takes_all_memory", lambda folder: on_a_chat(folder, "{{ 'a' * 8000000000 }}" + PLAIN))


def with_cache(folder: Path, make: Callable[[Path], object]) -> list[str]:
    """Return the command that reads a shard, the home folder closed; ``make`` makes the cache in the temporary one."""
    (folder / "tmp").mkdir()
    make(folder / "tmp" / f"smp_train-{os.getuid()}")
    ENVIRON[folder] = {"XDG_CACHE_HOME": str(folder / "no" / "such"), "TMPDIR": str(folder / "tmp")}
    return shard(folder, "a.json", b'{"input_ids": [1, 2], "attention_mask": [1, 1]}\n')


def open_to_all(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)


row(CONFIG, "the_cache_folder_is_a_link", lambda folder: with_cache(folder, lambda cache: link(cache, folder)))
row(CONFIG, "the_cache_folder_is_open_to_all", lambda folder: with_cache(folder, open_to_all))


def test_nothing_is_written_that_everybody_may_change(tmp_path: Path) -> None:
    write_shard(tmp_path / "data" / "a.json", 4)
    with warm(tmp_path, *read(tmp_path, max_steps=2), environ={"SMP_TRAIN_TEST_UMASK": "0"}) as command:
        assert command.code() == 0, command.err
    assert [path for path in tmp_path.rglob("*") if path.stat().st_mode & 0o002] == []
    assert list(tmp_path.glob("data/.smp_train_cache/*.tok"))


# --- URLs --------------------------------------------------------------------------------------------

SIGNED = f"https://user:{SECRET}@example.invalid/data?X-Amz-Signature={SECRET}"


row(DATA, "a_signed_url_is_no_data_folder", lambda folder: read(folder, training_dir=SIGNED))
row(CONFIG, "a_signed_url_is_no_checkpoint_folder", lambda folder: ["train", *flags(folder, checkpoint_dir=SIGNED)])
row(CONFIG, "a_signed_url_is_no_tokenizer", lambda folder: [*export(folder), f"--tokenizer={SIGNED}"])


def test_the_secrets_of_urls_are_not_stored(tmp_path: Path) -> None:
    """In a setting that the run has no use for, say."""
    words = flags(tmp_path, max_steps=1, checkpoint_freq=1, chat_template=SIGNED)
    with warm(tmp_path, "train", *words) as command:
        assert command.code() == 0, command.err
        assert SECRET not in command.out + command.err
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "meta.json"} <= {path.name for path in written}
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


# --- weights -----------------------------------------------------------------------------------------


def weights(folder: Path, name: str, data: bytes) -> list[str]:
    there = model(folder, **LLAMA)
    (there / name).write_bytes(data)
    return ["checkpoint", "convert", str(there), str(folder / "out")]


def safetensors(header: Any, data: bytes = b"1234") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def compressed(archive: bytes, only: str = "") -> bytes:
    """Return a file of torch.save with its entries compressed, or those whose names end with ``only``."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED if name.endswith(only) else zipfile.ZIP_STORED)
    return stream.getvalue()


INDEX_FILE = "model.safetensors.index.json"
WEIGHTS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a header of an exabyte": ("model.safetensors", lambda: (1 << 60).to_bytes(8, "little") + b"{}"),
    "a tensor behind the end": (
        "model.safetensors",
        lambda: safetensors({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4000, 4004]}}),
    ),
    "a header nested very deep": ("model.safetensors", lambda: safetensors(b'{"w":' * 100_000)),
    "an index of a file outside": (INDEX_FILE, lambda: b'{"weight_map": {"w": "../secret"}}'),
    "an index that is a list": (INDEX_FILE, lambda: b'{"weight_map": [1]}'),
    "code": ("pytorch_model.bin", lambda: saved({"w": Code()})),
    "code of the old format": ("pytorch_model.bin", lambda: pickle.dumps(Code())),
    "an enormous tensor": ("pytorch_model.bin", lambda: saved({"w": torch.zeros(1).expand(10**7, 10**6)})),
    "compressed entries": ("pytorch_model.bin", lambda: compressed(saved({"w": torch.zeros(10**6)}))),
}  # fmt: skip
for _name, (_file, _make) in WEIGHTS.items():
    row(CHECKPOINT, f"weights with {_name}", lambda at, f=_file, make=_make: weights(at, f, make()))  # type: ignore[misc]


def rank_file(folder: Path) -> list[str]:
    """A local checkpoint of the SMP sample, whose pickle is 100 KB on disk and 100 MB in memory."""
    found = indexed(folder).state_dict_metadata
    sizes = {name[6:]: info.size.numel() for name, info in found.items() if name.startswith("model.")}
    model = {name: torch.zeros(size) for name, size in sizes.items()}
    state = {n: {"exp_avg": one, "exp_avg_sq": one, "step": torch.tensor(1.0)} for n, one in enumerate(model.values())}
    optimizer = {"state": state, "param_groups": [{"params": list(state)}]}
    path = folder / "sample/llama_v2-1steps"
    path.mkdir(parents=True)
    archive = saved({"model": model, "optimizer": optimizer, "total_steps": 1, "other": bytes(10**8)})
    (path / "0.pt").write_bytes(compressed(archive, only="/data.pkl"))
    return ["train", *flags(folder, max_steps=2, resume_from_checkpoint=path)]


row(CHECKPOINT, "a_file_of_a_rank_is_compressed", rank_file)


# One of each reader, and of each thing that it may be made to do.
CORE = {
    "committed_names_a_file_above_its_folder", "a_shard_is_a_link", "meta_is_nested_very_deep",
    "index_calls_a_function", "index_names_a_file_above_its_folder",
    "configuration_brings_code", "tokenizer_brings_code_to_prepare", "a_line_of_a_shard_is_nested_very_deep",
    "the_cache_folder_is_a_link", "a_signed_url_is_no_data_folder", "weights with a header of an exabyte",
    "weights with code", "a_file_of_a_rank_is_compressed", "a_chat_template_runs_a_command",
}  # fmt: skip


@pytest.mark.parametrize("name", core(CASES, CORE.__contains__))
def test_a_hostile_input_ends_with_one_line(name: str, checkpoint: Path, tmp_path: Path) -> None:
    code, make = CASES[name]
    (tmp_path / "secret").write_text(SECRET)
    shutil.copytree(checkpoint, tmp_path / "ckpt" / "llama_v2-1steps")
    (tmp_path / "answers").write_text("y\n" * 100)
    words = make(tmp_path)
    limits = {"SMP_TRAIN_TEST_MEMORY": str(MEMORY), "SMP_TRAIN_TEST_STDIN": str(tmp_path / "answers")}
    environ = {"CANARY": str(tmp_path / "ran"), **limits, **ENVIRON.get(tmp_path, {})}
    with warm(tmp_path, *words, environ=environ) as command:
        ended = command.code(300)
        said = command.out + command.err
        assert not (tmp_path / "ran").exists()
        assert ended == code, said
        assert SECRET not in said
        assert "Traceback" not in said
        assert "[y/N]" not in said
        errors = [line for line in command.err.splitlines() if line.startswith("smp-train: error: ")]
        assert len(errors) == 1, said
        assert len(errors[0]) < 1000


@pytest.mark.parametrize("content", [DEEP, "[]", '{"generation": Infinity}', "\x00" * 1000])
def test_a_hostile_claim_or_reservation_hides_nothing_and_ends_nothing(
    content: str, checkpoint: Path, tmp_path: Path
) -> None:
    run = tmp_path / "ckpt"
    shutil.copytree(checkpoint, of(tmp_path))
    attempt = run / "llama_v2-9steps"
    attempt.mkdir()
    for file in (run / ".owner-7", attempt / ".begun"):
        file.write_text(content)
    os.utime(run / ".owner-7", (0, 0))  # long silent
    words = flags(tmp_path, run_name="ckpt", checkpoint_dir=tmp_path, resume_from_checkpoint=tmp_path, max_steps=2)
    with warm(tmp_path, "train", *words) as command:
        assert command.code(300) == 0, command.err
        assert command.err == ""
        assert "Resumed from" in command.out
    assert json.loads((run / "llama_v2-2steps" / "COMMITTED").read_text())["generation"] == 8
    assert (attempt / ".begun").read_text() == content, "it may be another program's"
