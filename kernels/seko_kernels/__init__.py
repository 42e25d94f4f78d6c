"""Kernels of Seko's engines, as ops: quantised KV caches, attention, convolutions, linear layers, row operations. Each
op has a definition in torch and a kernel in Triton or Gluon. Import public names from `seko_kernels` itself."""

from seko_kernels.formats import NUMBER_FORMATS, CacheTensor, NumberFormat, ScaleTensor
from seko_kernels.kv_formats import ChannelStatistics, ExactKv, KvFormat
from seko_kernels.kv_ops import kv_expand, kv_write
from seko_kernels.kv_schemes import SCHEMES, KvScheme, kv_format
from seko_kernels.lossy_kv import LossyKv, RowLayout
from seko_kernels.ops import plain_torch

__all__ = [
    "NUMBER_FORMATS",
    "SCHEMES",
    "CacheTensor",
    "ChannelStatistics",
    "ExactKv",
    "KvFormat",
    "KvScheme",
    "LossyKv",
    "NumberFormat",
    "RowLayout",
    "ScaleTensor",
    "kv_expand",
    "kv_format",
    "kv_write",
    "plain_torch",
]
