"""Alerts and dashboard of serve/examples/watch: they ask for figures that a server has, and fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import Starter
from .test_watching import figures

WATCH = Path(__file__).parents[2] / "serve" / "examples" / "watch"
FIGURE = re.compile(r"\bseko_serve_\w+")


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Prometheus' checker."""
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, of Debian's package prometheus")
    return subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )


def expressions() -> list[str]:
    """Return what the dashboard asks Prometheus for."""
    panels = json.loads((WATCH / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_each_figure_is_one_of_a_server(start: Starter) -> None:
    answered = {name.split()[0] for name in figures(start(max_sessions=1).url)}
    # A histogram's buckets are left out there; it has a count where it has buckets.
    answered |= {name.removesuffix("_count") + "_bucket" for name in answered if name.endswith("_count")}
    for text in ((WATCH / "alerts.yaml").read_text(encoding="utf-8"), *expressions()):
        asked = set(FIGURE.findall(text))
        # Series with labels come with their first event.
        assert asked - answered <= {"seko_serve_call_seconds_bucket"}, text


def test_alerts_fire_when_they_should() -> None:
    assert promtool("check", "rules", WATCH / "alerts.yaml").returncode == 0
    done = promtool("test", "rules", WATCH / "alerts.test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_that_never_fires_is_found(tmp_path: Path) -> None:
    text = (WATCH / "alerts.yaml").read_text(encoding="utf-8")
    (tmp_path / "alerts.yaml").write_text(text.replace("device_lost == 1", "device_lost == 2"))
    shutil.copy(WATCH / "alerts.test.yaml", tmp_path)
    assert promtool("test", "rules", tmp_path / "alerts.test.yaml").returncode != 0


def test_the_dashboard_asks_in_prometheus_language(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expr.replace("$__rate_interval", "5m")}
        for number, expr in enumerate(expressions())
    ]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool("check", "rules", tmp_path / "rules.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
