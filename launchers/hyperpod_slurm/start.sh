# shellcheck shell=bash
# Sourced by the training scripts of this folder with their kind, script and flags: reads variables and flags, submits the
# script where this is no job, and runs the job where it is one. Takes HYPERPOD_PATH. Ends the script.

# shellcheck source-path=SCRIPTDIR source=../host_python.sh
source "$HYPERPOD_PATH/launchers/host_python.sh"
python=$(host_python "$HYPERPOD_PATH" "${PYTHON:-}") || exit
settings=$(PYTHONPATH=$HYPERPOD_PATH "$python" -m smp_train.launch.script "$@") || exit
eval "$settings"
shift 2
if [ -z "${SLURM_JOB_ID:-}${DRY_RUN:-}" ]; then exec sbatch "$0" "$@"; fi
# shellcheck source-path=SCRIPTDIR source=../../smp_train/launch/batch.sh
source "$HYPERPOD_PATH/smp_train/launch/batch.sh"
