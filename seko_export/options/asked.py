"""The options of all workloads, and the workload of a build from its options, without importing torch."""

from __future__ import annotations

from dataclasses import Field
from pathlib import Path
from typing import Any

from seko_export.checkpoints.json_files import CONFIG_FILE, read_json
from seko_export.config.model import ModelConfig
from seko_export.errors import UsageError
from seko_export.families.registry import all_presets
from seko_export.options.declaration import ANY, BuildOptions, Option, declared, flag
from seko_export.workloads.base import ExportWorkload
from seko_export.workloads.registry import WORKLOADS, workload_named


def all_options() -> dict[str, tuple[Field[Any], Option]]:
    """Return the options of builds of every workload by the names of their fields. Of options of one name the first
    workload's stands for all."""
    kinds: list[type[BuildOptions]] = [BuildOptions]
    kinds += [workload.options for _, workload in WORKLOADS.every() if workload.options is not None]
    found: dict[str, tuple[Field[Any], Option]] = {}
    for kind in kinds:
        for option_field, option in declared(kind):
            found.setdefault(option_field.name, (option_field, option))
    return found


def options_of(checkpoint: Path | None = None, **asked: Any) -> BuildOptions:
    """Return the options that a command was given, as options of the workload whose model they name.

    Raises
    ------
    UsageError
        If options contradict each other, or one belongs to another workload.
    """
    known = all_options()
    given = {name: value for name, value in asked.items() if value != known[name][0].default}
    common = {field.name: given[field.name] for field, _ in declared() if field.name in given}
    workload = workload_asked(BuildOptions(checkpoint, **common))
    for name in given:
        check_workload(name, known[name][1], workload)
    return (workload.options or BuildOptions)(checkpoint, **given)


def workload_asked(options: BuildOptions) -> ExportWorkload[Any]:
    """Return the workload of a build: by its preset or by the config.json of its folder, and otherwise video."""
    if options.preset is not None:
        named = all_presets().get(options.preset)
        return workload_named(ModelConfig.workload if named is None else named.workload)
    folder = options.checkpoint or options.model_folder
    content = {} if folder is None else config_in(folder)
    recognising = (workload for _, workload in WORKLOADS.every() if content and workload.recognises(content))
    return next(recognising, None) or workload_named(ModelConfig.workload)


def config_in(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json; empty if there is none that can be read, which another check
    reports."""
    try:
        content = read_json(folder / CONFIG_FILE)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def check_workload(name: str, option: Option, workload: ExportWorkload[Any]) -> None:
    """Refuse an option that belongs to models of another workload."""
    if option.workload not in (ANY, workload.name):
        raise UsageError(
            f"{flag(name)} belongs to models of {option.workload}, and this is one of {workload.name}: leave it out"
        )
