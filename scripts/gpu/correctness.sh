#!/usr/bin/env bash
# What only a GPU shows, on a GPU box with its own torch: the tests marked gpu. Further arguments go to pytest.
#     SEKO_PYTHON=/path/to/python bash scripts/gpu/correctness.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/venv.sh
export CXX=${SEKO_CXX:-/usr/bin/g++} PYTHONUNBUFFERED=1 # a compiler that links the system's libstdc++
seko_make_venv dev
"$PYTHON" -m seko_export doctor
# By folder: the other tests need packages that a GPU box may lack. No pytest-benchmark: where it is installed, it warns of
# several processes (-n 8 --dist worksteal), and warnings are errors.
"$PYTHON" -m pytest -p no:benchmark -m gpu tests/runtime tests/kernels tests/checkpoints tests/export/test_gpu.py \
    tests/export/test_attention_waves.py tests/export/test_gpu_stream_cache.py tests/export/test_profiling.py \
    tests/export/test_pool_build.py tests/export/test_resident_window.py \
    tests/train_sample/test_graphs.py tests/bench/test_peers.py "$@"
