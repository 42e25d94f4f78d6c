#!/usr/bin/env bash
# Checkpoint -> artifact -> video, on this machine: builds artifacts/quickstart once, then replays it with the
# runtime alone into out/quickstart.mp4 (or .y4m where PyAV is missing).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
seko_make_venv
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the sample is tiny: on a busy machine spinning threads stall each other
artifact=artifacts/quickstart
if [ -f "$artifact/manifest.json" ] && "$PYTHON" -m seko_runtime info "$artifact" >/dev/null 2>&1; then
    echo "reusing $artifact"
else
    "$PYTHON" -m seko_export build --fp4-kv -o "$artifact" --force
fi
mkdir -p out
suffix=y4m
"$PYTHON" -c 'import av' 2>/dev/null && suffix=mp4
"$PYTHON" -m seko_runtime run "$artifact" --chunks 12 --seed 0 -o "out/quickstart.$suffix"
