"""AWS as moto doubles it in this process, furnished with what the jobs name."""

from __future__ import annotations

from collections.abc import Iterator

import moto
import pytest

from smp_train.launch import planned
from tests.sagemaker.jobs import ENVIRON, furnish


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)


PLANNED = "the plan does not fit"


@pytest.fixture
def aws(environ: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(planned, "check", lambda *run: [PLANNED])  # which takes ten seconds, and has tests of its own
    with moto.mock_aws():
        furnish()
        yield
