#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --open-mode=append
# Turn text into token shards on one node:  sbatch prepare_data.sh --input /fsx/text --output /fsx/data ...
# The flags are those of `smp-train prepare`. PYTHON: the interpreter, where it is not the checkout's .venv.

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
PYTHON=${PYTHON:-$HYPERPOD_PATH/.venv/bin/python}
command -v "$PYTHON" >/dev/null || { echo "smp-train: error: no interpreter $PYTHON; run setup_conda_env.sh, or set PYTHON" >&2; exit 2; }
PYTHONPATH=$HYPERPOD_PATH${PYTHONPATH:+:$PYTHONPATH} exec "$PYTHON" -m smp_train prepare "$@"
