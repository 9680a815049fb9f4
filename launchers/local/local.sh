# shellcheck shell=bash
# Sourced by the scripts of this folder and by hyperpod_slurm/launch_slurm.sh: variables of the environment to training flags.
#
#   USE_HF_MODEL=true HF_MODEL=meta-llama/Llama-2-7b-hf     a Hugging Face model, with its weights; or
#   USE_HF_MODEL=false MODEL_SIZE=7B                        a model from scratch: 350M 1B 3B 7B 13B 30B 70B
#   BATCH_SIZE=4 GRAD_ACCUM_STEPS=1                         per process
#   TRAINING_DIR= TEST_DIR=                                 folders of shards; random tokens without them

: "${USE_HF_MODEL:=false}" "${HF_MODEL:=meta-llama/Llama-2-7b-hf}" "${MODEL_SIZE:=7B}" "${BATCH_SIZE:=4}"
: "${GRAD_ACCUM_STEPS:=1}" "${TRAINING_DIR:=}" "${TEST_DIR:=}"
# shellcheck disable=SC2034 # given reads it
EXTRA=("$@")
# shellcheck source-path=SCRIPTDIR source=given.sh
source "$(dirname "${BASH_SOURCE[0]}")/given.sh"

FLAGS=()
[ -n "$(given batch_size train_batch_size)" ] || FLAGS+=(--batch-size "$BATCH_SIZE")
[ -n "$(given grad_accum_steps gradient_accumulation_steps)" ] || FLAGS+=(--grad-accum-steps "$GRAD_ACCUM_STEPS")
if [ -z "$(given "${MODEL_FLAGS[@]}" model_type)" ]; then
  if [ "$USE_HF_MODEL" = true ]; then FLAGS+=(--hf-model "$HF_MODEL"); else FLAGS+=(--from-scratch --model-size "$MODEL_SIZE"); fi
fi
if [ -z "$(given "${DATA_FLAGS[@]}")" ]; then
  if [ -n "$TRAINING_DIR" ]; then FLAGS+=(--training_dir "$TRAINING_DIR"); else FLAGS+=(--use_synthetic_data 1); fi
fi
[ -z "$TEST_DIR" ] || [ -n "$(given test_dir val_data)" ] || FLAGS+=(--test_dir "$TEST_DIR")
