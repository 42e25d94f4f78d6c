"""Names of programs. A manifest writes role, fullness and bucket as one string; only this file parses it."""

from __future__ import annotations

from dataclasses import dataclass

_FULL = "_full"


@dataclass(frozen=True)
class ProgramKey:
    """Identifies one program of a manifest.

    Parameters
    ----------
    role : str
        What the program does, in the workload's word.
    bucket : int or None
        Rows of the pool calls for which it is; None without a pool.
    full : bool
        Whether it is for rows whose caches are full.
    """

    role: str
    bucket: int | None = None
    full: bool = False

    @property
    def name(self) -> str:
        """The program's name in the manifest: ``step``, ``step_full``, ``step.4``, ``step_full.4``."""
        stem = f"{self.role}{_FULL}" if self.full else self.role
        return stem if self.bucket is None else f"{stem}.{self.bucket}"

    @classmethod
    def parse(cls, name: str) -> ProgramKey:
        """Parse a program's name; an unknown name becomes a role that no program has."""
        stem, _, bucket = name.partition(".")
        full = stem.endswith(_FULL)
        role = stem[: -len(_FULL)] if full else stem
        key = cls(role, int(bucket) if bucket.isdecimal() and bucket.isascii() else None, full)
        return key if key.name == name else cls(name)
