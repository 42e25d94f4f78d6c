#!/usr/bin/env bash
# What is left to prove of plans of TensorRT for RTX, on a box with such a GPU (RTX 20 to 50; driver 580 or newer):
# builds the sample with an FP4 cache for this GPU, verifies it against goldens recorded on it, makes video, runs the
# tests marked `rtx`, and measures a step beside the AOTInductor engines. Nothing of it has run yet (docs/tensorrt.md).
#     bash scripts/gpu/tensorrt_rtx.sh [FOLDER]        artifacts and figures go there; default a new folder in /tmp
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/venv.sh
seko_make_venv dev
seko_need_gpu prove
[ -n "${SEKO_PYTHON:-}" ] || "$PYTHON" -m pip install --quiet --constraint scripts/constraints.txt -e '.[tensorrt-rtx]'
work=${1:-$(mktemp -d /tmp/seko-rtx.XXXXXX)}
mkdir -p "$work"
for backend in tensorrt-rtx aoti; do
    # `build` records goldens on this GPU and verifies with the runtime alone; it ends with 6 where numbers differ.
    "$PYTHON" -m seko_export build --preset sample --fp4-kv --backend "$backend" --target auto -o "$work/$backend" --force
    "$PYTHON" -m seko_runtime verify "$work/$backend"
done
"$PYTHON" -m pytest -q -m rtx -rs tests/tensorrt_plans
for backend in tensorrt-rtx aoti; do
    "$PYTHON" -m seko_runtime run "$work/$backend" --seed 3 --chunks 12 -o "$work/$backend.y4m" --json | tee "$work/$backend.json"
done
echo "artifacts, videos and figures: $work"
