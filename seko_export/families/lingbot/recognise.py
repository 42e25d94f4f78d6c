"""Recognition of a lingbot-world model by shapes, config.json, and the name of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.sources import OpenedFiles, shown
from seko_export.families.lingbot.keys import KEYS
from seko_export.families.lingbot.model import CONTROLS, PER_CHUNK, LingbotModel
from seko_export.families.lingbot.presets import PRESETS, V1, V2
from seko_export.families.recognition import Fact, Facts, Recognised, Source, stream_facts
from seko_export.families.wan_layout.recognise import recognise as recognise_wan
from seko_export.families.wan_layout.recognise import unused_fields

_VERSIONS = {"lingbot_world_fast": V1, "transformers": V2}  # the authors' folder name for each version
_CONTROL = "control_type"


def recognise(where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None) -> Recognised | None:
    """Return the facts that a file and its config.json state about a lingbot-world model; None if the file holds no
    such model.

    The two versions of lingbot-world-fast have the same shapes. Their config.json differs only in sink and window,
    which a user may also choose. The folder's name distinguishes the versions. Any other folder name counts as the
    second version of lingbot-world, unless --preset names the first.
    """
    wan_model = recognise_wan(where, opened, config_json, family="lingbot", keys=KEYS)
    if wan_model is None:
        return None
    facts = Facts(where, dict(wan_model.model))
    control = None if config_json is None else config_json.get(_CONTROL)
    if control is not None:
        if not isinstance(control, str) or control not in CONTROLS:
            raise NotACheckpointError(
                f"{_CONTROL} in the config.json of {where} is {shown(repr(control))}, expected one of "
                f"{', '.join(CONTROLS)}"
            )
        facts.learn("control_channels", Fact(CONTROLS[control], Source.CONFIG, _CONTROL))
    facts.learn("camera", Fact(PER_CHUNK, Source.FAMILY))
    version, stated = _version(where), {name: fact for name, fact in wan_model.stream.items() if fact.is_read}
    preset = PRESETS[version]
    usual = stream_facts(preset.stream, Source.ASSUMED, version)
    if any(folder in _folders(where) for folder in _VERSIONS):
        usual["chunk_frames"] = Fact(preset.stream.chunk_frames, Source.FAMILY, version)
    return replace(
        wan_model,
        model=facts.known,
        stream=usual | stated,
        schedule=Fact(preset.schedule, Source.ASSUMED, version),
        kind=LingbotModel,
        unused=unused_fields(config_json, window=False),
    )


def _version(where: str) -> str:
    folders = _folders(where)
    return next((version for folder, version in _VERSIONS.items() if folder in folders), V2)


def _folders(where: str) -> set[str]:
    """Return the names of a checkpoint's folder and of its known subfolders."""
    path = Path(where)
    home = path if path.is_dir() else path.parent
    return {home.name, *(name for name in _VERSIONS if path.is_dir() and (path / name).is_dir())}
