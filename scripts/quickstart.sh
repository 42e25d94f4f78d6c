#!/usr/bin/env bash
# Sentence -> video, on this machine: builds artifacts/quickstart of the sample model once, then replays it with the
# runtime alone into out/quickstart.mp4 (or .y4m where PyAV is missing).
#     bash scripts/quickstart.sh ["a sentence of coloured shapes"]
# Picture and keys -> a walk: the same of the world sample (artifacts/world-sample), into out/world.mp4.
#     bash scripts/quickstart.sh --world [KEYS]      such as w-20,l-30: w s a d move, j l turn, i k zoom
# Either model in a browser: the page at http://127.0.0.1:8000/, until Ctrl-C.
#     bash scripts/quickstart.sh [--world] --serve [ARGUMENTS OF seko-serve...]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
seko_make_venv
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the sample is tiny: on a busy machine spinning threads stall each other
# Vector code triples what it takes to generate an engine for a CPU; without it the replay below takes 7 % more time.
export TORCHINDUCTOR_VEC_ISA_OK=${TORCHINDUCTOR_VEC_ISA_OK:-0}
mkdir -p out
suffix=y4m
"$PYTHON" -c 'import av' 2>/dev/null && suffix=mp4

built() { # ARTIFACT [CHECKPOINT]: builds it, unless it is there and the model has not changed since
    if [ -f "$1/manifest.json" ] && "$PYTHON" -m seko_runtime info "$1" >/dev/null 2>&1 &&
        [ -z "$(find "${2:-seko_export/sample}" -newer "$1/manifest.json" -print -quit)" ]; then
        echo "reusing $1"
    else
        echo "building $1"
        "$PYTHON" -m seko_export build "${@:2}" --fp4-kv -o "$1" --force
    fi
}

model=(artifacts/quickstart)
if [ "${1:-}" = --world ]; then
    model=(artifacts/quickstart-world artifacts/world-sample)
    shift
fi
if [ "${1:-}" = --serve ]; then
    seko_add_serve ""
    built "${model[@]}"
    exec "$PYTHON" -m seko_serve "${model[0]}" "${@:2}"
fi
built "${model[@]}"
if [ ${#model[@]} = 2 ]; then
    run=("out/world.$suffix" --prompts artifacts/world-sample/prompts.json --keys "${1:-w-20,d-20,l-30,i-20,wj-30}")
else
    prompt="a small red disc bouncing and a large blue ring pulsing on a green gradient"
    run=("out/quickstart.$suffix" --prompt "${1:-$prompt}" --chunks 12)
fi
exec "$PYTHON" -m seko_runtime run "${model[0]}" --seed 0 -o "${run[@]}"
