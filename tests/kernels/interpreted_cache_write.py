"""The plugin that writes rows of an exact cache, in Triton's interpreter; test_plugins.py runs it by itself."""

from __future__ import annotations

import pytest
import torch

from seko_kernels import plugins
from seko_kernels.triton.plugin_entries import cache_write_entry


@pytest.mark.parametrize("sizes", [(37, 3, 64, 55), (1, 1, 1, 2), (5, 2, 512, 9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_land_where_they_belong_and_others_stay(
    sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    tokens, heads, dim, places = sizes
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(places, heads, dim, generator=generator).to(dtype)
    x = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
    index = torch.randperm(places, generator=generator)[:tokens]
    plugin = plugins.cache_write()
    shapes = {"x": x.shape, "token_index": index.shape, "cache": cache.shape}
    launch = plugin.launch(shapes, lambda a, b: -(-a // b))
    expected = cache.index_copy(0, index, x)
    cache_write_entry[launch.grid](x, index, cache, *launch.scalars, cache, **plugin.constants(shapes))
    assert torch.equal(cache, expected)
