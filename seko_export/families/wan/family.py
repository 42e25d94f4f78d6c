"""The family object of Wan 2.1 and Self-Forcing, which implements `families.base.Family`."""

from __future__ import annotations

from seko_export.families.recognition import Recognised
from seko_export.families.wan.keys import KEYS
from seko_export.families.wan.presets import PRESETS
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_export.families.wan_layout.recognise import Seen


class WanFamily(WanLayoutFamily):
    """The family of Wan 2.1 text-to-video transformers, made causal as in Self-Forcing."""

    name = "wan"
    presets = PRESETS
    keys = KEYS

    def recognised(self, seen: Seen) -> Recognised | None:
        """Return what is known of a model whose input is the noisy latents alone; None for any other."""
        return None if seen.has_condition else seen.wan


FAMILY = WanFamily()
