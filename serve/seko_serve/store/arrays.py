"""Arrays within the JSON of a saved session. The state of a session holds its arrays as they are, because the device's
thread collects the state; the thread that writes the file makes text of them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def array_table(array: object) -> dict[str, Any]:
    """Return an array as a JSON object with its dtype, shape and data: a ``default`` for `json.dumps`. TypeError for
    any other object."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"a session's state holds a {type(array).__name__}, expected JSON and arrays")
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "base64": content}


def array_of(table: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array from a JSON object that `array_table` returned."""
    content = base64.b64decode(table["base64"])
    return np.frombuffer(content, np.dtype(table["dtype"])).reshape(table["shape"]).copy()


def arrays_of(tables: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return arrays by name from JSON objects that `array_table` returned."""
    return {name: array_of(table) for name, table in tables.items()}
