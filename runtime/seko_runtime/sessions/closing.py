"""A base class of what is closed at the end of its context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager that closes itself: artifacts, pools and sessions."""

    @abstractmethod
    def close(self) -> None:
        """End it and free what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
