"""Log lines in JSON, which contain nothing that a client sent."""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from seko_serve import request_ids

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
PEERS = ("aioice", "aiortc")  # libraries whose lines have the addresses that a client's offer names
FRAMES = 12  # of a traceback, the innermost
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-_])")  # of ECMA-48, such as Ray's colours


class JsonFormatter(logging.Formatter):
    """Formats each log record as one line with a JSON object: time, level, message, the id of the request that is
    answered, and the record's extra fields.

    For an exception the log line has the exception's type and the place in the code where it was raised. The text of an
    exception is left out of the log line, because it may quote a client's data.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as a line of JSON."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage().strip(),
        }
        if request := request_ids.current():
            line["request"] = request
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info and record.exc_info[1] is not None:
            line |= exception_fields(record.exc_info[1])
        return json.dumps(line, default=lambda value: type(value).__name__)


def exception_fields(error: BaseException) -> dict[str, object]:
    """Return the type of an exception and the code places of its traceback."""
    return {"exception": type(error).__name__, "at": list(_places(error))[-FRAMES:]}


def last_line(text: str) -> str:
    """Return the last line of another program's message that is not blank, without a terminal's escape sequences."""
    lines = [line.strip() for line in _ESCAPES.sub("", text).splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _places(error: BaseException) -> Iterator[str]:
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        yield f"{file.parent.name}/{file.name}:{frame.lineno} {frame.name}"


def set_up(level: str) -> None:
    """Write the process's log lines as JSON to stderr; `level` is the name of a level of `logging` in small letters."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for library in PEERS:
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
