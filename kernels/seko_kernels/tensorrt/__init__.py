"""The C++ plugin that carries kernels into TensorRT's plans: its source, compiled by the build. The package of the
plugin's source imports nothing."""

from __future__ import annotations

from pathlib import Path

PLUGIN_SOURCE = Path(__file__).with_name("ptx_kernel.cpp")
# name under which the source registers the plugin
PLUGIN_NAMESPACE, PLUGIN_NAME, PLUGIN_VERSION = "seko", "PtxKernel", "2"
