# shellcheck shell=bash
# The body of every Slurm batch script of smp-train: start the step, pass on requests to stop, and start again
# what did not finish. Runs on the first node of the job, outside of any container. It is sourced by the scripts in
# launchers/hyperpod_slurm, and is part of the text that `smp-train launch slurm` submits.
#
# Takes from its script: CODE_DIR, RUN_DIR, PYTHON, TRAIN_FLAGS (array); and where set: IMAGE, the arrays MOUNTS (as pyxis
# writes them), FOLDERS (to be mounted where they are) and WRITTEN (made, and mounted), UNSEEN, NPROC, INSTANCE_TYPE, PREFLIGHT,
# PROFILE, MAX_ATTEMPTS, NSYS_DIR, CONTAINER_ENV, and DRY_RUN, which prints what srun would be given. Ends the script.

# A job that gives way to another before its step is there must come back too: unheeded, the signal would end this script.
[ "${asked:-}" = USR1 ] || asked=''
trap 'asked=USR1' USR1

say() { printf 'smp-train: %s\n' "$*" >&2; }
refuse() { say "error: $*"; exit 2; }

[ -n "${SLURM_JOB_ID:-}" ] || [ -n "${DRY_RUN:-}" ] || refuse "this is a batch script: submit it with sbatch"
[ -e "$CODE_DIR/smp_train/launch/node_agent.py" ] || refuse "no smp_train in $CODE_DIR on $(hostname); the checkout (HYPERPOD_PATH) must be on a file system that all nodes mount"
FOLDERS=(${FOLDERS[@]+"${FOLDERS[@]}"} "$PWD" "$CODE_DIR" "$RUN_DIR")
for folder in ${WRITTEN[@]+"${WRITTEN[@]}"}; do
  [ -n "${DRY_RUN:-}" ] || mkdir -p "$folder" || refuse "cannot write $folder on $(hostname), which CHECKPOINT_DIR or a flag names"
  FOLDERS+=("$folder")
done
[ -n "${DRY_RUN:-}" ] || mkdir -p "$RUN_DIR/logs" || refuse "cannot write RUN_DIR=$RUN_DIR on $(hostname); set it to a folder on a shared file system"
# Slurm chooses GPUs where it has GRES; anything else comes from the shell that submitted this job.
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ] && [ "${NPROC:-auto}" = auto ] && [ -z "${SLURM_JOB_GPUS:-}${SLURM_GPUS_ON_NODE:-}" ]; then
  say "warning: CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES is left out: each node has its own GPUs; NPROC keeps it"
  unset CUDA_VISIBLE_DEVICES
fi

# --- the step ----------------------------------------------------------------------------------------------
command=("$PYTHON" -m smp_train.launch.node_agent)
step=(--kill-on-bad-exit=1 --ntasks-per-node=1 --label)
# An allocation of salloc may be for more tasks.
[ -z "${SLURM_JOB_NUM_NODES:-}" ] || step+=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES")
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
# Variables that training and the libraries below it read, and that images bring along. Not GPUs and paths: those differ inside.
HANDED_OVER='PYTHONPATH|PYTHONUNBUFFERED|NSYS_DIR|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)|(AWS|FI|GLOO|HF|NCCL|OFI_NCCL|PYTORCH|SMP_TRAIN|TORCH|TORCHELASTIC|WANDB)_[A-Z0-9_]+'

if [ -n "${IMAGE:-}" ]; then
  [ -n "${DRY_RUN:-}" ] || srun --help 2>&1 | grep -q -- --container-image || refuse "this cluster's srun knows no --container-image; install pyxis, or use launch_training_conda.sh"
  case "$IMAGE" in
    ./* | /*) [ -n "${DRY_RUN:-}" ] || [ -e "$IMAGE" ] || refuse "no image $IMAGE on $(hostname); make it with docker_build.sh, or set IMAGE" ;;
  esac
  [ ! -d /var/log/aws/clusters ] || FOLDERS+=(/var/log/aws/clusters) # SMP checks with it that this is HyperPod
  [ "${PROFILE:-}" != nsys ] || [ ! -d "$NSYS_DIR" ] || FOLDERS+=("$NSYS_DIR")
  # The marker tells the task that it is inside: with pyxis missing on a node, srun runs on the bare host.
  inside=$CODE_DIR/smp_train/launch:/.smp-train-inside:ro
  mounted() { case "$1" in /*) set -- "$1" ;; *) set -- "$PWD/$1" ;; esac; case ",$inside," in *",$1,"*) ;; *) inside+=",$1" ;; esac; }
  for mount in ${MOUNTS[@]+"${MOUNTS[@]}"}; do
    case "$mount" in *,* | *:*:*:*) refuse "$mount (FSX_MOUNT, --mounts): is not one mount, SOURCE or SOURCE:TARGET[:FLAGS]; pyxis has no way to write a comma or a colon in a path" ;; esac
    [ -n "${DRY_RUN:-}" ] || [ -e "${mount%%:*}" ] || refuse "no ${mount%%:*} to mount on $(hostname); make it, or take it out of MOUNTS"
    mounted "$mount"
  done
  for folder in "${FOLDERS[@]}"; do
    case "$folder" in *[,:]*) refuse "$folder: pyxis cannot mount a path with a comma or a colon in it; rename it, or name it by a link that has none" ;; esac
    mounted "$folder"
  done
  step+=(--container-image="$IMAGE" --container-mounts="$inside" --no-container-mount-home --container-workdir="$PWD")
  # What an image has set wins over the host's, but for names given here: those that somebody set for this run.
  handed=$({ compgen -e | grep -xE "$HANDED_OVER"; tr , '\n' <<<"${CONTAINER_ENV:-}"; } | grep . | sort -u | paste -sd,)
  step+=("--container-env=$handed")
  task+=(--inside)
  # srun would look the interpreter up on this host; the image has its own.
  command=(/bin/bash -c 'exec "$@"' task "${command[@]}")
else
  [ -n "${DRY_RUN:-}" ] || command -v "$PYTHON" >/dev/null || refuse "no interpreter $PYTHON on $(hostname); run setup_conda_env.sh, or set PYTHON"
fi

if [ -n "${DRY_RUN:-}" ]; then
  printf '%q ' srun "${step[@]}" "${command[@]}" "${task[@]}" -- "${TRAIN_FLAGS[@]}"
  echo
  exit 0
fi

# --- run it, and stop it when asked ----------------------------------------------------------------------------
# A STOP of this script has a word in it. One from before the job was submitted is another run's;
# a later one holds, also when it comes while the job waits or its image is unpacked.
stop=$RUN_DIR/STOP
ours() { grep -qxE 'USR1|TERM' "$stop" 2>/dev/null; }
if [ -e "$stop" ]; then
  submitted=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.*SubmitTime=\([^ ]*\).*/\1/p')
  old=$([ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || [ "$(stat -c %Y "$stop")" -ge "$(date -d "${submitted:-now}" +%s)" ] || echo old)
  if ours; then old=ours; fi
  rm -f "$stop"
  if [ -z "$old" ]; then
    say "stopped on request before it started: $stop was there; submit the same script again to go on"
    exit 0
  fi
fi
# One line for each start since the job's last checkpoint. Checkpoints in S3 (UNSEEN) cannot be looked at here: then the
# task counts starts, and this script those that end before it: an image that does not unpack, a node without Python.
launches=$RUN_DIR/launches.jsonl starts=$RUN_DIR/logs/starts-$SLURM_JOB_ID
saved() { find "$RUN_DIR/checkpoints" ${WRITTEN[@]+"${WRITTEN[@]}"} -maxdepth 2 -name COMMITTED -newer "$starts" 2>/dev/null | grep -q .; }
if [ -e "$starts" ] && saved; then : >"$starts"; fi
newest=$(sed -n 's/.*"committed_step": \([0-9]*\).*/\1/p' "$launches" 2>/dev/null | tail -n 1)
in_vain=0
while read -r restart committed; do
  [ "$committed" != "${newest:-0}" ] || grep -qF "\"attempt\": \"$SLURM_JOB_ID.$restart." "$launches" 2>/dev/null || in_vain=$((in_vain + 1))
done < <(cat "$starts" 2>/dev/null)
if [ "$in_vain" -ge "${MAX_ATTEMPTS:-3}" ]; then
  say "error: $in_vain starts of job $SLURM_JOB_ID ended before anything of smp-train ran: not trying again; what srun and the nodes said is above. When that is mended, submit the same script again"
  exit 1
fi
echo "${SLURM_RESTART_COUNT:-0} ${newest:-0}" >>"$starts" || refuse "cannot write $starts on $(hostname)"
export SMP_TRAIN_KEEP_STOP=1 # from here on a STOP is meant for this start
# Markers of an earlier run in this folder are told by their text, which has the time.
finished_before=$(cat "$RUN_DIR/DONE" 2>/dev/null)
stopped_before=$(cat "$RUN_DIR/STOPPED" 2>/dev/null)
recorded_before=$(wc -c 2>/dev/null <"$RUN_DIR/metrics.jsonl")
outputs=() said_before=()
while read -r output; do
  outputs+=("$output") said_before+=("$(wc -c 2>/dev/null <"$output")")
done < <(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -nE 's/^ *Std(Out|Err)=//p' | sort -u)
user='' ended=''
# Written here, as a signal may come just before the wait below. What a person asked for stays, and counts for more.
# shellcheck disable=SC2317 # the traps call it
ask() {
  [ -z "$ended" ] || return 0
  if [ -e "$stop" ] && ! ours; then user=yes; else echo "$asked" >"$stop"; fi
}
trap 'asked=USR1; ask' USR1 # time is up, or the job gives way to another: stop, save, go on later
trap 'asked=${asked:-TERM}; ask' TERM
# ^C of a person who runs this in an allocation: save and stop; ^C again ends the step.
trap '[ -z "$user" ] || kill "$srun_pid"; user=yes; [ -e "$stop" ] || : >"$stop"' INT
[ -z "$asked" ] || ask
say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), nodes $SLURM_JOB_NODELIST, run folder $RUN_DIR; to stop and save: touch $stop"
srun "${step[@]}" "${command[@]}" "${task[@]}" -- "${TRAIN_FLAGS[@]}" &
srun_pid=$!
while :; do
  wait "$srun_pid"
  code=$?
  kill -0 "$srun_pid" 2>/dev/null || break # else a signal ended the wait, not the step
done
ended=yes
if ours; then rm -f "$stop"; fi

# --- how it ended: by what the run left behind; srun returns 0 also for a node that died ---------------------
# new MARKER BEFORE: whether this start wrote DONE or STOPPED.
new() { local text; text=$(cat "$RUN_DIR/$1" 2>/dev/null); [ -n "$text" ] && [ "$text" != "$2" ]; }
if new DONE "$finished_before"; then
  say "finished: $RUN_DIR/DONE"
  exit 0
fi
if { [ -z "$asked" ] || [ -n "$user" ]; } && new STOPPED "$stopped_before"; then
  say "stopped on request and saved: $RUN_DIR/STOPPED; submit the same script again to go on"
  exit 0
fi
# Auto-resume runs several steps in one start; the last of them tells how it ended.
attempts=$RUN_DIR/logs/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0} last=-1
for folder in "$attempts".*; do
  if [ -d "$folder" ] && [ "${folder##*.}" -gt "$last" ]; then last=${folder##*.}; fi
done
# The guard's word counts before all others. Ranks that lost touch with another one, or that NCCL aborted for it, say
# nothing of why: theirs counts where there is no other, and then those matter that have left none.
failures=$(for file in "$attempts.$last"/failed-*; do
  [ -e "$file" ] || continue
  line=$(cat "$file")
  case "$line" in *cause=crash-loop) order=0 ;; *cause=lost-peer | *cause=aborted) order=2 ;; *) order=1 ;; esac
  printf '%s %s %s\n' "$order" "${file##*/}" "$line"
done | sort | cut -d' ' -f3-)
first=$(head -n 1 <<<"$failures")
# A node that lacks the shared file system leaves no file on it, and may not even have started the task: its own words and
# srun's are in the output of this job. What this host has and a node has not is the node's fault; what this host lacks as
# well, or any other end, may be of all. A run that was asked to stop has not failed, whatever an earlier step of it has.
if [ -z "$first" ] && [ -z "$asked" ]; then
  told=$(for i in ${outputs[@]+"${!outputs[@]}"}; do tail -c "+$((${said_before[i]:-0} + 1))" "${outputs[i]}" 2>/dev/null; done)
  first=$(grep -o 'LAUNCH-FAIL node=.*' <<<"$told" | grep -vxF "$(cat "$attempts".*/failed-* 2>/dev/null)" | head -n 1)
  if [ -z "$first" ]; then
    ends=$(sed -nE 's/.*srun: error: ([^ ,[]+): task [0-9]+: Exited with exit code ([0-9]+).*/node=\1 rank=-1 rc=\2/p' <<<"$told")
    first=$(head -n 1 <<<"$ends") cause=error
    if grep -qE "execve\(\)|No module named '?smp_train|pyxis: .*(No such file|does not exist)" <<<"$told" &&
      ! grep -qxF "node=${SLURMD_NODENAME:-$(hostname -s)} rank=-1 rc=${first##*=}" <<<"$ends"; then cause=node; fi
    first=${first:+LAUNCH-FAIL $first cause=$cause}
  fi
fi
silent='' down=''
case "$first" in
  *cause=lost-peer | *cause=aborted)
    heard=$(sed -n 's/.* node=\([^ ]*\) .*/\1/p' <<<"$failures")
    silent=$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null | grep -vxF "$heard")
    # More of them than have spoken: those that srun ended before they could.
    if [ "$(wc -l <<<"$silent")" -gt "$(wc -l <<<"$heard")" ]; then silent=''; fi
    silent=$(paste -sd, <<<"$silent")
    down=$(sinfo --noheader --Node --nodes "$SLURM_JOB_NODELIST" --format '%N %T' 2>/dev/null | awk '$2 ~ /down|fail|[*]$/ {print $1}' | sort -u | paste -sd,) ;;
esac
[ -z "$first" ] || say "first failure of this start: $first${silent:+; no word from $silent}${down:+; Slurm has lost $down}"
# A mistake shows at the first start, before its first step; later the same words mean a disk, a network, another node.
again=yes
case "$first" in
  *cause=crash-loop) again= ;;
  *cause=configuration | *cause=data | *cause=checkpoint)
    [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || tail -c "+$((${recorded_before:-0} + 1))" "$RUN_DIR/metrics.jsonl" 2>/dev/null | grep -q '"loss"' || again= ;;
esac
if [ -z "$again" ]; then
  say "error: this would fail again in the same way: not starting it again; logs: $attempts.*"
  code=${first##*rc=}
  exit "${code%% *}"
fi
state=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p')
if [ "$asked" = TERM ] && [ "$state" != RUNNING ]; then
  sed -i '$d' "$starts" # no fault of the run's: it does not count, here and in the task
  [ ! -d "$attempts.$last" ] || touch "$attempts.$last/ended-by-slurm"
  say "ended by Slurm ($state): it starts the job again when it lost a node; otherwise submit the same script again to go on"
  exit 143
fi

# exclude NODES: keep the job off bad nodes as long as enough others are left for it.
exclude() {
  local job before left
  job=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null)
  if grep -qE '(ReqNodeList|Features|Reservation)=[^( ]' <<<"$job"; then
    say "warning: the job may run on certain nodes only, and $1 is not left out; replace or reboot it"
    return 0
  fi
  before=$(sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1/p' <<<"$job" | grep -vx '(null)')
  left=$(sinfo --noheader --Node --partition "${SLURM_JOB_PARTITION:-}" --responding --states idle,alloc,mix,comp --format %N | sort -u |
    grep -cvxF "$(scontrol show hostnames "$1${before:+,$before}")")
  if [ "$left" -lt "${SLURM_JOB_NUM_NODES:-1}" ]; then
    say "warning: no other node can take the place of $1; replace or reboot it"
  elif scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=${before:+$before,}$1"; then
    say "the job stays off $1 from now on"
  fi
}

if saved || { [ -n "$asked" ] && new STOPPED "$stopped_before"; }; then
  : >"$starts"
elif [ "$(wc -l <"$starts")" -ge "${MAX_ATTEMPTS:-3}" ] && [ -z "${UNSEEN:-}" ]; then
  say "error: $(wc -l <"$starts") starts of job $SLURM_JOB_ID brought no new checkpoint: not trying again; logs: $attempts.*. Lower --checkpoint_freq if they needed longer"
  exit 1
fi
say "not finished (${asked:+asked to stop by $asked; }srun returned $code): putting the job back into the queue"
trap 'gone=yes' TERM # Slurm ends this script, and all it runs, as it takes the job back
if (trap '' TERM; exec scontrol requeue "$SLURM_JOB_ID"); then
  case "$first" in *cause=node) (trap '' TERM; bad=${first#*node=}; exclude "${bad%% *}") ;; esac
  [ -n "${gone:-}" ] || { sleep 60 & wait $!; }
  exit 143
fi
say "error: the job could not be requeued (is it submitted with --requeue, and does the cluster allow it?); submit the same script again to go on"
exit 1
