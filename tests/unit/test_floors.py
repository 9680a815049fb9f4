"""Imports run down the floors only, and what must launch without torch does not import it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "smp_train"

# Top to bottom. Rooms on one floor do not know each other, but for those named in NEIGHBOURS.
FLOORS = [
    {"api"},
    {"cli", "__main__", "launch", "bench", "planning"},
    {"failure_report"},
    {"train_lib"},
    {"build_run"},
    {"run", "inference"},
    {"train_utils"},
    {"backends", "data", "checkpoints", "telemetry"},
    {"parallel"},
    {"models", "losses", "learning_rates"},
    {"arguments", "distributed", "storage", "errors", "progress", "__init__"},
]
NEIGHBOURS = {
    ("__init__", "api"), ("cli", "bench"), ("cli", "launch"), ("launch", "cli"), ("__main__", "cli"),
    ("planning", "launch"), ("backends", "checkpoints"), ("backends", "data"),
}  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "smp_train":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("smp_train.")}
    return found - {"__version__"}


def test_every_room_has_a_floor() -> None:
    rooms = {room(path) for path in PACKAGE.rglob("*.py")}
    assert rooms - set().union(*FLOORS) == set()


def test_imports_run_down() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    up = [
        f"{path.relative_to(PACKAGE)} imports {theirs}"
        for path in PACKAGE.rglob("*.py")
        for theirs in imported_rooms(path) - {room(path)}
        if not (
            floor[theirs] > floor[room(path)]
            or floor[theirs] == floor[room(path)] == len(FLOORS) - 1
            or (room(path), theirs) in NEIGHBOURS
        )
    ]
    assert up == []


MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports(path: Path, *, at_once: bool = False) -> set[str]:
    """Return the modules that a file imports, not for type checkers; ``at_once``: those that it cannot do without."""
    names: set[str] = set()
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            left += node.orelse
        elif not (at_once and isinstance(node, ast.FunctionDef | ast.Try)):
            left += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {part if part in MODULES else str(node.module) for part in parts}
    return names


def test_no_cycles() -> None:
    """Imports inside functions count, those for type checkers do not."""
    graph = {module: (imports(path) & MODULES.keys()) - {module} for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(" imports ".join(reversed(cycle.args[1])))


def test_what_smp_v2_imports_is_there_in_torch_2_4() -> None:
    """Which has DTensor in ``torch.distributed._tensor``."""
    reached: dict[str, set[str]] = {}
    left = ["smp_train.train_lib", "smp_train.backends.smp"]
    while left:
        module = left.pop()
        if module in MODULES.keys() - reached:
            reached[module] = imports(MODULES[module], at_once=True)
            left += [*reached[module], module.rpartition(".")[0]]
    assert "smp_train.parallel.optimizer" in reached
    assert [module for module, names in reached.items() if "torch.distributed.tensor" in names] == []


LAUNCH = ["launch", *(f"launch.{name}" for name in ("node_agent", "slurm", "sagemaker", "local"))]
NOT_IMPORTED = {
    **{f"import smp_train.{room}": "torch transformers yaml numpy boto3"
       for room in ("cli", "arguments", "distributed", "storage", "errors", *LAUNCH)},
    "from smp_train import cli; cli.main(['train', '--print_config']); cli.main(['train', '--help'])": "torch numpy",
    "import smp_train.data.cli, smp_train.data.prepare.cli": "torch transformers datasets pyarrow",
}  # fmt: skip


@pytest.mark.parametrize("code", NOT_IMPORTED)
def test_what_is_slow_to_import_is_not_imported(code: str) -> None:
    check = f"{code}; import sys; print(sys.modules.keys() & set('{NOT_IMPORTED[code]}'.split()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_map_names_files_that_exist() -> None:
    """By the rule of docs/architecture.md: a file without a folder is in the folder of the file before it."""
    text = (PACKAGE.parent / "docs/architecture.md").read_text()
    section = text.partition("## Where things are")[2].partition("\n## ")[0]
    entries = [line for line in section.splitlines() if line.startswith("- ")]
    missing = []
    for entry in entries:
        folder = PACKAGE
        for name in re.findall(r"`([a-z0-9_/*]+(?:\.(?:py|js)|/))[^`]*`", entry):
            path = PACKAGE / name if "/" in name else folder / name
            missing += [] if list(path.parent.glob(path.name)) else [name]
            folder = path if name.endswith("/") else path.parent
    assert len(entries) > 20
    assert missing == []
