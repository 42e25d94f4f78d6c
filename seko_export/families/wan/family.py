"""The family object of Wan 2.1 and Self-Forcing, which implements `families.base.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seko_export.checkpoints.sources import OpenedFiles
from seko_export.families.recognition import Recognised
from seko_export.families.wan.keys import KEYS
from seko_export.families.wan.presets import PRESETS
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_export.families.wan_layout.picture_sizes import has_condition
from seko_export.families.wan_layout.recognise import recognise


class WanFamily(WanLayoutFamily):
    """The family of Wan 2.1 text-to-video transformers, made causal as in Self-Forcing."""

    name = "wan"
    presets = PRESETS
    keys = KEYS

    def recognise(
        self, where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None
    ) -> Recognised | None:
        """Return the facts that a checkpoint states about its model. The result is None if the checkpoint is no Wan
        checkpoint, or if the model's input also has a picture's latents besides the noisy latents."""
        recognised = recognise(where, opened, config_json, family=self.name, keys=KEYS)
        if recognised is None or has_condition(
            *(recognised.model[f"{side}_channels"].value for side in ("in", "out"))
        ):
            return None
        return recognised


FAMILY = WanFamily()
