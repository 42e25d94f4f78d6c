"""A strict double out of stubs: classes with the stubs' names and signatures, which refuse everything else.

It is no TensorRT. It knows what may be called with what, and nothing of what that does; what little a test needs of
that is put in by `does`.
"""

from __future__ import annotations

import ast
import enum
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

Overloads = list[tuple[inspect.Signature, dict[str, str]]]


class StrictError(AssertionError):
    """Something was called that the stubs do not have, or with what they do not take."""


class Strict:
    """Base of every class of a double: attributes are those of the stubs, of the stubs' types."""

    _module: types.ModuleType

    def __setattr__(self, name: str, value: object) -> None:
        declared = {
            key: kind
            for base in type(self).__mro__
            for key, kind in vars(base).get("_attributes", {}).items()
        }
        if not isinstance(getattr(type(self), name, None), property):
            subclass = type(self).__module__ != self._module.__name__ and not vars(type(self)).get(
                "_made_by_the_double"
            )
            if not subclass and name not in declared and not name.startswith("_"):
                raise StrictError(f"{type(self).__name__} has no attribute {name}")
            if name in declared:
                check_type(self._module, declared[name], value, f"{type(self).__name__}.{name}")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise StrictError(f"{type(self).__name__} has no {name}, or the double was not told its value")

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Check what a class of ours puts in the place of TensorRT's methods: as many parameters as are handed over."""
        super().__init_subclass__(**arguments)
        for base in cls.__mro__[1:]:
            for name, overloads in vars(base).get("_methods", {}).items():
                ours = vars(cls).get(name)
                if ours is None or name.startswith("__") or not inspect.isfunction(ours):
                    continue
                most = max(len(signature.parameters) for signature, _ in overloads)
                try:
                    inspect.signature(ours).bind(*range(most))
                except TypeError as error:
                    raise StrictError(
                        f"{cls.__name__}.{name} does not take what TensorRT hands over: {error}"
                    ) from None


def load(path: Path, name: str) -> types.ModuleType:
    """Return a module with every class of a stub."""
    module = types.ModuleType(name)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            setattr(module, node.name, _class_of(node, module))
    return module


def does(cls: type, method: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what a method of a double does, once its arguments are checked."""

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        if method not in vars(cls)["_methods"]:
            raise StrictError(f"{cls.__name__} has no method {method}")
        cls._behaviour[method] = function  # type: ignore[attr-defined]
        return function

    return put


def made_by_library(cls: Any, **values: Any) -> Any:
    """An object of a class that only the library makes."""
    instance = types.new_class(
        cls.__name__, (cls,), exec_body=lambda space: space.update(_made_by_the_double=True)
    )()
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def check_type(module: types.ModuleType, kind: str, value: object, place: str) -> None:
    """Refuse a value that is plainly not of a stub's type."""
    for part in _split_union(kind):
        base = part.partition("[")[0].strip()
        wanted: Any = {
            "int": int,
            "float": (int, float),
            "str": (str, bytes),  # pybind11 takes both
            "bool": bool,
            "None": type(None),
            "Buffer": (bytes, bytearray, memoryview),
            "Sequence": (list, tuple),
            "list": list,
            "tuple": tuple,
            "Callable": types.FunctionType,
        }.get(base)
        if wanted is None:
            owner: Any = module
            for step in base.split("."):
                owner = getattr(owner, step, None)
            if not isinstance(owner, type):
                return  # Any, object, or a class that is not among the stubs
            wanted = owner
        if isinstance(value, wanted) and not (isinstance(value, bool) and base == "int"):
            return
    raise StrictError(f"{place} takes {kind}, got {value!r}")


def _split_union(kind: str) -> list[str]:
    return [part.strip() for part in kind.split("|")] if "[" not in kind else [kind]


def _class_of(node: ast.ClassDef, module: types.ModuleType) -> type:
    plain = [
        part for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]
    members = [p.target.id for p in plain if ast.unparse(p.annotation) == node.name]  # type: ignore[union-attr]
    if members:
        return enum.Enum(
            node.name,
            {name: place for place, name in enumerate(members)},
            module=module.__name__,
            type=_Member,
        )
    methods: dict[str, Overloads] = {}
    body: dict[str, Any] = {"__module__": module.__name__, "_module": module, "_behaviour": {}}
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            methods.setdefault(part.name, []).append(_signature(part))
        elif isinstance(part, ast.ClassDef):
            body[part.name] = _class_of(part, module)
    methods.pop("__buffer__", None)  # what a double gives is a memoryview itself
    for name, overloads in methods.items():
        body[name] = _method(node.name, name, overloads, module)
    if "__init__" not in methods:
        body["__init__"] = _not_ours(node.name)
    body["_methods"] = methods
    body["_attributes"] = {p.target.id: ast.unparse(p.annotation) for p in plain}  # type: ignore[union-attr]
    return types.new_class(node.name, (Strict,), exec_body=lambda space: space.update(body))


class _Member:
    """A value of one of TensorRT's enums."""

    def __int__(self) -> int:
        return int(self.value)  # type: ignore[attr-defined]

    def __index__(self) -> int:
        return int(self.value)  # type: ignore[attr-defined]


def _signature(node: ast.FunctionDef) -> tuple[inspect.Signature, dict[str, str]]:
    arguments = node.args.args
    first_default = len(arguments) - len(node.args.defaults)
    parameters = [
        inspect.Parameter(
            argument.arg,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=... if place >= first_default else inspect.Parameter.empty,
        )
        for place, argument in enumerate(arguments)
    ]
    kinds = {
        argument.arg: ast.unparse(argument.annotation)
        for argument in arguments
        if argument.annotation is not None
    }
    return inspect.Signature(parameters), kinds


def _method(owner: str, name: str, overloads: Overloads, module: types.ModuleType) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        faults = []
        for signature, kinds in overloads:
            try:
                bound = signature.bind(self, *arguments, **named)
                for key, value in bound.arguments.items():
                    if key in kinds:
                        check_type(module, kinds[key], value, f"{owner}.{name}({key})")
                break
            except (TypeError, StrictError) as error:
                faults.append(str(error))
        else:
            raise StrictError(f"{owner}.{name}{arguments}{named}: {'; '.join(faults)}")
        for base in type(self).__mro__:
            behaviour = vars(base).get("_behaviour", {}).get(name)
            if behaviour is not None:
                return behaviour(self, *arguments, **named)
        if name == "__init__":
            return None
        raise StrictError(f"the double was not told what {owner}.{name} does")

    return method


def _not_ours(owner: str) -> Callable[..., None]:
    def init(self: Any, *_: Any, **__: Any) -> None:
        if not vars(type(self)).get("_made_by_the_double"):
            raise StrictError(f"{owner} cannot be made by hand")

    return init
