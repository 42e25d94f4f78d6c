#!/usr/bin/env bash
# The whole check: lint, format, types, import rules, tests. Makes its own venv. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
seko_make_venv dev
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the models are tiny: on a busy machine spinning threads stall each other
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
"$(dirname "$PYTHON")/lint-imports" --no-cache
# Two processes, as the tests use one core each; a file's tests stay together, so that its artifacts are built once.
"$PYTHON" -m pytest -n "${SEKO_TEST_PROCESSES:-2}" --dist loadfile --durations 25 "$@"
