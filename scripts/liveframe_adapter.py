"""An adapter with which liveframe, a harness of others, drives any artifact that keys steer.

    pip install "liveframe[world]==0.3.1"
    SEKO_ARTIFACT=artifacts/quickstart-world liveframe world run scripts/liveframe_adapter.py:SekoWorld --suite smoke

The artifact's controls say which of the harness' actions it has: W S A D to move, L R to turn, U N to look up and down.
It begins with the harness' picture where it takes one, and with its first prompt, or SEKO_PROMPT. liveframe measures
frame counts, latency, stalls and stability. Its figures on control assume a camera over a ground plane.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from liveframe.engine import NativeFrame
from liveframe.world.backend import WorldCapabilities

from seko_runtime import VideoManifest, open_artifact, read_manifest
from seko_runtime.controls import Controls, controls_of

ARTIFACT, PROMPT = (
    "SEKO_ARTIFACT",
    "SEKO_PROMPT",
)  # environment variables: liveframe makes a class without arguments
NOTHING = "0"  # the action of no key
# The labels of keys that mean an action; a car's steering wheel stands for turning.
LABELS: Mapping[str, tuple[str, ...]] = {
    "W": ("Move ahead",),
    "S": ("Move back",),
    "A": ("Move left",),
    "D": ("Move right",),
    "L": ("Look left", "Steer left"),
    "R": ("Look right", "Steer right"),
    "U": ("Look up",),
    "N": ("Look down",),
}


def codes_of(controls: Controls) -> dict[str, str]:
    """Return the key, by `KeyboardEvent.code`, of each of the harness' actions that an artifact's controls have."""
    control = controls.taking("held")
    if control is None:
        raise SystemExit(f"the artifact in {ARTIFACT} takes no keys: expected one with a camera or actions")
    described = {key["label"]: key["codes"][0] for key in control.describe()["keys"]}
    found = {
        action: next((described[label] for label in labels if label in described), None)
        for action, labels in LABELS.items()
    }
    return {action: code for action, code in found.items() if code is not None}


class SekoWorld:
    """An artifact as liveframe's `WorldBackend`: a session a case, a chunk a step.

    Parameters
    ----------
    folder : Path, optional
        The artifact's folder; default: the one that the environment names.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None and ARTIFACT not in os.environ:
            raise SystemExit(f"set {ARTIFACT} to the folder of an artifact")
        self._folder = Path(os.environ[ARTIFACT]) if folder is None else folder
        self._artifact: Any = None
        self._session: Any = None
        self._steps = 0

    @cached_property
    def manifest(self) -> VideoManifest:
        """The artifact's manifest, read without loading it."""
        manifest, _ = read_manifest(self._folder)
        if not isinstance(manifest, VideoManifest) or manifest.workload.video is None:
            raise SystemExit(f"{self._folder} makes no video frames: build it with --vae")
        return manifest

    @cached_property
    def codes(self) -> Mapping[str, str]:
        """The key of each action."""
        return codes_of(controls_of(self.manifest))

    @property
    def capabilities(self) -> WorldCapabilities:
        """What the harness is told before it loads the artifact."""
        video = self.manifest.workload.video
        assert video is not None  # checked with the manifest
        return WorldCapabilities(
            name=self.manifest.name,
            interaction_mode="interactive",
            native_fps=float(self.manifest.workload.stream.fps),
            chunk_frames=video.chunk_frames,
            chunk_frames_first=video.first_frames,
            resolution=(video.height, video.width),
            actions=frozenset((*self.codes, NOTHING)),
        )

    def load(self) -> None:
        """Open the artifact."""
        self._artifact = open_artifact(self._folder)

    def reset(self, image: np.ndarray, prompt: str | None, seed: int) -> None:
        """Begin a stream."""
        if self._session is not None:
            self._session.close()
        workload = self.manifest.workload
        own = workload.viewer.prompts[:1] if workload.viewer is not None else ()
        said = prompt or os.environ.get(PROMPT) or next(iter(own), None)
        asked = [
            picture["field"]
            for control in controls_of(self.manifest).describe().values()
            for picture in control.get("pictures", ())
        ]
        self._session = self._artifact.open_session(
            seed,
            prompt=said if workload.text is not None else None,
            image=image if "image" in asked else None,
        )
        self._steps = 0

    def step(self, actions: Sequence[str]) -> Iterator[NativeFrame]:
        """Hold the keys of some actions, and make a chunk."""
        held = [self.codes[action] for action in actions if action != NOTHING]
        self._session.controls.taking("held").take({"held": held})
        frames = np.ascontiguousarray(self._session.run_chunk().video()[0])  # [n, h, w, 3] uint8
        yield NativeFrame(self._steps, frames, len(frames))
        self._steps += 1

    def run_script(self, script: object) -> NoReturn:
        """Refuse what is for models that are given all actions at once."""
        raise NotImplementedError("an artifact is played step by step")

    def close(self) -> None:
        """Close stream and artifact."""
        for opened in (self._session, self._artifact):
            if opened is not None:
                opened.close()
        self._session = self._artifact = None
