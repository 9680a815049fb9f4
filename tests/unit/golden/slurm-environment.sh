#!/bin/bash
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --job-name=gpt_neox
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=/runs/gpt_neox/logs/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --gpus-per-node=2

# To hand this to sbatch yourself, first: mkdir -p /runs/gpt_neox/logs

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
  "flags": ["--use_synthetic_data", "1", "--profile_nsys=1", "--run_name=gpt_neox", "--run_dir=/runs/gpt_neox", "--checkpoint_dir=/checkpoints", "--resume_from_checkpoint=/checkpoints"],
  "code_dir": "<code>",
  "run_dir": "/runs/gpt_neox",
  "python": "<python>",
  "agent": ["--nproc=2", "--profile=nsys"],
  "max_attempts": 3,
  "written": ["/checkpoints"],
  "checkpoints": ["/checkpoints/gpt_neox"]
}
JOB
