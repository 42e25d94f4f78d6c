"""An artifact whose engines and weights are loaded in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.memory import Engine, Memory, Tensor
from seko_runtime.executor.resolved import Programs
from seko_runtime.format.manifest import Manifest
from seko_runtime.sessions.rank_place import ALONE, RankPlace

ManifestT = TypeVar("ManifestT", bound=Manifest)


class TokenIds(Protocol):
    """A tokenizer."""

    def ids(self, cleaned: str) -> NDArray[np.int64]:
        """Return the token ids of a text as an int64 array; the workload defines the array's shape."""


@dataclass(frozen=True)
class Loaded(Generic[ManifestT]):
    """A loaded artifact: manifest, engines and weights, from which pools are made.

    Parameters
    ----------
    manifest : Manifest
        The artifact's manifest; its table of files is not used.
    programs : Programs
        The manifest's programs, with every reference to a tensor resolved.
    engines : Mapping[str, Engine]
        The engines by name: callables ``list[tensor] -> list[tensor]``.
    weights : Mapping[str, tensor]
        The weights by name, as tensors on the device; those of `Manifest.host_weights` on the host.
    memory : callable
        Function that returns a new `Memory`, which the caller owns and closes.
    tokens : TokenIds, optional
        The artifact's tokenizer.
    digest : str
        SHA-256 of the manifest's file, hexadecimal.
    rank : RankPlace
        The number of this process among the ranks that run each call together.
    """

    manifest: ManifestT
    programs: Programs
    engines: Mapping[str, Engine]
    weights: Mapping[str, Tensor]
    memory: Callable[[], Memory]
    tokens: TokenIds | None = None
    digest: str = ""
    rank: RankPlace = ALONE
