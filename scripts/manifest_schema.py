"""The JSON schemas of the manifest, one for each workload, generated from the dataclasses that the runtime reads.

`python scripts/manifest_schema.py` writes the schemas into the runtime's package. A schema has types, bounds, defaults,
required fields, and what each field means. Rules that compare two fields, or a field with a file, are checked by the
runtime only, not by the schemas.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from seko_runtime.executor.programs_check import REF_PATTERN
from seko_runtime.format import budgets
from seko_runtime.format.json_fields import (
    MAX_INTEGER,
    MAX_KEY_LETTERS,
    MAX_TEXT_LETTERS,
    NAME_PATTERN,
    as_name,
)
from seko_runtime.format.manifest import MAX_RANK, Call, Manifest, as_device, as_sha256, as_shape
from seko_runtime.format.paths import as_path
from seko_runtime.format.records import Limit, Mark, OneOf, Within
from seko_runtime.opening.workloads import WORKLOADS
from seko_runtime.video.manifest import as_latent_shape

_FILE = "manifest.schema.json"
SCHEMAS: Mapping[Path, type[Manifest]] = {  # by the file in the runtime's package
    Path(inspect.getfile(workload.manifest_type)).with_name(_FILE): workload.manifest_type
    for workload in map(WORKLOADS.find, WORKLOADS.own)
}
Schema = dict[str, Any]

_TEXT = r"^[^\u0000-\u001f]*$"
_SIZES: Schema = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER}}
_PLAIN: Mapping[object, Schema] = {
    str: {"type": "string", "pattern": _TEXT, "maxLength": MAX_TEXT_LETTERS},
    int: {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    object: {},
}
_READERS: Mapping[Callable[..., Any], Schema] = {
    as_name: {"type": "string", "pattern": f"^{NAME_PATTERN.pattern}$"},
    as_path: {
        "type": "string",
        "pattern": r"^(?!.*(?:^|/)\.{0,2}(?:/|$))[^\\\u0000-\u001f\u007f]+$",
        "maxLength": 1024,
    },
    as_shape: _SIZES | {"maxItems": MAX_RANK},
    as_latent_shape: _SIZES | {"minItems": 3, "maxItems": 3},
    as_device: {"enum": ["cpu", "cuda"]},
    as_sha256: {"type": "string", "pattern": "^[0-9a-f]{64}$"},
}


def manifest_schema(kind: type[Manifest]) -> Schema:
    """Return the JSON schema (draft 2020-12) of a manifest's dataclass and of the dataclasses in it."""
    definitions: dict[str, Schema] = {}
    reference = _object(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "manifest.json of a Seko artifact",
        **reference,
        "$defs": dict(sorted(definitions.items())),
    }


def schema_text(kind: type[Manifest]) -> str:
    """Return the text of a schema file in the runtime's package."""
    return json.dumps(manifest_schema(kind), indent=1) + "\n"


def _object(kind: type, definitions: dict[str, Schema]) -> Schema:
    """Add the schema of a dataclass to the definitions, and return a reference to it."""
    if kind.__name__ not in definitions:
        definition: Schema = {"type": "object", "description": _told(kind)}
        definitions[kind.__name__] = definition
        hints, described = get_type_hints(kind, include_extras=True), _described(kind)
        properties, required = {}, []
        for field in fields(kind):
            hint = hints[field.name]
            properties[field.name] = _value(hint, definitions) | described.get(field.name, {})
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            if not has_default or Mark.REQUIRED in getattr(hint, "__metadata__", ()):
                required.append(field.name)
            else:
                properties[field.name] |= _default(field)
        if kind is Call:
            for side in ("inputs", "outputs"):
                properties[side]["items"] = {"type": "string", "pattern": f"^{REF_PATTERN.pattern}$"}
        definition |= {"properties": properties, "required": required}
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _value(hint: Any, definitions: dict[str, Schema]) -> Schema:
    """Return the schema of a value of this type."""
    notes: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, notes = get_args(hint)[0], hint.__metadata__
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (part for part in get_args(hint) if part is not NoneType)
        return {"anyOf": [_value(inner, definitions), {"type": "null"}]}
    for note in notes:
        if isinstance(note, Within):
            return {"type": "integer", "minimum": note.minimum, "maximum": note.maximum}
        if isinstance(note, OneOf):
            return {"enum": list(note.words)}
        if callable(note):
            return dict(_READERS[note])
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    if is_dataclass(hint):
        return _object(hint, definitions)  # type: ignore[arg-type]  # a class, not an instance
    limits = [getattr(budgets, note.constant) for note in notes if isinstance(note, Limit)]
    if get_origin(hint) is tuple:
        schema = {"type": "array", "items": _value(get_args(hint)[0], definitions)}
        return schema | ({"maxItems": limits[0]} if limits else {})
    schema = {
        "type": "object",
        "additionalProperties": _value(get_args(hint)[1], definitions),
        "propertyNames": {"maxLength": MAX_KEY_LETTERS},
    }
    return schema | ({"maxProperties": limits[0]} if limits else {})


def _told(kind: type) -> str:
    """Return a dataclass's docstring without the parameters."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").partition("Parameters\n----------\n")[0].split())


def _described(kind: type) -> dict[str, Schema]:
    """Return the descriptions of a dataclass's fields, from the parameters in its docstring and those of its bases."""
    descriptions = {}
    for described in filter(is_dataclass, reversed(kind.__mro__)):
        _, _, parameters = inspect.cleandoc(described.__doc__ or "").partition("Parameters\n----------\n")
        for names, text in re.findall(
            r"^([\w, ]+)(?: : .*)?\n((?:    .*\n?|\n(?=    ))+)", parameters, re.MULTILINE
        ):
            for name in names.split(", "):
                descriptions[name] = {"description": " ".join(text.split())}
    return descriptions


def _default(field: Field[Any]) -> Schema:
    """Return what a field that a manifest may leave out then is."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    return {"default": list(value) if isinstance(value, tuple) else value}


if __name__ == "__main__":
    for schema_path, manifest_class in SCHEMAS.items():
        schema_path.write_text(schema_text(manifest_class), encoding="utf-8")
