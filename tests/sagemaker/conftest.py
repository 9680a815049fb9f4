"""AWS as moto doubles it in this process, furnished with what the jobs name."""

from __future__ import annotations

from collections.abc import Iterator

import moto
import pytest

from tests.sagemaker.jobs import ENVIRON, furnish


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def aws(environ: None) -> Iterator[None]:
    with moto.mock_aws():
        furnish()
        yield
