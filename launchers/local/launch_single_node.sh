#!/bin/bash
# Train on this machine, one process per GPU (NPROC overrides):  ./launch_single_node.sh [--dry_run] [training flags]
# Variables: see local.sh; and NPROC, RUN_DIR, CHECKPOINT_DIR, PYTHON, PREFLIGHT=seconds (several machines: do they reach each other?),
# PROFILE=torch or nsys, DRY_RUN=1. ^C saves and stops; the same command goes on.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
# shellcheck source-path=SCRIPTDIR source=local.sh
source "$here/local.sh"
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$root/.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
OPTIONS=()
case "${DRY_RUN:-}" in '' | 0 | false) ;; *) OPTIONS+=(--dry_run) ;; esac
[ "${NPROC:-auto}" = auto ] || OPTIONS+=(--nproc "$NPROC")
[ -z "${PREFLIGHT:-}" ] || OPTIONS+=(--preflight "$PREFLIGHT")
[ -z "${PROFILE:-}" ] || OPTIONS+=(--profile "$PROFILE")
[ -z "${RUN_DIR:-}" ] || FLAGS+=(--run_dir "$RUN_DIR")
[ -z "${CHECKPOINT_DIR:-}" ] || FLAGS+=(--checkpoint_dir "$CHECKPOINT_DIR")
exec "$PYTHON" -m smp_train launch local ${OPTIONS[@]+"${OPTIONS[@]}"} ${FLAGS[@]+"${FLAGS[@]}"} "$@"
