"""Draw the server's page as people see it, on a desk and on a phone, in headless Chromium.

    bash scripts/quickstart.sh --serve &
    python -m scripts.page_pictures http://127.0.0.1:8000/ docs/images/page-sample

writes FOLDER-desk.webp, -phone.webp and -landscape.webp while the first example plays, and -full.webp of the full
screen once its controls have faded.
"""

from __future__ import annotations

import argparse
import base64
import io
import time
from pathlib import Path

from PIL import Image

from tests.serve.browser import Page, open_page

SIZES = {"desk": (1280, 800), "phone": (390, 844), "landscape": (844, 390)}
RUNNING = "document.body.dataset.painted > 30 || Boolean(document.querySelector('#text:enabled'))"
FADED_S = 4.0  # controls fade sooner
MOST_BYTES = 80_000


def picture(page: Page, file: Path) -> None:
    """Write what the page shows, as small as it takes to be below `MOST_BYTES`."""
    shown = Image.open(io.BytesIO(base64.b64decode(page.call("Page.captureScreenshot")["data"])))
    for quality in (85, 70, 50, 30):
        shown.convert("RGB").save(file, quality=quality, method=6)
        if file.stat().st_size < MOST_BYTES:
            return
    raise ValueError(f"{file} has {file.stat().st_size} bytes, expected fewer than {MOST_BYTES}")


def draw(url: str, stem: Path) -> None:
    """Write the pictures of a server's page."""
    with open_page(url) as page:
        page.resize(*SIZES["desk"])
        page.until(RUNNING)
        for name, size in SIZES.items():
            page.resize(*size)
            page.mouse("mouseMoved", size[0] / 2, size[1] / 2)
            time.sleep(1)
            picture(page, stem.with_name(f"{stem.name}-{name}.webp"))
        page.resize(*SIZES["desk"])
        if page.value("Boolean(document.getElementById('full'))"):
            page.value("document.getElementById('full').click(), true")
            time.sleep(FADED_S)
            picture(page, stem.with_name(f"{stem.name}-full.webp"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("stem", type=Path)
    given = parser.parse_args()
    draw(given.url, given.stem)
