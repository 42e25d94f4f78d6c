#!/usr/bin/env bash
# What only a GPU shows, on a GPU box with its own torch: the tests marked gpu. Further arguments go to pytest.
#     SEKO_PYTHON=/path/to/python bash scripts/gpu/correctness.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/venv.sh
export CXX=${SEKO_CXX:-/usr/bin/g++} PYTHONUNBUFFERED=1 # a compiler that links the system's libstdc++
export AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL=O0 # the builds of these tests are run a few times
seko_make_venv dev
seko_need_gpu test
"$PYTHON" -m seko_export doctor
# By folder: the other tests need packages that a GPU box may lack. What builds comes first. Processes get four cores and a
# GPU each, five at most a GPU, and tests that share a build run in one. No pytest-benchmark: where it is installed, it warns of
# several processes, and warnings are errors.
processes=$(($(nproc) / 4 < 5 * SEKO_GPUS ? $(nproc) / 4 : 5 * SEKO_GPUS))
"$PYTHON" -m pytest -p no:benchmark -p tests.support.dealt_machine -n $((processes > 1 ? processes : 1)) \
    --no-loadscope-reorder -v -m gpu \
    tests/export/test_gpu.py tests/lingbot/test_gpu.py tests/seko_talk/test_gpu.py tests/voxcpm2/test_gpu.py tests/export/test_gpu_offload_cache.py tests/export/test_gpu_offload_weights.py tests/export/test_pool_build.py \
    tests/export/test_worlds_gpu.py tests/export/test_resident_window.py tests/export/test_profiling.py tests/export/test_recording.py \
    tests/export/test_attention_waves.py tests/export/test_sampler.py tests/runtime tests/bench/test_peers.py \
    tests/checkpoints tests/kernels tests/toy_workload "$@"
