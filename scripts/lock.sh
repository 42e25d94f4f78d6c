#!/usr/bin/env bash
# Writes scripts/lock.txt: every package of the tested set, as scripts/constraints.txt and the four pyproject.toml give it.
#     bash scripts/lock.sh                             needs uv
# An environment of it, without scripts/venv.sh:
#     uv venv --python 3.11 .venv && uv pip sync scripts/lock.txt
#     SEKO_PYTHON=.venv/bin/python bash scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
wanted=./locked.in # paths in it are relative to it
trap 'rm -f "$wanted"' EXIT
printf -- '-e %s\n' './runtime[video,text]' ./kernels '.[dev,clients]' "./serve[$SEKO_SERVE_EXTRAS]" >"$wanted"
# Without the letters behind a version's plus, by which some indexes tell builds of torch apart.
uv pip compile --quiet --python-version 3.11 --no-annotate --no-header --constraint scripts/constraints.txt "$wanted" |
    sed 's/+[a-z0-9.]*$//' >scripts/lock.new
mv scripts/lock.new scripts/lock.txt
