"""The shapes that peers and engines are measured at, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.wan.presets import PRESETS


@dataclass(frozen=True)
class Shape:
    """One shape.

    Parameters
    ----------
    name : str
        ``S1`` to ``S6``; ``S0`` is tiny, and runs on a CPU.
    model, stream
        Dimensions and layout, one row.
    preset : str
        The model's name at `seko-export build`.
    """

    name: str
    model: ModelConfig
    stream: StreamConfig
    preset: str

    @property
    def text(self) -> str:
        """What rows of figures call it."""
        s = self.stream
        sink = f", sink {s.sink_frames}" if s.sink_frames else ""
        return (
            f"{self.name}: {self.model.name}, {s.height}x{s.width}, chunk {s.chunk_frames}{sink}, "
            f"ring {s.ring_frames}"
        )

    @property
    def layout(self) -> dict[str, int]:
        """The stream as options of `seko-export build`."""
        s = self.stream
        fields = ("height", "width", "chunk_frames", "sink_frames", "ring_frames")
        return {name.replace("_", "-"): getattr(s, name) for name in fields}

    @property
    def wrapped_chunk(self) -> int:
        """Number of the first chunk that evicts a frame; it and those after it see a full cache."""
        return -(-self.stream.cache_frames // self.stream.chunk_frames)

    def config(self, device: str, *, batch: int = 1) -> VideoBuild:
        """Return the exact build at this shape."""
        scheme = "bf16" if device == "cuda" else "fp32"
        return VideoBuild(
            self.model,
            VideoConfig(replace(self.stream, batch=batch), Schedule.warped(), scheme),
            TargetConfig(device),
        )


def _shape(name: str, preset: str, height: int, width: int, chunk: int, sink: int, ring: int) -> Shape:
    stride = PRESETS[preset].stream.spatial_stride
    stream = StreamConfig(height, width, chunk, sink, ring, spatial_stride=stride)
    return Shape(name, PRESETS[preset].model, stream, preset)


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (  # height, width, chunk, sink, ring
        _shape("S1", "self-forcing-1.3b", 480, 832, 3, 0, 21),
        _shape("S3", "self-forcing-1.3b", 320, 576, 3, 0, 12),
        _shape("S5", "wan-14b", 480, 832, 3, 0, 21),
        _shape("S6", "wan-5b", 704, 1280, 8, 8, 24),
        _shape("S0", "tiny", 64, 96, 3, 1, 6),  # to try the script; says nothing of speed
    )
}
