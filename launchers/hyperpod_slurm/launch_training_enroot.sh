#!/bin/bash
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#
# Train in a container (Enroot and Pyxis): 70B Llama 2 on synthetic data and 8 nodes unless told otherwise.
# IMAGE: the Enroot file that docker_build.sh makes: smpv2.sqsh in the checkout, or smp-train.sqsh where there is only that.
# Submit it as it is:  sbatch [--nodes=N] launch_training_enroot.sh [training flags]
# `./launch_training_enroot.sh --dry_run [training flags]` prints what each node would be given. Variables: see training.sh.

asked='' && trap 'asked=USR1' USR1 # heeded by batch.sh; until then it would end this script
case "${HYPERPOD_PATH:-}" in *:*) HYPERPOD_PATH= ;; esac # a mount, as other scripts have it
if [ -z "${HYPERPOD_PATH:-}" ]; then
  # Slurm runs a copy of this script: the original says where the checkout is.
  script=$(scontrol show job "${SLURM_JOB_ID:-0}" 2>/dev/null | sed -n 's/^ *Command=\([^ ]*\).*/\1/p' | head -n 1)
  HYPERPOD_PATH=$(cd "$(dirname "${script:-$0}")/../.." && pwd) || exit 2
fi
unset FLAGS RUN_ROOT # of other scripts, which set them for training.sh
# shellcheck source-path=SCRIPTDIR source=training.sh
source "$HYPERPOD_PATH/launchers/hyperpod_slurm/training.sh" || exit 2
if [ -z "${SLURM_JOB_ID:-}$DRY_RUN" ]; then exec sbatch "$0" "$@"; fi

if [ -z "${IMAGE:-}" ]; then
  IMAGE=$HYPERPOD_PATH/smpv2.sqsh
  [ -e "$IMAGE" ] || [ ! -e "$HYPERPOD_PATH/smp-train.sqsh" ] || IMAGE=$HYPERPOD_PATH/smp-train.sqsh
fi
PYTHON=${PYTHON:-python}
# shellcheck source-path=SCRIPTDIR source=../../smp_train/launch/batch.sh
source "$HYPERPOD_PATH/smp_train/launch/batch.sh"
