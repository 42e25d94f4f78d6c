#!/usr/bin/env bash
# What several ranks promise, on a box of four GPUs (two show less): pools, faults, padding, groups side by side,
# offloading, families, snapshots, a server. One line a proof; the exit code counts failures. Arguments go to the proofs.
#     SEKO_PYTHON=/path/to/python bash scripts/gpu/ranks_proof.sh [--only NAME] [--kills 50] [--full]
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
source scripts/venv.sh
export CXX=${SEKO_CXX:-/usr/bin/g++} PYTHONUNBUFFERED=1
seko_make_venv dev || exit
seko_need_gpu prove || exit
exec "$PYTHON" -m scripts.rank_proof "$@"
