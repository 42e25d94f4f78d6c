"""A plug-in of pytest: Triton's interpreter without half of its work, which no result shows. No tests.

It computes whether integers overflow, which it says only with its option `debug`; and it replaces the functions of
`triton.language` anew at every call of a function, though they stay replaced.
"""

from __future__ import annotations

from types import FunctionType

from triton.runtime import interpreter

_patch = interpreter._patch_lang
_patched: set[str] = set()


def _patch_once(function: FunctionType) -> interpreter._LangPatchScope:
    """Replace what a function's module calls, for good: the scope has nothing to take back."""
    if function.__module__ not in _patched:
        _patched.add(function.__module__)
        _patch(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_once
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
