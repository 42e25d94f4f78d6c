"""The names of programs. A manifest spells role, fill and bucket in one string; they are taken apart here alone."""

from __future__ import annotations

from dataclasses import dataclass

_FULL = "_full"


@dataclass(frozen=True)
class ProgramKey:
    """One program of a manifest.

    Parameters
    ----------
    role : str
        ``prompt``, ``begin``, ``denoise``, ``context``, ``text``, ``encode``, ``decode_first`` or ``decode``.
    bucket : int or None
        Rows of the pool's calls that it is for; None without a pool.
    full : bool
        Whether it is for rows whose caches are full.
    """

    role: str
    bucket: int | None = None
    full: bool = False

    @property
    def name(self) -> str:
        """The program's name in the manifest: ``denoise``, ``denoise_full``, ``denoise.4``, ``denoise_full.4``."""
        stem = f"{self.role}{_FULL}" if self.full else self.role
        return stem if self.bucket is None else f"{stem}.{self.bucket}"

    @classmethod
    def parse(cls, name: str) -> ProgramKey:
        """Return the key of a program's name; a name that is none becomes a role that no program has."""
        stem, _, bucket = name.partition(".")
        full = stem.endswith(_FULL)
        role = stem[: -len(_FULL)] if full else stem
        key = cls(role, int(bucket) if bucket.isdecimal() and bucket.isascii() else None, full)
        return key if key.name == name else cls(name)
