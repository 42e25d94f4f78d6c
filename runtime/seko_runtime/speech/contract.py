"""The contract of the speech workload: its programs and buffers, and when the host writes and reads each buffer.

Shapes in this contract use letters. B is the number of rows of a call, and R the number of rows of the pool with the
spare row. L is the number of positions that a call can read, and S the number of places of a cache. A patch (a short
piece of sound) has P latents of C channels. Numbers are int64 unless another dtype is named. "Model's dtype" is
bfloat16 on a GPU.

**A row** holds one session of a pool. On the device a row has three kinds of memory. The state of the language models
is in `BASE_STATE` [R, d], `RESIDUAL_STATE` [R, d] and `LAST_PATCH` [R, P, C]. The state of the decoder's convolutions
is in `VAE_STATES` [R, s] float32. In every cache the row has consecutive places. All these device buffers of a row have
the role ``cache``. Caches have S places on axis 1 ([layers, S, ...], ``row_axis`` 1); the other buffers have one entry
for each row on axis 0 (``row_axis`` 0). The host keeps the row's first place, next position, number of the next patch,
seed, guidance and temperature.

**Batch indices without a session** get row R - 1, start S - 1, first position 0, count 1, and 0 for everything else,
in any call. No session ever has the last row of a pool or the last place of a cache. `empty_numbers` returns the
numbers of a batch index without a session.

**A prefill** runs the language models over the next tokens of one row's prompt. The program of a prefill is
``prefill.T.L`` (`prefill_program`), for at most T tokens whose last position is below L. An artifact has a prefill
program for every pair of T and L with L at least T. A prompt may need several prefill calls, in order, with steps of
other rows between them. The prefill call of a prompt's last part leaves the state with which the row's first step
begins. Before the first part of a prompt the host fills the row's entry of `VAE_STATES` with zeros. Caches and states
need no zeros, because a row reads only what it wrote.

- Before each prefill call the host fills a host block of four numbers, [1] each. The four numbers are `PREFILL_ROWS`,
  `PREFILL_STARTS`, `PREFILL_FIRST` (position of the part's first token) and `PREFILL_COUNT` (tokens of the part).
- Between prefill calls the host writes buffers of the role ``session`` with ``Memory.write``. The written buffers are
  `IDS` [T], `IS_AUDIO` [T] bool and `PROMPT_PATCHES` [T, P, C] (model's dtype), as `prompts.SpeechPrompt` has them.
  Padding tokens are text, with any id below the vocabulary. The buffers have the length of the largest T; a call takes
  their leading entries.
- After a prefill call the row's position has moved by the count. A prefill has no results for the host to read.

**The lead-in** runs the decoder over one patch of a continued voice (`SpeechPrompt.context`, oldest patch first). The
program of the lead-in is ``lead_in``. The host calls it after the row's `VAE_STATES` are zeros and before the row's
first step. The host writes `LEAD_IN_PATCH` [1, P, C] (model's dtype) between calls; the host block of the call has
`PREFILL_ROWS`. The program's samples, `LEAD_IN_SAMPLES`, are not used.

**A step** makes the next patch and samples of each row of a call, and runs both language models over the patches. The
programs of a step are ``begin.B``, ``solve.B`` (run once for each moving step of the solver), ``advance.B.L`` and
``decode.B`` (`step_programs`). The programs of a step are captured as one CUDA graph for each pair of B and L. Every
row's position is below L, which is one of `SpeechWorkload.step_lengths`.

- Before each step the host fills a host block of buffers with [call_rows] entries, of which a call takes the leading B.
  The buffers of the host block are `ROWS`, `STARTS`, `FIRST` (the row's position), `COUNT` (1), `SEEDS`,
  `PATCH_NUMBERS` (from 0), `TEMPERATURE` and `GUIDANCE` (float32). The noise of a patch depends on seed and patch
  number alone, not on other rows of the call.
- After each step the host reads results with a copy that is queued behind the call. The results are `STOP` [call_rows]
  uint8, `SAMPLES` [call_rows, n] float32, `PATCH` [call_rows, P, C] (model's dtype) and `STOP_LOGITS` [call_rows, 2]
  float32. A `STOP` of 1 means that the patch is the row's last; a `STOP` before `SpeechLimits.least_patches` patches is
  ignored. The next call overwrites the results.
- After a step the position and the patch number of each row have moved by 1.
- If the host writes a state into a row's entries of `STATES` between calls, the next step continues from that state.
  The replay of a golden (recorded steps) writes the recorded states before each step.

**The voice program**, ``voice``, encodes the next stretch of a voice recording and uses no row. Between calls of the
voice program the host writes `VOICE` [1, m] float32 and reads `VOICE_LATENTS` [1, l, C] float32. Before the first
stretch of a voice the host fills `VOICE_STATES` with zeros. `prompts.pad_voice` pads a voice to whole patches. Zeros at
the end of the padded voice then fill its last call of the voice program, and the surplus latents are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

from seko_runtime.errors import ManifestError
from seko_runtime.executor.contract import CALL_ROWS, Contract, ProgramRule
from seko_runtime.executor.programs_check import resolve_programs
from seko_runtime.executor.resolved import Programs
from seko_runtime.format.manifest import Buffer
from seko_runtime.format.program_key import ProgramKey
from seko_runtime.speech.manifest import SpeechManifest

ROWS, STARTS, FIRST, COUNT = CALL_ROWS, "starts", "first", "count"
SEEDS, PATCH_NUMBERS, TEMPERATURE, GUIDANCE = "seeds", "patch_numbers", "temperature", "guidance"
PREFILL_ROWS, PREFILL_STARTS = "prefill.rows", "prefill.starts"
PREFILL_FIRST, PREFILL_COUNT = "prefill.first", "prefill.count"
IDS, IS_AUDIO, PROMPT_PATCHES = "prompt.ids", "prompt.is_audio", "prompt.patches"
LEAD_IN_PATCH, LEAD_IN_SAMPLES = "lead_in.patch", "lead_in.samples"
PATCH, MU, COND = "patch", "mu", "cond"  # of the step under way
STOP, STOP_LOGITS, SAMPLES = "stop", "stop_logits", "samples"
BASE_STATE, RESIDUAL_STATE, LAST_PATCH = "state.base", "state.residual", "state.patch"
STATES = (BASE_STATE, RESIDUAL_STATE, LAST_PATCH)
VAE_STATES, VOICE, VOICE_STATES, VOICE_LATENTS = "vae.states", "voice", "voice.states", "voice.latents"
LEAD_IN, VOICE_PROGRAM = "lead_in", "voice"  # programs
PLACES_AXIS = 1  # of a cache's places, after its layers

_OF_A_STEP = {
    ROWS: "int64",
    STARTS: "int64",
    FIRST: "int64",
    COUNT: "int64",
    SEEDS: "int64",
    PATCH_NUMBERS: "int64",
    TEMPERATURE: "float32",
    GUIDANCE: "float32",
}
_OF_A_PREFILL = (PREFILL_ROWS, PREFILL_STARTS, PREFILL_FIRST, PREFILL_COUNT)


def empty_numbers(manifest: SpeechManifest) -> dict[str, float]:
    """Return the numbers that the host writes for a batch index without a session, by the name of their buffer."""
    return {
        **dict.fromkeys(_OF_A_STEP, 0),
        ROWS: manifest.state_rows - 1,
        STARTS: manifest.workload.places - 1,
        COUNT: 1,
    }


@cache
def step_programs(batch: int, length: int) -> tuple[str, str, str, str]:
    """Return the names of the programs of a step, in order. The second program of a step, ``solve``, runs once for each
    moving step of the solver.
    """
    return (
        ProgramKey("begin", batch).name,
        ProgramKey("solve", batch).name,
        ProgramKey("advance", batch, length=length).name,
        ProgramKey("decode", batch).name,
    )


@cache
def prefill_program(tokens: int, length: int) -> str:
    """Return the name of the program for a prefill call of a given number of tokens and positions."""
    return ProgramKey("prefill", tokens, length=length).name


def resolve_speech(manifest: SpeechManifest) -> Programs:
    """Return the programs of a speech artifact with every reference resolved and checked; see `resolve_programs`."""
    return resolve_programs(manifest, speech_contract(manifest))


def speech_contract(manifest: SpeechManifest) -> Contract:
    """Return the contract of a speech artifact, as the text at the top of this module describes it.

    Raises
    ------
    ManifestError
        If the manifest is for several ranks, or has no pool.
    """
    if manifest.ranks != 1:
        raise ManifestError(
            f"a speech artifact for {manifest.ranks} ranks: this runtime knows speech of one; rebuild it"
        )
    workload = manifest.workload
    of_step = partial(ProgramRule, frozenset({"cache", "state", "host"}), frozenset({"cache", "state"}))
    rules: dict[str, ProgramRule] = {}
    units: list[tuple[str, ...]] = []
    for batch in manifest.buckets:
        for length in workload.step_lengths:
            unit = begin, solve, advance, decode = step_programs(batch, length)
            units.append(unit)
            rules |= {name: of_step(bucket=batch) for name in (begin, advance, decode)}
            rules[solve] = of_step("pass", range(workload.solver.moving_steps), bucket=batch)
    between = frozenset({"cache", "host", "session"})
    for tokens in workload.prefill_tokens:
        for length in workload.read_lengths:
            if length >= tokens:
                name = prefill_program(tokens, length)
                rules[name] = ProgramRule(between, frozenset({"cache"}), bucket=tokens)
                units.append((name,))
    rules[LEAD_IN] = ProgramRule(between, frozenset({"cache", "session"}))
    rules[VOICE_PROGRAM] = ProgramRule(frozenset({"session"}), frozenset({"session"}))
    return Contract(rules, units=tuple(units), check_buffers=partial(_check_buffers, manifest))


def _check_buffers(manifest: SpeechManifest, buffers: Mapping[str, Buffer]) -> None:
    workload, rows = manifest.workload, manifest.call_rows
    if rows >= manifest.state_rows:
        raise ManifestError(
            f"pool.buckets end with {rows}, the pool has {manifest.state_rows} rows, one of them spare"
        )
    if workload.places <= manifest.rows:
        raise ManifestError(f"{workload.places} places of a cache for {manifest.rows} sessions")
    host = {name: ((rows,), dtype) for name, dtype in _OF_A_STEP.items()}
    host |= dict.fromkeys(_OF_A_PREFILL, ((1,), "int64"))
    _expect_all(buffers, "host", host)
    for buffer in buffers.values():
        if buffer.role == "host" and buffer.name not in host:
            raise ManifestError(
                f"host buffer {buffer.name!r} is not one that the host fills: {', '.join(host)}"
            )
        if buffer.role == "cache":
            _check_cache(manifest, buffer)
        if buffer.role == "lane":
            raise ManifestError(
                f"buffer {buffer.name} has the role lane: nothing runs beside steps of speech"
            )
    patch, voice, most = workload.patch, workload.voice, workload.prefill_tokens[-1]
    if BASE_STATE not in buffers:
        raise ManifestError(f"buffer {BASE_STATE} is not there")
    dtype = buffers[BASE_STATE].dtype  # the model's
    width = buffers[BASE_STATE].shape[-1:]
    _expect_all(
        buffers,
        "cache",
        {
            BASE_STATE: ((manifest.state_rows, *width), dtype),
            RESIDUAL_STATE: ((manifest.state_rows, *width), dtype),
            LAST_PATCH: ((manifest.state_rows, *patch.shape), dtype),
        },
    )
    _expect_all(
        buffers,
        "state",
        {
            PATCH: ((rows, *patch.shape), dtype),
            STOP: ((rows,), "uint8"),
            STOP_LOGITS: ((rows, 2), "float32"),
            SAMPLES: ((rows, patch.samples), "float32"),
        },
    )
    latents = (1, voice.patches * patch.latents, patch.channels)
    _expect_all(
        buffers,
        "session",
        {
            IDS: ((most,), "int64"),
            IS_AUDIO: ((most,), "bool"),
            PROMPT_PATCHES: ((most, *patch.shape), dtype),
            LEAD_IN_PATCH: ((1, *patch.shape), dtype),
            LEAD_IN_SAMPLES: ((1, patch.samples), "float32"),
            VOICE: ((1, voice.samples), "float32"),
            VOICE_LATENTS: (latents, "float32"),
        },
    )
    for name, role in ((VAE_STATES, "cache"), (VOICE_STATES, "session")):
        if name not in buffers or buffers[name].role != role:
            raise ManifestError(f"buffer {name} is not there, or is no {role} buffer")
    _check_vocabulary(manifest)
    pool_bytes = sum(buffer.nbytes for buffer in buffers.values() if _has_places(buffer))
    if workload.kv.pool_bytes != pool_bytes:
        raise ManifestError(f"kv.pool_bytes is {workload.kv.pool_bytes}, the caches take {pool_bytes}")
    golden = workload.golden
    if golden is not None and not 1 <= len(golden.seeds) <= rows:
        raise ManifestError(f"golden.seeds has {len(golden.seeds)} seeds, a call has {rows} rows")


def _has_places(buffer: Buffer) -> bool:
    return buffer.role == "cache" and buffer.row_axis == PLACES_AXIS


def _check_cache(manifest: SpeechManifest, buffer: Buffer) -> None:
    """Check that the part of a cache buffer that belongs to a session can be found: its entry, or its places."""
    size = {0: manifest.state_rows, PLACES_AXIS: manifest.workload.places}.get(buffer.row_axis)
    if size is None or buffer.shape[buffer.row_axis : buffer.row_axis + 1] != (size,):
        raise ManifestError(
            f"cache buffer {buffer.name} {list(buffer.shape)} has row_axis {buffer.row_axis}, expected "
            f"{manifest.state_rows} rows on axis 0, or {manifest.workload.places} places on axis {PLACES_AXIS}"
        )
    if buffer.device_layers:
        raise ManifestError(f"cache buffer {buffer.name} is offloaded; caches of speech lie on the device")


def _check_vocabulary(manifest: SpeechManifest) -> None:
    """Check that every token id below the vocabulary is inside the table from which a prefill reads embeddings."""
    specs = {engine.name: engine.inputs for engine in manifest.engines}
    for program, calls in manifest.programs.items():
        for call in calls:
            if f"buffer:{IDS}[bucket]" not in call.inputs:
                continue
            tables = [
                spec.shape[0]
                for ref, spec in zip(
                    call.inputs, specs.get(call.engine, ()), strict=False
                )  # not compared yet
                if ref.startswith("weight:") and len(spec.shape) == 2
            ]
            if max(tables, default=0) < manifest.workload.vocabulary:
                raise ManifestError(
                    f"workload.vocabulary is {manifest.workload.vocabulary}, program {program} looks ids up in "
                    f"tables of {tables[:8]} entries; rebuild the artifact"
                )


def _expect_all(
    buffers: Mapping[str, Buffer], role: str, expected: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
    for name, (shape, dtype) in expected.items():
        buffer = buffers.get(name)
        if buffer is None:
            raise ManifestError(f"buffer {name} is not there, expected {role} {dtype} {list(shape)}")
        if (buffer.role, buffer.shape, buffer.dtype, buffer.row_axis) != (role, shape, dtype, 0):
            raise ManifestError(
                f"buffer {name} is {buffer.role} {buffer.dtype} {list(buffer.shape)}, expected {role} {dtype} "
                f"{list(shape)}"
            )
