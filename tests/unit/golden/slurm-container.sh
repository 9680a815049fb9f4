#!/bin/bash
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --job-name=llama_v2-70b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --output=/runs/llama_v2-70b/logs/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --partition=dev
#SBATCH --time=2-00:00:00

# To hand this to sbatch yourself, first: mkdir -p /runs/llama_v2-70b/logs
export HF_TOKEN='a b'
export X=''"'"'q'"'"''

asked= && trap 'asked=USR1' USR1
code=<code>
refuse() { echo "smp-train: error: $*" >&2; exit 2; }
[ -d "$code/smp_train/launch" ] || refuse "no smp_train in $code on $(hostname); all nodes must mount its file system"
for python in "${HOST_PYTHON:-}" <python> python3 ''; do
  ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null || break
done
[ -n "$python" ] || refuse "no Python 3.8 or newer on $(hostname); set HOST_PYTHON"
trap '' USR1
PYTHONPATH=$code${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m smp_train.launch.batch_job "$asked" <<'JOB'
{
  "flags": ["--model_type", "llama_v2", "--model-size=70b", "--training_dir", "/fsx/data/train", "--max_steps", "100", "--run_name=llama_v2-70b", "--run_dir=/runs/llama_v2-70b", "--checkpoint_dir=/checkpoints", "--resume_from_checkpoint=/checkpoints"],
  "code_dir": "<code>",
  "run_dir": "/runs/llama_v2-70b",
  "python": "python3",
  "agent": ["--instance_type=p5.48xlarge"],
  "max_attempts": 3,
  "image": "/fsx/smpv2.sqsh",
  "mounts": ["/fsx"],
  "container_env": ["HF_TOKEN", "X"],
  "read": ["/fsx/data/train"],
  "written": ["/checkpoints"],
  "checkpoints": ["/checkpoints/llama_v2-70b"]
}
JOB
