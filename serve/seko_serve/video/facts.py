"""What an artifact's manifest says about the video sessions of the artifact."""

from __future__ import annotations

from urllib.parse import quote

from seko_runtime import VideoManifest
from seko_runtime.controls import Controls, controls_of
from seko_runtime.video.manifest import Viewer
from seko_serve.errors import ServeError


def video_manifest(manifest: object) -> VideoManifest:
    """Return a served artifact's manifest; ServeError if the artifact makes no video."""
    if isinstance(manifest, VideoManifest):
        return manifest
    raise ServeError("unsupported", "this artifact speaks, and makes no video")


def check_needs_no_video(manifest: VideoManifest) -> None:
    """Raise a ServeError if an artifact turns an input video into another one, which comes into a session
    alone."""
    if manifest.takes_video:
        raise ServeError(
            "unsupported",
            "this artifact turns an input video into another one: open a session and send frames over its socket or by "
            "WHIP",
        )


def described(manifest: VideoManifest) -> dict[str, object]:
    """Return the facts about a video model that a page needs before it opens a session."""
    stream, controls = manifest.workload.stream, controls_of(manifest)
    asked = asked_pictures(controls)
    return {
        "kind": manifest.workload.kind,
        "width": stream.width,
        "height": stream.height,
        "fps": stream.fps,
        "takes": {
            "prompt": manifest.workload.text is not None,
            "keys": controls.taking("held") is not None,
            "image": "no" if "image" not in asked else "required" if asked["image"] else "may",
            "last_image": "last_image" in asked,
            "voice": speakers_of(controls),
            "video": manifest.takes_video,
        },
        "viewer": _viewer_facts(manifest),
        "controls": controls.describe(),
    }


def _viewer_facts(manifest: VideoManifest) -> dict[str, object]:
    """Return the help, prompts and pictures that the artifact brings for a viewer, as far as its model takes them."""
    viewer, takes_text = manifest.workload.viewer or Viewer(), manifest.workload.text is not None
    taken = viewer.pictures if "image" in asked_pictures(controls_of(manifest)) else ()
    return {
        "help": viewer.help,
        "prompts": list(viewer.prompts) if takes_text else [],
        "pictures": [
            {
                "url": f"v1/models/{quote(manifest.name, safe='')}/pictures/{number}",
                "caption": picture.caption,
            }
            for number, picture in enumerate(taken)
        ],
    }


def asked_pictures(controls: Controls) -> dict[str, bool]:
    """Return the fields of a request that take pictures of an artifact's controls, and whether each is required."""
    described = controls.describe().values()
    return {
        asked["field"]: asked["required"] for control in described for asked in control.get("pictures", ())
    }


def speakers_of(controls: Controls) -> int:
    """Return the number of voices that an artifact hears."""
    sounding = controls.sounding()
    return 0 if sounding is None else int(sounding.describe()["sound"]["speakers"])
