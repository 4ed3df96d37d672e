#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The wheel on ARM, on a Debian machine of another kind: Debian's Python for arm64 runs under qemu-user, builds the wheel with the
# cross-compiler, installs it beside torch, and answers with it; no compiler can be found then. It takes about ten minutes, tells
# nothing about speed, and leaves nothing behind but the architecture. Run it as root, after
#
#   apt-get install g++-aarch64-linux-gnu qemu-user && dpkg --add-architecture arm64 && apt-get update
set -euo pipefail
cd "$(dirname "$0")/.."
PIP=${PIP:-.venv/bin/pip}
# The newest whose wheel for ARM does not ask for CUDA.
TORCH=${TORCH:-torch==2.9.1}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

packages="libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1
          libncursesw6 libtinfo6 libreadline8 libdb5.3 libssl3 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib"
mkdir "$WORK/debs" "$WORK/root" "$WORK/tools" "$WORK/site"
# shellcheck disable=SC2086
(cd "$WORK/debs" && apt-get -qq -o APT::Sandbox::User=root download $(printf '%s:arm64 ' $packages))
for package in "$WORK"/debs/*.deb; do dpkg -x "$package" "$WORK/root"; done
"$PIP" -q download --no-deps --dest "$WORK" pip
"$PIP" -q install --target "$WORK/tools" hatchling hatch-vcs packaging
git clone -q . "$WORK/source"

arm() { PYTHONDONTWRITEBYTECODE=1 HOME=$WORK qemu-aarch64 -L "$WORK/root" "$WORK/root/usr/bin/python3.11" "$@"; }

echo "building the wheel"
CXX=aarch64-linux-gnu-g++ PYTHONPATH=$WORK/tools arm - <<PYTHON
from hatchling.builders.wheel import WheelBuilder
print(*WheelBuilder("$WORK/source").build(directory="$WORK", versions=["standard"]))
PYTHON
echo "installing it"
arm "$(ls "$WORK"/pip-*.whl)/pip" install -q --root-user-action ignore --no-warn-script-location --target "$WORK/site" "$TORCH" "$(ls "$WORK"/kvpress_toolkit-*_aarch64.whl)"
echo "answering with it"
CXX=/nonexistent HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=$WORK/site arm -P - <<'PYTHON'
import kvpress
from kvpress.kernels import counters
from kvpress.kernels.cpu import build

print("levels", build.supported_levels(), "best", build.best_level())
model, tokenizer = kvpress.load_model("reference")
text = " The code for tiger is 4471." + " The old river runs near the green hill." * 20 + "\nThe code for tiger is"
ids = tokenizer(text, return_tensors="pt")["input_ids"]
for spec in ("none", "kivi", "snapkv:0.5 + kivi:bits=2", "gear_l", "turboquant", "zipcache", "cq", "quest:budget=64", "xattention"):
    with kvpress.get_press(spec)(model):
        answer = tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :])
    print(f"{spec:28s} {answer}")
    assert answer.strip().startswith("4471"), spec
assert {"packed_decode", "coded_decode", "block_prefill", "tile_mass"} <= set(counters()), counters()
print("compiled kernels ran:", *sorted(counters()))
PYTHON
