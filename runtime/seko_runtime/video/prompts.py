"""Prompts of a pool's streams: each prompt is encoded once, then copied from a bounded cache. The module
`seko_runtime.video.text` makes token ids from prompts."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from seko_runtime.arguments import whole_number
from seko_runtime.backends.memory import Memory, Tensor
from seko_runtime.sessions.loaded import TokenIds
from seko_runtime.video.contract import TEXT_BUFFER, TEXT_ENCODED, TEXT_IDS
from seko_runtime.video.device import VideoDevice
from seko_runtime.video.text import prompt_key, prompt_words


class PromptKey(NamedTuple):
    """Key of an entry of the prompt cache. The key includes the owner of the session, so that no other owner finds the
    entry."""

    owner: str
    prompt: str  # SHA-256 of the prompt; see `prompt_key`


class PromptCache:
    """Cache of encoded prompts: their embeddings, [1, n, text_dim] each. The keys and values that every layer has of
    them are a hundred times as large, and computed again in milliseconds. Owners (tenants) of sessions do not see each
    other's cached prompts.

    A full prompt cache drops the least recently used entry of the owner with most entries, so that one owner's many
    prompts do not displace another owner's few.

    Parameters
    ----------
    capacity : int
        Largest number of entries of all owners together; 0 disables the cache.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = whole_number(capacity, "prompt_cache", 0)
        self._entries: OrderedDict[PromptKey, Tensor] = OrderedDict()
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: PromptKey) -> Tensor | None:
        """Return the prompt cache's entry of a key, and count a hit or a miss."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry

    def put(self, key: PromptKey, entry: Tensor) -> None:
        """Add an encoded prompt to the cache."""
        self._entries[key] = entry
        while len(self._entries) > self._capacity:
            counts = Counter(entry.owner for entry in self._entries)
            most = max(counts.values())
            del self._entries[next(entry for entry in self._entries if counts[entry.owner] == most)]

    def forget(self, owner: str) -> None:
        """Drop the cached prompts of an owner."""
        for key in [key for key in self._entries if key.owner == owner]:
            del self._entries[key]

    def clear(self) -> None:
        """Drop all cached prompts; the counts of hits and misses stay."""
        self._entries.clear()


class RowPrompts:
    """Sets the prompts of a pool's streams: their parts of ``text.embeddings`` and of all buffers that the program
    ``prompt`` writes.

    Parameters
    ----------
    memory : Memory
        The memory of the pool's tensors.
    ids : TokenIds
        The artifact's tokenizer.
    digest : str
        SHA-256 of the artifact; may be empty.
    capacity : int
        Largest number of entries of the prompt cache.
    may_be_empty : bool
        Whether a prompt may be the empty text; see `prompt_words`.
    """

    def __init__(
        self, memory: Memory, ids: TokenIds, digest: str, capacity: int, *, may_be_empty: bool = False
    ) -> None:
        self.cache, self._may_be_empty = PromptCache(capacity), may_be_empty
        self._memory, self._ids = memory, ids
        self._digest = digest
        self._owners: dict[int, str] = {}  # owner of each row; rows that are missing here share one owner

    def begin_owner(self, row: int, tenant: str | None) -> None:
        """Set the tenant (owner of sessions) of a row: from now on the row shares cached prompts with other rows of the
        tenant. Without a tenant a row uses only its own cached prompts.

        If the row's last session had no tenant, its cached prompts are dropped.
        """
        alone = f"row {row}"
        self.cache.forget(alone)
        self._owners[row] = alone if tenant is None else f"tenant {tenant}"

    def check(self, prompt: str) -> None:
        """Raise the error that `set` would raise for a prompt; no prompt changes."""
        self._ids.ids(self._words(prompt))

    def set(self, device: VideoDevice, row: int, prompt: str, weight: float = 1.0) -> None:
        """Set the prompt of a row. A new prompt is encoded, and a cached prompt is copied from the prompt cache.
        Nothing changes until the prompt is encoded.

        Parameters
        ----------
        device : VideoDevice
            The device side of the pool.
        row : int
            Number of the row.
        prompt : str
            The prompt, a sentence.
        weight : float
            The prompt's share of the row's new embeddings, above 0; the rest are those that the row has now.
        """
        own, encoded = device.row_of(TEXT_BUFFER, row), self._encoded(device, row, prompt)
        before = None if weight == 1 else self._memory.read(own)
        with device.prompting(row):
            self._memory.copy(own, encoded)
            if before is not None:
                self._memory.write(own, (1 - weight) * before + weight * self._memory.read(own))
            device.run_prompt(row)

    def _encoded(self, device: VideoDevice, row: int, prompt: str) -> Tensor:
        """Return the embeddings of a row's prompt, from the cache or new."""
        cleaned = self._words(prompt)
        key = PromptKey(self._owners.get(row, ""), prompt_key(cleaned, self._digest))
        encoded = self.cache.get(key)
        if encoded is None:
            encoded = self._encode(device, cleaned)
            self.cache.put(key, encoded)
        return encoded

    def _words(self, prompt: str) -> str:
        return prompt_words(prompt, may_be_empty=self._may_be_empty)

    def _encode(self, device: VideoDevice, prompt: str) -> Tensor:
        """Return a copy of the embeddings [1, n, text_dim] of a cleaned prompt."""
        ids = self._ids.ids(prompt)
        with self._memory.ordered():
            self._memory.write(device.buffers[TEXT_IDS], ids)
            device.once["text"].run()
            own = self._memory.allocate(device.specs[TEXT_ENCODED])
            self._memory.copy(own, device.buffers[TEXT_ENCODED])
        return own
