# shellcheck shell=bash
# The body of every Slurm batch script of smp-train: start the step, pass on requests to stop, and start again
# what did not finish. Runs on the first node of the job, outside of any container. It is sourced by the scripts in
# launchers/hyperpod_slurm, and is part of the text that `smp-train launch slurm` submits.
#
# Takes from its script: CODE_DIR, RUN_DIR, PYTHON, TRAIN_FLAGS (array), MOUNTS (array); and where set: IMAGE,
# NPROC, INSTANCE_TYPE, PREFLIGHT, PROFILE, MAX_ATTEMPTS, NSYS_DIR, CONTAINER_ENV, TRAINING_DIR, TEST_DIR, CHECKPOINT_DIR, and
# DRY_RUN, which prints what srun would be given. Ends the script.

say() { printf 'smp-train: %s\n' "$*" >&2; }
refuse() { say "error: $*"; exit 2; }

[ -n "${SLURM_JOB_ID:-}" ] || [ -n "${DRY_RUN:-}" ] || refuse "this is a batch script: submit it with sbatch"
[ -e "$CODE_DIR/smp_train/launch/task.py" ] || refuse "no smp_train in $CODE_DIR on $(hostname); the checkout (HYPERPOD_PATH) must be on a file system that all nodes mount"
for folder in "${TRAINING_DIR:-}" "${TEST_DIR:-}"; do
  case "$folder" in '' | *://*) continue ;; esac
  [ -n "${DRY_RUN:-}" ] || [ -d "$folder" ] || refuse "no folder $folder on $(hostname); set TRAINING_DIR and TEST_DIR to folders of shards that all nodes mount"
  MOUNTS+=("$folder")
done
case "${CHECKPOINT_DIR:-}" in
  '' | *://*) ;;
  *) [ -n "${DRY_RUN:-}" ] || mkdir -p "$CHECKPOINT_DIR" || refuse "cannot write CHECKPOINT_DIR=$CHECKPOINT_DIR on $(hostname)"; MOUNTS+=("$CHECKPOINT_DIR") ;;
esac
[ -n "${DRY_RUN:-}" ] || mkdir -p "$RUN_DIR/logs" || refuse "cannot write RUN_DIR=$RUN_DIR on $(hostname); set it to a folder on a shared file system"
for name in LD_PRELOAD FI_PROVIDER RDMAV_FORK_SAFE NCCL_PROTO NCCL_SOCKET_NTHREADS FI_EFA_USE_DEVICE_RDMA; do
  if [ -n "${!name:-}" ]; then say "warning: $name=${!name} comes from the shell that submitted this job; current images need it unset"; fi
done

# --- the step ----------------------------------------------------------------------------------------------
command=("$PYTHON" -m smp_train.launch.task)
step=(--kill-on-bad-exit=1 --ntasks-per-node=1 --label)
# HyperPod's plugin swaps a bad node and runs the same srun again. Stock Slurm does not know the option.
if srun --help 2>&1 | grep -q -- --auto-resume; then step+=(--auto-resume=1); fi
task=(--nproc "${NPROC:-auto}" --max_attempts "${MAX_ATTEMPTS:-3}" --failures "$RUN_DIR/logs")
[ -z "${INSTANCE_TYPE:-}" ] || task+=(--instance_type "$INSTANCE_TYPE")
[ -z "${PREFLIGHT:-}" ] || task+=(--preflight "$PREFLIGHT")
left=$([ -n "${DRY_RUN:-}" ] || squeue --noheader --jobs "$SLURM_JOB_ID" --format %L 2>/dev/null)
[ -z "$left" ] || task+=(--time_left "$left")
case "${PROFILE:-}" in
  '' | 0 | none) ;;
  torch) TRAIN_FLAGS+=(--use_profiler 1) ;;
  nsys) TRAIN_FLAGS+=(--profile_nsys 1); task+=(--nsys) ;;
  *) refuse "PROFILE=$PROFILE: is not torch or nsys" ;;
esac
# Of this shell's PYTHONPATH nothing is in a container, whose Python is another one.
[ -z "${IMAGE:-}" ] || PYTHONPATH=
export PYTHONPATH="$CODE_DIR${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
: "${NSYS_DIR:=/fsx/nsight-efa}"
export NSYS_DIR

if [ -n "${IMAGE:-}" ]; then
  [ -n "${DRY_RUN:-}" ] || srun --help 2>&1 | grep -q -- --container-image || refuse "this cluster's srun knows no --container-image; install pyxis, or use launch_training_conda.sh"
  case "$IMAGE" in
    ./* | /*) [ -n "${DRY_RUN:-}" ] || [ -e "$IMAGE" ] || refuse "no image $IMAGE on $(hostname); make it with docker_build.sh, or set IMAGE" ;;
  esac
  # The marker tells the task that it is inside: with pyxis missing on a node, srun runs on the bare host.
  mounts="$PWD,$CODE_DIR,$RUN_DIR,$CODE_DIR/smp_train/launch:/.smp-train-inside:ro"
  [ ! -d /var/log/aws/clusters ] || mounts+=",/var/log/aws/clusters" # SMP checks with it that this is HyperPod
  [ "${PROFILE:-}" != nsys ] || [ ! -d "$NSYS_DIR" ] || mounts+=",$NSYS_DIR"
  for mount in "${MOUNTS[@]}"; do
    [ -n "${DRY_RUN:-}" ] || [ -e "${mount%%:*}" ] || refuse "no ${mount%%:*} to mount on $(hostname); make it, or take it out of MOUNTS"
    mounts+=",$mount"
  done
  step+=(--container-image="$IMAGE" --container-mounts="$mounts" --no-container-mount-home --container-workdir="$PWD")
  step+=("--container-env=NCCL_DEBUG,PYTHONPATH,PYTHONUNBUFFERED${CONTAINER_ENV:+,$CONTAINER_ENV}")
  task+=(--inside)
  # srun would look the interpreter up on this host; the image has its own.
  command=(/bin/bash -c 'exec "$@"' task "${command[@]}")
else
  [ -n "${DRY_RUN:-}" ] || command -v "$PYTHON" >/dev/null || refuse "no interpreter $PYTHON on $(hostname); run setup_conda_env.sh, or set PYTHON"
fi

if [ -n "${DRY_RUN:-}" ]; then
  # Where any Python here can read the flags, mistakes in them are told.
  for python in "$PYTHON" python3; do
    "$python" -c 'import sys, yaml, packaging; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
    "$python" -m smp_train.launch.flags "${TRAIN_FLAGS[@]}" || exit
    break
  done
  printf '%q ' srun "${step[@]}" "${command[@]}" "${task[@]}" -- "${TRAIN_FLAGS[@]}"
  echo
  exit 0
fi

# --- run it, and stop it when asked ----------------------------------------------------------------------------
# Markers of an earlier run in this folder are told by their text, which has the time.
finished_before=$(cat "$RUN_DIR/DONE" 2>/dev/null)
stopped_before=$(cat "$RUN_DIR/STOPPED" 2>/dev/null)
asked=
trap 'asked=USR1' USR1 # time is up, or the job gives way to another: stop, save, go on later
trap 'asked=${asked:-TERM}' TERM
say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), nodes $SLURM_JOB_NODELIST, run folder $RUN_DIR; to stop and save: touch $RUN_DIR/STOP"
srun "${step[@]}" "${command[@]}" "${task[@]}" -- "${TRAIN_FLAGS[@]}" &
srun_pid=$!
while :; do
  wait "$srun_pid"
  code=$?
  kill -0 "$srun_pid" 2>/dev/null || break # else a signal ended the wait, not the step
  # Until it is gone: a run that is just starting takes an older STOP away.
  while [ -n "$asked" ] && kill -0 "$srun_pid" 2>/dev/null; do
    touch "$RUN_DIR/STOP"
    sleep 2
  done
done

# --- how it ended: by what the run left behind; srun returns 0 also for a node that died ---------------------
finished=$(cat "$RUN_DIR/DONE" 2>/dev/null)
if [ -n "$finished" ] && [ "$finished" != "$finished_before" ]; then
  say "finished: $RUN_DIR/DONE"
  exit 0
fi
attempts="$RUN_DIR/logs/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
first=$(for file in "$attempts".*/failed-*; do [ -e "$file" ] && printf '%s %s\n' "${file##*/}" "$(cat "$file")"; done | sort | head -n 1 | cut -d' ' -f2-)
[ -z "$first" ] || say "first failure of this start: $first"
case "$first" in
  *cause=configuration | *cause=data | *cause=checkpoint | *cause=crash-loop)
    say "error: this would fail again in the same way: not starting it again; logs: $attempts.*"
    code=${first##*rc=}
    exit "${code%% *}"
    ;;
esac
state=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p')
if [ "$asked" = TERM ] && [ "$state" != RUNNING ]; then
  say "ended by Slurm ($state): it starts the job again when it lost a node; otherwise submit the same script again to go on"
  exit 143
fi
stopped=$(cat "$RUN_DIR/STOPPED" 2>/dev/null)
if [ -z "$asked$first" ] && [ -n "$stopped" ] && [ "$stopped" != "$stopped_before" ]; then
  say "stopped on request and saved: $RUN_DIR/STOPPED; submit the same script again to go on"
  exit 0
fi
say "not finished (${asked:+asked to stop by $asked; }srun returned $code): putting the job back into the queue"
scontrol requeue "$SLURM_JOB_ID" && { sleep 60; }
say "error: the job could not be requeued (is it submitted with --requeue, and does the cluster allow it?); submit the same script again to go on"
exit 1
