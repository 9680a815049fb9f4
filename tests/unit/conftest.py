"""A place to save to, in a folder and in S3."""

import math

import pytest


@pytest.fixture(scope="module")
def server():
    """Run an S3 of this module's own, whose faults a test may choose."""
    pytest.importorskip("boto3")
    pytest.importorskip("moto.server")
    from tests.s3_server import serving

    with serving() as proxy:
        yield proxy


@pytest.fixture
def s3_place(server, monkeypatch, request) -> str:
    """Return a prefix of a bucket of this test's own; no request of a killed process is on its way."""
    from smp_train.checkpoints import commit
    from tests.s3_server import bucket

    monkeypatch.setattr(commit, "IN_FLIGHT_SECONDS", -math.inf)
    return f"{bucket(server, monkeypatch, request.node.nodeid)}/runs/one"


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path) -> str:
    """Return a location of this test's own, of either kind, in which nothing is."""
    return str(tmp_path / "runs" / "one") if request.param == "folder" else request.getfixturevalue("s3_place")
