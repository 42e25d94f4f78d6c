"""Upper limits of a manifest's sizes, so that a small document cannot exhaust the machine that reads it.

The comment at each limit has the number that the largest known artifact needs, which is Wan 14B with VAE and text
encoder, 40 layers, 5 passes, calls of 1, 2, 4 and 8 rows in a pool of 64 sessions, a cache for each pass, and two layer
groups.
"""

from __future__ import annotations

from seko_runtime.errors import ManifestError

MAX_BUFFERS = 1 << 10  # 62
MAX_BUFFER_BYTES = 1 << 45  # all buffers together: 2.1e12
MAX_WEIGHTS = 1 << 15  # 1,767
MAX_ENGINES = 1 << 10  # 62
MAX_SIGNATURE_TENSORS = 1 << 15  # inputs and outputs of all engines: 2,280
MAX_FILES = 1 << 13  # 153
MAX_FILE_BYTES = 1 << 44  # all files together: 8e10
MAX_HELD_BYTES = 1 << 32  # engines, golden, tokenizer and compiler cache together: 8e8
MAX_PATH_PARTS = 16  # 2
MAX_BUCKETS = 1 << 8  # 4
MAX_ENTRIES = 1 << 10  # entries of `producer`, `extra` or an object of the workload: 10
MAX_INPUTS = 1 << 8  # 1
MAX_CALLS = 1 << 13  # 409
MAX_REFERENCES = 1 << 18  # references of all calls: 16,048
MAX_RESOLVED_REFERENCES = 3 << 19  # references of the calls of all runs: 116,906
MAX_DISTINCT_REFERENCES = 1 << 17  # different references among these: 12,768


class Budget:
    """The number of items that a document may still contain; several tables may share one budget.

    Parameters
    ----------
    most : int
        Largest number of items.
    what : str
        Name of the limited items, for the error message.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self._left = most, what, most

    def take(self, count: int, where: str) -> None:
        """Use ``count`` items of the budget for the part of the document at the path ``where``.

        Raises
        ------
        ManifestError
            If fewer than ``count`` items of the budget are left.
        """
        self._left -= count
        if self._left < 0:
            raise ManifestError(
                f"{where} brings the {self._what} to {self._most - self._left}, at most {self._most} are read; "
                "rebuild the artifact"
            )
