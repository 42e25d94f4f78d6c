"""Prompts of a session's rows: encoded once each, then copied from a bounded cache. Tokens are in `text`."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.errors import UsageError
from seko_runtime.executor.buffers_check import TEXT_BUFFER, TEXT_ENCODED, TEXT_IDS
from seko_runtime.format.manifest import TensorSpec
from seko_runtime.video.live import Live
from seko_runtime.video.text import TokenIds, clean_prompt, prompt_key

PROMPT_CACHE = 8  # entries; one of Wan 1.3B takes 90 MiB on the device


class PromptKey(NamedTuple):
    """Names an entry of the cache: nobody but its owner finds it."""

    owner: str
    prompt: str  # as `prompt_key` names it


class PromptCache:
    """What prompts left in the prompt buffers, for several owners who do not see each other's.

    A full cache forgets an entry of the owner who has most of them, the one that was not used for longest: so one
    owner's many prompts do not push out another's few.

    Parameters
    ----------
    capacity : int
        Entries held, of all owners together; 0 holds none.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise UsageError(f"prompt_cache is {capacity}, expected at least 0 entries")
        self._capacity = capacity
        self._entries: OrderedDict[PromptKey, list[Tensor]] = OrderedDict()
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: PromptKey) -> list[Tensor] | None:
        """Entry of a key, counted as a hit or a miss."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry

    def put(self, key: PromptKey, entry: list[Tensor]) -> None:
        """Add an entry."""
        self._entries[key] = entry
        while len(self._entries) > self._capacity:
            counts = Counter(one.owner for one in self._entries)
            most = max(counts.values())
            del self._entries[next(one for one in self._entries if counts[one.owner] == most)]

    def forget(self, owner: str) -> None:
        """Forget an owner's entries."""
        for key in [key for key in self._entries if key.owner == owner]:
            del self._entries[key]

    def clear(self) -> None:
        """Forget all entries, not the counts."""
        self._entries.clear()


class RowPrompts:
    """Sets the rows' parts of ``text.embeddings`` and of all that the program ``prompt`` writes.

    Parameters
    ----------
    memory : Memory
        The session's.
    ids : TokenIds
        The artifact's.
    digest : str
        The artifact's; empty for none.
    capacity : int
        Entries of the cache.
    """

    def __init__(self, memory: Memory, ids: TokenIds, digest: str, capacity: int) -> None:
        self.cache = PromptCache(capacity)
        self._memory, self._ids = memory, ids
        self._digest = digest
        self._owners: dict[int, str] = {}  # by row; those that are not here have one owner together

    def begin_owner(self, row: int, tenant: str | None) -> None:
        """Let a row find from now on what its tenant's rows encoded; without a tenant, what it encodes itself.

        What the row's last owner kept for itself is forgotten.
        """
        alone = f"row {row}"
        self.cache.forget(alone)
        self._owners[row] = alone if tenant is None else f"tenant {tenant}"

    def set(self, live: Live, rows: Sequence[int], prompts: Sequence[str]) -> None:
        """Set one prompt a row: every new one is encoded, one that is held is copied.

        Until all are encoded nothing of the session has changed.

        Parameters
        ----------
        live : Live
            The session's.
        rows : sequence of int
            All of them, unless a row's prompt is its own program's work.
        prompts : sequence of str
            One each.
        """
        cleaned = [clean_prompt(prompt) for prompt in prompts]
        keys = [
            PromptKey(self._owners.get(row, ""), prompt_key(prompt, self._digest))
            for row, prompt in zip(rows, cleaned, strict=True)
        ]
        names = self._results(live)
        held: dict[PromptKey, list[Tensor]] = {}
        encoded: dict[PromptKey, Tensor] = {}
        for key, prompt in zip(keys, cleaned, strict=True):
            if key in held or key in encoded:
                continue
            entry = self.cache.get(key) if names else None
            if entry is not None:
                held[key] = entry
            else:
                encoded[key] = self._encode(live, prompt)
        with self._memory.ordered():
            for row, key in zip(rows, keys, strict=True):
                if key in encoded:
                    self._memory.copy(live.row_of(TEXT_BUFFER, row), encoded[key])
                    continue
                # A program that reads every row needs a held one's embeddings alone, beside a new prompt's.
                count = 1 if encoded and not live.prompt_by_row else len(names)
                for name, part in zip(names[:count], held[key][:count], strict=True):
                    self._memory.copy(live.row_of(name, row), part)
            if encoded:
                live.run_prompt([row for row, key in zip(rows, keys, strict=True) if key in encoded])
            for key in encoded if names else ():
                self.cache.put(key, [self._copied(live, name, rows[keys.index(key)]) for name in names])

    def _encode(self, live: Live, prompt: str) -> Tensor:
        """Embeddings [1, n, text_dim] of a cleaned prompt, a tensor of its own."""
        ids = self._ids.ids(prompt)
        with self._memory.ordered():
            self._memory.write(live.buffers[TEXT_IDS], ids)
            live.once["text"].run()
            own = self._memory.allocate(live.specs[TEXT_ENCODED])
            self._memory.copy(own, live.buffers[TEXT_ENCODED])
        return own

    def _results(self, live: Live) -> list[str]:
        """Buffers that hold what a prompt leaves, the embeddings first; none if one cannot be cut into rows."""
        names = [TEXT_BUFFER, *(name for name in live.prompt_buffers if name != TEXT_BUFFER)]
        return names if all(live.has_rows(name) for name in names) else []

    def _copied(self, live: Live, name: str, row: int) -> Tensor:
        source = live.row_of(name, row)
        shape, dtype = self._memory.describe(source)
        own = self._memory.allocate(TensorSpec(name, shape, dtype))
        self._memory.copy(own, source)
        return own


def checked_tenant(tenant: object) -> str | None:
    """Return a tenant's name, or None; UsageError if it is neither: an empty one is a name that somebody lost."""
    if tenant is None or (isinstance(tenant, str) and tenant):
        return tenant
    found = "empty" if isinstance(tenant, str) else type(tenant).__name__
    raise UsageError(f"tenant is {found}, expected a name, or None for a session that shares no prompts")
