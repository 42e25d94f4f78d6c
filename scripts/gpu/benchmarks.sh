#!/usr/bin/env bash
# The figures that only a GPU gives, on a GPU box with its own torch; each appends its rows to docs/benchmarks/ itself.
#     SEKO_PYTHON=/path/to/python bash scripts/gpu/benchmarks.sh [--prepare] [SECTION...]    without: all, in this order
# --prepare only builds what the sections measure; run the same without it afterwards. While a section measures, nothing
# should be built on its GPU: that has doubled the times of eager models. Three sections build side by side, and those of
# large models one after another behind them: each of a build's workers holds up to 1 GB of GPU memory, and five such
# sections beside each other filled 139 GB.
# Sections of one lane run one after another; lanes are dealt out to the GPUs that there are. SEKO_SECONDS bounds each
# section (default 480). Builds of several lanes at a time want 16 cores a lane: a section that they starve runs out of time.
# peers_vae_fp8, vae_fp8 and vae22_fp8 want fp8 rows of this GPU in tuned_conv.json, which vae_kernels writes.
# serve_s3 counts 3,000 chunks of the viewers that are admitted: at 16 fps 281 s of eight, 563 s of four (SEKO_SECONDS=700).
# Rows of the checkpoints that people stream: vae22 vae22_fp8 fps5 fps5_tiny peers_tiny peers5 abot.
# Logs stand in $SEKO_WORK (default /tmp/seko-bench), its last lines are printed; the exit code counts what failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
lanes=("vae_kernels vae vae_fp8 pipeline" "vae22 vae22_fp8" "fps5 fps5_tiny" "abot" "peers" "peers_tiny" "peers_vae_fp8" "parts" "peers14" "peers5" "threads" "quality" "peers3 kernels" "fit" "fit14" "first_chunk" "step" "lingbot" "lingbot_key" "lingbot_720p" "seko_talk" "voxcpm2_kernels voxcpm2" "serve" "serve_misses" "serve_s3" "serve_key")
prepare=() preparable=" first_chunk vae vae_fp8 pipeline peers peers_tiny peers_vae_fp8 parts peers3 lingbot lingbot_key seko_talk serve serve_misses serve_s3 serve_key " preparable_alone=" vae22 vae22_fp8 fps5 fps5_tiny abot peers5 lingbot_720p "
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
work=${SEKO_WORK:-/tmp/seko-bench} seconds=${SEKO_SECONDS:-480} rows=docs/benchmarks/h200.jsonl
mkdir -p "$work"

limit=(timeout --kill-after=10 "$seconds" "$PYTHON")
bench() { # SCRIPT OPTIONS...: a bench that can build ahead
    "${limit[@]}" "$@" "${prepare[@]}"
}

compare() { # SECTION SHAPE OPTIONS...: peers and engines at one shape
    bench scripts/bench_peers.py --shapes "$2" "${@:3}" --seconds $((seconds - 20)) --work "$work/$1" --rows "$rows"
}

serve_full() { # PARTS OPTIONS...: the server over full-size models; needs starlette, uvicorn, websockets, av, prometheus-client
    bench scripts/bench/serve_full.py --work "$work/serve" --rows "$rows" --parts "$@"
}

section() { # NAME
    case $1 in
    kernels) "${limit[@]}" scripts/bench/kernels.py --seconds $((seconds - 60)) --shapes S1,S5,S3 --admit --rows "$rows" ;;
    peers) compare "$1" S1 --engines exact,fp4,fp4_fp8,fp4_fp8_resident --plot docs/images/peers.png ;;
    peers_tiny) compare "$1" S1 --engines fp4_fp8_resident --peers B3 --extras tiny ;;
    peers_vae_fp8) compare "$1" S1 --engines fp4_fp8_resident --peers B3 --extras e2e,e2e_fp8 ;;
    parts) compare "$1" S1 --engines exact,exact_plain,fp4,fp4_torch,fp4_plain --peers '' --extras '' ;;
    peers3) compare "$1" S3 --engines exact,fp4,fp4_fp8,fp4_fp8_resident --peers B0,B3 ;;
    peers14) compare "$1" S5 --engines fp4_fp8,fp4_fp8_resident --peers B3 --extras '' --chunks 8 ;;
    quality) "${limit[@]}" -m scripts.kv_quality --sample seko_export/sample --rows docs/benchmarks/kv-quality.jsonl \
        --pictures docs/images --prompts 200 --chunks 7,20,100 --batch 200 --device cuda ;;
    peers5) compare "$1" S6 --engines fp4_fp8,fp4_fp8_resident --peers B3 --extras '' --chunks 8 ;;
    vae22) bench scripts/bench/vae.py --vae wan-2.2 --work "$work/vae22" --rows "$rows" ;;
    vae22_fp8) bench scripts/bench/vae.py --vae wan-2.2 --fp8 --work "$work/vae22-fp8" --rows "$rows" ;;
    fps5) bench scripts/bench/pipeline.py --models 5b --chunks 20 --work "$work/pipeline5" --rows "$rows" ;;
    abot) bench scripts/bench/pipeline.py --models abot-480,abot-704 --chunks 20 --work "$work/pipeline_abot" --rows "$rows" ;;
    fps5_tiny) bench scripts/bench/pipeline.py --models 5b-tiny --chunks 20 --work "$work/pipeline5" --rows "$rows" ;;
    pipeline) bench scripts/bench/pipeline.py --models sample,1.3b --work "$work/pipeline" --rows "$rows" ;;
    threads) "${limit[@]}" scripts/bench/thread_soak.py --chunks 20000 --fp4-kv --rows "$rows" ;;
    fit) "${limit[@]}" scripts/bench/sessions_fit.py --preset self-forcing-1.3b --work "$work/fit" --rows "$rows" ;;
    fit14) "${limit[@]}" scripts/bench/sessions_fit.py --preset wan-14b --kv fp4 --work "$work/fit14" --rows "$rows" ;;
    step) "${limit[@]}" scripts/bench/main_job.py --work "$work/step" --rows "$rows" ;;
    vae_fp8) bench scripts/bench/vae.py --fp8 --work "$work/vae-fp8" --rows "$rows" ;;
    vae) bench scripts/bench/vae.py --work "$work/vae" --rows "$rows" ;;
    vae_kernels) "${limit[@]}" scripts/bench/vae_kernels.py --fp8 --seconds $((seconds - 40)) \
        --admit kernels/seko_kernels/tuned_conv.json ;; # before vae, whose engines read the table
    lingbot) bench scripts/bench/lingbot.py --work "$work/lingbot" --rows "$rows" --parts chunk,compiled,share ;;
    lingbot_key) bench scripts/bench/lingbot.py --work "$work/lingbot" --rows "$rows" --parts key ;;
    lingbot_720p) bench scripts/bench/lingbot.py --work "$work/lingbot" --rows "$rows" --parts fits ;;
    seko_talk) bench scripts/bench/seko_talk.py --work "$work/seko-talk" --rows "$rows" ;;
    serve) serve_full s1,s3,encode --misses-of 350 --misses-s3-of 800 ;; # all of these rows in one call, of fewer chunks
    serve_misses) serve_full misses ;;                                   # 480 s of video: SEKO_SECONDS=590
    serve_s3) serve_full s3 ;;
    serve_key) serve_full key ;;
    voxcpm2_kernels) "${limit[@]}" scripts/bench/voxcpm2_kernels.py --parts admit --seconds 170 \
        --admit kernels/seko_kernels/tuned_rows.json ;;
    voxcpm2) "${limit[@]}" scripts/bench/voxcpm2.py --work "$work/voxcpm2" --rows "$rows" ;;
    first_chunk) bench scripts/bench/main_job.py --first-chunk --work "$work/first-chunk" --rows "$rows" ;;
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
