"""The base class of artifacts, pools and sessions: context managers that close themselves at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from seko_runtime.host.releasing import release_after_error


class Closing(ABC):
    """A context manager whose end calls `close`: base class of artifacts, pools and sessions."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the error that ended the block is raised
            release_after_error(self.close)
