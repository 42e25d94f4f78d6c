"""C++ source of the plugin that carries kernels into TensorRT plans. A build compiles the source. The package
`seko_kernels.tensorrt` imports nothing."""

from __future__ import annotations

from pathlib import Path

PLUGIN_SOURCE = Path(__file__).with_name("ptx_kernel.cpp")
# name under which the source registers the plugin
PLUGIN_NAMESPACE, PLUGIN_NAME, PLUGIN_VERSION = "seko", "PtxKernel", "2"
