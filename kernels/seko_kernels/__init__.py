"""KV-cache formats, their torch references and their Triton kernels. Import from here."""

from seko_kernels.formats import CacheTensor, ScaleTensor
from seko_kernels.kv_formats import ChannelStatistics, ExactKv, KvFormat
from seko_kernels.kv_schemes import SCHEMES, KvScheme, kv_format
from seko_kernels.lossy_kv import LossyKv, RowLayout
from seko_kernels.ops import nvfp4_expand, nvfp4_expand_keys, nvfp4_write, plain_torch

__all__ = [
    "SCHEMES",
    "CacheTensor",
    "ChannelStatistics",
    "ExactKv",
    "KvFormat",
    "KvScheme",
    "LossyKv",
    "RowLayout",
    "ScaleTensor",
    "kv_format",
    "nvfp4_expand",
    "nvfp4_expand_keys",
    "nvfp4_write",
    "plain_torch",
]
