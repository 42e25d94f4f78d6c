"""The numbers of a video stream that the host keeps (seed, conditioning frames, positions), and a parser of their JSON
form in snapshots."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from seko_runtime.errors import SnapshotError
from seko_runtime.format.json_fields import Fields, as_integer
from seko_runtime.parallel.records import record
from seko_runtime.sessions.row_state import StateForm
from seko_runtime.sessions.snapshot import content_digest
from seko_runtime.video.clocks import Cut, RowClock
from seko_runtime.video.manifest import VideoManifest


@record
@dataclass(frozen=True)
class RowNumbers:
    """The numbers of a video stream that the host keeps: seed, conditioning frames, positions.

    Parameters
    ----------
    seed : int
        Seed of the stream's random noise.
    conditioning_frames : int
        Number of conditioning frames with which the stream began.
    rebuild_due : bool
        Whether the stream's KV cache must be rebuilt before its next chunk.
    clock : RowClock
        The stream's two frame counts and its kept chunks.
    """

    seed: int
    conditioning_frames: int
    rebuild_due: bool
    clock: RowClock


def read_numbers(fields: Fields) -> RowNumbers:
    """Parse the saved numbers of a stream from JSON; SnapshotError or ManifestError if they are invalid."""
    clock = Fields(fields.value("clock"), f"{fields.where}.clock")
    cut = Fields(clock.value("cut"), f"{fields.where}.clock.cut")
    seed = fields.value("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= 1 << 62:
        raise SnapshotError(f"{fields.where}.seed is {str(seed)[:40]}, expected an integer within 62 bits")
    return RowNumbers(
        seed=seed,
        conditioning_frames=fields.integer("conditioning_frames"),
        rebuild_due=fields.flag("rebuild_due", default=False),
        clock=RowClock(
            first=clock.integer("first"),
            slot_first=clock.integer("slot_first"),
            made=clock.integer("made"),
            first_frames=clock.items("first_frames", as_integer),
            cut=Cut(
                jump=cut.integer("jump"),
                due=cut.flag("due", default=False),
                pinned=cut.integer("pinned"),
                ring=cut.items("ring", as_integer),
            ),
        ),
    )


def check_numbers(numbers: RowNumbers, manifest: VideoManifest) -> None:
    """Raise a SnapshotError if the saved numbers are impossible for a stream of this artifact. `RowClocks` checks the
    frame counts of the saved numbers."""
    most = manifest.workload.stream.chunk_frames
    if numbers.conditioning_frames > most:
        raise SnapshotError(
            f"{numbers.conditioning_frames} conditioning frames, expected at most {most}; take another snapshot"
        )
    if numbers.rebuild_due and numbers.clock.made and manifest.no_rebuild:
        raise SnapshotError(
            "its cache is to be rebuilt, which this artifact cannot do; take another snapshot"
        )


def stream_content(manifest: VideoManifest) -> str:
    """Return a SHA-256 over the weights and the layout of the stream, on which a snapshot depends. Builds of the same
    model with other numbers of ranks or sessions have the same digest. The digest is "" if the manifest has no
    hashes."""
    workload = manifest.workload
    layout: list[object] = [asdict(workload.stream), asdict(workload.schedule), workload.kv.scheme]
    if not (manifest.has_context or manifest.pass_caches):  # caches of one layout, with other content
        layout.append("no context pass")
    return content_digest(manifest, layout)


STATE_FORM = StateForm(read_numbers)
