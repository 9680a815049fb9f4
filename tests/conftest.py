"""What every test gets: one thread, no network, no variables of the machine or chance that would change a result."""

import contextlib
import logging
import math
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Of hypothesis: the same examples in every run, and no time limits. Not everywhere where tests run is it installed.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.load_profile("ci")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Processes that tests start compile the package once, not each for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
for name in list(os.environ):
    if name.startswith(("SM_", "SLURM_", "OMPI_", "PMI_", "PALS_", "PBS_")) or name in {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TRAINING_JOB_NAME", "SMP_TRAIN_JOB",
        "ROLE_NAME", "TORCHELASTIC_RUN_ID",
    }:
        del os.environ[name]

# As smp_train.cli sets it: the servers that fork ranks load torch before that.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@pytest.fixture(autouse=True)
def own_log():
    """Put the package's log back as it was: a verb that runs in this process sets its handlers."""
    logger = logging.getLogger("smp_train")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture(scope="session")
def server():
    """S3 on the loopback interface, behind a proxy that fails on demand: `tests.s3_server`."""
    pytest.importorskip("boto3")
    pytest.importorskip("moto.server")
    from tests.s3_server import serving

    with serving() as proxy:
        yield proxy


@pytest.fixture
def bucket(server, monkeypatch, request):
    """``s3://...`` of a bucket of this test's own, on a server that forgot the tests before."""
    from tests import s3_server

    place = s3_server.bucket(server, monkeypatch, request.node.nodeid)
    server.gets.clear()
    return place


@pytest.fixture
def s3_place(bucket, monkeypatch) -> str:
    """Return a prefix of a bucket of this test's own; no request of a killed process is on its way."""
    from smp_train.checkpoints import folder

    monkeypatch.setattr(folder, "IN_FLIGHT_SECONDS", -math.inf)
    return f"{bucket}/runs/one"


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def place(request, tmp_path) -> str:
    """Return a location of this test's own, of either kind, in which nothing is."""
    return str(tmp_path / "runs" / "one") if request.param == "folder" else request.getfixturevalue("s3_place")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest kinds first: pytest-xdist deals the files out in this order, and short ones even it out."""
    order = ["system", "distributed", "unit"]
    kinds = {item: item.path.relative_to(HERE).parts[0] for item in items}
    items.sort(key=lambda item: order.index(kinds[item]) if kinds[item] in order else len(order))
