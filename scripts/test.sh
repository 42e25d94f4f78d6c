#!/usr/bin/env bash
# The whole check: lint, format, types, import rules, tests. Makes its own venv. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
seko_make_venv dev
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the models of the tests are tiny; two spinning threads on a busy machine are slower
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$(dirname "$PYTHON")/lint-imports" --no-cache
"$PYTHON" -m pytest "$@"
