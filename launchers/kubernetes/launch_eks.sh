#!/bin/bash
# Train on Kubernetes: EKS, or HyperPod on EKS. Needs kubectl, and Python with this package (no torch).
#   IMAGE=123456789012.dkr.ecr.us-west-2.amazonaws.com/smp-train:1 CLAIM=fsx:/fsx ./launch_eks.sh [training flags]
# --dry_run after the script's name prints the manifest, --check asks the cluster whether it would take it.
# Options of `smp-train launch k8s` may stand among the flags.
set -euo pipefail

script=$(readlink -f -- "$0")
root=${script%/*/*/*}
# shellcheck source-path=SCRIPTDIR source=../host_python.sh
source "$root/launchers/host_python.sh"
PYTHON=${PYTHON:-$(host_python "$root")}
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m smp_train.launch.script k8s "$script" "$@"
