#!/bin/bash
# Make the image and, where Enroot is installed, the .sqsh file that launch_training_enroot.sh starts from.
# Run it on a worker node: image caches are on its local disks.
#   bash docker_build.sh                       SMP v2 image of AWS, region $AWS_REGION
#   TARGET=native bash docker_build.sh         public PyTorch image, for the native backend
# Variables: AWS_REGION, ACCOUNT (registry), TAG (of the base image), IMAGE_NAME, OUTPUT (.sqsh file), ENGINE (docker or
# podman), BASE (any other base image).
set -euo pipefail

refuse() { echo "error: $*" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${TARGET:=smp}" "${AWS_REGION:=${AWS_DEFAULT_REGION:-us-west-2}}" "${ACCOUNT:=658645717510}" "${TAG:=2.5.1-gpu-py311-cu124}"
case "$TARGET" in
  smp) : "${IMAGE_NAME:=smpv2}" "${BASE:=$ACCOUNT.dkr.ecr.$AWS_REGION.amazonaws.com/smdistributed-modelparallel:$TAG}" ;;
  native) : "${IMAGE_NAME:=smp-train}" "${BASE:=docker.io/pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime}" ;;
  *) refuse "TARGET=$TARGET: is not smp or native" ;;
esac
: "${OUTPUT:=$root/$IMAGE_NAME.sqsh}"
if [ -z "${ENGINE:-}" ]; then
  for ENGINE in docker podman none; do command -v "$ENGINE" >/dev/null && break; done
fi
[ "$ENGINE" != none ] || refuse "neither docker nor podman is installed here; run this on a worker node"
command -v "$ENGINE" >/dev/null || refuse "ENGINE=$ENGINE is not installed here"
"$ENGINE" info >/dev/null 2>&1 || refuse "$ENGINE does not answer: is the daemon running, and are you in the group docker?"

case "$BASE" in
  *.dkr.ecr.*.amazonaws.com/*)
    command -v aws >/dev/null || refuse "the AWS command line is needed to pull $BASE"
    password=$(aws ecr get-login-password --region "$AWS_REGION") ||
      refuse "no login to ECR in $AWS_REGION; add iam/ecr-pull.json to the role of this node"
    printf '%s' "$password" | "$ENGINE" login --username AWS --password-stdin "${BASE%%/*}" >/dev/null ||
      refuse "${BASE%%/*} does not accept the login; is AWS_REGION=$AWS_REGION one that has SMP images?"
    ;;
esac
"$ENGINE" build --build-arg "BASE=$BASE" --target "$TARGET" --tag "$IMAGE_NAME" "$root"

if command -v enroot >/dev/null; then
  # Enroot does not overwrite, and a job may be reading the old file: make the new one beside it, then swap.
  scratch=$OUTPUT.$$.sqsh
  trap 'rm -f "$scratch"' EXIT
  case "$ENGINE" in docker) scheme=dockerd ;; *) scheme=podman ;; esac
  enroot import --output "$scratch" "$scheme://$IMAGE_NAME:latest"
  mv -f "$scratch" "$OUTPUT"
  echo "ready: IMAGE=$OUTPUT sbatch $root/launchers/hyperpod_slurm/launch_training_enroot.sh"
else
  echo "ready: image $IMAGE_NAME:latest (no enroot here, so no .sqsh file)"
fi
