"""The load tool: its figures by their definitions, and a run against a server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_serve.cli import main
from seko_serve.load import Report, View, arrivals, percentile

from .bounded import until
from .conftest import Starter
from .test_server import PROMPT, http


def view(came: list[float], frames: list[int], fps: float = 4.0) -> View:
    return View(opened_at=came[0] - 1.0, fps=fps, first_at=came[0], came_at=came, frames=frames)


def test_figures_are_those_of_their_definitions() -> None:
    # Frames are shown from 10 s on: the chunk of 4 frames is due at 11, the next ones at 12 and 13.
    steady = view([10.0, 11.0, 11.5, 13.0], [4, 4, 4, 4])
    late = view([10.0, 11.5, 12.25, 12.5], [4, 4, 4, 4])
    assert steady.late(1) == [0.0, 0.0, 0.0]
    assert late.late(1) == [0.5, 0.25, 0.0]
    assert late.late(2) == [0.0, 0.0]  # it begins to play at 11.5
    refused = View(opened_at=0.0, refused="full")
    report = Report.of([steady, late, refused], 1)
    assert (report.sessions, report.served, report.refused) == (3, 2, {"full": 1})
    assert (report.chunks, report.late, report.worst_ms) == (6, 2, 500.0)
    assert report.cpr == pytest.approx((1 + 1 / 3) / 2)
    assert report.ttfc_ms_p99 == pytest.approx(1000.0)
    assert report.rtf == pytest.approx((1.0 + 2.5 / 3) / 2)
    assert "CPR       0.6667" in report.text()
    assert Report.of([refused], 1).cpr is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], percent: float
) -> None:
    value_at = percentile(values, percent)
    assert value_at in values
    share = [value for value in values if value <= value_at]  # type: ignore[operator]
    below = [value for value in values if value < value_at]  # type: ignore[operator]
    assert len(share) >= percent / 100 * len(values) - 1e-9
    assert len(below) <= percent / 100 * len(values) + 1e-9


def test_arrivals_are_seeded_and_at_the_rate() -> None:
    times = arrivals(4_000, 0.5, 3)
    assert times == arrivals(4_000, 0.5, 3) == sorted(times)
    assert times != arrivals(4_000, 0.5, 4)
    assert times[-1] / 3_999 == pytest.approx(2.0, rel=0.1)
    assert arrivals(3, 0.0, 0) == [0.0] * 3


def test_viewers_are_served_refused_and_counted(start: Starter, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(max_sessions=2)
    options = ["--sessions", "3", "--arrivals", "0", "--seconds", "1", "--prompt", PROMPT, "--fps", "60"]
    assert main(["load", server.url, *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["sessions"], report["served"], report["lost"]) == (3, 2, 0)
    assert report["refused"] == {"full": 1}
    assert report["chunks"] > 0
    assert report["ttfc_ms_p50"] > 0
    assert server.manager.sessions == {}
    assert main(["load", server.url, "--sessions", "1", "--prompt", "x" * 5000]) == 1
    printed = capsys.readouterr()
    assert "1 too_large" in printed.out
    assert printed.err.endswith(
        "seko-serve: no viewer was served: prompt has 5000 letters, at most 4000 are taken\n"
    )


URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["localhost:8000"], "localhost:8000 is no address"),
        (["ftp://localhost"], "ftp://localhost is no address"),
        (["http://"], "http:// is no address"),
        (["http://localhost:port"], "http://localhost:port is no address"),
        ([URL, "--sessions", "-1"], "--sessions -1"),
        ([URL, "--sessions", "0"], "--sessions 0"),
        ([URL, "--arrivals", "-0.5"], "--arrivals -0.5"),
        ([URL, "--arrivals", "nan"], "--arrivals nan"),
        ([URL, "--arrivals", "inf"], "--arrivals inf"),
        ([URL, "--seconds", "0"], "--seconds 0.0"),
        ([URL, "--seconds", "nan"], "--seconds nan"),
        ([URL, "--buffer", "0"], "--buffer 0"),
        ([URL, "--buffer", "9"], "--buffer 9"),
        ([URL, "--fps", "nan"], "--fps nan"),
        ([URL, "--fps", "-4"], "--fps -4.0"),
        ([URL, "--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
        ([URL, "--image", "/nowhere/picture.png"], "/nowhere/picture.png"),
    ],
)
def test_options_that_cannot_be_are_named(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", *options]) == 2
    printed = capsys.readouterr()
    assert named in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_of_keys_without_a_key_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    file.chmod(0o600)
    for command in (["load", URL], ["toy"]):
        assert main([*command, "--api-key-file", str(file)]) == 2
        assert "--api-key-file keys has no key" in capsys.readouterr().err


def test_where_nobody_listens_or_something_else_does_nobody_is_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["load", URL, "--sessions", "1", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["refused"] == {"unreachable": 1}
    assert printed.err == (
        f"seko-serve: no server of Seko answers at {URL}: Connection refused; check the address, and whether the "
        "server runs\n"
    )

    assert main(["load", URL, "--sessions", "1"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("no server of Seko answers") == 1

    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(self.server.status)  # type: ignore[attr-defined]
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever).start()
        try:
            for other.status in (200, 502):  # type: ignore[attr-defined]
                url = f"http://127.0.0.1:{other.server_port}"
                assert main(["load", url, "--sessions", "1", "--json"]) == 1
                assert json.loads(capsys.readouterr().out)["refused"] == {"unreachable": 1}
        finally:
            other.shutdown()


def test_a_load_that_is_ended_leaves_no_session(start: Starter) -> None:
    url = start().url
    words = [sys.executable, "-m", "seko_serve", "load", url, "--sessions", "1", "--codec", "rgb24"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as load:
        until(lambda: http(f"{url}/v1/sessions")[1]["data"])
        load.terminate()
        assert "interrupted" in load.communicate()[1]
    assert load.returncode == 128 + signal.SIGTERM
    assert http(f"{url}/v1/sessions")[1]["data"] == []
