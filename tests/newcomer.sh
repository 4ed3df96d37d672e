#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a newcomer meets: the built wheel in fresh environments, used on a PATH without a compiler. Every step prints its time and the
# size of what it made, and fails where it takes much more than it should. Nothing is left behind. Without arguments both parts run:
# `core` without extras, `eval` with the demo.
#
#   PYTHON=python3.13 TORCH=torch==2.13.0 tests/newcomer.sh [core] [eval]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
# Exact, so that pip takes the build that the machine is configured for: one for CPUs, others bring gigabytes of CUDA.
TORCH=${TORCH:-torch==2.13.0}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

step() { # step NAME SECONDS COMMAND...: run a command within a limit; its output is kept for `shows`
    local name=$1 limit=$2 begun
    shift 2
    begun=$(date +%s.%N)
    if ! timeout "$limit" "$@" >"$WORK/output" 2>&1; then
        tail -30 "$WORK/output"
        echo "FAILED: $name (limit $limit s)"
        exit 1
    fi
    printf '%-44s %7.1f s\n' "$name" "$(echo "$(date +%s.%N) $begun" | awk '{print $1 - $2}')"
}
shows() { # shows TEXT: the last step printed this
    grep -qF -- "$1" "$WORK/output" || { cat "$WORK/output"; echo "FAILED: no '$1' in the output"; exit 1; }
}
lacks() { # lacks TEXT: the last step did not print this
    ! grep -qiF -- "$1" "$WORK/output" || { cat "$WORK/output"; echo "FAILED: '$1' in the output"; exit 1; }
}
size() { # size NAME PATH MIB: print a size, and fail above a bound
    local mib
    mib=$(du -sm "$2" | cut -f1)
    printf '%-44s %7d MiB\n' "$1" "$mib"
    [ "$mib" -le "$3" ] || { echo "FAILED: $1 is over $3 MiB"; exit 1; }
}
fresh() { # fresh NAME WHAT SECONDS MIB: a new environment with torch and the wheel, with extras or without
    "$PYTHON" -m venv "$WORK/$1"
    step "install torch ($1)" 900 "$WORK/$1/bin/pip" install -q --disable-pip-version-check "$TORCH"
    step "install kvpress-toolkit$2 ($1)" "$3" "$WORK/$1/bin/pip" install -q --disable-pip-version-check "$WHEEL$2"
    size "environment ($1)" "$WORK/$1" "$4"
}
bare() { # bare NAME COMMAND...: run a program of an environment that sees nothing else of the machine, no compiler either
    local name=$1
    shift
    (cd "$WORK" && env -i HOME="$WORK" PATH="$WORK/$name/bin" LANG=C.UTF-8 HF_HUB_OFFLINE=1 COLUMNS=80 "$@")
}
export -f bare
export WORK

"$PYTHON" --version
step "build the wheel" 900 "$PYTHON" -m pip wheel -q --disable-pip-version-check --no-deps --wheel-dir "$WORK" .
WHEEL=$(echo "$WORK"/kvpress_toolkit-*.whl)
size "wheel" "$WHEEL" 60

without_extras() {
    fresh core "" 600 3000
    for compiler in cc c++ gcc g++ clang clang++; do
        ! (PATH="$WORK/core/bin" && command -v "$compiler") || { echo "FAILED: $compiler is on the PATH"; exit 1; }
    done
    step "kvpress --help" 5 bash -c 'bare core kvpress --help'
    shows "--import"
    step "kvpress list" 5 bash -c 'bare core kvpress list'
    shows "tidal_decode"
    step "kvpress plan" 60 bash -c 'bare core kvpress plan --model reference --context 100000 --memory 100MB'
    shows "the cache and the activations of a pass"
    cat >"$WORK/first.py" <<'PY'
import warnings

warnings.simplefilter("error", RuntimeWarning)
import kvpress

model, tokenizer = kvpress.load_model("reference")
inputs = tokenizer(" The code for tiger is 4837. The old river runs." * 60, return_tensors="pt")
press = kvpress.get_press("expected_attention:0.5,epsilon=0.02 + kivi:bits=4,residual_length=32 + quest:budget=128")
with press(model):
    output = model.generate(**inputs, max_new_tokens=8)
report = kvpress.memory_report(press.last_cache)
print(report)
assert output.shape[1] == inputs["input_ids"].shape[1] + 8
assert report.compression_factor > 3
PY
    step "generate under three presses" 120 bash -c 'bare core python first.py'
    lacks "compil"
    step "compress a text" 120 bash -c 'printf " The code for tiger is 4837. The old river runs.%.0s" {1..40} | bare core kvpress compress \
        --model reference --press frontier:smaller=10 --text - --out text.kv'
    step "ask about it" 120 bash -c 'bare core kvpress ask --model reference --cache text.kv "What is the code for tiger?"'
    shows "4837"
    step "kvpress eval says what it needs" 60 bash -c 'bare core kvpress eval --press none; test $? = 2'
    shows "kvpress-toolkit[eval]"
}

with_eval() {
    fresh eval "[eval]" 900 4000
    step "kvpress eval --help" 15 bash -c 'bare eval kvpress eval --help'
    shows "niah_single"
    step "kvpress demo" 1500 bash -c 'bare eval kvpress demo --out demo'
    shows "By exact answers"
    lacks "compil"
    size "results of the demo" "$WORK/demo" 50
}

[ $# -gt 0 ] || set -- core eval
for part in "$@"; do
    case $part in
    core) without_extras ;;
    eval) with_eval ;;
    *) echo "core or eval, got $part" && exit 2 ;;
    esac
done
echo "passed"
