#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#
# Train on a cluster with the variables of ../local/local.sh: USE_HF_MODEL, HF_MODEL, MODEL_SIZE, BATCH_SIZE, ...
# Runs in the environment that setup_conda_env.sh makes, or in the container IMAGE when that is set.
# Submit it as it is:  sbatch [--nodes=N] launch_slurm.sh [training flags]
# `./launch_slurm.sh --dry_run [training flags]` prints what each node would be given. Variables: see training.sh.

asked='' && trap 'asked=USR1' USR1 # heeded by batch.sh; until then it would end this script
case "${HYPERPOD_PATH:-}" in *:*) HYPERPOD_PATH= ;; esac # a mount, as other scripts have it
if [ -z "${HYPERPOD_PATH:-}" ]; then
  # Slurm runs a copy of this script: the original says where the checkout is.
  script=$(scontrol show job "${SLURM_JOB_ID:-0}" 2>/dev/null | sed -n 's/^ *Command=\([^ ]*\).*/\1/p' | head -n 1)
  HYPERPOD_PATH=$(cd "$(dirname "${script:-$0}")/../.." && pwd) || exit 2
fi
# shellcheck source-path=SCRIPTDIR source=../local/local.sh
source "$HYPERPOD_PATH/launchers/local/local.sh" || exit 2
unset RUN_ROOT
# shellcheck source-path=SCRIPTDIR source=training.sh
source "$HYPERPOD_PATH/launchers/hyperpod_slurm/training.sh" || exit 2
if [ -z "${SLURM_JOB_ID:-}$DRY_RUN" ]; then exec sbatch "$0" "$@"; fi

PYTHON=${PYTHON:-$([ -n "${IMAGE:-}" ] && echo python || echo "$HYPERPOD_PATH/.venv/bin/python")}
# shellcheck source-path=SCRIPTDIR source=../../smp_train/launch/batch.sh
source "$HYPERPOD_PATH/smp_train/launch/batch.sh"
