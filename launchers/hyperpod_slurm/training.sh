# shellcheck shell=bash
# Sourced by the sbatch scripts of this folder and by ../kubernetes/launch_eks.sh: variables of the environment to training
# flags. Every one has a default, and what follows the script's name on the command line is added to the flags and wins.
#
#   model_type=llama_v2 model_size=70b     a preset (`smp-train train --help`)
#   use_synthetic_data=1                   random tokens; 0 as soon as TRAINING_DIR is set
#   TRAINING_DIR= TEST_DIR=                folders of .json or .json.gz shards (data/README.md)
#   RUN_DIR=runs/<model>                   run.json, metrics, logs, DONE; below the folder you submit from
#   CHECKPOINT_DIR=$RUN_DIR/checkpoints    written there, and resumed from there
#   shard_degree=                          processes that share one copy of the model; all of them when empty
#   NPROC=auto                             processes on each node: one per GPU, or one
#   INSTANCE_TYPE=                         such as p5.48xlarge: each node is checked against the table
#   PREFLIGHT=                             such as 180: before training, all nodes reach each other within so many seconds,
#                                          or those that do not are named
#   PROFILE=                               torch or nsys
#   MAX_ATTEMPTS=3                         starts without a new checkpoint before giving up
#   CONTAINER_ENV=                         further variables, separated by commas, whose values here beat those of the image,
#                                          as those of AWS, EFA, NCCL, torch and Hugging Face that are set do anyway
#   FSX_MOUNT=/fsx                         mounted into the container where it exists; several are separated by commas
#   DRY_RUN=                               1: as --dry_run after the script's name

# shellcheck disable=SC2034 # batch.sh reads what is set here
CODE_DIR=$HYPERPOD_PATH
: "${model_type:=llama_v2}" "${model_size:=70b}" "${shard_degree:=}" "${TRAINING_DIR:=}" "${TEST_DIR:=}"
if [ -n "$TRAINING_DIR" ]; then : "${use_synthetic_data:=0}"; else : "${use_synthetic_data:=1}"; fi

MOUNTS=() FOLDERS=() WRITTEN=()
IFS=, read -ra mounts <<<"${FSX_MOUNT:-/fsx}"
for mount in ${mounts[@]+"${mounts[@]}"}; do
  if [ -e "${mount%%:*}" ]; then MOUNTS+=("$mount")
  elif [ -n "${FSX_MOUNT:-}" ]; then echo "warning: FSX_MOUNT: no $mount on $(hostname): not mounted" >&2; fi
done

# shellcheck source-path=SCRIPTDIR source=../local/given.sh
source "$HYPERPOD_PATH/launchers/local/given.sh"
EXTRA=(${FLAGS[@]+"${FLAGS[@]}"})
case "${DRY_RUN:-}" in '' | 0 | false) DRY_RUN= ;; esac
for word in "$@"; do
  case "$word" in -h | --help)
    # What there is to know is said at the head of the script and of this file.
    for told in "$0" ${FLAGS[@]+"$HYPERPOD_PATH/launchers/local/local.sh"} "$HYPERPOD_PATH/launchers/hyperpod_slurm/training.sh"; do
      sed -n '/^#!/d; /^#SBATCH/d; /^# shellcheck/d; /^[^#]/q; s/^#\( \|$\)//p' "$told"
    done
    echo "training flags: smp-train train --help"
    exit 0 ;;
  esac
  case "$word" in --dry_run | --dry-run) DRY_RUN=1 ;; *) EXTRA+=("$word") ;; esac
done

RUN_DIR=${RUN_DIR:-$(given run_dir)}
if [ -z "$RUN_DIR" ]; then
  type=$(given model_type) size=$(given model_size) hf=$(given hf_model hf_pretrained_model_name_or_dir)
  [ -n "$type$size" ] || size=$model_size
  [ -z "$(given from_scratch)" ] || type=${type:-scratch}
  label=${type:-$model_type}${size:+-${size,,}}
  [ -z "$hf" ] || label=$(basename "$hf")
  name=$(given run_name)
  RUN_DIR=runs/${name:-$label}
fi
case "$RUN_DIR" in /*) ;; *) RUN_DIR=${RUN_ROOT:-$PWD}/$RUN_DIR ;; esac

TRAIN_FLAGS=()
if [ -z "$(given "${MODEL_FLAGS[@]}")" ]; then
  [ -n "$(given model_type)" ] || TRAIN_FLAGS+=(--model_type "$model_type")
  [ -n "$(given model_type model_size)" ] || TRAIN_FLAGS+=(--model_size "$model_size")
fi
if [ -z "$(given "${DATA_FLAGS[@]}")" ]; then
  TRAIN_FLAGS+=(--use_synthetic_data "$use_synthetic_data")
  [ -z "$TRAINING_DIR" ] || TRAIN_FLAGS+=(--training_dir "$TRAINING_DIR")
fi
[ -z "$TEST_DIR" ] || [ -n "$(given test_dir val_data)" ] || TRAIN_FLAGS+=(--test_dir "$TEST_DIR")
[ -z "${CHECKPOINT_DIR:-}" ] || TRAIN_FLAGS+=(--checkpoint_dir "$CHECKPOINT_DIR")
[ -z "$shard_degree" ] || TRAIN_FLAGS+=(--hybrid_shard_degree "$shard_degree")
TRAIN_FLAGS+=("${EXTRA[@]}" --run_dir "$RUN_DIR")

# A container sees what is mounted: folders that flags name too, and those that the run writes, made where they are missing.
while read -r place; do
  if [ ! -e "$place" ] && [[ $place =~ ^(.*):[0-9.eE+-]+$ ]]; then place=${BASH_REMATCH[1]}; fi # the weight of a blend
  case "$place" in *://*) ;; *) [ ! -e "$place" ] || FOLDERS+=("$place") ;; esac
done < <(given "${DATA_FLAGS[@]:1}"; given test_dir val_data; given resume_from_checkpoint ckpt_load_path restart_checkpoint_file
  given hf_model hf_pretrained_model_name_or_dir; given pretrained_model_name; given pretrained_model_weights; given tokenizer
  given config; given smp_config)
while read -r place; do
  case "$place" in '' | *://* | local:*) ;; *) WRITTEN+=("$place") ;; esac
done < <(given checkpoint_dir ckpt_save_path; given data_cache_dir; given tensorboard_dir)
