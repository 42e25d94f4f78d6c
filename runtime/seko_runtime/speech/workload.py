"""The speech workload: models that speak a text, in patches (short pieces of sound)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from seko_runtime.executor.contract import Contract
from seko_runtime.format.safetensors_map import MappedTensor
from seko_runtime.sessions.artifact import OpenedFiles
from seko_runtime.sessions.engines import Engines
from seko_runtime.sessions.loaded import Loaded, TokenIds
from seko_runtime.sessions.workload import RuntimeWorkload
from seko_runtime.speech.artifact import SpeechArtifact
from seko_runtime.speech.contract import speech_contract
from seko_runtime.speech.device import state_forms
from seko_runtime.speech.golden import check_golden
from seko_runtime.speech.local_rows import LocalSpeechRows, open_speech_rows
from seko_runtime.speech.manifest import CHECKS, KIND, SpeechManifest
from seko_runtime.speech.row_numbers import STATE_FORM
from seko_runtime.speech.tokens import SpeechTokenizer


class SpeechWorkloadKind(RuntimeWorkload[SpeechManifest]):
    """The speech workload (the code for models that speak) as the runtime uses it."""

    kind = KIND
    manifest_type = SpeechManifest
    manifest_checks = CHECKS
    form = STATE_FORM

    def contract(self, manifest: SpeechManifest) -> Contract:
        """Return the contract: the programs and buffers that the manifest of a speech artifact must have."""
        return speech_contract(manifest)

    def golden_file(self, manifest: SpeechManifest) -> str | None:
        """Return the path of the artifact's file of recorded steps."""
        golden = manifest.workload.golden
        return None if golden is None else golden.file

    def check_golden(self, manifest: SpeechManifest, golden: Mapping[str, MappedTensor]) -> None:
        """Check the shapes of recorded prompts, states, patches, sound and voices."""
        check_golden(manifest, golden)

    def tokens(self, manifest: SpeechManifest, files: Mapping[str, memoryview]) -> TokenIds | None:
        """Return the tokenizer of a speech artifact."""
        name = manifest.workload.tokenizer
        return None if name is None else SpeechTokenizer(files[name], name, manifest.workload.vocabulary)

    def open_rows(self, loaded: Loaded[SpeechManifest], options: Mapping[str, Any]) -> LocalSpeechRows:
        """Return the rows of a pool of speech sessions in this process. A speech pool has no options, so ``options`` is
        empty."""
        return open_speech_rows(loaded, **options)

    def artifact(self, files: OpenedFiles[SpeechManifest], engines: Engines) -> SpeechArtifact:
        """Return the artifact as a `SpeechArtifact`, with opened engines."""
        return SpeechArtifact(files, engines)

    def described(self, manifest: SpeechManifest) -> tuple[Sequence[str], Mapping[str, object]]:
        """Return a description of an artifact's sound, length, cache and solver."""
        workload = manifest.workload
        patch, kv, solver = workload.patch, workload.kv, workload.solver
        forms = state_forms([spec for spec in manifest.buffers if spec.role == "cache"], workload.positions)
        size = sum(spec.nbytes for spec in forms.values())
        lines = [
            f"sound    {patch.sample_rate} samples a second, {patch.seconds * 1000:.4g} ms a patch; voices of "
            f"{workload.voice.sample_rate} samples a second",
            f"session  up to {workload.positions} positions of text, voice and patches; {workload.places - 1} for all",
            f"         up to {size} bytes when it is paused or saved, by the positions that it has filled",
            f"prefill  {', '.join(map(str, workload.prefill_tokens))} tokens; a step reads "
            f"{', '.join(map(str, workload.step_lengths))} positions",
            f"solver   {solver.steps} steps, guidance {solver.guidance:g}, temperature {solver.temperature:g}",
            f"KV pool  {kv.pool_bytes} bytes ({kv.scheme}), in bf16 {kv.bf16_pool_bytes}",
        ]
        facts: dict[str, object] = {
            "patch": {**asdict(patch), "seconds": patch.seconds},
            "voice": asdict(workload.voice),
            "session_bytes": size,
            "positions": workload.positions,
            "places": workload.places - 1,
            "solver": asdict(solver),
            "kv": {"scheme": kv.scheme, "pool_bytes": kv.pool_bytes},
        }
        return lines, facts


WORKLOAD = SpeechWorkloadKind()
