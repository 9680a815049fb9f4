# shellcheck shell=bash
# Sourced where a script's own choices give way to flags after its name, which are in the array EXTRA.

# given NAME [ALIAS ...]: print the values, one per line, that the command line gives to a flag under any of its names;
# 1 for a switch without a value.
given() {
  local names=" $* " word name taking="" found=()
  for word in ${EXTRA[@]+"${EXTRA[@]}"}; do
    if [[ $word != --* ]]; then
      [ -z "$taking" ] || found+=("$word")
      continue
    fi
    name=${word#--} name=${name%%=*} taking=""
    [[ $names == *" ${name//-/_} "* ]] || continue
    taking=yes found=()
    [[ $word != *=* ]] || found=("${word#*=}")
  done
  if [ ${#found[@]} -gt 0 ]; then printf '%s\n' "${found[@]}"; elif [ -n "$taking" ]; then echo 1; fi
}

# shellcheck disable=SC2034 # for the scripts that source this
MODEL_FLAGS=(model hf_model hf_pretrained_model_name_or_dir pretrained_model_name model_name from_scratch)
# shellcheck disable=SC2034
DATA_FLAGS=(use_synthetic_data training_dir train_data data_path dataset_path dataset)
