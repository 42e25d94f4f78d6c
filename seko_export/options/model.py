"""Choice of a build's model from its checkpoint, a preset and ``--heads``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seko_export.checkpoints.errors import NotACheckpointError, UnknownModelError
from seko_export.checkpoints.json_files import read_json_object
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.model_files import ModelFile, recognise_checkpoint
from seko_export.families.recognition import CHOSEN, NAMES, Fact, Recognised, Source
from seko_export.families.registry import video_family_named
from seko_export.families.video import Preset
from seko_export.options.declaration import BuildOptions

HEADS = "--heads"
_ASPECT = re.compile(r"([1-9][0-9]{0,5})[:x]([1-9][0-9]{0,5})", re.ASCII)


@dataclass(frozen=True)
class ChosenModel:
    """The model that a build uses, with its stream layout and schedule.

    Parameters
    ----------
    model : ModelConfig
        Dimensions of the model. The model's name is that of the preset with these dimensions. Without a preset the name
        has family, width and depth.
    stream : StreamConfig
        The layout of the stream, with the options applied.
    schedule : Schedule or None
        Timesteps of a chunk's passes, if the checkpoint states them.
    notes : tuple of str
        Sentences for the user about sizes that were assumed.
    """

    model: ModelConfig
    stream: StreamConfig
    schedule: Schedule | None = None
    notes: tuple[str, ...] = ()


def preset_model(name: str, preset: Preset, options: BuildOptions) -> ChosenModel:
    """Return the model of a named preset; raise an error if the checkpoint's config.json contradicts the preset.

    Shapes of the checkpoint are compared with the preset when the weights are read. The schedule of the model is that
    of the preset; if the preset has no schedule, that of config.json.

    Raises
    ------
    CheckpointError
        If config.json contradicts the preset in a field that no option sets.
    UsageError
        If ``--heads`` contradicts the preset.
    """
    if options.heads not in (None, preset.model.heads):
        raise UsageError(
            f"{HEADS} {options.heads} contradicts --preset {name}, which has {preset.model.heads}: leave one out"
        )
    stream, schedule = replace(preset.stream, **options.layout), preset.schedule
    if options.checkpoint is None:
        return ChosenModel(preset.model, stream, schedule)
    try:
        file = _recognised(options, options.checkpoint)
    except UnknownModelError:  # the strict comparison with this model will say more
        return ChosenModel(preset.model, stream, schedule)
    recognised = file.recognised
    # A preset of another family lacks some of what the file says.
    shared = [name for name in recognised.model if hasattr(preset.model, name) and name not in CHOSEN]
    pairs = [(name, getattr(preset.model, name), recognised.model[name]) for name in shared]
    pairs += [
        (name, getattr(preset.stream, name), fact)
        for name, fact in recognised.stream.items()
        if name not in options.layout
    ]
    if schedule is not None and recognised.schedule is not None and options.timesteps is None:
        pairs.append(("schedule", schedule, recognised.schedule))
    odd = [
        f"{name} is {fact.value} by {fact.origin}, {ours} by the preset"
        for name, ours, fact in pairs
        if fact.source is Source.CONFIG and fact.value != ours
    ]
    if odd:
        raise CheckpointError(
            f"{options.checkpoint} contradicts --preset {name}: {'; '.join(odd)}; leave --preset out, or give what "
            "belongs to the stream as options"
        )
    config = {
        name: recognised.model[name]
        for name in CHOSEN
        if name in recognised.model and hasattr(preset.model, name)
    }
    stated: dict[str, Any] = {
        name: fact.value for name, fact in config.items() if fact.source is Source.CONFIG
    }
    model = replace(preset.model, **stated)
    return ChosenModel(
        model, stream, schedule or recognised.own_schedule, _unused_note(options.checkpoint, recognised)
    )


def with_aspect(chosen: ChosenModel, aspect: str | None) -> ChosenModel:
    """Return the model with a video of the aspect that ``--aspect`` names, W:H, and of the same area.

    Raises
    ------
    UsageError
        If ``--aspect`` is not W:H, or a side of the video would be empty.
    """
    if aspect is None:
        return chosen
    match = _ASPECT.fullmatch(aspect)
    if match is None:
        raise UsageError(f"--aspect {aspect[:40]!r}: expected width and height, as 16:9 or 1920:1080")
    height, width = chosen.stream.sides_for(int(match[2]) / int(match[1]))
    return replace(chosen, stream=replace(chosen.stream, height=height, width=width))


def with_model_options(chosen: ChosenModel, options: BuildOptions) -> ChosenModel:
    """Return the model with ``--camera`` and ``--speakers`` applied.

    Raises
    ------
    UsageError
        If the model has no such field, or does not support the value.
    """
    for name, lacking in (("camera", "has no camera"), ("speakers", "hears no voice")):
        value = getattr(options, name)
        if value is not None and not hasattr(chosen.model, name):
            raise UsageError(f"--{name} {value}: {chosen.model.name!r} {lacking}; leave it out")
        if value is not None:
            try:
                chosen = replace(chosen, model=replace(chosen.model, **{name: value}))
            except UsageError as fault:  # it begins with the name of the field
                raise UsageError(f"--{fault}") from None
    return chosen


def with_run_config(chosen: ChosenModel, options: BuildOptions) -> ChosenModel:
    """Return the model with layout and passes from the file ``--run-config``; other options override the file.

    Raises
    ------
    UsageError
        If the family has no run configurations, or the file asks for a feature that Seko does not support.
    NotACheckpointError
        If the run configuration is not a JSON object.
    """
    file = options.run_config
    if file is None:
        return chosen
    stream_fields, schedule = video_family_named(chosen.model.family).run_config(
        str(file), read_json_object(file)
    )
    return replace(
        chosen, stream=replace(chosen.stream, **{**stream_fields, **options.layout}), schedule=schedule
    )


@dataclass(frozen=True)
class ReadFacts:
    """The known facts of a checkpoint's model without a preset.

    Parameters
    ----------
    file : ModelFile
        The checkpoint that a family recognised.
    name : str
        Name of the preset that has all dimensions of the checkpoint. Without a preset the name has family, width and
        depth.
    model, stream : mapping of str to Fact
        Fields of `ModelConfig` and `StreamConfig`; fields that were not read have the value of the preset or of the
        family.
    preset : Preset or None
        The preset with the name ``name``, if there is one.
    alike : tuple of str
        Names of presets that have all dimensions and stream fields of the checkpoint.
    candidates : tuple of str
        The presets of ``alike`` between which the user must choose; empty if there is one, or if the checkpoint's path
        names the preset.
    """

    file: ModelFile
    name: str
    model: Mapping[str, Fact]
    stream: Mapping[str, Fact]
    preset: Preset | None = None
    alike: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()

    @property
    def recognised(self) -> Recognised:
        """Return the recognised checkpoint with `model` and `stream` in place of what was read from the file."""
        return replace(self.file.recognised, model=self.model, stream=self.stream)


def read_facts(options: BuildOptions, checkpoint: Path, presets: Mapping[str, Preset]) -> ReadFacts:
    """Return the known facts about a checkpoint's model.

    Parameters
    ----------
    options : BuildOptions
        The options of the build, of which ``--heads``, ``--entry`` and ``--audio-adapter`` are used.
    checkpoint : Path
        File or folder of the checkpoint.
    presets : mapping of str to Preset
        Presets with which the checkpoint is compared.

    Raises
    ------
    CheckpointError
        If the checkpoint cannot be read, belongs to no known family, or contradicts its config.json or ``--heads``.
    """
    file = _recognised(options, checkpoint)
    model, stream = _with_heads(checkpoint, file.recognised, options.heads), file.recognised.stream
    family = file.recognised.family
    read = {name: fact.value for name, fact in model.items() if fact.is_read and name not in CHOSEN}
    layout = {name: fact.value for name, fact in stream.items() if fact.is_read}
    alike = {
        name: preset
        for name, preset in presets.items()
        if preset.model.family == family and all(getattr(preset.model, name) == read[name] for name in read)
    }
    # Where the family takes the passes from a preset, the rest is of that preset, too.
    passes = file.recognised.schedule
    usual = passes.detail if passes is not None and passes.source is Source.ASSUMED else ""
    # Of models that differ in their streams alone, the one with this stream; of these, the one that the path names.
    for name, preset in sorted(
        alike.items(),
        key=lambda item: (
            item[0] != usual,
            bool(item[1].missing) and not item[1].is_named(checkpoint),
            not _has(item[1].stream, layout),
            not item[1].is_named(checkpoint),
        ),
    ):
        same = tuple(name for name, preset in alike.items() if _has(preset.stream, layout))
        return ReadFacts(
            file,
            name,
            _taken_from(name, preset.model, model),
            _taken_from(name, preset.stream, stream),
            preset,
            same,
            same if len(same) > 1 and not preset.is_named(checkpoint) else (),
        )
    return ReadFacts(file, f"{family}-{model['dim'].value}x{model['layers'].value}", model, stream)


def read_model(options: BuildOptions, checkpoint: Path, presets: Mapping[str, Preset]) -> ChosenModel:
    """Return the model that a checkpoint describes.

    Fields that the checkpoint does not state are taken from the preset with the same dimensions; without a preset, from
    the family. A note names these fields and their values. The parameters are those of `read_facts`.

    Raises
    ------
    CheckpointError
        If the checkpoint cannot be read, belongs to no known family, or contradicts its config.json or ``--heads``.
    UsageError
        If the model's number of heads is unknown, or the options contradict each other.
    """
    facts = read_facts(options, checkpoint, presets)
    recognised = facts.recognised
    if recognised.lacking:
        raise UsageError(f"{checkpoint} {lacking_sentence(recognised)}")
    answered = {*(recognised.questions if options.run_config else ()), *options.layout}
    for name, question in recognised.questions.items():
        if name not in recognised.stream and name not in answered:
            raise UsageError(
                f"{checkpoint} does not tell {name} of its streams, and no preset has its sizes: {question.sentence}"
            )
    return ChosenModel(
        model_of(checkpoint, facts),
        StreamConfig(**{name: fact.value for name, fact in recognised.stream.items()} | {**options.layout}),
        recognised.own_schedule or (None if facts.preset is None else facts.preset.schedule),
        notes_on(checkpoint, facts, answered),
    )


def _recognised(options: BuildOptions, checkpoint: Path) -> ModelFile:
    adapter = options.audio_adapter
    file = recognise_checkpoint(checkpoint, entry=options.entry, companion=adapter)
    family = file.recognised.family
    if adapter is not None and not video_family_named(family).keys.companions:
        raise UsageError(
            f"--audio-adapter {adapter}: {checkpoint} is of {family}, which has none; leave it out"
        )
    return file


def model_of(checkpoint: Path, facts: ReadFacts) -> ModelConfig:
    """Return the config of the model, none of whose fields may be unknown.

    Raises
    ------
    UsageError
        If the model's width is no multiple of ``--heads``.
    NotACheckpointError
        If the dimensions in the checkpoint contradict each other.
    """
    try:
        return facts.recognised.model_named(facts.name)
    except UsageError as fault:
        if facts.model["heads"].source is Source.ASKED:
            raise
        raise NotACheckpointError(f"{checkpoint} is of a model that cannot be built: {fault}") from fault


def lacking_sentence(recognised: Recognised) -> str:
    """Return a sentence that names the fields that the checkpoint does not state and its family does not assume."""
    widths = " and ".join(
        f"{name} {recognised.model[name].value}"
        for name in ("dim", "audio_width")
        if name in recognised.model
    )
    file = "config.json beside the weights"
    give = f"a {file} that says it"
    if "heads" in recognised.lacking:
        give = (
            f"{HEADS} N, or a {file}"
            if recognised.lacking == ("heads",)
            else f"{HEADS} N, and a {file} with the rest"
        )
    return (
        f"does not tell its {', '.join(recognised.lacking)}, and {recognised.family} has no rule for {widths}: "
        f"give {give}"
    )


def notes_on(checkpoint: Path, facts: ReadFacts, answered: Set[str] = frozenset()) -> tuple[str, ...]:
    """Return sentences on stream fields that a checkpoint does not state, and on the values that are assumed for these
    fields.

    The user's options set the fields that ``answered`` names, so there is no sentence on them.
    """
    taken: dict[str, list[str]] = {}
    for name, fact in facts.model.items():
        if not fact.is_read:
            taken.setdefault(fact.origin, []).append(f"{name} {fact.value}")
    notes = []
    if taken:
        listed = "; ".join(f"{', '.join(values)} ({origin})" for origin, values in taken.items())
        heads = facts.model.get("heads")
        option = "" if heads is None or heads.is_read else f"{HEADS} N or "
        notes.append(
            f"{checkpoint} does not tell all of its model; taken: {listed}; {option}a config.json beside the weights "
            "says otherwise"
        )
    for name, question in facts.recognised.questions.items():
        answer = facts.stream.get(name)
        if name in answered:
            continue
        if answer is None:
            notes.append(f"{checkpoint} does not tell {name} of its streams: {question.sentence}")
        elif not answer.is_read:
            notes.append(
                f"{name} {answer.value} is taken ({answer.origin}); if the weights have others: {question.sentence}"
            )
    if facts.candidates:
        notes.append(
            f"{checkpoint} does not tell which preset it is of: {', '.join(facts.candidates)} have its sizes; stream "
            f"and passes of {facts.name} are taken, --preset NAME chooses others"
        )
    elif len(facts.alike) > 1:
        others = ", ".join(name for name in facts.alike if name != facts.name)
        have = "has" if len(facts.alike) == 2 else "have"
        notes.append(
            f"stream and passes are those of {facts.name}, since the file is named so; {others} {have} the same sizes: "
            "--preset names one"
        )
    notes += _unused_note(checkpoint, facts.recognised)
    if facts.file.ignored_config is not None:
        notes.append(f"{facts.file.ignored_config} is of something else than {checkpoint}, and was not read")
    return tuple(notes)


def _unused_note(checkpoint: Path, recognised: Recognised) -> tuple[str, ...]:
    if not recognised.unused:
        return ()
    return (
        f"not used of the config.json of {checkpoint}: {', '.join(recognised.unused)}; "
        + (
            "--run-config or the options of the stream say it"
            if recognised.questions
            else "a --preset says it"
        ),
    )


def _with_heads(path: Path, recognised: Recognised, heads: int | None) -> dict[str, Fact]:
    """Return a model's facts with ``--heads``, which overrides the family's assumption.

    Raises
    ------
    CheckpointError
        If config.json states another number of heads.
    """
    model = dict(recognised.model)
    if heads is None:
        return model
    before = model.get("heads")
    if before is not None and before.source is Source.CONFIG and before.value != heads:
        raise CheckpointError(
            f"{path} contradicts {HEADS} {heads}: heads is {before.value} by {before.origin}; leave the option out, or "
            "correct the file"
        )
    return model | {"heads": Fact(heads, Source.ASKED, HEADS)}


def _has(stream: StreamConfig, layout: Mapping[str, object]) -> bool:
    return all(getattr(stream, name) == value for name, value in layout.items())


def _taken_from(name: str, preset: ModelConfig | StreamConfig, facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Return the facts that were read from a checkpoint, completed with the values of a preset."""
    read = {name_of_fact for name_of_fact, fact in facts.items() if fact.is_read}
    assumed = [field for field in vars(preset) if field not in {*read, *NAMES}]
    taken = {
        name_of_fact: Fact(getattr(preset, name_of_fact), Source.PRESET, name) for name_of_fact in assumed
    }
    return {**facts, **taken}
