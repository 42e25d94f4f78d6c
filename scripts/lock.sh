#!/usr/bin/env bash
# Writes scripts/lock.txt: every package of the tested set, as scripts/constraints.txt and the four pyproject.toml give it.
#     bash scripts/lock.sh                             needs uv
# An environment of it, without scripts/venv.sh:
#     uv venv --python 3.11 && uv pip sync --torch-backend cpu scripts/lock.txt
# The set has torch for CPUs: from its own index, or from the folder UV_FIND_LINKS (then without --torch-backend).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
wanted=./locked.in # paths in it are relative to it
trap 'rm -f "$wanted" scripts/lock.new' EXIT
printf -- '-e %s\n' './runtime[video,text]' ./kernels '.[dev,clients]' "./serve[$SEKO_SERVE_EXTRAS]" >"$wanted"
[ -n "${UV_FIND_LINKS:-}" ] || export UV_TORCH_BACKEND=cpu
# Without the letters behind a version's plus, by which some indexes tell builds of torch apart.
uv pip compile --quiet --python-version 3.11 --no-annotate --no-header --constraint scripts/constraints.txt "$wanted" |
    sed 's/+[a-z0-9.]*$//' >scripts/lock.new
mv scripts/lock.new scripts/lock.txt
