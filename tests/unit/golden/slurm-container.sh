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

export FI_EFA_USE_HUGE_PAGE=0
export HF_HUB_ETAG_TIMEOUT=60
export HF_TOKEN='a b'
export NCCL_DEBUG=WARN
export NCCL_SOCKET_IFNAME='^docker,lo,veth'
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TOKENIZERS_PARALLELISM=false
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000
export X=''"'"'q'"'"''

CODE_DIR=<code>
RUN_DIR=/runs/llama_v2-70b
PYTHON=python3
IMAGE=/fsx/smpv2.sqsh
NPROC=8
INSTANCE_TYPE=p5.48xlarge
PROFILE=''
MAX_ATTEMPTS=3
PREFLIGHT=''
MOUNTS=(
  /fsx
  /fsx/data/train
)
TRAIN_FLAGS=(
  --model_type
  llama_v2
  --model-size=70b
  --training_dir
  /fsx/data/train
  --max_steps
  100
  --run_dir=/runs/llama_v2-70b
  --checkpoint_dir=/runs/llama_v2-70b/checkpoints
  --resume_from_checkpoint=/runs/llama_v2-70b/checkpoints
)
