"""An artifact that several processes replay together, as the calling process sees it. They run `rank_process`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.backends.host import check_device
from seko_runtime.backends.memory import Engine
from seko_runtime.errors import (
    DeviceMissingError,
    RankLostError,
    SekoRuntimeError,
    UsageError,
)
from seko_runtime.format.manifest import Manifest
from seko_runtime.host.faults import machine_faults
from seko_runtime.opening.golden import ChunkError
from seko_runtime.opening.opened import OpenArtifact
from seko_runtime.parallel.group import RankGroup
from seko_runtime.video.call_lock import CallLock, under_lock
from seko_runtime.video.conditioning import by_either_name
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.pool import Pool
from seko_runtime.video.prompts import PROMPT_CACHE
from seko_runtime.video.ranked_session import CALL_S, OPEN_S, RankedSession, named_arrays

PROCESS = "seko_runtime.opening.rank_process"
_NOT_YET = "an artifact of several ranks cannot do this yet; build it without --ranks"


class RankedArtifact(OpenArtifact):
    """`OpenArtifact` of several ranks. Its engines and tensors are in the processes of a `RankGroup`.

    One session at a time is open: the collectives of two would meet in another order on each rank.

    Parameters
    ----------
    path, device, trust, copy_weights
        As `open_artifact` takes them. ``cuda:N`` is rank 0's device; the others have the next ones.
    manifest, digest
        The artifact's; every process must find the same.
    """

    def __init__(
        self,
        path: str | Path,
        manifest: Manifest,
        digest: str,
        device: str,
        *,
        trust: str | Path | None,
        copy_weights: bool,
    ) -> None:
        self.manifest, self.digest = manifest, digest
        self.device = check_device(manifest.target, device)
        devices = rank_devices(manifest, self.device)
        self._session: RankedSession | None = None
        self._call_lock = CallLock("the artifact is closed; open it again with open_artifact()", waits=True)
        facts = {
            "path": str(Path(path).absolute()),
            "devices": devices,
            "trust": None if trust is None else str(Path(trust).absolute()),
            "copy_weights": copy_weights,
        }
        self._group = RankGroup(PROCESS, manifest.ranks, facts, seconds=OPEN_S)
        found = [self._group.begun.results[rank] for rank in range(manifest.ranks)]
        for rank, one in enumerate(found):
            if one != found[0] or one["digest"] != digest:
                self._group.close()
                raise RankLostError(
                    f"rank {rank} of {manifest.ranks} found {one}, expected the digest {digest} and what rank 0 has, "
                    f"{found[0]}: the artifact or the installation changed meanwhile; open it again"
                )

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of its processes, by rank."""
        return self._group.processes

    @machine_faults()
    @under_lock
    def open_session(
        self,
        seeds: Sequence[int] | None = None,
        text: object = None,
        *,
        prompt: str | Sequence[str] | None = None,
        steps: int | None = None,
        shift: float | None = None,
        image: object = None,
        conditioning_latents: object = None,
        reference: object = None,
        inputs: Inputs | None = None,
        prompt_cache: int = PROMPT_CACHE,
        overlap: bool = True,
        given_latents: object = None,
    ) -> RankedSession:
        """Open the session; see `OpenArtifact.open_session`.

        Raises
        ------
        UsageError
            If an argument does not fit, or a session is open.
        RankLostError
            If a process died or hangs.
        """
        if self._session is not None and not self._session.closed:
            raise UsageError("an artifact of several ranks has one session at a time: close the open one")
        facts: dict[str, Any] = {
            "seeds": None if seeds is None else [int(seed) for seed in seeds],
            "prompt": prompt if prompt is None or isinstance(prompt, str) else list(prompt),
            "steps": steps,
            "shift": shift,
            "prompt_cache": prompt_cache,
            "overlap": overlap,
            "inputs": None if inputs is None else [*inputs],
        }
        tensors = {
            "text": text,
            "image": image,
            "conditioning_latents": by_either_name(conditioning_latents, given_latents),
            "reference": reference,
        }
        arrays = named_arrays({name: one for name, one in tensors.items() if one is not None})
        arrays |= {f"inputs.{name}": one for name, one in named_arrays(inputs).items()}
        self._session = RankedSession(self.manifest, self._group, facts, arrays)
        return self._session

    def open_pool(
        self,
        *,
        steps: int | None = None,
        shift: float | None = None,
        prompt_cache: int = PROMPT_CACHE,
        overlap: bool = True,
        snapshot_key: bytes | None = None,
    ) -> Pool:
        """Raise a UsageError: there are no pools of several ranks yet."""
        del steps, shift, prompt_cache, overlap, snapshot_key
        raise UsageError(_NOT_YET)

    @machine_faults()
    def golden_text(self) -> NDArray[np.generic]:
        """Text embeddings with which the golden was recorded; see `OpenArtifact.golden_text`."""
        return self._of_first("golden_text")["text"]

    def golden_inputs(self, chunk: int | None) -> dict[str, NDArray[np.generic]]:
        """Return the golden's values of the caller's inputs; see `OpenArtifact.golden_inputs`."""
        if not self.manifest.caller_inputs:
            return {}
        return {**self._of_first("golden_inputs", {"chunk": chunk})}

    @machine_faults()
    def chunk_error(
        self,
        number: int,
        latents: NDArray[np.float32],
        cache: Mapping[str, NDArray[np.float32]] | None = None,
        video: NDArray[np.uint8] | None = None,
    ) -> ChunkError:
        """Compare a chunk with the recorded one; see `OpenArtifact.chunk_error`."""
        arrays: dict[str, NDArray[Any]] = {"latents": latents}
        if video is not None:
            arrays["video"] = video
        arrays |= {f"cache.{name}": one for name, one in (cache or {}).items()}
        facts = {"number": number, "cache": cache is not None}
        told = self._group.call("chunk_error", facts, arrays, ranks=(0,), seconds=CALL_S).results[0]
        return ChunkError(**told)

    def wrap_engines(self, wrap: Callable[[str, Engine], Engine]) -> None:
        """Raise a UsageError: the engines are in other processes."""
        del wrap
        raise UsageError(_NOT_YET)

    @contextmanager
    def without_capture(self) -> Iterator[None]:
        """Raise a UsageError: the graphs are in other processes."""
        raise UsageError(_NOT_YET)
        yield

    @property
    def stats(self) -> Mapping[str, int]:
        """Counters of rank 0's backend."""
        found: Mapping[str, int] = self._group.call("backend_stats", ranks=(0,), seconds=CALL_S).results[0]
        return found

    @machine_faults()
    def close(self) -> None:
        """Close the session and end all processes; a second call does nothing."""
        if self._call_lock.forked:
            return
        with self._call_lock.last():
            try:
                if self._session is not None:
                    self._session.close()
            except SekoRuntimeError:
                pass  # of processes that are gone; whoever used the session was told
            finally:
                self._session = None
                self._group.close()

    def _of_first(self, command: str, facts: Mapping[str, Any] | None = None) -> dict[str, NDArray[Any]]:
        """Return the arrays with which rank 0 answers."""
        return self._group.call(command, facts, ranks=(0,), seconds=CALL_S).arrays[0]


def rank_devices(manifest: Manifest, device: str) -> list[str]:
    """Return each rank's device, from rank 0's on.

    Raises
    ------
    DeviceMissingError
        If this machine has too few.
    """
    if manifest.target.device == "cpu":
        return ["cpu"] * manifest.ranks
    from seko_runtime.backends.cuda_driver import device_count

    first, count = int(device.partition(":")[2] or 0), device_count()
    if first + manifest.ranks > count:
        raise DeviceMissingError(
            f"this artifact makes its chunks on {manifest.ranks} GPUs from cuda:{first} on, this machine has {count}: "
            "open it where there are enough, or rebuild it with fewer --ranks"
        )
    return [f"cuda:{first + rank}" for rank in range(manifest.ranks)]
