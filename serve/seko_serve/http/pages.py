"""The server's web page: the HTML for each kind of artifact, and the files that the HTML loads."""

from __future__ import annotations

from pathlib import Path
from string import Template

from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

PAGE = Path(__file__).parent.parent / "page"
TITLES = {"video": "Seko live", "speech": "Seko speaks"}  # by the kind of the artifact


def composed(kind: str) -> str:
    """Return the HTML of a page: the frame that all pages share, around the main part of one kind of artifact."""

    def part(name: str, **content: str) -> str:
        return Template((PAGE / f"{name}.html").read_text(encoding="utf-8")).substitute(content)

    main = part(f"{kind}.main", access=part("access"))
    return part("frame", title=TITLES[kind], script=f"{kind}.js", main=main)


def page_files() -> Mount:
    """Return the route ``/page`` of the page's files."""
    return Mount("/page", StaticFiles(directory=PAGE))
