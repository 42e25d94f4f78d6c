"""Storage formats of KV caches by their command-line names (schemes), and the `KvFormat` for each name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from seko_kernels.errors import KvSchemeError
from seko_kernels.formats import NUMBER_FORMATS
from seko_kernels.kv_formats import EXACT_SCHEMES, ExactKv, KvFormat
from seko_kernels.lossy_kv import LossyKv, RowLayout

SCHEMES = (*EXACT_SCHEMES, *NUMBER_FORMATS)
_SINK = "-sink"


@dataclass(frozen=True)
class KvScheme:
    """A KV scheme: the names of the storage formats of keys and of values.

    Parameters
    ----------
    keys, values : str
        Names of the two storage formats, each one of `SCHEMES`.
    exact_sink : bool
        Whether the sink (the first frames, which stay in the cache) is stored unquantised.

    Raises
    ------
    KvSchemeError
        If there is no scheme of this name, or an exact sink is requested for an exact cache.
    """

    keys: str
    values: str
    exact_sink: bool = False

    def __post_init__(self) -> None:
        for name in (self.keys, self.values):
            if name not in SCHEMES:
                raise KvSchemeError(f"no KV scheme {name!r}; there are {', '.join(SCHEMES)}")
        if self.exact_sink and not {self.keys, self.values} & {*NUMBER_FORMATS}:
            raise KvSchemeError(f"a {self} cache is exact, its sink with it: leave the exact sink out")

    @classmethod
    def parse(cls, text: str) -> KvScheme:
        """Return the scheme that a string such as ``int8-fp4-sink`` names; the inverse of ``str``."""
        keys, *values = scheme_names(text)
        return cls(keys, "-".join(values) or keys, exact_sink=text.endswith(_SINK))

    def __str__(self) -> str:
        both = self.keys if self.keys == self.values else f"{self.keys}-{self.values}"
        return both + _SINK * self.exact_sink


def scheme_names(text: str) -> list[str]:
    """Split the name of a scheme without ``-sink``, such as ``KEYS-VALUES`` or ``BOTH``, into the names of the two
    formats of keys and values. The name of a format may itself contain ``-``."""
    parts, names = text.removesuffix(_SINK).split("-"), []
    while parts:
        known = (count for count in range(len(parts), 1, -1) if "-".join(parts[:count]) in SCHEMES)
        taken = next(known, 1)
        names.append("-".join(parts[:taken]))
        parts = parts[taken:]
    return names


def kv_format(
    scheme: KvScheme | str,
    heads: int,
    head_dim: int,
    exact_dtype: torch.dtype,
    layout: RowLayout | None = None,
    *,
    before_rope: bool = False,
) -> KvFormat:
    """Return the cache format that a scheme names.

    Parameters
    ----------
    scheme : KvScheme or str
        The scheme or its name. One name of `SCHEMES` is for both keys and values. Two names with ``-`` between them, as
        ``"int8-fp4"``, are for keys and for values. A ``"-sink"`` at the end keeps the sink exact.
    heads, head_dim : int
        Number of attention heads, and number of channels of a head.
    exact_dtype : torch.dtype
        The model's compute dtype: bfloat16 on CUDA, float32 on a CPU. An exact scheme must be of this dtype.
    layout : RowLayout, optional
        Layout of a row's cache; needed only for an exact sink.
    before_rope : bool
        Whether exact keys, too, are stored before RoPE.

    Returns
    -------
    KvFormat

    Raises
    ------
    KvSchemeError
        If there is no scheme of this name, an exact scheme is not of the model's dtype, or an exact sink is requested
        without ``layout``.
    KernelsError
        If the format cannot store heads of this number of channels.
    """
    scheme = KvScheme.parse(scheme) if isinstance(scheme, str) else scheme
    for name in (scheme.keys, scheme.values):
        if EXACT_SCHEMES.get(name, exact_dtype) != exact_dtype:
            raise KvSchemeError(
                f"KV scheme {name!r} stores {EXACT_SCHEMES[name]}, but the model computes in {exact_dtype}; "
                f"choose the scheme of that dtype, or one of {', '.join(NUMBER_FORMATS)}"
            )
    keys, values = (NUMBER_FORMATS.get(name) for name in (scheme.keys, scheme.values))
    if keys is None and values is None:
        return ExactKv(heads, head_dim, exact_dtype, before_rope)
    if scheme.exact_sink:
        if layout is None:
            raise KvSchemeError(f"KV scheme {scheme} needs the layout of a row's cache")
        return LossyKv(heads, head_dim, keys, values, exact_dtype, layout, before_rope and keys is None)
    dtype = exact_dtype if None in (keys, values) else None
    return LossyKv(heads, head_dim, keys, values, dtype, before_rope=before_rope and keys is None)
