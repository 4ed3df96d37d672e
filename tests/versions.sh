#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The oldest and the newest Python, torch and transformers that pyproject.toml names, each in a fresh environment with the sources and a
# part of the tests. A version that cannot be had here is an error; arguments choose: tests/versions.sh oldest newest
#
#   PYTHON_OLDEST=python3.11 PYTHON_NEWEST=python3.13 TORCH_OLDEST=2.7.0 tests/versions.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON_OLDEST=${PYTHON_OLDEST:-python3.11}
PYTHON_NEWEST=${PYTHON_NEWEST:-python3.13}
TORCH_OLDEST=${TORCH_OLDEST:-2.7.0}
TORCH_NEWEST=${TORCH_NEWEST:-2.13.0}
TRANSFORMERS_OLDEST=${TRANSFORMERS_OLDEST:-5.21.0}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
TESTS=(tests/test_families.py tests/test_spec.py tests/test_hf_signatures.py tests/test_without_press.py tests/test_readme.py tests/test_terminal.py)

run() { # run NAME PYTHON TORCH TRANSFORMERS
    echo "== $1: $("$2" --version), torch $3, transformers $4"
    "$2" -m venv "$WORK/$1"
    local pip=("$WORK/$1/bin/pip" install -q --disable-pip-version-check)
    "${pip[@]}" "torch==$3"
    "${pip[@]}" "torch==$3" "transformers$4" -e '.[eval]' pytest hypothesis
    "$WORK/$1/bin/python" -c 'import sys, torch, transformers; print(sys.version.split()[0], torch.__version__, transformers.__version__)'
    PYTHONPATH=.:eval HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$WORK/$1/bin/python" -m pytest -q -x -p no:cacheprovider "${TESTS[@]}"
    rm -rf "${WORK:?}/$1"
}

[ $# -gt 0 ] || set -- oldest newest
for which in "$@"; do
    case $which in
    oldest) run oldest "$PYTHON_OLDEST" "$TORCH_OLDEST" "==$TRANSFORMERS_OLDEST" ;;
    newest) run newest "$PYTHON_NEWEST" "$TORCH_NEWEST" ">=$TRANSFORMERS_OLDEST,<5.25" ;;
    *) echo "oldest or newest, got $which" && exit 2 ;;
    esac
done
echo "passed"
