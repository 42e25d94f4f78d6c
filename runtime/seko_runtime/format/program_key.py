"""Names of programs in a manifest, and the `ProgramKey` that each name stands for. A program's name consists of its
role, marks if the program is for a row's first call or for full caches, its bucket and its length. Only the module
`program_key` parses names of programs."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST, _FULL = "_first", "_full"


@dataclass(frozen=True)
class ProgramKey:
    """Key of a program: it identifies one program of a manifest.

    Parameters
    ----------
    role : str
        Task of the program, as a word defined by the workload.
    bucket : int or None
        Number of entries of a call (rows of a pool, or tokens) for which the program is made; None without buckets.
    full : bool
        Whether the program is for rows whose caches are full.
    length : int or None
        Number of positions that the program reads, if a workload has programs for several lengths; only with a
        bucket.
    first : bool
        Whether the program is for the first calls of a row, before which its caches are empty.
    """

    role: str
    bucket: int | None = None
    full: bool = False
    length: int | None = None
    first: bool = False

    @property
    def name(self) -> str:
        """Name of the program in the manifest, such as ``step``, ``step_full``, ``step.4``, ``step_first.4``,
        ``step.4.1024``."""
        stem = f"{self.role}{_FIRST * self.first}{_FULL * self.full}"
        return ".".join((stem, *(str(size) for size in (self.bucket, self.length) if size is not None)))

    @classmethod
    def parse(cls, name: str) -> ProgramKey:
        """Parse a program's name; an unknown name becomes a role that no program has."""
        stem, *sizes = name.split(".")
        full = stem.endswith(_FULL)
        role = stem.removesuffix(_FULL)
        first = role.endswith(_FIRST)
        role = role.removesuffix(_FIRST)
        numbers = [int(size) for size in sizes if size.isdecimal() and size.isascii()]
        bucket, length = (*numbers, None, None)[:2]
        key = cls(role, bucket, full, length, first)
        return key if key.name == name else cls(name)
