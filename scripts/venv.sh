# shellcheck shell=bash
# Sourced by the other scripts: makes .venv with the three distributions, or reuses it. Sets $PYTHON.
# A GPU box that brings its own torch: SEKO_PYTHON=/path/to/python uses that interpreter and installs nothing. A .venv
# that uv made, as scripts/lock.sh says, is used in the same way.
if [ -z "${SEKO_PYTHON:-}" ] && grep -qs '^uv = ' .venv/pyvenv.cfg; then
    SEKO_PYTHON=$PWD/.venv/bin/python
fi

SEKO_SERVE_EXTRAS=otel,ray,realtime,s3,simulate,webrtc # of the server, in the tested set
export SEKO_SERVE_EXTRAS

seko_find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    echo "Python 3.11 or 3.12 was not found; install one of them" >&2
    return 5
}

seko_ticking() { # $1: what is being done; then the command. Says every five seconds for how long it has been at it.
    local what=$1 begun=$SECONDS ticker status=0
    shift
    echo "$what" >&2
    while sleep 5 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do echo "$what, $((SECONDS - begun)) s" >&2; done &
    ticker=$!
    "$@" || status=$?
    kill "$ticker" 2>/dev/null
    wait "$ticker" 2>/dev/null || true
    return "$status"
}

seko_install_torch() { # TORCH==VERSION PIP...: by this pip and its options; without a GPU the build for CPUs
    local torch=$1 install=("${@:2}") index report
    # torch 2.13 requires it, and indexes of torch alone lack it; what follows is built with it.
    "${install[@]}" "setuptools>=77" || return
    # An index that somebody chose is used as it is. The public one has torch for CUDA alone: 2.7 GB to download and 5.5 GB
    # on the disk, which are of no use without a GPU.
    if ! nvidia-smi -L >/dev/null 2>&1 &&
        ! "$PYTHON" -m pip config list | grep -E 'index|find-links' >/dev/null &&
        report=$("${install[@]}" --dry-run --ignore-installed --no-deps --report - "$torch") &&
        grep -E '"(nvidia|cuda)-' >/dev/null <<<"$report"; then
        index=$(sed -n 's/.*--index-url \([^ ]*\).*/\1/p' scripts/container/Dockerfile.cpu)
        seko_ticking "installing $torch for CPUs: no NVIDIA GPU is seen" "${install[@]}" --retries 1 --index-url "$index" "$torch" && return
        echo "torch for CPUs cannot be had from $index; torch for CUDA comes instead, with 2.7 GB. To choose one yourself," \
            "end this, set PIP_EXTRA_INDEX_URL, and start again" >&2
    fi
    seko_ticking "installing $torch" "${install[@]}" "$torch"
}

seko_make_venv() { # $1: the extra to install, "" or "dev"
    # pip compiles nothing below: modules are compiled when they are first imported, once for all processes.
    unset PYTHONDONTWRITEBYTECODE
    if [ -n "${SEKO_PYTHON:-}" ]; then
        PYTHON=$SEKO_PYTHON
        export PYTHONPATH="$PWD:$PWD/runtime:$PWD/kernels:$PWD/serve${PYTHONPATH:+:$PYTHONPATH}"
        return 0
    fi
    PYTHON=$PWD/.venv/bin/python
    local extra=${1:-} stamp wanted
    stamp=.venv/seko-installed-${extra:-base}
    wanted=$(cat pyproject.toml runtime/pyproject.toml kernels/pyproject.toml serve/pyproject.toml scripts/constraints.txt scripts/venv.sh | cksum)
    if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    local base
    base=$(seko_find_python) || return
    [ -x "$PYTHON" ] || seko_ticking "making .venv" "$base" -m venv .venv || return
    local torch install=("$PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile
        --constraint .venv/constraints.txt)
    torch=$(grep '^torch==' scripts/constraints.txt)
    # torch first and alone: the pinned version keeps a range elsewhere from pulling another build of it. The one for CUDA
    # requires a Triton of its own, which stays; the one for CPUs requires none, and the pinned one comes.
    grep -v '^triton==' scripts/constraints.txt >.venv/constraints.txt
    seko_install_torch "$torch" "${install[@]}" || return
    "$PYTHON" -c 'from importlib.metadata import requires; exit(any("triton" in line for line in requires("torch")))' &&
        cp scripts/constraints.txt .venv/constraints.txt
    # Without isolation: setuptools is here, and would be installed again for each of the three.
    seko_ticking "installing seko-runtime, seko-kernels, seko-export and what they need" \
        "${install[@]}" --no-build-isolation -e "./runtime[video,text]" -e ./kernels -e ".${extra:+[$extra]}" || return
    # The speech model, the merge of LoRAs and the tiny decoder that tests compare with. What else their packages require is not called.
    [ "$extra" != dev ] || "${install[@]}" --no-deps voxcpm peft accelerate flashdreams || return
    # Tests take warnings as errors, also those of compiling a library; so all is compiled before, on every core. Some
    # files are templates that no Python compiles.
    [ "$extra" != dev ] || "$PYTHON" -W ignore -m compileall -q -j 0 .venv/lib >/dev/null || true
    echo "$wanted" >"$stamp"
}

seko_add_serve() { # the server's distribution, behind the base environment; $1: extras such as "ray,s3", or nothing
    [ -n "${SEKO_PYTHON:-}" ] && return 0
    local stamp=.venv/seko-installed-serve${1:+-$1} wanted
    wanted=$(cat runtime/pyproject.toml serve/pyproject.toml scripts/constraints.txt | cksum)
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return 0
    seko_ticking "installing seko-serve and what it needs" "$PYTHON" -m pip install --quiet --disable-pip-version-check \
        --constraint .venv/constraints.txt --no-build-isolation -e "./serve${1:+[$1]}" || return
    echo "$wanted" >"$stamp"
}

seko_try_extra() { # $1: an extra that is nice to have; tests that need it skip without
    [ -n "${SEKO_PYTHON:-}" ] && return 0
    local stamp=.venv/seko-tried-$1 wanted
    wanted=$(cat pyproject.toml scripts/constraints.txt | cksum)
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return 0
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --constraint .venv/constraints.txt -e ".[$1]" ||
        echo "the extra $1 cannot be installed here: the tests that need it skip" >&2
    echo "$wanted" >"$stamp"
}

seko_need_gpu() { # $1: what there is nothing to do without one; exports how many there are as $SEKO_GPUS
    SEKO_GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || return
    export SEKO_GPUS
    [ "$SEKO_GPUS" -gt 0 ] && return 0
    echo "no CUDA device: there is nothing to $1" >&2
    return 5
}
