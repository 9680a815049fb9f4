#!/bin/bash
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#
# Train in a container (Enroot and Pyxis): 70B Llama 2 on synthetic data and 8 nodes by default.
# IMAGE: the Enroot file that docker_build.sh makes: smpv2.sqsh in the checkout, or smp-train.sqsh where there is only that.
# Submit it as it is:  sbatch [--nodes=N] launch_training_enroot.sh [training flags]
# `./launch_training_enroot.sh --dry_run [training flags]` prints what each node would be given. --help lists the variables.

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
exec "$python" -E "$HYPERPOD_PATH/launchers/hyperpod_slurm/start.py" "$asked" enroot "$0" "$@"
