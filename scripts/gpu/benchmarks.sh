#!/usr/bin/env bash
# The figures that only a GPU gives, on a GPU box with its own torch: the cases of scripts/bench/cases.py that stand in
# `lanes` below. Rows are appended to the file of docs/benchmarks/ of this GPU.
#     SEKO_PYTHON=/path/to/python bash scripts/gpu/benchmarks.sh [--prepare] [CASE...]    without: all, in this order
# --prepare only builds what the cases measure; run the same without it afterwards. While a case measures, nothing
# should be built on its GPU: that has doubled the times of eager models. Three cases build side by side, and those of
# large models one after another behind them: each of a build's workers holds up to 1 GB of GPU memory, and five such
# cases beside each other filled 139 GB.
# Cases of one lane run one after another; lanes are dealt out to the GPUs that there are. SEKO_SECONDS bounds each
# case (default 480). Builds of several lanes at a time want 16 cores a lane: a case that they starve runs out of time.
# peers_vae_fp8, vae_fp8 and vae22_fp8 want fp8 rows of this GPU in tuned_conv.json, which vae_kernels writes.
# serve_s3 counts 3,000 chunks of the viewers that are admitted: at 16 fps 281 s of eight, 563 s of four
# (SEKO_SECONDS=700); serve_misses watches 480 s of video (SEKO_SECONDS=590).
# Logs stand in $SEKO_WORK (default /tmp/seko-bench), its last lines are printed; the exit code counts what failed.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
lanes=("vae_kernels vae vae_fp8 pipeline" "vae22 vae22_fp8" "fps5 fps5_tiny" "abot" "matrix_game" "minwm" "loops" "v2v video_encode" "worlds_sessions" "peers" "peers_tiny" "peers_vae_fp8" "peers14" "peers5" "real_peers" "threads" "quality" "peers3 kernels" "fit" "fit14" "first_chunk" "lingbot" "lingbot_key" "lingbot_720p" "seko_talk" "voxcpm2_kernels voxcpm2" "serve" "serve_misses" "serve_s3")
prepare=() preparable=" first_chunk vae vae_fp8 pipeline peers peers_tiny peers_vae_fp8 peers3 real_peers lingbot lingbot_key seko_talk serve serve_misses serve_s3 " preparable_alone=" vae22 vae22_fp8 fps5 fps5_tiny abot matrix_game minwm loops v2v worlds_sessions peers5 lingbot_720p "
[ "${1:-}" != --prepare ] || { prepare=(--prepare) && shift; }
wanted=" ${*:-${lanes[*]}} "
for name in $wanted; do
    [[ " ${lanes[*]} " == *" $name "* ]] || { echo "no section $name: expected some of ${lanes[*]}" >&2 && exit 2; }
    [ ${#prepare[@]} -eq 0 ] || [ $# -eq 0 ] || [[ $preparable$preparable_alone == *" $name "* ]] || { echo "section $name builds nothing ahead" >&2 && exit 2; }
done
source scripts/venv.sh
export CXX=${SEKO_CXX:-/usr/bin/g++} PYTHONUNBUFFERED=1
seko_make_venv dev || exit
seko_need_gpu measure || exit
work=${SEKO_WORK:-/tmp/seko-bench} seconds=${SEKO_SECONDS:-480}
mkdir -p "$work"

section() { # CASE: as scripts/bench/cases.py has it; a child that hangs is ended
    timeout --kill-after=10 "$seconds" "$PYTHON" -m scripts.bench "$1" --work "$work" --seconds "$seconds" "${prepare[@]}"
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

failed=0 pids=()
wait_all() { # counts what failed
    for pid in "${pids[@]}"; do
        wait "$pid" || failed=$((failed + $?))
    done
}

build_ahead() { # MOST NAMES...: those that are wanted, at most MOST at a time
    local most=$1
    shift
    pids=()
    for name in "$@"; do
        [[ $wanted == *" $name "* ]] || continue
        [ "$(jobs -rp | wc -l)" -lt "$most" ] || wait -n || true
        lane 0 "$name" &
        pids+=($!)
    done
    wait_all
}

if [ ${#prepare[@]} -gt 0 ]; then
    # shellcheck disable=SC2086 # names without spaces
    build_ahead 3 $preparable
    # shellcheck disable=SC2086
    build_ahead 1 $preparable_alone
    exit "$failed"
fi

dealt=() turn=0 # by GPU, the sections of its lanes
for lane_sections in "${lanes[@]}"; do
    for name in $lane_sections; do
        [[ $wanted == *" $name "* ]] || continue
        dealt[turn++ % SEKO_GPUS]+=" $lane_sections"
        break
    done
done
for i in "${!dealt[@]}"; do
    read -ra names <<<"${dealt[i]}"
    lane "$i" "${names[@]}" &
    pids+=($!)
done
wait_all
"$PYTHON" scripts/bench/table.py
exit "$failed"
