"""The family object of Wan 2.1 and Self-Forcing, which implements `families.base.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seko_export.families.recognition import Recognised
from seko_export.families.wan.keys import KEYS
from seko_export.families.wan.presets import PRESETS
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_export.families.wan_layout.recognise import Seen
from seko_runtime.format.manifest import ControlSpec
from seko_runtime.video.manifest import VideoManifest

if TYPE_CHECKING:
    from torch import Tensor

    from seko_export.config.video import VideoBuild


class WanFamily(WanLayoutFamily):
    """The family of Wan 2.1 text-to-video transformers, made causal as in Self-Forcing."""

    name = "wan"
    presets = PRESETS
    keys = KEYS
    takes_video = True

    def recognised(self, seen: Seen) -> Recognised | None:
        """Return what is known of a model whose input is the noisy latents alone; None for any other."""
        return None if seen.has_condition else seen.wan

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the frames and levels of a recorded chunk's input video, if the build takes one."""
        from seko_export.families.layers.video_in import golden_video

        return golden_video(config, chunk)

    def controls(self, config: VideoBuild, manifest: VideoManifest) -> tuple[ControlSpec, ...]:
        """Return the controls of the build's inputs, the input video among them."""
        from seko_export.families.layers.video_in import video_control

        video = () if config.workload.stream.strength is None else (video_control(config),)
        return (*super().controls(config, manifest), *video)


FAMILY = WanFamily()
