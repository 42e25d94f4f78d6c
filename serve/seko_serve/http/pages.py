"""The server's web page: the HTML for each kind of artifact, and the files that the HTML loads."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any

from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from seko_serve.http.workload import served_workload, served_workloads

PAGE = Path(__file__).parent.parent / "page"


def composed(kind: str) -> str:
    """Return the HTML of a page: the frame that all pages share, around the main part of one kind of artifact."""

    page = served_workload(kind).page
    main = (page.folder / f"{kind}.main.html").read_text(encoding="utf-8")
    frame = Template((PAGE / "frame.html").read_text(encoding="utf-8"))
    return frame.substitute(title=page.title, script=f"{kind}.js", main=main)


class _Files(StaticFiles):
    """Files of which a browser asks whether they are new: those of two versions of a server do not fit together."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers["cache-control"] = "no-cache"
        return answer


def page_files() -> Mount:
    """Return the route ``/page`` of the page's files: those that all pages share, and those of each workload."""
    files = _Files(directory=PAGE)
    files.all_directories.extend(workload.page.folder for workload in served_workloads())
    return Mount("/page", files)
