"""The options ``--audio`` and ``--mask`` of `run`: voices, pictures that show where each speaker is, and the length of
the run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.cli.conditioning import Conditioning
from seko_runtime.errors import UsageError
from seko_runtime.media_files.pictures import BLACK, load_image
from seko_runtime.media_files.sound import load_sound
from seko_runtime.video.conditioning.speaker_masks import KIND, masks_input, speaker_masks
from seko_runtime.video.conditioning.voice import RATE, AudioWindows
from seko_runtime.video.manifest import VideoManifest


def read_audio(paths: Sequence[Path] | None) -> NDArray[np.float32] | None:
    """Return the voices in sound files, float32 [speakers, N] at 16 kHz. A voice that is shorter than the longest voice
    is followed by silence.

    Raises
    ------
    UsageError, VideoWriterError
        If a sound file cannot be read; see `load_sound`.
    """
    if not paths:
        return None
    voices = [load_sound(path) for path in paths]
    longest = max(map(len, voices))
    return np.stack([np.pad(voice, (0, longest - len(voice))) for voice in voices])


def fit_audio(
    voices: NDArray[np.float32] | None,
    options: argparse.Namespace,
    manifest: VideoManifest,
    files: Mapping[str, NDArray[Any]],
) -> None:
    """Check that the artifact takes these voices as audio. Without ``--chunks`` the length of the voices decides the
    number of chunks, ``options.chunks``.

    Raises
    ------
    UsageError
        If the artifact takes no audio, or another number of speakers; if the artifact takes audio and neither
        ``--audio`` nor an input with audio windows is passed.
    """
    windows = AudioWindows.of(manifest)
    if windows is None:
        if voices is not None:
            raise UsageError(f"--audio: {AudioWindows.missing(manifest)}")
        return
    windows_given = windows.name in files
    if voices is None and not windows_given:
        raise UsageError(
            "this artifact's model needs a voice: give --audio FILE, a wav or another file that PyAV reads"
        )
    if voices is None:
        return
    if windows_given:
        raise UsageError(f"--audio and --input {windows.name} both say what is heard; give one")
    if len(voices) != windows.speakers:
        raise UsageError(
            f"--audio is given {len(voices)} times, this artifact has {windows.speakers} speakers: give one file each"
        )
    latent_frames = windows.latent_frames(voices.shape[1])
    if latent_frames < 1:
        raise UsageError(
            f"--audio holds {voices.shape[1]} samples at {RATE} Hz, less than a video frame: give more"
        )
    options.chunks = options.chunks or -(-latent_frames // windows.chunk_frames)


def read_masks(paths: Sequence[Path] | None) -> list[NDArray[np.uint8]]:
    """Return the mask pictures that ``--mask`` names, as `load_image` reads them."""
    return [load_image(path, "--mask", background=BLACK) for path in paths or ()]


def mask_inputs(
    masks: Sequence[NDArray[np.uint8]], manifest: VideoManifest, files: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the model input that the masks of ``--mask`` become, by name.

    Raises
    ------
    UsageError
        If the artifact takes no masks, or another number or size of masks; if ``--input`` also has masks.
    """
    if not masks:
        return {}
    mask_array, spec = speaker_masks(masks, manifest), masks_input(manifest)
    name = KIND if spec is None else spec.name
    if name in files:
        raise UsageError(f"--mask and --input {name} both say where the speakers are; give one")
    return {name: mask_array}


def as_portrait(
    conditions: Conditioning, options: argparse.Namespace, manifest: VideoManifest
) -> Conditioning:
    """Return the run's conditioning; for a model with audio, the picture of ``--image`` becomes the portrait, which is
    the reference frame.

    Raises
    ------
    UsageError
        If ``--reference`` also names a portrait.
    """
    if (
        options.image is None
        or AudioWindows.of(manifest) is None
        or not manifest.workload.stream.reference_frames
    ):
        return conditions
    if options.reference is not None:
        raise UsageError("--image and --reference are both the portrait of a model that speaks; give one")
    return replace(conditions, image=None, reference=conditions.image, reference_option="image")
