"""Images that cannot run on an instance type, or with a backend, are refused before anything is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from smp_train.errors import ConfigError
from smp_train.launch import images
from smp_train.launch.instances import find

SMP = "658645717510.dkr.ecr.us-west-2.amazonaws.com/smdistributed-modelparallel:{}"
AWS = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training{}:2.8.0-gpu-py312"
OLD = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training{}:2.7.1-gpu-py312"


@pytest.mark.parametrize(
    ("instance", "image", "backend", "complaint"),
    [
        ("p5.48xlarge", SMP.format("2.5.1-gpu-py311-cu124"), "smp", ""),
        ("p5.48xlarge", SMP.format("2.4.1-gpu-py311-cu121"), "auto", ""),
        ("p6-b200.48xlarge", "/fsx/image-without-a-word.sqsh", "native", ""),
        ("p6e-gb200.36xlarge", AWS.format("-arm64"), "native", ""),
        ("p5.48xlarge", "registry/charm64x:1", "native", ""),
        ("p6-b200.48xlarge", SMP.format("2.5.1-gpu-py311-cu124"), "smp", "CUDA 12.4 does not know the B200 of p6-b200"),
        ("p6e-gb200.36xlarge", AWS.format(""), "native", "is for x86_64, and p6e-gb200.36xlarge has aarch64"),
        ("p5.48xlarge", AWS.format("-arm64"), "native", "is for aarch64, and p5.48xlarge has x86_64"),
        ("p5.48xlarge", SMP.format("2.2.0-gpu-py310-cu121"), "smp", "torch 2.4.1 and 2.5.1"),
        ("p5.48xlarge", SMP.format("2.5.1-gpu-py311-cu124"), "native", "has torch 2.5.1, and --backend native needs"),
        ("p5.48xlarge", OLD.format(""), "auto", "has torch 2.7.1, and --backend native needs 2.8"),
        ("p6e-gb200.36xlarge", OLD.format("-arm64"), "native", "has torch 2.7.1, and --backend native needs 2.8"),
    ],
)
def test_image_against_instance_and_backend(instance: str, image: str, backend: str, complaint: str) -> None:
    if not complaint:
        images.check_image(find(instance), image, backend)
        images.check_image(None, image, backend)
        return
    with pytest.raises(ConfigError) as refused:
        images.check_image(find(instance), image, backend)
    assert complaint in str(refused.value)


def test_enroot_file_tells_by_its_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "for-amd64.sqsh"
    image.write_bytes(b"\x7fELF" + bytes(14) + b"\xb7\x00" + bytes(100))  # an ELF for aarch64, whatever its name says
    tool = tmp_path / "unsquashfs"
    tool.write_text('#!/bin/sh\n[ "$1" = -cat ] && [ "$3" = usr/bin/env ] && exec cat "$2"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert images.architecture(str(image)) is None, "nothing can read it"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert images.architecture(str(image)) == "aarch64"
    with pytest.raises(ConfigError, match=r"aarch64.*p5\.48xlarge.*x86_64"):
        images.check_image(find("p5.48xlarge"), str(image))
    image.write_bytes(b"no program")
    assert images.architecture(str(image)) is None
