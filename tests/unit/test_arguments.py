"""Command lines, SageMaker's environment and configuration files as users write them; help and list of the flags."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_train.arguments import Arguments, help_text, ineffective, parse, print_config, validate
from smp_train.arguments.aliases import ALIASES, SMP_KEYS, WITHOUT_EFFECT
from smp_train.arguments.document import markdown, title
from smp_train.arguments.groups import GROUPS, flags
from smp_train.errors import ConfigError
from tests.command_lines import LINES


def read(line: str, environ: dict[str, str] | None = None) -> Arguments:
    return parse(shlex.split(line), environ or {}).args


MEANINGS: dict[str, dict[str, Any]] = {
    **{line.text: line.means for line in LINES.values()},
    # 002's evaluation, and 004's defaults
    "--environment local --model mingpt --precision float32 --max_epochs -1 --prompt 'To be' --num_tokens 32": {
        "evaluate_only": True, "epochs": None, "bf16": False, "prompt": "To be", "num_tokens": 32,
    },
    "--from-scratch": {"model_size": "7b"},
    # Hugging Face's run_clm
    "--model_name_or_path meta-llama/Llama-3.1-8B --dataset_name allenai/c4 --dataset_config_name en --do_train "
    "--do_eval --per_device_train_batch_size 4 --per_device_eval_batch_size 8 --gradient_accumulation_steps 2 "
    "--learning_rate 2e-5 --lr_scheduler_type cosine --warmup_ratio 0.03 --weight_decay 0.1 --adam_beta2 0.95 "
    "--max_grad_norm 1.0 --max_steps 1000 --save_steps 200 --save_total_limit 3 --logging_steps 10 "
    "--eval_steps 100 --block_size 4096 --bf16 --gradient_checkpointing --report_to none --seed 42 --run_name c4 "
    "--output_dir out/c4 --overwrite_output_dir --optim adamw_torch --torch_compile "
    "--dataloader_num_workers 4 --ddp_timeout 3600": {
        "hf_pretrained_model_name_or_dir": "meta-llama/Llama-3.1-8B", "dataset": ["allenai/c4"],
        "train_batch_size": 4, "val_batch_size": 8, "gradient_accumulation_steps": 2, "lr": 2e-5,
        "lr_decay_style": "cosine", "min_lr": 0.0, "warmup": 0.03, "weight_decay": 0.1, "max_steps": 1000,
        "checkpoint_freq": [200], "num_kept_checkpoints": [3], "logging_freq": 10, "validation_freq": 100,
        "max_context_width": 4096, "activation_checkpointing": "full", "tensorboard_dir": None, "run_name": "c4",
        "run_dir": "out/c4", "checkpoint_dir": ["out/c4/checkpoints"], "use_torch_compile": True,
        "distributed_timeout_minutes": 60.0, "evaluate_only": False,
    },
    # names of its Trainer; what a name implies gives way to a flag of its own, in either order
    "--lr_scheduler_type cosine_with_min_lr": {"lr_decay_style": "cosine", "min_lr": 1e-5},
    "--lr_scheduler_type constant": {"lr_decay_style": "constant", "warmup": 0.0},
    "--lr_scheduler_type constant --warmup_steps 5": {"lr_decay_style": "constant", "warmup": 5.0},
    "--lr_scheduler_type constant_with_warmup --warmup_ratio 0.1": {"lr_decay_style": "constant", "warmup": 0.1},
    "--lr_scheduler_type warmup_stable_decay": {"lr_decay_style": "wsd", "min_lr": 1e-5},
    "--min_lr 1e-6 --lr_scheduler_type cosine": {"min_lr": 1e-6},
    "--lr_scheduler_type cosine --min_lr 1e-6": {"min_lr": 1e-6},
    "--checkpoint_dir c --output_dir o": {"checkpoint_dir": ["c"], "run_dir": "o", "model_dir": None},
    "--output_dir o --run_dir r": {"checkpoint_dir": ["o/checkpoints"], "run_dir": "r"},
    "--report_to wandb tensorboard": {"report_to": ["wandb", "tensorboard"]},
    "--gradient_checkpointing --bf16 --do_train --torch_compile": {"use_torch_compile": True, "bf16": True},
    # switches
    "--no_fast_validation --no-mixed-precision --lr 1": {"fast_validation": False, "bf16": False, "lr": 1.0},
    "--no-use-flash-attn": {"attn_implementation": "sdpa"},
    # SMP's rule: a degree settles the strategy
    "": {"sharding_strategy": "full_shard", "run_name": "", "run_dir": "", "checkpoint_dir": ["checkpoints"],
         "label": "gpt_neox"},
    "--shard_degree 8": {"sharding_strategy": "hybrid_shard"},
    "--shard_degree 1": {"sharding_strategy": "no_shard"},
    "--shard_degree 0 --sharding_strategy hybrid_shard": {"hybrid_shard_degree": None},
    "--shard_degree 8 --sharding_strategy _hybrid_shard_zero2": {"sharding_strategy": "_hybrid_shard_zero2"},
    # folders follow from the name, and a label from the model
    "--model_size 13B": {"label": "scratch-13b"},
    "--model_name llama2_7b": {"label": "llama_v2-7b"},
    "--hf-model org/name": {"label": "name"},
    "--run_name x": {"run_dir": "runs/x", "checkpoint_dir": ["checkpoints"]},
    "--run_name x --run_dir Y --checkpoint_dir y": {"run_dir": "Y", "checkpoint_dir": ["y"]},
    # validation that is never due asks for no data
    "--validation_freq 500 --max_steps 4 --use_synthetic_data 1": {"validation_freq": 500},
    "--validation_freq 4 --max_steps 4 --training_dir d": {"validation_freq": 4},
}  # fmt: skip
OVERRIDDEN: dict[str, dict[str, Any]] = {
    "--batch_size 4 --train_batch_size 2": {"train_batch_size": 2},
    "--mixed-precision --bf16 0": {"bf16": False},
    "--model_name llama2_7b --model_size 13b": {"model_type": "llama_v2", "model_size": "13b"},
    "--dropout 0.1 --attn_pdrop 0": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0},
    "--lr 1 --max_lr 2 --lr 3": {"lr": 3.0},
}


@pytest.mark.parametrize("line", [*MEANINGS, *OVERRIDDEN])
def test_a_command_line_keeps_its_meaning(line: str) -> None:
    """The last of two names of one flag counts, with a note."""
    resolved = parse(shlex.split(line), {})
    expected = (MEANINGS | OVERRIDDEN)[line]
    assert {name: getattr(resolved.args, name) for name in expected} == expected
    assert any("the last one counts" in note for note in ineffective(resolved)) == (line in OVERRIDDEN)


TRANSLATED: dict[str, tuple[str, dict[str, Any]]] = {
    "model_name": ("llama2_13b", {"model_type": "llama_v2", "model_size": "13b"}),
    "model": ("mingpt", {"model_type": "gpt2"}),
    "precision": ("float32", {"bf16": False}),
    "max_epochs": ("2", {"epochs": 2, "evaluate_only": False}),
    "warmup_steps": ("100", {"warmup": 100.0}),
    "use_flash_attn": ("1", {"attn_implementation": "flash_attention_2"}),
    "output_dir": ("out/", {"run_dir": "out", "checkpoint_dir": ["out/checkpoints"]}),
    "warmup_ratio": ("0.03", {"warmup": 0.03}),
    "lr_scheduler_type": ("linear", {"lr_decay_style": "linear", "min_lr": 0.0}),
    "fsdp": ("shard_grad_op offload", {"sharding_strategy": "shard_grad_op", "cpu_offload": True}),
    "ddp_timeout": ("600", {"distributed_timeout_minutes": 10.0}),
    "disable_tqdm": ("True", {"progress_bar": False}),
    "packing": ("True", {"short": "pack"}),
    "eval_strategy": ("steps", {"validation_freq": None}),
    "evaluation_strategy": ("steps", {"validation_freq": None}),
    "mp_parameters": ("hybrid_shard_degree=8", {"hybrid_shard_degree": 8}),
}
ACCEPTED = {name: sorted(accepted or {"1"})[0] for name, (accepted, _) in WITHOUT_EFFECT.items() if accepted != ()}
"""Names without effect, each with a value that is accepted."""
RENAMES = [
    (alias.name, ours) for alias in ALIASES for ours in alias.flags
    if alias.name not in {*TRANSLATED, *WITHOUT_EFFECT}
]  # fmt: skip
"""docs/flags.md, which is compared with the flags, has these pairs."""


@pytest.mark.parametrize(("name", "text"), ACCEPTED.items())
def test_what_has_no_counterpart_is_answered(name: str, text: str) -> None:
    assert parse([f"--{name}", text], {}).args == parse([], {f"SM_HP_{name.upper()}": text}).args == Arguments()
    assert any(f"--{name}" in line for line in ineffective(parse([f"--{name}={text}"], {})))


TEXTS = {"sharding_strategy": "grad-shard", "activation_checkpointing": "False", "distributed_backend": "gloo"}
KINDS = {bool: "0 1", int: "3 3", float: "0.5 0.5", str: "d d"}


@pytest.mark.parametrize(("alias", "name"), RENAMES)
def test_renamed(alias: str, name: str) -> None:
    flag = flags()[name]
    text = TEXTS.get(name, KINDS[flag.kind].split()[not flag.default])
    expected = getattr(parse([f"--{name}={text}"], {}).args, name)
    assert expected != flag.default
    check_alias(alias, text, {name: expected})


@pytest.mark.parametrize("alias", TRANSLATED)
def test_translated(alias: str) -> None:
    check_alias(alias, *TRANSLATED[alias])


def check_alias(alias: str, text: str, expected: dict[str, Any]) -> None:
    written = alias.replace("_", "-")
    for argv in ([f"--{alias}", text], [f"--{alias}={text}"], [f"--{written}={text}"]):
        resolved = parse(argv, {})
        assert {ours: getattr(resolved.args, ours) for ours in expected} == expected
    changed = [ours for ours in expected if expected[ours] != flags()[ours].default]
    assert all(written in resolved.sources[ours] for ours in changed)
    assert parse([], {f"SM_HP_{alias.upper()}": text}).args == resolved.args


REFUSED_VALUES = [
    *((name, "d") for name, (accepted, _) in WITHOUT_EFFECT.items() if accepted == ()),
    ("data_type", "bert"), ("checkpoint_type", "async_local"), ("report_to", "comet_ml"), ("fp16", "1"),
    ("optim", "adafactor"), ("lr_scheduler_type", "polynomial"), ("warmup_ratio", "1"), ("warmup_ratio", "-0.1"),
    ("save_steps", "0.1"), ("save_strategy", "epoch"), ("eval_strategy", "epoch"), ("do_train", "False"),
    ("metric_for_best_model", "accuracy"), ("fsdp", "full_shard nonsense"), ("torch_dtype", "bfloat16"),
    ("push_to_hub", "True"), ("output_dir", "s3://bucket/out"),
]  # fmt: skip
"""Values of other systems' names that have no counterpart."""


@pytest.mark.parametrize(("name", "value"), REFUSED_VALUES)
def test_values_without_counterpart_are_refused_by_name(name: str, value: str) -> None:
    for argv, environ in (([f"--{name}", value], {}), ([], {f"SM_HP_{name.upper()}": value})):
        with pytest.raises(ConfigError, match=next(iter(environ), f"--{name}")) as refused:
            parse(argv, environ)
        assert "\n" not in str(refused.value)


SPELLINGS = [
    ("sharding_strategy", value, meaning)
    for value, meaning in {
        "fsdp": "full_shard", "hsdp": "hybrid_shard", "ddp": "no_shard", "full": "full_shard",
        "hybrid": "hybrid_shard", "full-shard": "full_shard", "grad-shard": "shard_grad_op", "no-shard": "no_shard",
        "hybrid-full-shard": "hybrid_shard", "hybrid-grad-shard": "_hybrid_shard_zero2", "FULL_SHARD": "full_shard",
        "_HYBRID_SHARD_ZERO2": "_hybrid_shard_zero2",
    }.items()
] + [
    ("bf16", text, value)
    for text, value in {
        **dict.fromkeys(("1", "true", "True", "TRUE", "yes", "on"), True),
        **dict.fromkeys(("0", "false", "False", "off"), False),
    }.items()
] + [
    ("max_steps", "1e3", 1000), ("max_steps", "32.0", 32), ("model_type", '"llama_v3"', "llama_v3"),
    ("validation_freq", "None", None), ("validation_freq", "", None), ("validation_freq", "null", None),
    ("validation_freq", "0", None), ("lr", "", 1e-4), ("lr", "None", 1e-4),
    ("moe_load_balancing", "none", "none"), ("shuffle", "none", "none"), ("selective_checkpointing", "1/3", 1 / 3),
    ("checkpoint_freq", "[1, 2]", [1, 2]), ("checkpoint_freq", "1,2", [1, 2]), ("tensorboard_dir", "None", None),
    ("checkpoint_dir", "['a', 'b']", ["a", "b"]), ("checkpoint_dir", '["a", "b"]', ["a", "b"]),
    ("checkpoint_dir", "a,b", ["a,b"]), ("checkpoint_dir", "[]", ["checkpoints"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), SPELLINGS)
def test_spellings_of_values(name: str, text: str, value: Any) -> None:
    assert getattr(parse([f"--{name}={text}"], {}).args, name) == value
    assert getattr(parse([f"--{name}", text], {}).args, name) == value
    assert getattr(parse([], {f"SM_HP_{name.upper()}": text}).args, name) == value


REFUSED_LINES = {
    "--train_batchsize 4": "unknown flag --train_batchsize; did you mean --train_batch_size?",
    "--qqq 1": "`smp-train train --help` lists all",
    "--max_step 4": "did you mean --max_steps?",  # no abbreviations
    "--no-lr": "unknown flag --no-lr",
    "--use_peft": "--lora_rank",
    "--pipeline_parallel_degree 2": "--tensor_parallel_degree",
    "--no-bf16 0": "--no-bf16 takes no value",
    "-lr 3": "unknown flag -lr: flags begin with two dashes",
    "train.py --lr 3": "unexpected argument 'train.py'",
    "--lr": "--lr expects a value",
    "--lr 1 2": "unexpected argument '2' after --lr",
    "--debug maybe": "--debug 'maybe': expects 0 or 1",
    "--debug 1 maybe": "unexpected argument 'maybe' after --debug",
    "--lr fast": "--lr 'fast': expects a number",
    "--max_steps 1.5": "--max_steps '1.5': expects an integer",
    "--lr_decay_style step": "is not one of constant, linear, cosine, exponential, plateau, wsd",
    "--checkpoint_freq 1 two": "--checkpoint_freq ['1', 'two']: expects an integer",
    "--checkpoint_freq [1": "is not a list such as [1, 2]",
    "--sharding zero": "--sharding 'zero': is not one of",
    "--model_name gpt4": "--model_name 'gpt4': is not a name such as llama2_7b",
    "--model bert": "--model 'bert': is not available; any other model",
    "--precision fp8": "--precision 'fp8': is not available; give float32 or bf16",
    "--warmup-steps 0.1": "--warmup-steps '0.1': expects an integer",
    "--config nowhere.yaml": "--config nowhere.yaml: No such file or directory",
    "--shard_degree 4 --mp_parameters hybrid_shard_degree=8": "--shard_degree and --mp_parameters both set",
    "--mp_parameters partitions=2": "no parameter of SMP v2",
    "--mp_parameters hybrid_shard_degre=2": "did you mean hybrid_shard_degree?",
    "--mp_parameters zzz=2": "the parameters are hybrid_shard_degree",
    "--mp_parameters hybrid_shard_degree": "is not key=value",
    "--mp_parameters '{nonsense'": "--mp_parameters '{nonsense': neither JSON nor key=value",
    "--mp_parameters tensor_parallel_degree=two": "expects an integer",
}


@pytest.mark.parametrize("line", REFUSED_LINES)
def test_refused(line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(line)
    assert REFUSED_LINES[line] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_precedence(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "lr: 1e-1\nmax_steps: 10\nseed: 10\nbf16: false\ncheckpoint-dir: [a, b]\nbatch_size: 9\n"
    )
    environ = {"SM_HP_LR": "0.2", "SM_HP_MAX_STEPS": "20", "SM_HP_TRAIN-BATCH-SIZE": "5"}
    resolved = parse(["--config", str(config), "--lr", "0.3"], environ)
    args, sources = resolved.args, resolved.sources
    assert (args.lr, sources["lr"]) == (0.3, "command line")
    assert (args.max_steps, sources["max_steps"]) == (20, "SM_HP_MAX_STEPS")
    assert (args.train_batch_size, sources["train_batch_size"]) == (5, "SM_HP_TRAIN-BATCH-SIZE")
    assert (args.seed, sources["seed"]) == (10, f"config file {config}")
    assert (args.bf16, args.checkpoint_dir) == (False, ["a", "b"])
    assert (args.beta1, sources["beta1"]) == (0.9, "default")
    assert resolved.given("seed")
    assert not resolved.given("beta1")
    implied = parse(["--output_dir", "out"], {**environ, "SM_HP_RUN_DIR": "hp", "SM_HP_CONFIG": str(config)})
    assert (implied.args.seed, implied.args.checkpoint_dir, implied.args.run_dir) == (10, ["out/checkpoints"], "out")
    assert implied.sources["checkpoint_dir"] == "command line, --output_dir"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("lr: [1, 2]", "lr in {path} [1, 2]: expects one value"),
        ("learning_rat: 1", "unknown flag learning_rat in {path}"),
        ("max_stepz: 1", "did you mean max_steps?"),
        ("- lr", "expected a mapping"),
        ("a: b: c", "line 1: not YAML"),
        ("model: {hidden_width: 4}", "model holds a mapping"),
        ("config: other.yaml", "cannot name another"),
        ("max_steps: true", "expects a number"),
    ],
)
def test_bad_configuration_files(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        parse(["--config", str(path)], {})
    assert complaint.format(path=path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_configuration_files_may_be_json_or_empty(tmp_path: Path) -> None:
    path, content = tmp_path / "run.json", {"lr": 0.5, "mp_parameters": {"hybrid_shard_degree": 4}}
    for text, expected in ((json.dumps({**content, "validation_freq": None}), (0.5, 4)), ("", (1e-4, None))):
        path.write_text(text)
        args = parse(["--config", str(path)], {}).args
        assert (args.lr, args.hybrid_shard_degree, args.validation_freq) == (*expected, None)


def test_smp_parameters() -> None:
    expected = {"activation_loading_horizon": 3, "hybrid_shard_degree": 8, "sm_activation_offloading": True}
    for text in (json.dumps(expected), ",".join(f"{name}={value}" for name, value in expected.items())):
        environment = {"SM_HP_MP_PARAMETERS": text}
        for argv, source in (([], "SM_HP_MP_PARAMETERS"), (["--mp_parameters", text], "command line, --mp_parameters")):
            resolved = parse(argv, environment)
            assert {name: getattr(resolved.args, name) for name in expected} == expected
            assert resolved.sources["hybrid_shard_degree"] == source
    assert len(flags().keys() & set(SMP_KEYS)) == len(SMP_KEYS) == 9
    for text in ("''", "hybrid_shard_degree=0", "placement_strategy=cluster"):
        assert read(f"--mp_parameters {text}") == Arguments()


SAGEMAKER = {
    "SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "SM_CHANNEL_TRAIN": "/opt/ml/input/data/train",
    "SM_CHANNEL_TEST": "/opt/ml/input/data/test", "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
    "SM_MODEL_DIR": "/opt/ml/model", "SM_HP_SAGEMAKER_INSTANCE_TYPE": "ml.p4d.24xlarge", "SM_HPS": "{}",
    "SM_HP_SAGEMAKER_TORCH_DISTRIBUTED_ENABLED": "true", "SM_HP_MODEL_TYPE": "llama_v3", "SM_HP_BF16": "true",
    "SM_HP_EPOCHS": "", "SM_HP_CHECKPOINT_FREQ": "[1, 2]",
}  # fmt: skip


def test_sagemaker_environment() -> None:
    # As its toolkit writes them: sorted, a value always follows, booleans as Python's, None as nothing.
    line = ["--bf16", "True", "--checkpoint_freq", "[1, 2]", "--epochs", "", "--model_type", "llama_v3"]
    resolved = parse(line, SAGEMAKER)
    args, sources = resolved.args, resolved.sources
    assert (args.bf16, args.checkpoint_freq, args.epochs, args.model_type) == (True, [1, 2], None, "llama_v3")
    assert (args.training_dir, sources["training_dir"]) == (["/opt/ml/input/data/train"], "SM_CHANNEL_TRAIN")
    assert (args.test_dir, args.checkpoint_dir) == ("/opt/ml/input/data/test", ["/opt/ml/checkpoints"])
    assert (args.run_dir, sources["run_dir"]) == ("/opt/ml/output/data", "SM_OUTPUT_DATA_DIR")
    assert not resolved.given("training_dir")
    assert parse(["--training_dir", "d"], SAGEMAKER).args.training_dir == ["d"]
    for environ, words in (
        ({"SM_HP_MAX_STEPZ": "3"}, r"SM_HP_MAX_STEPZ.*max_steps"),
        ({"SM_HP_LR": "1", "SM_HP_MAX_LR": "2"}, "SM_HP_LR and SM_HP_MAX_LR both set"),  # they have no order
    ):
        with pytest.raises(ConfigError, match=words):
            parse([], environ)


def test_validation_that_is_never_due_asks_for_no_data() -> None:
    idle = parse(shlex.split("--validation_freq 500 --max_steps 4 --training_dir d"), {})
    assert idle.args.validation_freq is None
    assert "--validation_freq 500 has no effect: --max_steps" in idle.notes[0]
    for use in ("--keep_best 1", "--early_stopping 2", "--evaluate_first 1"):
        with pytest.raises(ConfigError, match="--test_dir"):  # not that it needs --validation_freq, which is there
            validate(parse(shlex.split(f"--validation_freq 500 --max_steps 4 --training_dir /d {use}"), {}).args, 1)


@given(st.lists(st.text(max_size=12), max_size=5), st.sampled_from(sorted(flags().keys() - {"config"})), st.text())
def test_anything_parses_or_is_refused_in_one_line_by_name(argv: list[str], name: str, text: str) -> None:
    for words, named in ((argv, ""), ([f"--{name}={text}"], f"--{name}")):
        message = named
        try:
            parse(words, {})
        except ConfigError as refused:
            message = str(refused)
        assert named in message
        assert "\n" not in message or any("\n" in word for word in words)


ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "flags.md"
# Read where the flags themselves are settled: they shape other flags, or the command line's own behaviour.
SETTLED_AT_PARSING = {"config", "from_scratch", "run_name", "selective_checkpointing", "smp_config"}


def test_help_names_everything_and_fits() -> None:
    text = help_text()
    assert max(map(len, text.splitlines())) <= 100
    names = {*flags(), *(alias.name for alias in ALIASES)}
    assert names <= set(re.findall(r"--(\w+)", text))
    assert all(f"\n{title(group)}: " in text for group in GROUPS)


def test_print_config_gives_every_value_its_source() -> None:
    resolved = parse(["--batch-size=7", "--model_name", "llama2_7b"], {"SM_HP_LR": "0.25"})
    rows = [line.split(maxsplit=2) for line in print_config(resolved).splitlines() if line and line[0] != "#"]
    assert [row[0] for row in rows] == list(flags())
    table = {name: " ".join(row) for name, *row in rows}
    assert table["train_batch_size"] == "7 command line, --batch-size"
    assert table["lr"] == "0.25 SM_HP_LR"
    assert table["model_size"] == "7b command line, --model_name"
    assert table["beta1"] == "0.9 default"
    assert table["hidden_width"] == "- default: the preset's, else 768"


def test_reference_table_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == markdown(), "run: python -m smp_train.arguments > docs/flags.md"


def test_every_flag_is_read_refused_or_said_to_have_no_effect() -> None:
    files = [path for path in (ROOT / "smp_train").rglob("*.py") if "arguments" not in path.relative_to(ROOT).parts]
    # args.NAME, or NAME as a string where flags are looped over (the model's widths are).
    pattern = re.compile(r"(?:args|arguments)\.(\w+)|[\"'](\w+)[\"']")
    read = {name for path in files for found in pattern.findall(path.read_text(encoding="utf-8")) for name in found}
    effective = {name for name, flag in flags().items() if not flag.smp_only}
    assert effective - SETTLED_AT_PARSING - read == set()


def test_settings_are_immutable_after_parsing() -> None:
    resolved = parse(["--lr", "0.1"], {})
    for settings, name in ((resolved.args, "lr"), (resolved, "args"), (resolved.inputs, "loss")):
        with pytest.raises(FrozenInstanceError):
            setattr(settings, name, None)
    assert parse(["--run_dir", "Out", "--run_name", "x"], {}).given("run_dir")
    changed = resolved.with_values("--auto", hybrid_shard_degree=2)
    assert (resolved.args.hybrid_shard_degree, resolved.sources["hybrid_shard_degree"]) == (None, "default")
    assert (changed.args.sharding_strategy, changed.sources["hybrid_shard_degree"]) == ("hybrid_shard", "--auto")
    assert changed.sources["sharding_strategy"] == "follows from --hybrid_shard_degree"
    note = parse(["--shard_degree", "8", "--sharding_strategy", "full"], {}).notes[0]
    assert "changes --sharding_strategy from full_shard to hybrid_shard" in note
