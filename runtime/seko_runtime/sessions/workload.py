"""The interface of a workload: everything that the runtime must know about one kind of model, such as speech models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic

from seko_runtime.executor.contract import Contract
from seko_runtime.format.records import Check
from seko_runtime.format.safetensors_map import MappedTensor
from seko_runtime.sessions.artifact import OpenArtifact, OpenedFiles
from seko_runtime.sessions.engines import Engines
from seko_runtime.sessions.loaded import Loaded, ManifestT, TokenIds
from seko_runtime.sessions.row_state import StateForm
from seko_runtime.sessions.rows import Rows

Tensors = Mapping[str, MappedTensor]


class RuntimeWorkload(ABC, Generic[ManifestT]):
    """A kind of model, as the runtime uses it. The manifest of an artifact names its workload
    in ``workload.kind``.

    Attributes
    ----------
    kind : str
        Name of the workload in manifests.
    manifest_type : type
        Class of the workload's manifests, a subclass of `Manifest`.
    manifest_checks : mapping of type to callable
        The workload's checks of a manifest's tables; see `Document`.
    first_rank_programs : collection of str
        Names of programs that rank 0 alone runs; see `RankPlace`.
    rows : type
        The interface of the workload's rows: `Rows`, or a protocol derived from it. The rows over several ranks have
        the methods of this interface.
    form : StateForm
        How the state of a row is read from files.
    """

    kind: str
    manifest_type: type[ManifestT]
    manifest_checks: Mapping[type, Check] = {}
    first_rank_programs: Collection[str] = ()
    rows: type = Rows
    form: StateForm

    @abstractmethod
    def contract(self, manifest: ManifestT) -> Contract:
        """Return the programs and buffers that a manifest of this workload must have."""

    @abstractmethod
    def golden_file(self, manifest: ManifestT) -> str | None:
        """Return the path of the artifact's file of recorded results, or None."""

    @abstractmethod
    def check_golden(self, manifest: ManifestT, golden: Tensors) -> None:
        """Check the shapes of the tensors that `OpenArtifact.verify` needs; ArtifactError if they are wrong."""

    def tokens(self, manifest: ManifestT, files: Mapping[str, memoryview]) -> TokenIds | None:
        """Return the artifact's tokenizer, or None; ``files`` has the contents of the files that `Workload.files`
        names.
        """
        del manifest, files
        return None

    @abstractmethod
    def open_rows(self, loaded: Loaded[ManifestT], options: Mapping[str, Any]) -> Rows[Any, Any]:
        """Return the rows of a pool in this process, ready to run.

        Parameters
        ----------
        loaded : Loaded
            The opened artifact with its engines.
        options : mapping
            Options of the pool, by name.
        """

    def pool_manifest(self, manifest: ManifestT, options: Mapping[str, Any]) -> ManifestT:
        """Return the manifest of a pool's rows, which the pool's options may change; UsageError if an option is
        impossible for the artifact."""
        del options
        return manifest

    @abstractmethod
    def artifact(self, files: OpenedFiles[ManifestT], engines: Engines) -> OpenArtifact[ManifestT]:
        """Return the workload's own `OpenArtifact`, made of these files and engines."""

    @abstractmethod
    def described(self, manifest: ManifestT) -> tuple[Sequence[str], Mapping[str, object]]:
        """Return the lines of text and the JSON with which the command ``info`` describes an artifact of this
        workload."""
