#!/usr/bin/env bash
# What is left to prove of plans of TensorRT for RTX, on a box with such a GPU (RTX 20 to 50; driver 580 or newer):
# builds the sample with an FP4 cache for this GPU, with TensorRT's attention and, where the GPU has fp8 numbers, with
# Seko's 8-bit attention as a plugin; verifies each against goldens recorded on it, makes video, runs the tests marked
# `rtx`, and times chunks beside the AOTInductor engines. Nothing of it has run yet (docs/tensorrt.md).
#     bash scripts/gpu/tensorrt_rtx.sh [FOLDER]        artifacts and figures go there; default a new folder in /tmp
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/venv.sh
seko_make_venv dev
seko_need_gpu prove
[ -n "${SEKO_PYTHON:-}" ] || "$PYTHON" -m pip install --quiet --constraint .venv/constraints.txt -e '.[tensorrt-rtx]'
work=${1:-$(mktemp -d /tmp/seko-rtx.XXXXXX)}
mkdir -p "$work"
failed=0
step() { # a command; one that fails is told, and the rest is tried all the same
    "$@" && return
    echo "failed with $?: $*" >&2
    failed=$((failed + 1))
}
builds=("tensorrt-rtx,torch" "aoti,torch")
fp8=$("$PYTHON" -c 'import torch; print(int(torch.cuda.get_device_capability() >= (8, 9)))')
[ "$fp8" = 0 ] || builds+=("tensorrt-rtx,fp8" "aoti,fp8")
for build in "${builds[@]}"; do
    # `build` records goldens on this GPU and verifies with the runtime alone; it ends with 6 where numbers differ.
    step "$PYTHON" -m seko_export build --preset sample --fp4-kv --backend "${build%,*}" --attention "${build#*,}" \
        --target auto -o "$work/$build" --force
    [ -e "$work/$build" ] || continue
    step "$PYTHON" -m seko_runtime verify "$work/$build"
    step "$PYTHON" -m seko_runtime run "$work/$build" --seed 3 --chunks 12 -o "$work/$build.y4m"
    step "$PYTHON" -m seko_export bench "$work/$build" --json >"$work/$build.json"
    cat "$work/$build.json"
done
step "$PYTHON" -m pytest -q -m rtx -rs tests/tensorrt_plans
echo "artifacts, videos and figures: $work; steps that failed: $failed"
exit "$((failed > 0))"
