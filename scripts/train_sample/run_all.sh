#!/usr/bin/env bash
# Trains the whole sample, in calls of at most CALL minutes: call it again until it prints "sample: done".
#   run_all.sh [CALL=9.2] [VAE=5] [DIT=10] [ODE=2.5] [DMD=5]     minutes of this call, and of each stage in all
# Try the chain on a CPU: SEKO_COMPILE= SEKO_TRAIN_OPTIONS="--rehearse --device cpu" run_all.sh 9 0.1 0.1 0.1 0.1
# Runs stand in $SEKO_RUNS. What has to travel between machines is packed into $OUT as STAGE.GROUP.tar (bfloat16: 2 bytes
# a parameter of a finished stage, 6 of an unfinished one; logs apart) after each stage that this call worked on, and is
# taken up again from $SEKO_CARRIED where $SEKO_RUNS does not have that stage. A call that ends dit, makes ode and begins
# dmd writes 8 files: 2 + 2 + 3, and one with all its reports and sheets. No file of tensors is above 16 MiB.
set -euo pipefail
cd "$(dirname "$0")/../.."
call=${1:-9.2} vae=${2:-5} dit=${3:-10} ode=${4:-2.5} dmd=${5:-5}
runs=${SEKO_RUNS:-/tmp/seko-sample} carried=${SEKO_CARRIED:-out/sample-runs} out=${OUT:-out/sample-runs}
python=${SEKO_PYTHON:-python3}
ranks=${SEKO_RANKS:-1} # GPUs of this host to train on, the first of those that are visible
launch=("$python")
if [ "$ranks" -gt 1 ]; then
    launch+=(-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$ranks")
    cores=$(($(nproc) / ranks > 0 ? $(nproc) / ranks : 1)) # torchrun alone would give each rank one
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cores} TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$cores}
fi
read -ra more <<<"${SEKO_TRAIN_OPTIONS:-}" # of every training script
judging=()                                 # of these, what evaluate.py takes, too
for ((i = 0; i < ${#more[@]}; i++)); do
    case ${more[i]} in
    --rehearse | --device=* | --seed=*) judging+=("${more[i]}") ;;
    --device | --seed) judging+=("${more[@]:i:2}") ;;
    esac
done
read -ra compile <<<"${SEKO_COMPILE---compile}" # for the DiT; the VAE trains too shortly for it
read -ra graphs <<<"${SEKO_GRAPHS:-}"           # --graphs, for the teacher and the student
export PYTHONPATH="$PWD:$PWD/runtime:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
deadline=$("$python" -c "import time; print(time.time() + 60 * $call)")
mkdir -p "$runs" "$out"

finished() { # STAGE: its state says so
    [ -f "$runs/$1/state/state.json" ] && grep -q '"finished": true' "$runs/$1/state/state.json"
}
stage() { # STAGE MINUTES SCRIPT OPTIONS...
    local name=$1 minutes=$2 script=$3
    shift 3
    if [ ! -d "$runs/$name" ] && compgen -G "$carried/$name.*.tar" >/dev/null; then
        "$python" -m scripts.train_sample.packing unpack "$runs/$name" "$carried"
    fi
    finished "$name" && return
    local left
    left=$("$python" -c "import time; print(int($deadline - time.time()))")
    if [ "$left" -lt 40 ]; then # less than loading and compiling take
        echo "sample: not finished, call again (next: $name)"
        exit 0
    fi
    "${launch[@]}" -m "scripts.train_sample.$script" --folder "$runs/$name" --minutes "$minutes" --deadline "$deadline" \
        --resume "$@" "${more[@]}" | tee "$runs/$name.json"
    "$python" -m scripts.train_sample.packing pack "$runs/$name" "$out"
    if ! finished "$name"; then
        echo "sample: not finished, call again (next: $name)"
        exit 0
    fi
}
reports=() reported=""
judged() { # NAME OPTIONS...: a report and a sheet, once
    local name=$1 left
    shift
    [ -f "$runs/judge-$name.json" ] && return
    left=$("$python" -c "import time; print(int($deadline - time.time()))")
    if [ "$left" -lt 40 ]; then
        echo "sample: not finished, call again (next: judge $name)"
        exit 0
    fi
    "${launch[@]}" -m scripts.train_sample.evaluate --vae "$runs/vae" --teacher "$runs/dit" \
        --sheet "$runs/sheet-$name.png" "$@" "${judging[@]}" | tee "$runs/judging"
    mv "$runs/judging" "$runs/judge-$name.json"
    reports+=("sheet-$name.png" "judge-$name.json")
    tar -C "$runs" -cf "$out/judge-$name.tar" "${reports[@]}" # with those that this call packed before
    if [ -n "$reported" ]; then rm -f "$out/judge-$reported.tar"; fi
    reported=$name
}

stage vae "$vae" train_vae
stage dit "$dit" train_dit --vae "$runs/vae" "${compile[@]}" "${graphs[@]}"
# What distillation has to reach: guided, many passes.
judged teacher --prompts 64 --chunks 8 --passes 24 --euler --guidance 2.5
stage ode "$ode" distil --method ode --vae "$runs/vae" --teacher "$runs/dit" "${compile[@]}" "${graphs[@]}"
judged ode --prompts 64 --chunks 20 --student "$runs/ode"
stage dmd "$dmd" distil --method dmd --vae "$runs/vae" --teacher "$runs/dit" --begin "$runs/ode" "${compile[@]}" "${graphs[@]}"
judged dmd --prompts 200 --chunks 80 --student "$runs/dmd"
echo "sample: done"
