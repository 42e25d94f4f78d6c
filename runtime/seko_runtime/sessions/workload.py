"""A workload: one kind of model, and everything that the runtime must know of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic

from seko_runtime.executor.contract import Contract
from seko_runtime.format.safetensors_map import MappedTensor
from seko_runtime.sessions.artifact import OpenArtifact, OpenedFiles
from seko_runtime.sessions.engines import Engines
from seko_runtime.sessions.loaded import Loaded, ManifestT, TokenIds
from seko_runtime.sessions.ranked_rows import Command, Group
from seko_runtime.sessions.rows import Rows

Tensors = Mapping[str, MappedTensor]


class RuntimeWorkload(ABC, Generic[ManifestT]):
    """A kind of model. An artifact names it in its manifest's ``workload.kind``.

    Attributes
    ----------
    kind : str
        Its name.
    first_rank_programs : collection of str
        Programs that rank 0 alone runs; see `RankPlace`.
    rank_commands : mapping of str to callable
        What a rank answers besides `ranked_rows.COMMANDS`, where the workload's artifacts may have several ranks.
    """

    kind: str
    first_rank_programs: Collection[str] = ()
    rank_commands: Mapping[str, Command] = {}

    @abstractmethod
    def parse(self, document: bytes) -> ManifestT:
        """Read a manifest of this kind; ManifestError if it is wrong. Nothing in it is trusted."""

    @abstractmethod
    def contract(self, manifest: ManifestT) -> Contract:
        """Return the programs and buffers that such a manifest must have."""

    @abstractmethod
    def golden_file(self, manifest: ManifestT) -> str | None:
        """Return the file of recorded results, if there is one."""

    @abstractmethod
    def check_golden(self, manifest: ManifestT, golden: Tensors) -> None:
        """Check the shapes of the tensors that `OpenArtifact.verify` needs; ArtifactError if they are wrong."""

    def tokens(self, manifest: ManifestT, files: Mapping[str, memoryview]) -> TokenIds | None:
        """Return the artifact's tokenizer, if it has one; ``files`` are those of `Workload.files`."""
        del manifest, files
        return None

    @abstractmethod
    def open_rows(self, loaded: Loaded[ManifestT], options: Mapping[str, Any]) -> Rows[Any, Any]:
        """Return the rows of an artifact in this process, prepared.

        Parameters
        ----------
        loaded : Loaded
            The artifact.
        options : mapping
            What the opener of a pool chose, by name.
        """

    def open_ranked_rows(
        self, manifest: ManifestT, group: Group, options: Mapping[str, Any]
    ) -> Rows[Any, Any]:
        """Return the rows of an artifact of several ranks; reached only where a contract allows ranks."""
        raise NotImplementedError

    @abstractmethod
    def artifact(self, files: OpenedFiles[ManifestT], engines: Engines) -> OpenArtifact[ManifestT]:
        """Return the open artifact that a caller gets."""

    @abstractmethod
    def described(self, manifest: ManifestT) -> tuple[Sequence[str], Mapping[str, object]]:
        """Return lines and JSON for the command ``info``, of what only this workload has."""
