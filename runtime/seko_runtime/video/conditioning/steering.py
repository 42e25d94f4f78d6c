"""Camera inputs of each chunk from a controller: a keyboard camera or a recorded path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from seko_runtime.arguments import mapping_of
from seko_runtime.errors import UsageError

ResultT = TypeVar("ResultT")


@runtime_checkable
class Camera(Protocol):
    """A controller that supplies the camera inputs of each chunk of one stream, such as `KeyboardCamera` or
    `CameraPath`."""

    def next_chunk(self) -> Mapping[str, object]:
        """Move the camera on by a chunk, and return the chunk's camera inputs by name."""

    def state(self) -> dict[str, Any]:
        """Return the camera controller's state as a JSON value, for `load`."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a camera state that `state` returned."""


def steered(
    run: Callable[[Mapping[str, object] | None], ResultT],
    inputs: Mapping[str, object] | None,
    camera: Camera | None,
) -> ResultT:
    """Make a chunk with the caller's inputs and the camera inputs that ``camera`` gives for the chunk. If the chunk
    fails, the camera keeps its old position.

    Raises
    ------
    UsageError
        If ``camera`` is no camera, or the caller's inputs and the camera have an input in common.
    """
    if camera is None:
        return run(inputs)
    if not isinstance(camera, Camera):
        raise UsageError(
            f"camera is a {type(camera).__name__}, expected a KeyboardCamera or CameraPath; arrays go into inputs"
        )
    before = camera.state()
    try:
        moved = camera.next_chunk()
        by_name = mapping_of(inputs, "inputs")
        if both := sorted(set(moved) & set(by_name)):
            raise UsageError(
                f"found the input {both[0]!r} and a camera, which makes the same input; give one of them"
            )
        return run({**by_name, **moved})
    except BaseException:
        camera.load(before)
        raise
