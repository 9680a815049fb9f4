#!/usr/bin/env bash
# pack.sh [FOLDER [PACKAGE…]]: unpack what a GPU machine without a network lacks beside torch and transformers, for
# Python 3.12 on x86_64 Linux, into FOLDER (default .gpu). There: PYTHONPATH=$PWD/.gpu:$PWD python3 -m smp_train bench gpu …
set -euo pipefail
folder=${1:-.gpu}
packages=(orjson isal pysimdjson tqdm torchao)
[ $# -le 1 ] || packages=("${@:2}")
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$wheels" "${packages[@]}"
mkdir -p "$folder"
for wheel in "$wheels"/*.whl; do python3 -m zipfile -e "$wheel" "$folder"; done
du -sh "$folder"
