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
[ -n "${HF_HUB_ETAG_TIMEOUT+set}" ] || export HF_HUB_ETAG_TIMEOUT=60
[ -n "${TOKENIZERS_PARALLELISM+set}" ] || export TOKENIZERS_PARALLELISM=false

asked=
[ -z "${SLURM_JOB_ID:-}" ] || DRY_RUN=
[ -n "${SLURM_JOB_GPUS:-}${SLURM_GPUS_ON_NODE:-}" ] || unset CUDA_VISIBLE_DEVICES
CODE_DIR=<code>
RUN_DIR=/runs/gpt_neox
PYTHON=<python>
IMAGE=''
NPROC=2
INSTANCE_TYPE=''
PROFILE=nsys
MAX_ATTEMPTS=3
PREFLIGHT=''
CONTAINER_ENV=HF_HUB_ETAG_TIMEOUT,TOKENIZERS_PARALLELISM
UNSEEN=''
MOUNTS=()
FOLDERS=()
WRITTEN=()
TRAIN_FLAGS=(
  --use_synthetic_data
  1
  --profile_nsys=1
  --run_name=gpt_neox
  --run_dir=/runs/gpt_neox
  --checkpoint_dir=/runs/gpt_neox/checkpoints
  --resume_from_checkpoint=/runs/gpt_neox/checkpoints
)
