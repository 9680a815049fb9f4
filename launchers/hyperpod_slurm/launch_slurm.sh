#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#
# Train on a cluster with the variables USE_HF_MODEL, HF_MODEL, MODEL_SIZE, BATCH_SIZE, ...
# Runs in the environment that setup_conda_env.sh makes, or in the container IMAGE when that is set.
# Submit it as it is:  sbatch [--nodes=N] launch_slurm.sh [training flags]
# `./launch_slurm.sh --dry_run [training flags]` prints what each node would be given. --help lists the variables.

asked='' && trap 'asked=USR1' USR1 # a job may be preempted before start.py has its handler
case "${HYPERPOD_PATH:-}" in *:*) HYPERPOD_PATH= ;; esac # a mount, as other scripts have it
if [ -z "${HYPERPOD_PATH:-}" ]; then
  script=$(readlink -f -- "$0")
  if [ ! -e "${script%/*}/start.py" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    # A batch job runs a copy of this script: what was submitted begins the job's command line.
    script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p' | head -n 1)
    while [ ! -f "$script" ] && [[ $script == *' '* ]]; do script=${script% *}; done
    script=$(readlink -f -- "$script")
  fi
  HYPERPOD_PATH=${script%/*/*/*}
fi
if [ ! -e "$HYPERPOD_PATH/launchers/hyperpod_slurm/start.py" ]; then
  echo "smp-train: error: no smp-train in '$HYPERPOD_PATH' on $(hostname); set HYPERPOD_PATH to a checkout that all nodes mount" >&2
  exit 2
fi
# shellcheck source-path=SCRIPTDIR source=../host_python.sh
source "$HYPERPOD_PATH/launchers/host_python.sh"
python=$(host_python "$HYPERPOD_PATH" "${PYTHON:-}") || exit
trap '' USR1
exec "$python" -E "$HYPERPOD_PATH/launchers/hyperpod_slurm/start.py" "$asked" slurm "$0" "$@"
