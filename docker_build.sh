#!/bin/bash
# Make the image and, where Enroot is installed, the .sqsh file that launch_training_enroot.sh starts from.
# Run it on a worker node: image caches are on its local disks.
#   bash docker_build.sh                       SMP v2 image of AWS, region $AWS_REGION
#   TARGET=native bash docker_build.sh         AWS's public PyTorch image, which has the EFA plugin, for the native backend;
#                                              an aarch64 node (p6e-gb200) needs BASE: AWS's arm64 image has torch 2.7
# Variables: AWS_REGION, ACCOUNT (registry), TAG (of the base image), IMAGE_NAME, OUTPUT (.sqsh file), FREE_GB (disk that it
# may need, 40), ENGINE (docker or podman), BASE (any other base image; NAME@sha256:DIGEST
# builds on exactly that one, where a tag may be another image tomorrow), EXTRA_PACKAGES (for pip, such as
# hyperpod-elastic-agent), IMAGE_USER (who the image runs as: trainer, with user id 10001, which must be able to write to what
# is mounted; IMAGE_USER=root for SageMaker, whose toolkit needs it), and
# PUSH=123456789012.dkr.ecr.REGION.amazonaws.com/smp-train:1, the repository that Kubernetes pulls from. SageMaker needs no image
# of your own; one for it must have SageMaker's training toolkit: BASE=....dkr.ecr.REGION.amazonaws.com/pytorch-training:...-sagemaker
set -euo pipefail

refuse() { echo "error: $*" >&2; exit 2; }
case "${1:-}" in
  '') ;;
  -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) refuse "unknown argument $1: variables choose what is built; docker_build.sh --help lists them" ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${TARGET:=smp}" "${AWS_REGION:=${AWS_DEFAULT_REGION:-us-west-2}}" "${ACCOUNT:=658645717510}" "${TAG:=2.5.1-gpu-py311-cu124}"
machine=$(uname -m)
case "$TARGET" in
  smp)
    [ "$machine" = x86_64 ] || [ -n "${BASE:-}" ] ||
      refuse "AWS has SMP images for x86_64 only, and this machine is $machine: use TARGET=native"
    : "${IMAGE_NAME:=smpv2}" "${BASE:=$ACCOUNT.dkr.ecr.$AWS_REGION.amazonaws.com/smdistributed-modelparallel:$TAG}" ;;
  native)
    : "${IMAGE_NAME:=smp-train}"
    # github.com/aws/deep-learning-containers lists AWS's images: docs/src/data/pytorch-training-arm64 ends at 2.7 (2026-08-21).
    [ "$machine" = x86_64 ] || [ -n "${BASE:-}" ] ||
      refuse "AWS has no $machine image with torch 2.8 or newer: set BASE to one, such as nvcr.io/nvidia/pytorch:25.09-py3"
    : "${BASE:=public.ecr.aws/deep-learning-containers/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-ec2}"
    case "$BASE" in
      *pytorch/pytorch:* | nvcr.io/*) echo "warning: $BASE may have no EFA plugin: between nodes NCCL would go through TCP" >&2 ;;
    esac
    ;;
  *) refuse "TARGET=$TARGET: is not smp or native" ;;
esac
case "$IMAGE_NAME" in *[:/]*) refuse "IMAGE_NAME=$IMAGE_NAME: a plain name; PUSH=REPOSITORY:TAG names a registry's" ;; esac
: "${OUTPUT:=$root/$IMAGE_NAME.sqsh}"
: "${FREE_GB:=40}"
if [ -z "${ENGINE:-}" ]; then
  for ENGINE in docker podman none; do command -v "$ENGINE" >/dev/null && break; done
fi
if command -v enroot >/dev/null; then
  folder=$(dirname "$OUTPUT")
  { [ -d "$folder" ] && [ -w "$folder" ]; } || refuse "OUTPUT=$OUTPUT: $folder is no folder that you may write to"
  free=$(($(stat --file-system --format='%a * %S' "$folder") / 1000000000))
  # The base has some 20 GB, and the new file is whole before the old one goes.
  [ "$free" -ge "$FREE_GB" ] || refuse "$folder: $free GB are free, and an image may need $FREE_GB; set OUTPUT to another disk, or FREE_GB"
fi
[ "$ENGINE" != none ] || refuse "neither docker nor podman is installed here; run this on a worker node"
command -v "$ENGINE" >/dev/null || refuse "ENGINE=$ENGINE is not installed here"
"$ENGINE" info >/dev/null 2>&1 || refuse "$ENGINE does not answer: is the daemon running, and are you in the group docker?"

# login IMAGE WHAT_IF_REFUSED: log in to the registry of an image, where that is ECR. ECR is told by the host alone: the rest
# of a name can say anything, and the password goes to the host.
login() {
  local host=${1%%/*} region
  [[ $1 = */* && $host =~ ^[0-9]{12}\.dkr\.ecr(-fips)?\.([a-z0-9-]+)\.amazonaws\.com(\.cn)?$ ]] || return 0
  region=${BASH_REMATCH[2]}
  command -v aws >/dev/null || refuse "the AWS command line is needed for $1"
  password=$(aws ecr get-login-password --region "$region") ||
    refuse "no login to ECR in $region; add iam/ecr-pull.json to the role of this node"
  printf '%s' "$password" | "$ENGINE" login --username AWS --password-stdin "$host" >/dev/null ||
    refuse "$host does not accept the login; $2"
}
login "$BASE" "is AWS_REGION=$AWS_REGION one that has SMP images?"
[ -z "${PUSH:-}" ] || login "$PUSH" "is it your account's, and may this role push (ecr:PutImage)?"
"$ENGINE" build --build-arg "BASE=$BASE" --build-arg "EXTRA_PACKAGES=${EXTRA_PACKAGES:-}" \
  ${IMAGE_USER:+--build-arg "IMAGE_USER=$IMAGE_USER"} --target "$TARGET" --tag "$IMAGE_NAME" "$root"
if [ -n "${PUSH:-}" ]; then
  "$ENGINE" tag "$IMAGE_NAME" "$PUSH"
  "$ENGINE" push "$PUSH"
  echo "ready: IMAGE=$PUSH CLAIM=NAME:/fsx $root/launchers/kubernetes/launch_eks.sh"
fi

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
