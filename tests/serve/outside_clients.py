"""Files of benchmarks that others wrote, from their packages, with stand-ins for what they import beside. No tests.

The packages require whole inference engines. Only the file with the client is taken out of each, into a folder of the
test; where no package index answers, the test is skipped with pip's reason.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from zipfile import ZipFile
from zlib import crc32

import pytest

SGLANG, VLLM_OMNI = "sglang==0.5.23", "vllm-omni==0.30.0"
LIMIT_S = 300

_SGLANG_FILES = (
    "sglang/multimodal_gen/apps/realtime_webui/",
    "sglang/multimodal_gen/benchmarks/",
    "sglang/multimodal_gen/test/server/realtime_consistency.py",
)
_SGLANG_STAND_INS = {
    "sglang/multimodal_gen/runtime/utils/logging_utils.py": """
        import logging

        def init_logger(name):
            return logging.getLogger(name)

        def configure_logger(args):
            pass
    """,
    "sglang/multimodal_gen/test/test_utils.py": """
        def print_divider(length):
            print("-" * length)

        def print_value_formatted(name, value):
            print(name, value)

        def is_image_url(path):
            return path.startswith("http")
    """,
    "sglang/multimodal_gen/test/server/testcase_configs.py": """
        class DiffusionSamplingParams:
            pass
    """,
    "sglang/multimodal_gen/runtime/realtime/video.py": """
        RAW_RGB_CONTENT_TYPE = "application/x-raw-rgb"
    """,
    "imageio.py": "",
    "msgspec/__init__.py": "",
    "msgspec/msgpack.py": """
        from msgpack import packb as encode
        from msgpack import unpackb as decode
    """,
    "sglang/srt/utils/network.py": """
        class NetworkAddress:
            pass
    """,
}
_VLLM_OMNI_FILES = ("vllm_omni/benchmarks/", "vllm_omni/metrics/")
_VLLM_OMNI_STAND_INS = {
    "vllm_omni/__init__.py": "",
    "vllm_omni/benchmarks/__init__.py": "",
    "vllm_omni/benchmarks/patch/__init__.py": "",
    "vllm_omni/metrics/__init__.py": "",
    "pybase64.py": "from base64 import *",
    "vllm/__init__.py": """
        import importlib.abc, importlib.machinery, logging, sys, types

        ROOTS = ("vllm", "soundfile", "prettytable")

        class Anything:
            def __init__(self, *given, **named):
                pass

        class Empty(types.ModuleType):
            __path__ = []

            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)
                return Anything

        class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            def find_spec(self, name, path, target=None):
                root = name.split(".")[0]
                return importlib.machinery.ModuleSpec(name, self) if root in ROOTS else None

            def create_module(self, spec):
                return Empty(spec.name)

            def exec_module(self, module):
                pass

        sys.meta_path.append(Finder())
    """,
    "vllm/logger.py": """
        import logging

        def init_logger(name):
            return logging.getLogger(name)
    """,
    "vllm/benchmarks/lib/__init__.py": "",
    "vllm/benchmarks/__init__.py": "",
    "vllm/benchmarks/lib/endpoint_request_func.py": """
        from dataclasses import dataclass, field

        ASYNC_REQUEST_FUNCS, OPENAI_COMPATIBLE_BACKENDS = {}, []

        class StreamedResponseHandler:
            pass

        @dataclass
        class RequestFuncInput:
            prompt: str
            api_url: str
            prompt_len: int
            output_len: int
            model: str
            model_name: str | None = None
            extra_headers: dict | None = None
            extra_body: dict | None = None
            multi_modal_content: object = None

        @dataclass
        class RequestFuncOutput:
            generated_text: str = ""
            success: bool = False
            latency: float = 0.0
            output_tokens: int = 0
            ttft: float = 0.0
            itl: list = field(default_factory=list)
            tpot: float = 0.0
            prompt_len: int = 0
            error: str = ""
            start_time: float = 0.0

        def _validate_api_url(url, name, suffix):
            assert url.endswith(suffix)

        def _update_payload_common(payload, request):
            payload.update(request.extra_body or {})

        def _update_headers_common(headers, request):
            headers.update(request.extra_headers or {})

        def _get_headers(kind=None):
            return {}

        def _get_chat_content(request, mm_position=None):
            return []
    """,
}


def sglang_clients(folder: Path) -> Path:
    """Return a folder to import sglang's benchmark of video servers and its tests' client of realtime video from."""
    return _taken(SGLANG, _SGLANG_FILES, _SGLANG_STAND_INS, folder)


def sglang_page(folder: Path) -> Path:
    """Return the folder of sglang's page for realtime video."""
    return sglang_clients(folder) / _SGLANG_FILES[0]


def vllm_omni_benchmark(folder: Path) -> Path:
    """Return a folder to import vllm-omni's requests for videos and speech from."""
    return _taken(VLLM_OMNI, _VLLM_OMNI_FILES, _VLLM_OMNI_STAND_INS, folder)


def _taken(package: str, files: tuple[str, ...], stand_ins: Mapping[str, str], folder: Path) -> Path:
    """Return a folder with these files of a package and these stand-ins, which other processes may make as well."""
    place = folder / f"{package}-{crc32(repr((files, stand_ins)).encode()):08x}"
    if place.is_dir():
        return place
    with TemporaryDirectory(dir=folder) as own:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", own, package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            pytest.skip(f"{package} cannot be had: {done.stderr.strip().splitlines()[-1]}")
        (wheel,) = Path(own).glob("*.whl")
        made = Path(own) / "made"
        with ZipFile(wheel) as archive:
            archive.extractall(made, [name for name in archive.namelist() if name.startswith(files)])
        for name, text in stand_ins.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        with suppress(OSError):  # another process was first
            made.rename(place)
    return place
