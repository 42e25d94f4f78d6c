#!/usr/bin/env bash
# The check before a commit: lint, format, types, import rules, links of the docs, and the tests that are not marked slow.
# Makes its own venv.
#     bash scripts/test.sh [--smoke | --all] [--coverage] [PYTEST ARGUMENTS...]
#         --smoke      lint and the files in tests/smoke.txt: a minute, without a compiler or the server
#         --all        every test, as CI runs it
#         --coverage   also a line a room: the share of its statements that the tests reached
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
tier=fast
case "${1:-}" in
--smoke | --all)
    tier=${1#--}
    shift
    ;;
esac
if [ "${1:-}" = --coverage ]; then
    mkdir -p out
    rm -f out/coverage
    set -- --cov --cov-append --cov-report= "${@:2}"
fi
seko_make_venv dev
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the models are tiny: on a busy machine spinning threads stall each other
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
if [ "$tier" = smoke ]; then
    mapfile -t files < <(grep -v '^#' tests/smoke.txt)
    exec "$PYTHON" -m pytest -n "${SEKO_TEST_PROCESSES:-2}" --dist loadfile -m "not slow and not quiet and not gpu" \
        "${files[@]}" "$@"
fi
seko_add_serve "$SEKO_SERVE_EXTRAS"
seko_try_extra tensorrt-rtx
seko_try_extra clients
# At home a test skips where a program is missing; CI is to have them all.
if [ "${CI:-}" = true ]; then
    missing=
    for program in g++ chromium-headless-shell nginx redis-server promtool; do
        command -v "$program" >/dev/null || missing="$missing $program"
    done
    if [ -n "$missing" ]; then
        echo "not installed, and CI=true asks for all:$missing" >&2
        exit 5
    fi
fi
# Host code of engines is run a few times here, and optimising it takes a tenth of their compilation.
export AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL=${AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL:-O0}
# Vector code triples what it takes to generate an engine for a CPU, and each new compiler cache tries ten instruction
# sets first. Kernels with vector code are compiled in the slow tier (tests/kernels/conftest.py).
export TORCHINDUCTOR_VEC_ISA_OK=${TORCHINDUCTOR_VEC_ISA_OK:-0}
# Types and import rules take one core for most of a minute, so they are checked beside the tests. What they print comes
# in one piece, behind the tests.
said=$(mktemp)
SEKO_SKIPS=$(mktemp) # a row for each skipped test of the runs below, for one table
export SEKO_SKIPS
SEKO_MADE=$(mktemp -d) # objects that g++ compiled and folders of tests, for all that runs below
export SEKO_MADE PATH=$PWD/tests/support/compiler:$PATH
trap 'rm -rf "$said" "$SEKO_SKIPS" "$SEKO_MADE"' EXIT
{ "$PYTHON" -m mypy && "$(dirname "$PYTHON")/lint-imports" --no-cache && NO_MKDOCS_2_WARNING=1 "$PYTHON" -m mkdocs build --strict --quiet; } >"$said" 2>&1 &
checks=$!
end() { # STATUS OF THE TESTS
    local status=0
    wait "$checks" || status=$?
    cat "$said"
    [ "$status" = 0 ] || echo "mypy, lint-imports or mkdocs failed: see above" >&2
    "$PYTHON" -m tests.support.skips "$SEKO_SKIPS"
    exit $(($1 | status))
}
run() { # PROCESSES PYTEST ARGUMENTS...
    "$PYTHON" -m pytest -n "$1" --dist loadfile --no-loadscope-reorder --durations 25 "${@:2}"
}
# Three processes for two cores, as a test uses one core and some wait for a quarter of a minute; a file's tests stay
# together, so that its artifacts are built once.
# In the order of tests/conftest.py, which puts the longest files first; the plug-in would put them last.
first=0 last=0 quiet=()
if [ "$tier" = fast ]; then
    run "${SEKO_TEST_PROCESSES:-3}" -m "not slow" "$@" || first=$?
    end "$first"
fi
run "${SEKO_TEST_PROCESSES:-3}" -m "not quiet" "$@" || first=$?
# Of the files that have such a test alone: to import all others again would take minutes.
[ $# -gt 0 ] || mapfile -t quiet < <(grep -rlF mark.quiet tests --include 'test_*.py')
run 2 -m quiet "${quiet[@]}" "$@" || last=$?
# 5: the arguments choose no test of this run, but perhaps of the other one.
[ "$first" != 5 ] || end "$last"
[ "$last" != 5 ] || end "$first"
end $((first | last))
