# shellcheck shell=bash
# Sourced: host_python CHECKOUT [INTERPRETER] prints a Python of this host that can read flags: INTERPRETER where it can.
host_python() {
  local python
  for python in "${HOST_PYTHON:-}" "${2:-}" "$1/.venv/bin/python" python3 python3.13 python3.12 python3.11 python3.10; do
    if [ -n "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$python"
      return 0
    fi
  done
  echo "smp-train: error: no Python 3.10 or newer on $(hostname); set HOST_PYTHON, or run launchers/hyperpod_slurm/setup_conda_env.sh" >&2
  return 2
}
