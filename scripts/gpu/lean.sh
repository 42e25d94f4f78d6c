#!/usr/bin/env bash
# What TensorRT's real lean runtime says to what is no plan, on a GPU box that cannot reach a package index.
# Elsewhere: python -m pip download --no-deps -d WHEELS --python-version 3.12 --only-binary :all: tensorrt-lean-cu13-bindings tensorrt-lean-cu13-libs
#            python -m pip wheel --no-deps -w WHEELS tensorrt-lean-cu13
#     SEKO_PYTHON=/path/to/python bash scripts/gpu/lean.sh WHEELS
set -euo pipefail
wheels=$(realpath "$1")
cd "$(dirname "$0")/../.."
source scripts/venv.sh
seko_make_venv dev
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$place" "$wheels"/*.whl
PYTHONPATH="$place:${PYTHONPATH:-}" "$PYTHON" -m pytest -m gpu -rs tests/runtime/test_tensorrt_backend.py
