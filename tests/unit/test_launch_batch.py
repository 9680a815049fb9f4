"""The batch scripts' own decisions, with doubles of Slurm's commands: when a job goes back into the queue."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from smp_train.launch import srun_step

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "launchers/hyperpod_slurm"
BATCH_JOB = "smp_train.launch.batch_job"
ENROOT, CONDA = "launch_training_enroot.sh", "launch_training_conda.sh"
JOB = "77"

SRUN = """#!/bin/bash
if [ "$1" = --help ]; then echo "$SRUN_HELP"; source "$CLUSTER/early" "srun $1"; exit; fi
printf '%s\\n' "$@" >"$CLUSTER/srun-words"
echo srun >>"$CLUSTER/calls"
source "$CLUSTER/step"
"""
# Slurm ends what runs of a job as it requeues it; this double reaches the script's whole process group.
SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show job") echo "   JobState=$STATE Restarts=0 SubmitTime=$SUBMITTED ExcNodeList=$EXCLUDED" ;;
  "show hostnames") tr , '\\n' <<<"$3" ;;
  "show "*) ;;
  *) echo "scontrol $*" >>"$CLUSTER/calls" ;;
esac
if [ "$1" = requeue ]; then
  [ -z "$NO_REQUEUE" ] || exit 1
  kill -TERM 0
fi
"""
# What Slurm sends to the batch script alone, the leader of its session, as it runs this command.
EARLY = 'read -r _ _ _ _ _ script _ </proc/$$/stat; [ "$1" != "$EARLY" ] || kill -USR1 "$script"\n'
SINFO = '#!/bin/bash\necho "$NODES"\n'


@dataclass
class Cluster:
    """One job of one run, as its batch script meets it at each start."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    restarts: int = 0

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir(parents=True)
        (self.folder / "early").write_text(EARLY)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("sinfo", SINFO)):
            (self.folder / "bin" / name).write_text(text)
            (self.folder / "bin" / name).chmod(0o755)

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"

    def start(
        self, step: str, *words: str, script: str = "", fields: dict[str, Any] | None = None, **environ: str
    ) -> tuple[int, str]:
        """Run the job once, by a script or with options; its srun does ``step``. Return (exit code, its output)."""
        (self.folder / "step").write_text(f'logs="{self.run}/logs/{JOB}.{self.restarts}"; RUN="{self.run}"\n{step}\n')
        environ = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "CLUSTER": str(self.folder), "HYPERPOD_PATH": str(ROOT),
            "SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_NUM_NODES": "2", "STATE": "RUNNING",
            "SLURM_RESTART_COUNT": str(self.restarts), "RUN_DIR": str(self.run), "PYTHON": sys.executable,
            "MAX_ATTEMPTS": "9", "SUBMITTED": "2020-01-01T00:00:00", **self.environ, **environ,
        }  # fmt: skip
        job = srun_step.Job(
            ["--use_synthetic_data", "1"], str(ROOT), str(self.run), sys.executable,
            max_attempts=int(environ["MAX_ATTEMPTS"]), checkpoints=[f"{self.folder}/checkpoints/mine"], **fields or {},
        )  # fmt: skip
        command = ["bash", SCRIPTS / script, *words] if script else [sys.executable, "-m", BATCH_JOB, ""]
        environ |= {} if script else {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=self.folder, env=environ, start_new_session=True, input=json.dumps(asdict(job)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored in the background
        )  # fmt: skip
        self.restarts += 1
        return done.returncode, done.stdout

    def calls(self, name: str) -> list[str]:
        """Return the calls of a command, without its name."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix(name).strip() for line in lines if line.split()[0] == name]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "cluster")


def agent(state: str, step: int) -> str:
    """Return what the first node's agent does with the record of starts."""
    code = f"from smp_train.launch.starts import Starts; Starts(*sys.argv[1:3]).add(sys.argv[3], {state!r}, {step})"
    return f'PYTHONPATH={ROOT} {sys.executable} -c "import sys; {code}" "$RUN" 77 "$SLURM_RESTART_COUNT.0"\n'


def words(cluster: Cluster) -> list[str]:
    """Return what srun was given."""
    return (cluster.folder / "srun-words").read_text().splitlines()


UNPACK = 'echo "pyxis: couldn\'t start container" >&2; exit 1'


# A checkpoint counts where it is newer than the record of starts; clocks of file systems advance in ticks.
COMMIT = """mkdir -p "$CLUSTER/checkpoints/{0}/x-1steps"; marker="$CLUSTER/checkpoints/{0}/x-1steps/COMMITTED"
until [ "$marker" -nt "$RUN/logs/starts-77" ]; do date >"$marker"; done
"""


def test_a_job_starts_so_often_without_a_checkpoint(cluster: Cluster) -> None:
    """Whatever they fail of; a checkpoint of this run begins the count anew, also of a start whose node was lost."""
    for end, code in (("exit 1", 143), ("kill -9 $PPID", -9)):
        assert cluster.start(UNPACK, MAX_ATTEMPTS="2")[0] == 143
        ended, said = cluster.start(COMMIT.format("mine") + end, MAX_ATTEMPTS="2")
        assert (ended, "not trying again" in said) == (code, False), said
    assert cluster.start(COMMIT.format("other") + UNPACK, MAX_ATTEMPTS="2")[0] == 143
    code, said = cluster.start(COMMIT.format("mine/deeper") + fails("error") + "exit 1", MAX_ATTEMPTS="2")
    assert (code, "2 starts of job 77 brought no new checkpoint: not trying again" in said) == (1, True)
    assert cluster.start(UNPACK, MAX_ATTEMPTS="2")[0] == 1, "put back by hand"
    assert (len(cluster.calls("srun")), cluster.calls("scontrol")) == (6, ["requeue 77"] * 4)


def test_scripts_look_for_checkpoints_of_their_own_run(cluster: Cluster) -> None:
    """Those of the folder that one submits from, by default; the run is called as its run folder."""
    for name, code in (("run", 143), ("other", 1)):
        assert cluster.start(COMMIT.format(name) + "exit 1", script=CONDA, MAX_ATTEMPTS="1")[0] == code
    given = words(cluster)
    assert f"--checkpoint_dir={cluster.folder}/checkpoints" in given
    assert f"--resume_from_checkpoint={cluster.folder}/checkpoints" in given
    code, _ = cluster.start(COMMIT.format("x") + "exit 1", "--run_name=x", script=CONDA, RUN_DIR="x", MAX_ATTEMPTS="1")
    assert code == 143


def test_starts_that_slurm_ends_do_not_count(cluster: Cluster) -> None:
    """A job that is preempted again and again while its image is unpacked."""
    for _ in "12":
        code, said = cluster.start(ASKED.format("TERM") + "exit 1", STATE="PENDING", MAX_ATTEMPTS="1")
        assert (code, "ended by Slurm (PENDING)" in said) == (143, True)
    assert (len(cluster.calls("srun")), cluster.calls("scontrol")) == (2, [])


S3 = {"checkpoints_in_s3": True}


def test_starts_that_reach_a_task_are_the_tasks_to_count(cluster: Cluster) -> None:
    """Where checkpoints are in S3, which a task alone may look at."""
    for step in (0, 0, 10):
        assert cluster.start(agent("began", step) + "exit 1", fields=S3, MAX_ATTEMPTS="1")[0] == 143
    assert cluster.start(UNPACK, fields=S3, MAX_ATTEMPTS="1")[0] == 1
    assert len(cluster.calls("srun")) == 4


def test_a_task_that_could_look_into_s3_saves_a_start(cluster: Cluster) -> None:
    """Its last word is the newest checkpoint there; without it the next start has to look."""
    for begin, end, code in ((0, 10, 143), (10, 10, 143), (10, 10, 1)):
        step = agent("began", begin) + fails("killed") + agent("ended", end)
        assert cluster.start(step + "exit 1", fields=S3, MAX_ATTEMPTS="2")[0] == code
    assert len(cluster.calls("srun")) == 3


LAUNCH = ("__init__", "batch_job", "command", "srun_step", "starts")


def test_the_systems_python_reads_a_batch_job() -> None:
    """Ubuntu 20.04 has 3.8; whatever it has of packages, none is imported."""
    package = Path(srun_step.__file__).parents[1]
    names = {"__init__", "errors", *(f"launch/{name}" for name in LAUNCH)}
    modules = {f"smp_train.{name.replace('/', '.')}" for name in names}
    for name in names:
        tree = ast.parse((package / f"{name}.py").read_text(encoding="utf-8"), feature_version=(3, 8))
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = {one.name for node in top if isinstance(node, ast.Import) for one in node.names}
        imported |= {str(node.module) for node in top if isinstance(node, ast.ImportFrom)}
        assert all(one in modules or one.partition(".")[0] in sys.stdlib_module_names for one in imported), name
        assert name == "__init__" or "__future__" in imported, "annotations of today's are not evaluated"


def fails(cause: str, node: str = "n1", step: int = 0, code: int = 1, at: str = "1") -> str:
    """Return what a task does that fails on a node in a step."""
    line = f"LAUNCH-FAIL node={node} rank=0 rc={code} cause={cause}"
    return f'mkdir -p "$logs.{step}"; echo "{line}" >"$logs.{step}/failed-{at}-node-{node}"\n'


TRAIN = 'echo \'{"step": 10, "loss": 3.1}\' >>"$RUN/metrics.jsonl"\n'
STOPPED = 'rm -f "$RUN/STOP"; echo now >"$RUN/STOPPED"\n'
ASKED = 'kill -{} $PPID; until [ -e "$RUN/STOP" ]; do :; done\n'
THREE = {"SLURM_JOB_NODELIST": "n1,n2,n3", "NODES": "n1 idle\nn2 down*\nn3 idle"}
SILENT = fails("lost-peer", node="n1") + fails("lost-peer", node="n3")
BAD = fails("node", node="n2", code=75) + "exit 75"
FIRST = "first failure of this start: LAUNCH-FAIL node=n2 rank=0 rc=1 cause="
ENDS: dict[str, tuple[str, dict[str, str], int, str]] = {
    "not finished": ("exit 1", {}, 143, "putting the job back into the queue"),
    "no requeue": ("exit 1", {"NO_REQUEUE": "1"}, 1, "error: the job could not be requeued"),
    "configuration": (fails("configuration", code=2), {}, 2, "this would fail again in the same way"),
    "data": (fails("data", code=3), {}, 3, "this would fail again in the same way"),
    "checkpoint": (fails("checkpoint", code=4), {}, 4, "this would fail again in the same way"),
    # S3 that does not answer after hours, or a new node without the data: the number of starts is limited.
    "data, having trained": (TRAIN + fails("data", code=3), {}, 143, "cause=data"),
    "checkpoint, restarted": (fails("checkpoint", code=4), {"SLURM_RESTART_COUNT": "1"}, 143, "cause=checkpoint"),
    "crash loop": (fails("node", node="n2", at="0") + fails("crash-loop"), {}, 1, "cause=crash-loop"),
    "stopped after a swap": (fails("killed") + 'mkdir "$logs.1"\n' + STOPPED, {}, 0, "stopped on request and saved"),
    "the last step": (fails("data", step=9) + fails("error", node="n2", step=10), {}, 143, f"{FIRST}error"),
    "time is up": (ASKED.format("USR1") + STOPPED, {}, 143, "asked to stop by USR1"),
    # As a FIFO, STOP is empty and shows when it is read.
    "both asked": ('mkfifo "$RUN/STOP"; kill -USR1 $PPID; : >"$RUN/STOP"\n' + STOPPED, {}, 0,
                   "stopped on request and saved"),
    "^C": (ASKED.format("INT") + STOPPED, {}, 0, "stopped on request and saved"),
    "^C twice": (ASKED.format("INT") + "kill -INT $PPID; exec sleep 1000", {"NO_REQUEUE": "1"}, 1, "error"),
    "silent node": (SILENT, THREE, 143, "cause=lost-peer; no word from n2; Slurm has lost n2\n"),
    "ended with it": (fails("aborted"), THREE, 143, "cause=aborted; Slurm has lost n2\n"),
    "cause came later": (SILENT + fails("killed", node="n2", at="2"), THREE, 143, f"{FIRST}killed"),
    "bad node": (BAD, {"NODES": "n1\nn2\nn3\nn9", "EXCLUDED": "n9"}, 143, "the job stays off n2 from now on"),
    "no other": (BAD, {"NODES": "n1\nn2\nn9", "EXCLUDED": "n9"}, 143, "no other node can take the place of n2"),
    "certain nodes": (BAD, {"NODES": "n1\nn2\nn3", "EXCLUDED": "(null) ReqNodeList=n1,n2"}, 143, "n2 is not left out"),
}


@pytest.mark.parametrize("end", ENDS)
def test_how_a_start_ends(cluster: Cluster, end: str) -> None:
    step, environ, code, said = ENDS[end]
    cluster.restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
    ended, output = cluster.start(f"{step}\nexit 1", **environ)
    assert (ended, said in output) == (code, True), output
    requeued = code == 143 or "NO_REQUEUE" in environ
    excluded = ["update JobId=77 ExcNodeList=n9,n2"] if end == "bad node" else []
    assert cluster.calls("scontrol") == ["requeue 77"] * requeued + excluded
    assert ("could not be requeued" in output) == ("NO_REQUEUE" in environ)


def test_markers_of_an_earlier_run_do_not_count(cluster: Cluster) -> None:
    cluster.run.mkdir()
    for marker in ("DONE", "STOPPED"):
        (cluster.run / marker).write_text("yesterday\n")
        assert cluster.start("exit 0")[0] == 143
        assert cluster.start(f'echo today >"$RUN/{marker}"')[0] == 0


def test_a_request_of_slurms_is_not_left_to_the_next_start(cluster: Cluster) -> None:
    cluster.start(ASKED.format("USR1") + "exit 1")
    assert not (cluster.run / "STOP").exists()
    (cluster.run / "STOP").write_text("USR1\n")
    assert cluster.start("exit 1")[0] == 143, "a script that was lost with its node has left it"
    assert len(cluster.calls("srun")) == 2


def test_a_job_that_gives_way_as_soon_as_it_starts_comes_back(cluster: Cluster) -> None:
    """Slurm's signal may come before srun is there to be told."""
    stopped = 'cat "$RUN/STOP" >"$CLUSTER/seen"; rm "$RUN/STOP"; echo now >"$RUN/STOPPED"'
    code, said = cluster.start(stopped, EARLY="srun --help", script=CONDA)
    assert (code, cluster.calls("scontrol")) == (143, ["requeue 77"]), said
    assert "asked to stop by USR1" in said
    assert (cluster.folder / "seen").read_text() == "USR1\n"


def test_a_wish_to_stop_holds_for_a_job_that_waits(cluster: Cluster) -> None:
    cluster.run.mkdir()
    (cluster.run / "STOP").touch()
    code, said = cluster.start("exit 1", SUBMITTED="2100-01-01T00:00:00")
    assert (code, len(cluster.calls("srun"))) == (143, 1), "it was meant for a run before this one"
    assert not (cluster.run / "STOP").exists()
    (cluster.run / "STOP").touch()
    code, said = cluster.start("exit 1", SUBMITTED="2100-01-01T00:00:00")
    assert (code, len(cluster.calls("srun"))) == (0, 1), "between two starts of this job"
    assert "stopped on request before it started" in said
    cluster.start('touch "$RUN/STOP"; echo "$SMP_TRAIN_KEEP_STOP" >"$CLUSTER/keep"; exit 1')
    assert (cluster.folder / "keep").read_text() == "1\n"
    assert (cluster.run / "STOP").exists(), "the next start is to see it"
    cluster.restarts = 0
    assert cluster.start("exit 1")[0] == 0, "after the job was submitted"


def test_gpus_of_the_shell_that_submitted_are_not_the_jobs(cluster: Cluster) -> None:
    seen = 'echo "${CUDA_VISIBLE_DEVICES-none}" >"$CLUSTER/seen"'
    for environ, left in (({}, "none"), ({"SLURM_JOB_GPUS": "0,1"}, "0"), ({"NPROC": "1"}, "0")):
        cluster.start(seen, CUDA_VISIBLE_DEVICES="0", script=CONDA, **environ)
        assert (cluster.folder / "seen").read_text() == f"{left}\n"


def mounted(cluster: Cluster, *flags: str, **environ: str) -> set[str]:
    """Start a job in a container; return what is mounted into it."""
    code, said = cluster.start("exit 1", *flags, script=ENROOT, **container(cluster), **environ)
    assert code == 143, said
    (mounts,) = [word.partition("=")[2].split(",") for word in words(cluster) if word.startswith("--container-mounts")]
    assert all(mount.startswith("/") for mount in mounts), mounts
    return set(mounts)


def container(cluster: Cluster) -> dict[str, str]:
    (cluster.folder / "image.sqsh").touch()
    return {"IMAGE": f"{cluster.folder}/image.sqsh", "SRUN_HELP": "--container-image"}


def folder(cluster: Cluster, name: str) -> str:
    (cluster.folder / name).mkdir(parents=True)
    (cluster.folder / name / "0.json").touch()
    return str(cluster.folder / name)


def test_folders_that_flags_name_are_mounted(cluster: Cluster) -> None:
    train, test, more = (folder(cluster, name) for name in ("train", "test", "data/more"))
    new = cluster.folder / "elsewhere/new"
    flags = ["--training_dir", "train:0.3", f"{more}:0.7", "--test_dir=test", "--hf_model", "gpt2"]
    flags += ["--checkpoint_dir", str(new), "s3://bucket/x", "local:/nvme/y"]
    flags += ["--checkpoint_freq", "5", "5", "5", "--num_kept_checkpoints", "2", "2", "2"]
    mounts = mounted(cluster, *flags)
    assert {train, more, test, str(new)} <= mounts
    assert new.is_dir()
    assert not any("bucket" in mount or "nvme" in mount or "gpt2" in mount for mount in mounts)
    assert {train, f"{cluster.folder}/ck"} <= mounted(cluster, TRAINING_DIR="train", CHECKPOINT_DIR="ck")
    several = f"{cluster.folder}/data:/data:ro,{new}"
    assert {f"{cluster.folder}/data:/data:ro", str(new)} <= mounted(cluster, FSX_MOUNT=several)
    assert not [path for path in cluster.folder.iterdir() if path.name.startswith("local:")]


def test_what_the_image_must_not_overrule(cluster: Cluster) -> None:
    environ = {"CONTAINER_ENV": "MINE,HF_HOME", "NCCL_DEBUG": "INFO", "HF_HOME": "/fsx/hf", "NCCLX": "y", "MINE": ""}
    cluster.environ["PYTHONPATH"] = "/mine"  # of another Python than the image's
    step = 'echo "$PYTHONPATH" >"$CLUSTER/path"; exit 1'
    assert cluster.start(step, script=ENROOT, **container(cluster), OMP_NUM_THREADS="3", **environ)[0] == 143
    (named,) = [word.partition("=")[2].split(",") for word in words(cluster) if word.startswith("--container-env=")]
    wanted = {"HF_HOME", "MINE", "NCCL_DEBUG", "NSYS_DIR", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED"}
    assert (len(named), set(named)) == (len(wanted), wanted)
    assert (cluster.folder / "path").read_text() == f"{ROOT}\n"


def test_a_dry_run_can_be_a_variable(cluster: Cluster) -> None:
    (cluster.folder / "bin/sbatch").write_text('#!/bin/bash\necho "sbatch $*" >>"$CLUSTER/calls"\n')
    (cluster.folder / "bin/sbatch").chmod(0o755)
    for value, job, submitted in (("1", "", 0), ("0", "", 1), ("1", JOB, 1)):
        code, said = cluster.start("exit 1", "--max_steps", "7", DRY_RUN=value, SLURM_JOB_ID=job, script=CONDA)
        assert (code, len(cluster.calls("sbatch")), cluster.calls("srun")) == (0, submitted, []), said
        assert ("--max_steps 7" in said) is (value == "1")


@pytest.mark.parametrize(
    ("script", "job", "words"),
    [
        ("hyperpod_slurm/" + ENROOT, "", ["Submit it as it is", "MAX_ATTEMPTS=3  "]),
        ("hyperpod_slurm/" + CONDA, JOB, ["Submit it as it is", "NPROC=auto  "]),
        ("hyperpod_slurm/launch_slurm.sh", "", ["MODEL_SIZE=7B  "]),
        ("kubernetes/launch_eks.sh", "", ["NAMESPACE=kubeflow"]),
        ("local/launch_multi_node.sh", "", ["--nproc"]),
    ],
)
def test_help_starts_and_asks_for_nothing(cluster: Cluster, script: str, job: str, words: list[str]) -> None:
    path = f"{cluster.folder}/bin:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", ROOT / "launchers" / script, "--help"], capture_output=True, text=True, timeout=240, check=False,
        env={"PATH": path, "PYTHON": sys.executable, "SLURM_JOB_ID": job, "HYPERPOD_PATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr, "SBATCH" in done.stdout) == (0, "", False)
    assert all(word in done.stdout for word in words), done.stdout
    assert not (cluster.folder / "calls").exists()


def test_the_clusters_own_logs_are_mounted_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SMP tells HyperPod by them; elsewhere the mount would fail."""
    job = srun_step.Job(["--lr", "1"], "/code", "/run", "python", image="/x.sqsh")
    for folder in (tmp_path, tmp_path / "none"):
        monkeypatch.setattr(srun_step, "SMP_CLUSTER_LOGS", str(folder))
        assert (str(folder) in srun_step.mounts(job)) is folder.exists()
