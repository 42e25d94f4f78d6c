"""The command `seko-run run` for a video artifact."""

from __future__ import annotations

import argparse

from seko_runtime.cli.output import Report
from seko_runtime.cli.runs import RunCommand
from seko_runtime.cli.video.options import OPTIONS
from seko_runtime.video.manifest import VideoManifest


class VideoRun(RunCommand):
    """Makes video, chunk by chunk."""

    kind = "video"
    they, it = "make video", "makes video"
    options = OPTIONS

    def run(self, options: argparse.Namespace, manifest: VideoManifest) -> Report:
        """Make the chunks, write them, and return the report."""
        from seko_runtime.cli.video.run import run

        return run(options, manifest)


COMMAND = VideoRun()
