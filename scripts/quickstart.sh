#!/usr/bin/env bash
# Sentence -> video, on this machine: builds artifacts/quickstart of the sample model once, then replays it with the
# runtime alone into out/quickstart.mp4 (or .y4m where PyAV is missing).
#     bash scripts/quickstart.sh ["a sentence of coloured shapes"]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
seko_make_venv
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the sample is tiny: on a busy machine spinning threads stall each other
artifact=artifacts/quickstart
prompt="a small red disc bouncing and a large blue ring pulsing on a green gradient"
if [ -f "$artifact/manifest.json" ] && "$PYTHON" -m seko_runtime info "$artifact" >/dev/null 2>&1; then
    echo "reusing $artifact"
else
    "$PYTHON" -m seko_export build --fp4-kv -o "$artifact" --force
fi
mkdir -p out
suffix=y4m
"$PYTHON" -c 'import av' 2>/dev/null && suffix=mp4
"$PYTHON" -m seko_runtime run "$artifact" --prompt "${1:-$prompt}" --chunks 12 --seed 0 -o "out/quickstart.$suffix"
