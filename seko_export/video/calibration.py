"""Calibration of quantised caches: statistics of keys and values of the unquantised model, and the constants computed
from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.families.layers.rotary import rotate
from seko_kernels.kv_formats import ChannelStatistics, KvFormat
from seko_kernels.scratch import scratch_constants


def layer_constants(config: VideoBuild, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the constants that fused kernels need in addition to the constants of the cache format. The names of these
    constants are ``blocks.{layer}.kv.NAME``.

    Parameters
    ----------
    config : VideoBuild
        The configuration of the build. Without fp8 attention the result has no constants.
    tensors : mapping of str to Tensor
        Weights of the model and the cache format's constants, by name.
    """
    constants: dict[str, Tensor] = {}
    for layer in range(config.model.layers if config.target.attention_kind.past_in_8_bits else 0):
        known = {c.name: tensors[f"blocks.{layer}.kv.{c.name}"].cpu() for c in config.kv.scale_tensors}
        constants |= {f"blocks.{layer}.kv.{n}": t for n, t in scratch_constants(known).items()}
    return constants


def uncalibrated_scales(config: VideoBuild) -> dict[str, Tensor]:
    """Return a cache format's constants for channels whose values are in [-1, 1]. Constants for the range [-1, 1] are
    good enough for random weights only."""
    ones = torch.ones(config.model.heads, config.model.head_dim)
    statistics = ChannelStatistics(-ones, ones, 0 * ones)
    return {
        f"blocks.{layer}.kv.{name}": tensor.clone()
        for layer in range(config.model.layers)
        for name, tensor in config.kv.calibrate(statistics, statistics).items()
    }


@dataclass
class _Sums:
    """Minimum, maximum, sum and count for each channel [H, D] of one layer's keys or values."""

    lowest: Tensor
    highest: Tensor
    total: Tensor  # float64, so that a mean over a million tokens does not depend on their order
    tokens: int = 0

    def add(self, x: Tensor) -> None:
        """Add tokens [T, H, D] to the sums."""
        x = x.float()
        self.lowest = torch.minimum(self.lowest, x.amin(0).cpu()) if self.tokens else x.amin(0).cpu()
        self.highest = torch.maximum(self.highest, x.amax(0).cpu()) if self.tokens else x.amax(0).cpu()
        self.total += x.double().sum(0).cpu()
        self.tokens += len(x)

    @property
    def statistics(self) -> ChannelStatistics:
        """Return the statistics in the form that a cache format takes; zeros if there were no tokens."""
        return ChannelStatistics(self.lowest, self.highest, (self.total / max(1, self.tokens)).float())


class KvStatistics:
    """Statistics of each channel of keys and values for each layer, collected while the exact model runs.

    The statistics contain only keys and values that a chunk's last pass writes for frames of the stream: the context
    pass or, without one, the last denoise pass. Later chunks read no keys and values of other passes, and chunks of
    reference frames may contain padding. If each pass has a cache of
    its own, the statistics contain the keys and values of all passes. If the format stores keys before RoPE, the
    rotation of the recorded keys is undone first.

    Parameters
    ----------
    config : VideoBuild
        The configuration of the build with an exact cache.
    form : KvFormat
        The cache format to calibrate.
    """

    def __init__(self, config: VideoBuild, form: KvFormat) -> None:
        self._config, self._form = config, form
        model = config.model
        shape = (model.heads, model.head_dim)
        self._sums = [
            tuple(
                _Sums(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape, dtype=torch.float64))
                for _ in range(2)
            )
            for _ in range(model.layers)
        ]
        # Frame numbers are negative while reference frames are written, before the first chunk.
        chunks = -(-config.workload.stream.reference_frames // config.workload.stream.chunk_frames)
        self._calls = -chunks * model.layers * config.workload.cache_passes

    def watch(
        self, block: Callable[[list[Tensor]], Sequence[Tensor]], names: Sequence[str]
    ) -> Callable[[list[Tensor]], Sequence[Tensor]]:
        """Wrap an unquantised block engine, whose inputs have these names, to record the keys and values that it
        writes; layers are called in order, pass by pass."""
        stream, schedule = self._config.workload.stream, self._config.workload.schedule
        layers, apart = self._config.model.layers, stream.pass_caches
        first, passes = (schedule.passes_of(chunk) + stream.has_context for chunk in (0, 1))

        def watched(inputs: list[Tensor]) -> Sequence[Tensor]:
            outputs = block(inputs)
            layer, turn = self._calls % layers, self._calls // layers
            last = turn == first - 1 or (turn >= first and (turn - first) % passes == passes - 1)
            self._calls += 1
            if self._calls > 0 and (apart or last):
                self._add(layer, dict(zip(names, inputs, strict=True)))
            return outputs

        return watched

    def calibrate(self) -> dict[str, Tensor]:
        """Return the cache format's constants as weights with the names ``blocks.{layer}.kv.NAME``."""
        return {
            f"blocks.{layer}.kv.{name}": tensor
            for layer, (k, v) in enumerate(self._sums)
            for name, tensor in self._form.calibrate(k.statistics, v.statistics).items()
        }

    def _add(self, layer: int, tensors: dict[str, Tensor]) -> None:
        token_index, cos, sin = (tensors[name] for name in ("token_index", "cos", "sin"))
        # keys or values of the chunk, [B*T, H, D]
        k, v = (tensors[f"caches.{name}"][token_index] for name in ("k", "v"))
        if self._form.keys_before_rope and not self._config.kv.keys_before_rope:
            k = rotate(k.float().unflatten(0, cos.shape[:2]), cos, -sin).flatten(0, 1)
        for sums, x in zip(self._sums[layer], (k, v), strict=True):
            sums.add(x)
