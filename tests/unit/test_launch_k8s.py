"""Kubernetes manifests word for word and against the resource definitions; what is refused; what kubectl is asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from smp_train import cli
from smp_train.arguments import parse
from smp_train.launch import k8s, planned
from smp_train.launch.flags import inline_files
from tests.unit.test_launch_render import compare, dry_run, refusal

SCHEMA = json.loads((Path(__file__).parent / "schemas/kubernetes.json").read_text())
ROOT = Path(__file__).parents[2]
IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/smp-train:1"
JOB = [
    "k8s", "--nodes", "2", "--instance_type", "ml.p5.48xlarge", "--image", IMAGE, "--claims", "fsx:/fsx",
    "--model_type", "llama_v2", "--model_size=7b", "--training_dir", "/fsx/data/train", "--max_steps", "100",
]  # fmt: skip
PLAIN = ["k8s", "--nproc", "1", "--image", IMAGE, "--claims", "fsx:/fsx", "--use_synthetic_data", "1"]


def prepared(*words: str) -> tuple[Any, Any]:
    return k8s.prepare([*PLAIN[1:], *words])


def validate(manifest: dict[str, Any]) -> None:
    jsonschema.validate(manifest, {"$ref": f"#/$defs/{manifest['kind']}", "$defs": SCHEMA["$defs"]})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kubeflow", ["--env", "A=x", "--secrets", "HF_TOKEN=hub:token", "--queue", "team", "--service_account", "s3"]),
        (
            "hyperpod",
            ["--operator", "hyperpod", "--hang_after", "1800", "--host_paths", "/opt/dlami/nvme:/local",
             "--priority=high", "--profile", "nsys"],
        ),
        ("job", ["--recovery", "in_place", "--hybrid_shard_degree=8", "--queue=team", "--secrets=HF_TOKEN=hub:token"]),
    ],
)  # fmt: skip
def test_manifest(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = dry_run(capsys, *JOB, *words)
    validate(yaml.safe_load(said))
    compare(f"k8s-{name}.yaml", said)


def test_schema_refuses_what_the_cluster_would() -> None:
    """The check above can fail: unknown fields, wrong types and missing ones are found, at any depth."""
    wrong: list[Callable[[dict[str, Any], dict[str, Any]], Any]] = [
        lambda spec, pod: spec.update(replicas=2),
        lambda spec, pod: spec.update(nprocPerNode=8),
        lambda spec, pod: pod.pop("containers"),
    ]
    for spoil in wrong:
        job = k8s.manifest(*prepared())
        validate(job)
        spoil(job["spec"], job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"])
        with pytest.raises(jsonschema.ValidationError):
            validate(job)


def expand(text: str, environ: dict[str, str]) -> str:
    """Expand a word as Kubernetes does: $$ is $, $(NAME) a variable that exists, all else itself."""
    known = {f"$({name})": value for name, value in environ.items()} | {"$$": "$"}
    return re.sub(r"\$\$|\$\([^)]*\)", lambda found: known.get(found[0], found[0]), text)


def test_words_reach_the_container_as_they_are() -> None:
    odd = "a $(HOME) $$ 'b' \"c\""
    job = k8s.manifest(*prepared("--tensorboard_dir", odd, "--env", f"X={odd}"))
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    words = [expand(word, {"HOME": "/root"}) for word in container["command"]]
    assert words[words.index("--tensorboard_dir") + 1] == odd
    assert [expand(one["value"], {"HOME": "/root"}) for one in container["env"] if one["name"] == "X"] == [odd]


def test_run_folder_and_checkpoints_lie_on_the_volume_and_pods_know_their_job() -> None:
    spec, _ = prepared("--model_type", "llama_v2")
    args = spec.resolved.args
    assert (spec.run_dir, args.checkpoint_dir) == ("/fsx/runs/llama_v2", ["/fsx/checkpoints"])
    assert args.resume_from_checkpoint == "/fsx/checkpoints"
    args = prepared("--run_dir=/fsx/mine", "--resume_from_checkpoint=/fsx/old/x-5steps")[0].resolved.args
    assert (args.run_name, args.checkpoint_dir) == ("mine", ["/fsx/checkpoints"])
    assert args.resume_from_checkpoint == "/fsx/old/x-5steps"
    for operator in k8s.OPERATORS:
        job = k8s.manifest(*prepared("--operator", operator, "--namespace=hyperpod-ns", "--job_name=my-job"))
        assert "{'name': 'SMP_TRAIN_JOB', 'value': 'hyperpod-ns/my-job'}" in str(job)
    for run, name in (("7B_Run!", "run-7b-run"), ("x" * 80, "x" * 50), ("Ünï", "n"), ("llama_v2", "llama-v2")):
        assert prepared("--run_name", run)[1].job_name == name


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([word for word in PLAIN if word not in ("--claims", "fsx:/fsx")], "give --claims CLAIM:/path"),
        ([*PLAIN, "--run_dir", "/elsewhere"], "--run_dir /elsewhere: is on no volume that all pods share"),
        ([*PLAIN, "--host_paths", "/nvme:/nvme", "--checkpoint_dir=/nvme/c"], "is on no volume that all pods share"),
        ([*JOB, "--training_dir", "/data"], "--training_dir /data: is on no volume of the pods"),
        ([*PLAIN, "--resume_from_checkpoint", "/fsx2/c"], "--resume_from_checkpoint /fsx2/c: is on no volume"),
        ([word for word in PLAIN if word not in ("--image", IMAGE)], "--image is missing"),
        ([*PLAIN, "--image", "/fsx/smpv2.sqsh"], "Kubernetes pulls images from a registry"),
        ([*JOB, "--instance_type", "ml.p6-b200.48xlarge", "--image", "x:cu124"], "CUDA 12.4 does not know the B200"),
        ([*PLAIN, "--claims", "fsx"], "--claims fsx: is not CLAIM:/path"),
        ([*PLAIN, "--host_paths", "x:/y"], "--host_paths x:/y: is not /path:/path"),
        ([*PLAIN, "--secrets", "HF_TOKEN=hub"], "is not NAME=SECRET:KEY"),
        ([*PLAIN, "--secrets", "HF_TOKEN=hub:a:b"], "is not NAME=SECRET:KEY"),
        ([*PLAIN, "--job_name", "My_Job"], "--job_name My_Job: small letters, digits and dashes"),
        ([*PLAIN, "--namespace", "A"], "--namespace A: small letters"),
        ([*PLAIN, "--operator", "hyperpodd"], "is not kubeflow or hyperpod; did you mean hyperpod?"),
        ([*PLAIN, "--hang_after", "60"], "add --operator hyperpod"),
        ([*JOB, "--hybrid_shard_degree", "3"], "does not divide the 16"),
    ],
)
def test_refused(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint in refusal(capsys, *words)


def test_configuration_files_travel_as_flags(tmp_path: Path) -> None:
    config, smp = tmp_path / "run.yaml", tmp_path / "smp.json"
    config.write_text("lr: 1e-3\ncheckpoint_freq: [5, 9]\nuse_synthetic_data: true\ntest_dir: null\n")
    smp.write_text('{"hybrid_shard_degree": 4}')
    words = ["--config", str(config), "--lr", "2", f"--smp_config={smp}"]
    travelling = inline_files(words)
    assert str(tmp_path) not in " ".join(travelling)
    there, here = vars(parse(travelling, {}).args), vars(parse(words, {}).args)
    assert {name for name, value in there.items() if value != here[name]} == {"config", "smp_config"}
    assert (there["lr"], there["checkpoint_freq"], there["hybrid_shard_degree"]) == (2, [5, 9], 4)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A double of kubectl that writes down how it is called and fails where KUBECTL_FAILS says."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "kubectl"
    path.write_text(
        f'#!/bin/bash\necho "$*" >> "{tmp_path}/calls"\n[ "$1" != create ] || cat >> "{tmp_path}/manifest"\n'
        'case "$*" in *"${KUBECTL_FAILS:-nothing}"*) echo "$KUBECTL_SAYS" >&2; exit 1 ;; esac\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(planned, "check", lambda *run: [])  # which takes ten seconds, and has tests of its own
    return tmp_path / "calls"


def test_a_job_for_recovery_in_place_is_submitted(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", *JOB, "--recovery=in_place", "--hybrid_shard_degree=8"]) == 0
    out = capsys.readouterr().out
    pod_0 = "-l batch.kubernetes.io/job-name=llama-v2-7b,batch.kubernetes.io/job-completion-index=0"
    for words in (
        "submitted job/llama-v2-7b\n", f"logs -n kubeflow -f {pod_0}\n", "exec -n kubeflow job/llama-v2-7b -- touch",
        "delete -n kubeflow job/llama-v2-7b service/llama-v2-7b\n",
    ):  # fmt: skip
        assert words in out


def test_submitted_after_the_cluster_was_asked(calls: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*JOB, "--secrets", "HF_TOKEN=hub:token"]
    asked = [
        "create --dry-run=server --validate=strict -f -",
        "get persistentvolumeclaims fsx -n kubeflow -o name",
        "get secrets hub -n kubeflow -o name",
    ]
    assert cli.main(["launch", *words, "--check"]) == 0
    assert calls.read_text().splitlines() == asked
    manifest = (calls.parent / "manifest").read_text()
    assert cli.main(["launch", *words]) == 0
    assert calls.read_text().splitlines() == [*asked, *asked, "create -f -"]
    assert (calls.parent / "manifest").read_text() == 3 * manifest
    out = capsys.readouterr().out
    for words in ("submitted pytorchjob/{}", "logs -n kubeflow -f {}-worker-0", "delete -n kubeflow pytorchjob/{}"):
        assert words.format("llama-v2-7b") in out


@pytest.mark.parametrize(
    ("fails", "says", "advice"),
    [
        ("--dry-run", 'no matches for kind "PyTorchJob" in version "kubeflow.org/v1"', "operator of this kind is not"),
        ("get pers", 'persistentvolumeclaims "fsx" not found', "`kubectl get pvc -n NAMESPACE`"),
        ("--dry-run", "The connection to the server localhost:8080 was refused", "aws eks update-kubeconfig"),
    ],
)
def test_cluster_refuses(
    calls: Path, fails: str, says: str, advice: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("KUBECTL_FAILS", fails)
    monkeypatch.setenv("KUBECTL_SAYS", says)
    assert cli.main(["launch", *JOB]) == 2
    err = capsys.readouterr().err
    assert (says in err, advice in err, "create -f -" in calls.read_text()) == (True, True, False)


def test_warnings(calls: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of HyperPod's namespaces, and of variables that reach the pods, not of this shell's."""
    assert cli.main(["launch", *JOB, "--namespace", "default", "--check"]) == 0
    assert "HyperPod restarts jobs in namespaces kubeflow and hyperpod-... only" in capsys.readouterr().err
    monkeypatch.setenv("NCCL_PROTO", "simple")
    monkeypatch.setenv("HF_TOKEN", "x")
    gated = [*PLAIN, "--hf_model", "meta-llama/Llama-2-7b-hf", "--env", "FI_PROVIDER=efa", "--check"]
    assert cli.main(["launch", *gated]) == 0
    err = capsys.readouterr().err
    assert ("FI_PROVIDER=efa is set" in err, "is gated" in err, "NCCL_PROTO" in err) == (True, True, False)
    assert cli.main(["launch", *gated, "--secrets", "HF_TOKEN=hub:token"]) == 0
    assert "is gated" not in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["launch", *PLAIN, "--check"]) == 2
    assert "there is no kubectl here; install it, or add --dry_run" in capsys.readouterr().err


def test_script_shows_the_manifest() -> None:
    environ = {
        "PATH": os.environ["PATH"], "PYTHON": sys.executable, "IMAGE": IMAGE, "NODES": "4", "CLAIM": "fsx:/fsx",
        "INSTANCE_TYPE": "ml.p5.48xlarge", "model_size": "7b", "TRAINING_DIR": "/fsx/data/train", "PROFILE": "torch",
        "OPERATOR": "hyperpod", "shard_degree": "8", "NPROC": "auto", "PREFLIGHT": "60",
    }  # fmt: skip
    script = [ROOT / "launchers/kubernetes/launch_eks.sh", "--max_steps", "7", "--dry_run"]
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd="/", env=environ)
    assert (done.returncode, "warning: PREFLIGHT=60 is for Slurm" in done.stderr) == (0, True), done.stderr
    job = yaml.safe_load(done.stdout)
    validate(job)
    (replicas,) = job["spec"]["replicaSpecs"]
    assert replicas["replicas"] == 4
    command = " ".join(replicas["template"]["spec"]["containers"][0]["command"])
    for part in (
        "--model_type llama_v2", "--model_size 7b", "--training_dir /fsx/data/train", "--hybrid_shard_degree 8",
        "--max_steps 7", "--use_profiler=1", "--run_dir=/fsx/runs/llama_v2-7b",
    ):  # fmt: skip
        assert part in command
