"""The manifest's object ``workload`` of a speech build."""

from __future__ import annotations

from math import prod

from seko_export.config.media import TOKENIZER_FILE
from seko_export.families.registry import graph_of
from seko_export.families.speech.config import SpeechBuild
from seko_export.families.speech.family import speech_family_of
from seko_runtime.format.manifest import KvPool
from seko_runtime.speech import contract
from seko_runtime.speech.manifest import KIND, Golden, Solver, SpeechWorkload

GUIDANCE = 2.0  # of the original's `generate`
_BF16_BYTES = 2


def speech_workload(config: SpeechBuild, golden: Golden | None = None) -> SpeechWorkload:
    """Return the object ``workload`` of a speech manifest; ``golden`` is the description of the recorded steps."""
    work, family = config.workload, speech_family_of(config.model)
    return SpeechWorkload(
        kind=KIND,
        positions=work.positions,
        places=work.places,
        read_lengths=work.read_lengths,
        step_lengths=config.step_lengths,
        prefill_tokens=work.prefill_tokens,
        vocabulary=config.model.vocabulary,
        patch=config.model.patch,
        voice=config.model.voice_encoder(work.voice_patches),
        solver=Solver(work.steps, family.moving_steps(work.steps), GUIDANCE),
        kv=kv_pool(config),
        tokenizer=TOKENIZER_FILE if work.tokenizer else None,
        golden=golden,
    )


def kv_pool(config: SpeechBuild) -> KvPool:
    """Return the size of the caches in bytes, in the build's own format and in bf16."""
    quantised, exact = (
        [buffer for buffer in graph_of(build).buffers if buffer.row_axis == contract.PLACES_AXIS]
        for build in (config, config.as_exact)
    )
    size = sum(buffer.nbytes for buffer in quantised)
    numbers = sum(prod(buffer.shape) for buffer in exact)
    return KvPool(
        scheme=config.workload.kv_scheme,
        pool_bytes=size,
        bf16_pool_bytes=numbers * _BF16_BYTES,
        bits_per_number=8 * size / numbers,
    )
