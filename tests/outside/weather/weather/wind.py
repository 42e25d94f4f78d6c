"""The control: held keys add up to a wind, which blows through the next chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.controls import Control, Event
from seko_runtime.controls.base import ControlOption, one_of, parameters_of
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import ControlSpec, InputSpec


@dataclass(frozen=True)
class WindParameters:
    """The wind [east, south] of each key, by `KeyboardEvent.code`."""

    keys: Mapping[str, tuple[float, ...]]


class Wind(Control):
    """A wind that a person holds keys for, or sets."""

    kind = "wind"
    options = (ControlOption("--wind", "EAST,SOUTH", "the wind that blows", "Weather"),)

    def __init__(self, spec: ControlSpec, inputs: Mapping[str, InputSpec]) -> None:
        super().__init__(spec, inputs)
        self._keys = parameters_of(WindParameters, spec).keys
        self.reset()

    def describe(self) -> dict[str, Any]:
        """Return the events, and the keys as a page draws them."""
        names = {"type": "array", "items": {"type": "string"}}
        pair = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
        keys = [
            {
                "pad": "wind",
                "face": code.removeprefix("Key"),
                "label": f"wind {east:g}, {south:g}",
                "codes": [code],
            }
            for code, (east, south) in sorted(self._keys.items(), key=lambda key: (key[1][1] >= 0, key[1][0]))
        ]  # a page puts the first one above the others
        return {"events": {"held": {"held": names}, "wind": {"wind": pair}}, "keys": keys}

    def check(self, event: Event) -> Event:
        """Return an event: ``held``, a list of keys, or ``wind``, [east, south]."""
        which, values = one_of(event, {"held": (), "wind": ()}, "a wind")
        if which == "held":
            return {"held": [code for code in values["held"] if code in self._keys]}
        try:
            east, south = map(float, values["wind"])
        except (TypeError, ValueError):
            raise UsageError(f"wind is {values['wind']!r}, expected two numbers: east, south") from None
        return {"wind": [east, south]}

    def _apply(self, event: Event) -> None:
        winds = [event["wind"]] if "wind" in event else [self._keys[code] for code in event["held"]]
        self._blows, self._active = np.sum(winds, 0, np.float32) + np.zeros(2, np.float32), True

    @property
    def active(self) -> bool:
        """Whether somebody has let it blow."""
        return self._active

    def next_chunk(self) -> Mapping[str, NDArray[np.float32]]:
        """Return the wind of each latent frame of the chunk, [F, 2]."""
        if not self._active:
            return {}
        spec = self.inputs["wind"]
        return {spec.name: np.broadcast_to(self._blows, spec.shape).copy()}

    def reset(self) -> None:
        """Return to still air; who steers, goes on steering."""
        self._active = getattr(self, "_active", False)
        self._blows = np.zeros(2, np.float32)

    def state(self) -> dict[str, Any]:
        """Return the wind as a JSON value."""
        return {"blows": self._blows.tolist(), "active": self._active}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue with a wind that `state` returned."""
        self._blows, self._active = np.array(state["blows"], np.float32), bool(state["active"])

    @classmethod
    def events_of(cls, given: Mapping[str, Any]) -> list[Event]:
        """Return the event that ``--wind`` says."""
        return [{"wind": given["--wind"].split(",")}] if given.get("--wind") else []
