#!/bin/bash
# Train on this machine, one process per GPU (NPROC overrides):  ./launch_single_node.sh [--dry_run] [training flags]
# ^C saves and stops; the same command goes on. PYTHON: the interpreter, where it is not the checkout's .venv.
# Options of `smp-train launch local` (--nproc, --check, ...) may stand among the flags.
set -euo pipefail

script=$(readlink -f -- "$0")
root=${script%/*/*/*}
# shellcheck source-path=SCRIPTDIR source=../host_python.sh
source "$root/launchers/host_python.sh"
PYTHON=${PYTHON:-$(host_python "$root")}
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m smp_train.launch.script local "$script" "$@"
