#!/bin/bash
# Make the environment that launch_training_conda.sh uses, in the checkout, where all nodes see it.
#   bash setup_conda_env.sh             a virtual environment (.venv) of python3, 3.10 or newer
#   bash setup_conda_env.sh --conda     a conda environment in the same place, with Python 3.11 of its own
# Run again, it updates what is there. EXTRAS (default train) chooses what is installed with the package.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
target=${TARGET:-$root/.venv}
: "${EXTRAS:=train}"

case "${1:-}" in
  '')
    [ -x "$target/bin/python" ] || "${PYTHON:-python3}" -m venv "$target" ;;
  --conda)
    command -v conda >/dev/null || { echo "error: no conda here; install Miniconda, or leave --conda out" >&2; exit 2; }
    [ -x "$target/bin/python" ] || conda create --yes --prefix "$target" python=3.11 pip ;;
  *)
    echo "error: unknown option $1; the only one is --conda" >&2; exit 2 ;;
esac
"$target/bin/python" -c 'import sys; sys.version_info >= (3, 10) or sys.exit("error: Python 3.10 or newer is needed; set PYTHON")'
"$target/bin/python" -m pip install --upgrade --editable "${root}[$EXTRAS]"
case "$(stat --file-system --format=%T "$target")" in
  lustre | nfs | fuseblk | ceph | gpfs | beegfs) ;;
  *) echo "warning: $target is on a local file system: other nodes will not see it unless this machine is the only one" >&2 ;;
esac
echo "ready: sbatch $root/launchers/hyperpod_slurm/launch_training_conda.sh"
