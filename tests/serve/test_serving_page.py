"""docs/clients.md and the example of a systemd unit repeat what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seko_serve.errors import table
from seko_serve.http.fields import Fields
from seko_serve.live.manager import CLOSING_S, DRAIN_S
from seko_serve.run import SERVER_LIMITS
from seko_serve.speech.fields import FIELDS as SPEECH_FIELDS
from seko_serve.speech.fields import VOICE_FIELDS
from seko_serve.video.fields import FIELDS as VIDEO_FIELDS
from seko_serve.video.realtime_messages import FIELDS as REALTIME_FIELDS

from .conftest import Starter, toy_opener
from .test_limits import told_limits
from .toys import talk_opener, world_opener

ROOT = Path(__file__).parents[2]
CLIENTS = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
UNIT = (ROOT / "serve" / "examples" / "seko-serve.service").read_text(encoding="utf-8")


def test_the_table_of_errors_is_that_of_the_code() -> None:
    assert table() in CLIENTS, f"write this into docs/clients.md:\n{table()}"


@pytest.mark.parametrize("fields", [VIDEO_FIELDS, SPEECH_FIELDS, VOICE_FIELDS, REALTIME_FIELDS])
def test_the_tables_of_fields_are_those_of_the_code(fields: Fields) -> None:
    assert fields.table() in CLIENTS, f"write this into docs/clients.md:\n{fields.table()}"


def test_systemd_waits_until_all_sessions_are_saved() -> None:
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(seconds) > DRAIN_S + CLOSING_S + SERVER_LIMITS["timeout_graceful_shutdown"]


@pytest.mark.parametrize("opener", [toy_opener, world_opener, talk_opener])
def test_the_page_names_every_limit_that_a_client_is_told(start: Starter, opener: object) -> None:
    _, _, rows = CLIENTS.partition("| name in `limits` |")
    names = re.findall(
        r"`(\w+)`", "".join(line for line in rows.split("\n\n")[0].splitlines() if line[:3] == "| `")
    )
    assert set(told_limits(start(opener))) <= set(names)
