#!/usr/bin/env bash
# The figures that only a GPU gives, on a GPU box with its own torch; each appends its rows to docs/benchmarks/ itself.
#     SEKO_PYTHON=/path/to/python bash scripts/gpu/benchmarks.sh [SECTION...]       without: all, in this order
# Sections of one lane run one after another, since the next one needs what the last one left (peers take the tiles that
# kernels admitted); lanes run side by side where there are several GPUs. SEKO_SECONDS bounds each section (default 480).
# Logs stand in $SEKO_WORK (default /tmp/seko-bench), its last lines are printed; the exit code counts what failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
source scripts/venv.sh
export CXX=${SEKO_CXX:-/usr/bin/g++} PYTHONUNBUFFERED=1
seko_make_venv dev || exit
work=${SEKO_WORK:-/tmp/seko-bench} seconds=${SEKO_SECONDS:-480} rows=docs/benchmarks/h200.jsonl
mkdir -p "$work"
lanes=("kernels peers" "quality" "pipeline stream pool" "step vae layers")
wanted=" ${*:-${lanes[*]}} "
read -ra gpus <<<"$("$PYTHON" -c 'import torch; print(*range(torch.cuda.device_count()))')"
for name in $wanted; do
    [[ " ${lanes[*]} " == *" $name "* ]] || { echo "no section $name: expected some of ${lanes[*]}" >&2 && exit 2; }
done
if [ "${#gpus[@]}" -eq 0 ]; then
    echo "no CUDA device: there is nothing to measure" >&2
    exit 5
fi

limit=(timeout --kill-after=10 "$seconds" "$PYTHON")
section() { # NAME
    case $1 in
    kernels) "${limit[@]}" scripts/bench/kernels.py --seconds $((seconds - 60)) --shapes S1,S5,S3 --admit --rows "$rows" ;;
    peers) "${limit[@]}" scripts/bench_peers.py --shapes S1,S3 --seconds $((seconds - 20)) --work "$work/peers" --rows "$rows" \
        --plot docs/images/peers.png ;;
    quality) "${limit[@]}" -m scripts.kv_quality --sample seko_export/sample --rows docs/benchmarks/kv-quality.jsonl \
        --pictures docs/images --prompts 200 --chunks 7,20,100 --batch 200 --device cuda ;;
    pipeline) "${limit[@]}" scripts/bench/pipeline.py --full --work "$work/pipeline" --rows "$rows" ;;
    stream) "${limit[@]}" scripts/bench/long_stream.py "$work/pipeline/sample" --rows "$rows" --picture docs/images/long-stream.png ;;
    pool) "${limit[@]}" -m seko_export build --fp4-kv --no-text --no-vae --sessions 8 --batch 1,2,4 -o "$work/pool" --force --json &&
        "${limit[@]}" scripts/bench/pool.py "$work/pool" --seconds $((seconds / 4)) --rows "$rows" ;;
    step) "${limit[@]}" scripts/bench/main_job.py --work "$work/step" --rows "$rows" ;;
    vae) "${limit[@]}" scripts/bench/vae.py --work "$work/vae" --rows "$rows" ;;
    layers) "${limit[@]}" scripts/bench/layer_streaming.py --work "$work/layers" --rows "$rows" ;;
    esac
}

lane() { # GPU NAMES...: its sections that are wanted, one after another; returns how many failed
    export CUDA_VISIBLE_DEVICES=$1
    shift
    local name code began failed=0
    for name in "$@"; do
        [[ $wanted == *" $name "* ]] || continue
        began=$SECONDS
        section "$name" >"$work/$name.log" 2>&1
        code=$?
        echo "== $name: exit $code after $((SECONDS - began)) s"
        tail -n 3 "$work/$name.log" | cut -c1-2000
        [ "$code" -eq 0 ] || failed=$((failed + 1))
    done
    return "$failed"
}

failed=0
if [ "${#gpus[@]}" -lt "${#lanes[@]}" ]; then
    read -ra every <<<"${lanes[*]}"
    lane "${gpus[0]}" "${every[@]}" || failed=$?
else
    pids=()
    for i in "${!lanes[@]}"; do
        read -ra names <<<"${lanes[i]}"
        lane "${gpus[i]}" "${names[@]}" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || failed=$((failed + $?))
    done
fi
"$PYTHON" scripts/bench/table.py README.md docs/performance.md docs/sessions.md docs/kv-quality.md
exit "$failed"
