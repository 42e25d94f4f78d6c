"""FFmpeg sends a video by WHIP, as a process of its own: its muxer holds Python's lock while it connects. No tests.

The certificate that FFmpeg makes itself where it was built with GnuTLS is on a curve, secp224r1, that OpenSSL takes
from nobody, so it is given one.

python -m tests.serve.ffmpeg_sender URL SECONDS
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from typing import Any

import av
import numpy as np

FPS, HEIGHT, WIDTH = 30, 240, 320


def certificate(folder: str) -> dict[str, str]:
    """The options of the muxer for a certificate in a folder."""
    files = {"key_file": f"{folder}/key.pem", "cert_file": f"{folder}/certificate.pem"}
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    made = ("-keyout", files["key_file"], "-out", files["cert_file"], "-subj", "/CN=whip", "-days", "2")
    subprocess.run(("openssl", "req", "-x509", *curve, *made), check=True, capture_output=True)
    return files


def main(url: str, seconds: str) -> None:
    """Send frames, each brighter than the one before, in their own time."""
    with (
        tempfile.TemporaryDirectory() as folder,
        av.open(url, "w", format="whip", options=certificate(folder)) as output,
    ):
        stream: Any = output.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.options = {"preset": "ultrafast", "tune": "zerolatency", "profile": "baseline", "g": "15"}
        begun = time.monotonic()
        for number in range(round(float(seconds) * FPS)):
            time.sleep(max(0.0, begun + number / FPS - time.monotonic()))
            picture = np.full((HEIGHT, WIDTH, 3), number % 256, np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            output.mux(stream.encode(frame))


if __name__ == "__main__":
    main(*sys.argv[1:])
