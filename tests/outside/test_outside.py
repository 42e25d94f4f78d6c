"""A distribution that Seko does not know brings a family and a control: installed, built, run and served as
docs/extending.md says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from tests.serve.browser import browser_path, open_page
from tests.serve.processes import free_port
from tests.support.lone_runtime import (
    LINKED,
    build_project,
    install_into,
    make_venv,
    outside_environment,
    wheel_once,
)
from tests.support.manifest_schema import check_manifest
from tests.support.uncompiled import UNCOMPILED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
WEATHER = Path(__file__).parent / "weather"
SERVING = ("av", "pillow", "starlette", "uvicorn", "websockets", "prometheus_client")
# The command `seko-export`, whose builds make no compiler's cache.
UNCACHED = """
from functools import partial
import seko_export
from seko_export.cli import main
seko_export.build = partial(seko_export.build, compiler_cache=False)
main()
"""


def blocks(language: str) -> list[str]:
    """Return the page's blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[str]:
    """Return the commands of the page, in order."""
    text = re.sub(r"```.*?```", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def test_what_the_page_shows_stands_in_the_example() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (WEATHER / "weather").glob("*.py"))
    project = (WEATHER / "pyproject.toml").read_text(encoding="utf-8")
    shown = blocks("python")
    assert len(shown) > 3
    assert [block for block in shown if block not in code] == []
    assert [block for block in blocks("toml") if block not in project] == []


@pytest.mark.slow
def test_it_is_installed_built_run_and_served(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Outside the repository: the three wheels alone build and run it, and with the server's it is served.

    Its engines are programs of which nothing is compiled.
    """
    wheels = [wheel_once(tmp_path_factory, name) for name in ("runtime", "kernels", "seko_export")]
    shutil.copytree(WEATHER, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    make_venv(
        tmp_path / "venv", *wheels, build_project(tmp_path / "project", tmp_path), linked=(*LINKED, "ftfy")
    )
    programs = tmp_path / "venv/bin"
    environment = outside_environment() | {"HOME": str(tmp_path), UNCOMPILED: "1"}
    said = {}
    *ran, serve = commands()
    for command in ran:
        name, *words = shlex.split(command.replace("SAMPLE", str(ROOT / "seko_export" / "sample")))
        program = [programs / name]
        if words[0] == "build":
            program = [programs / "python", "-c", UNCACHED]
            words += ["--backend", "compile"]
        done = subprocess.run(
            [*program, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
        assert not re.search(rf"{ROOT}/(runtime|kernels|seko_export/(?!sample))", done.stderr)
        said[" ".join([name, *words[:1]])] = done.stdout
    check_manifest(tmp_path / "artifact")
    assert re.search(r"family\s+weather", said["seko-export inspect"])
    east, west = (np.load(tmp_path / f"{way}.npy").astype(int) for way in ("east", "west"))
    assert east.shape == west.shape
    assert abs(east - west).max() > 0
    install_into(tmp_path / "venv", wheel_once(tmp_path_factory, "serve"), linked=SERVING)
    _serve(programs, serve, tmp_path, environment)


def _serve(programs: Path, command: str, folder: Path, environment: dict[str, str]) -> None:
    """Serve the artifact, and look whether the page draws the control's keys."""
    name, *words = shlex.split(command)
    port = free_port()
    arguments = [programs / name, *words, "--port", str(port), "--snapshots", "none"]
    with subprocess.Popen(
        arguments, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            for line in server.stderr:
                if "http://" in line:
                    break
            with urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
                (model,) = json.load(answer)["data"]
            codes = {code for key in model["controls"]["wind"]["keys"] for code in key["codes"]}
            assert codes == {"KeyH", "KeyU", "KeyN", "KeyM"}
            if browser_path() is not None:
                with open_page(f"http://127.0.0.1:{port}/") as page:
                    page.until(
                        "document.getElementById('start') && !document.getElementById('start').disabled"
                    )
                    page.value(
                        "document.getElementById('prompt').value = 'a red disc';"
                        "document.getElementById('start').click(); true"
                    )
                    page.until("!!document.querySelector('[data-code=KeyH]')")
                    page.until("Number(document.body.dataset.painted || 0) > 12")
                    assert page.problems == []
        finally:
            server.terminate()
            server.wait(30)
