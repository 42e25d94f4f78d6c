"""The numbers of a speech session that the host keeps, as JSON in snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from seko_runtime.errors import SnapshotError
from seko_runtime.format.json_fields import Fields, as_number
from seko_runtime.format.manifest import MAX_SEED
from seko_runtime.sessions.row_state import StateForm
from seko_runtime.speech.manifest import MAX_GUIDANCE, MAX_TEMPERATURE, SpeechManifest


@dataclass(frozen=True)
class RowNumbers:
    """The numbers of a speech session that the host keeps.

    Parameters
    ----------
    positions : int
        Number of places that the session has in each cache.
    filled : int
        Number of filled places, which is the session's next position.
    pending : int
        Number of tokens of the session's prompt over which the model has not run yet.
    patches : int
        Number of patches that were made of the present text.
    limit : int
        Number of patches after which the text ends, even if the model has not ended the text; 0 if the session has no
        text.
    stopped : bool
        Whether the model has said that the last patch is the text's last.
    seed : int
        Seed of the session's random noise.
    guidance, temperature : float
        Strength of classifier-free guidance, and standard deviation of the noise; see `Solver`.
    """

    positions: int
    filled: int
    pending: int
    patches: int
    limit: int
    stopped: bool
    seed: int
    guidance: float
    temperature: float


def read_numbers(fields: Fields) -> RowNumbers:
    """Parse the saved numbers of a speech session from JSON; ManifestError if they are invalid."""
    return RowNumbers(
        **{name: fields.integer(name) for name in ("positions", "filled", "pending", "patches", "limit")},
        stopped=fields.flag("stopped", default=False),
        seed=fields.integer("seed", 0, MAX_SEED),
        guidance=as_number(fields.value("guidance"), f"{fields.where}.guidance"),
        temperature=as_number(fields.value("temperature"), f"{fields.where}.temperature"),
    )


def check_numbers(numbers: RowNumbers, manifest: SpeechManifest) -> None:
    """Raise a SnapshotError if saved numbers are impossible for a session of this artifact."""
    workload = manifest.workload
    left = max(0, numbers.limit - numbers.patches)
    if (
        not 1 <= numbers.positions <= workload.positions
        or numbers.filled + numbers.pending + left > numbers.positions
        or numbers.patches > numbers.limit
        or (numbers.pending and numbers.patches)
    ):
        raise SnapshotError(
            f"a row with {numbers.filled} of {numbers.positions} positions filled, {numbers.pending} tokens to come, "
            f"{numbers.patches} of {numbers.limit} patches made; this artifact has {workload.positions} positions a "
            "session: take another snapshot"
        )
    solver = workload.solver
    for name, most in (("guidance", MAX_GUIDANCE), ("temperature", MAX_TEMPERATURE)):
        number = getattr(numbers, name)
        if not 0 <= number <= max(most, getattr(solver, name)):
            raise SnapshotError(
                f"a row with {name} {number:g}, expected 0 to {most:g}: take another snapshot"
            )


STATE_FORM = StateForm(read_numbers)
