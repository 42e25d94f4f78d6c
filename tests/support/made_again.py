"""Chunks that fail once behind an engine that has run, and are made again. No tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.goldens.eager import Engine
from seko_export.video.recording import eager_session
from seko_runtime.errors import EngineRunError


def made_again(
    config: VideoBuild,
    weights: Mapping[str, Tensor],
    text: Tensor,
    seed: int,
    *,
    engine: str,
    failing: Collection[int],
) -> list[NDArray[Any]]:
    """Return the first five chunks of a stream; those of the numbers ``failing`` fail once in the named engine, after
    it has written its results."""
    fails = False

    def around(inner: Engine) -> Engine:
        def run(inputs: list[Tensor]) -> Sequence[Tensor]:
            outputs = inner(inputs)
            if fails:
                raise RuntimeError("planted")
            return outputs

        return run

    chunks = []
    with eager_session(config, weights, text, [seed], around={engine: around}) as session:
        for number in range(5):
            if number in failing:
                fails = True
                with pytest.raises(EngineRunError, match="planted"):
                    session.run_chunk()
                fails = False
            chunks.append(np.asarray(session.run_chunk().to_host()))
    return chunks
