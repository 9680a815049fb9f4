#!/bin/bash
# Train on Kubernetes: EKS, or HyperPod on EKS. Needs kubectl, and Python with this package (no torch).
#   IMAGE=123456789012.dkr.ecr.us-west-2.amazonaws.com/smp-train:1 CLAIM=fsx:/fsx ./launch_eks.sh [training flags]
# --dry_run after the script's name prints the manifest, --check asks the cluster whether it would take it. Variables:
#
#   IMAGE=                          image with this package (docker_build.sh makes and pushes it)
#   CLAIM=                          NAME:/path of the persistent volume claim that all pods share
#   NODES=8 INSTANCE_TYPE=ml.p5.48xlarge
#   OPERATOR=kubeflow               or hyperpod, where HyperPod's training operator is installed
#   NAMESPACE=kubeflow JOB_NAME= QUEUE= SERVICE_ACCOUNT= PROFILE=
#   HF_SECRET=                      SECRET:KEY that holds the Hugging Face token
#
# and the variables of ../hyperpod_slurm/training.sh: model_type, model_size, TRAINING_DIR, shard_degree, RUN_DIR, ...

HYPERPOD_PATH=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) || exit 2
for name in IMAGE CLAIM; do
  case " $* " in *" -h "* | *" --help "*) break ;; esac
  [ -n "${!name:-}" ] || { echo "error: set $name; for example: IMAGE=REGISTRY/smp-train:1 CLAIM=fsx:/fsx $0" >&2; exit 2; }
done
: "${NODES:=8}" "${INSTANCE_TYPE:=ml.p5.48xlarge}" "${OPERATOR:=kubeflow}" "${NAMESPACE:=kubeflow}"
for name in PREFLIGHT MAX_ATTEMPTS CONTAINER_ENV FSX_MOUNT; do
  [ -z "${!name:-}" ] || echo "warning: $name=${!name} is for Slurm, and without effect here" >&2
done
unset FLAGS
# shellcheck disable=SC2034 # training.sh reads it
RUN_ROOT=${CLAIM#*:}
# shellcheck source-path=SCRIPTDIR source=../hyperpod_slurm/training.sh
source "$HYPERPOD_PATH/launchers/hyperpod_slurm/training.sh" || exit 2
OPTIONS=(--nodes "$NODES" --instance_type "$INSTANCE_TYPE" --image "$IMAGE" --claims "$CLAIM" --operator "$OPERATOR" --namespace "$NAMESPACE")
[ "${NPROC:-auto}" = auto ] || OPTIONS+=(--nproc "$NPROC")
[ -z "${JOB_NAME:-}" ] || OPTIONS+=(--job_name "$JOB_NAME")
[ -z "${QUEUE:-}" ] || OPTIONS+=(--queue "$QUEUE")
[ -z "${SERVICE_ACCOUNT:-}" ] || OPTIONS+=(--service_account "$SERVICE_ACCOUNT")
[ -z "${HF_SECRET:-}" ] || OPTIONS+=(--secrets "HF_TOKEN=$HF_SECRET")
[ -z "${PROFILE:-}" ] || OPTIONS+=(--profile "$PROFILE")
[ -z "$DRY_RUN" ] || OPTIONS+=(--dry_run)
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$HYPERPOD_PATH/.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi
PYTHONPATH="$HYPERPOD_PATH${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m smp_train launch k8s "${OPTIONS[@]}" "${TRAIN_FLAGS[@]}"
