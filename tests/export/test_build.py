"""A built artifact: its report, its bytes, and its engines and streams against the eager model."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from seko_export import BuildOptions, build
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import FlatModule, Piece
from seko_export.errors import MachineError
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.wan.presets import PRESETS
from seko_export.host.compiler_cache import (
    CACHE_VARIABLE,
    private_cache,
)
from seko_export.host.workshop import workshop
from seko_export.lowering.package import local_prefixes
from seko_export.video.bounds import CACHE_TOLERANCES, TOLERANCES
from seko_export.video.recording import golden_text
from seko_export.video.workload import VideoBuildResult
from seko_runtime import open_artifact
from seko_runtime.backends.engine_tensors import TENSORS_KEY, packed_name, tensors_text
from seko_runtime.video.manifest import parse_video_manifest
from seko_runtime.video.ring import Ring
from tests.support.stacked import eager_session, open_stacked
from tests.support.tiers import first_is_fast
from tests.support.tolerances import STEP, relative_error
from tests.support.uncompiled import UNCOMPILED, leave_uncompiled
from tests.truth.eager_stream import same_bytes

TINY = PRESETS["tiny"]
FP4 = VideoBuild(TINY.model, VideoConfig(TINY.stream, Schedule.warped(), "fp4"), TargetConfig("cpu"))
ROWS = VideoBuild(
    TINY.model,
    VideoConfig(StreamConfig(32, 32, 3, 1, 6, batch=2), Schedule.warped(), "fp32"),
    TargetConfig("cpu"),
)
WRAPS = 2
REPORT = {
    "artifact",
    "digest",
    "build_s",
    "kv",
    "engine_bytes",
    "weight_bytes",
    "engine_s",
    "golden_error",
    "kernels",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """`ROWS`, with an exact cache; its engines are exported programs, of which nothing is compiled."""
    options = BuildOptions(preset="tiny", batch=(2,), height=32, width=32, backend="compile", target="cpu")
    goal = tmp_path_factory.mktemp("rows") / "artifact"
    with pytest.MonkeyPatch.context() as patch:
        leave_uncompiled(patch)
        return build(options, goal, compiler_cache=False, note=lambda _: None)


def test_report_says_what_is_on_disk(fp4):
    """Digest of the manifest, sizes, and a pool of 9/32 of bf16 (4 bits and an 8-bit scale for 16 numbers) and 8 bytes
    a slot, which frame it holds."""
    report, folder = fp4.report, fp4.folder
    assert set(report) >= REPORT
    assert report["artifact"] == str(folder)
    assert report["kernels"] == "plain"  # on a CPU, unless it is asked for
    assert report["digest"] == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert report["engine_bytes"] == sum(f.stat().st_size for f in (folder / "engines").iterdir())
    assert report["weight_bytes"] == sum(f.stat().st_size for f in (folder / "weights").iterdir())
    kv = report["kv"]
    assert (kv["scheme"], kv["bits_per_number"]) == ("fp4-before-rope", 4.5)
    numbers = 2 * FP4.model.layers * FP4.workload.stream.cache_tokens * FP4.model.dim
    assert kv["bf16_pool_bytes"] == 2 * numbers
    assert kv["pool_bytes"] == 0.28125 * kv["bf16_pool_bytes"] + 8 * FP4.workload.stream.cache_frames
    first, evicting = kv["error_vs_exact"]
    assert first == 0  # it has no past, and nothing else is rounded
    assert 0 < evicting < 0.1
    assert report["golden_error"] <= TOLERANCES[torch.float32]["lossy"]
    assert set(report["engine_s"]) == set(make_pieces(FP4))
    assert 0 < report["golden_rounding"] < TOLERANCES[torch.float32]["lossy"]


def test_the_error_of_the_engines_stands_beside_that_of_rounding(fp4):
    """Without it a reader cannot tell whether 1e-2 of a model in bfloat16 is a fault."""
    result = VideoBuildResult(**fp4.report | {"golden_error": 1.17e-2, "golden_rounding": 1.05e-2})
    *_, engines, rounding = result.lines()
    assert engines.startswith("verified  engines against the eager model: relative error 1.17e-02")
    assert rounding.strip() == "other last bits alone move the eager model by 1.05e-02"
    exact = {key: value for key, value in result.kv.items() if key != "error_vs_exact"}
    *_, rounding = replace(result, kv=exact).lines()
    assert rounding.endswith("by 1.05e-02 in the first chunk")
    *_, engines = replace(result, golden_rounding=None).lines()
    assert engines.startswith("verified")


@pytest.mark.slow
def test_exact_cache_on_a_cpu_is_fp32(rows):
    """It says so, with twice the bytes of bf16, and reports no error of a lossy track."""
    kv = rows.kv
    assert (kv["scheme"], kv["bits_per_number"]) == ("fp32", 32.0)
    assert kv["pool_bytes"] == 2 * kv["bf16_pool_bytes"]
    assert "error_vs_exact" not in kv
    assert 0 < rows.golden_rounding < TOLERANCES[torch.float32]["lossy"]


@pytest.mark.parametrize("name", ["fp4", "small_artifact"])
def test_nothing_of_this_machine_is_in_the_artifact(name, request):
    """No folder of the installation, no home, no temporary place, no user, no host."""
    built = request.getfixturevalue(name)
    folder = built if name == "small_artifact" else built.folder
    for path in folder.rglob("*"):
        if path.is_file():
            for inside, content in _contents(path):
                needles = [needle for needle in _needles(folder) if needle in content]
                assert not needles, f"{path.relative_to(folder)} {inside}: {needles}"


def test_every_package_carries_its_engines_name_and_signature(fp4):
    """By which the runtime tells it from another one's before anything of it runs."""
    engines = parse_video_manifest((fp4.folder / "manifest.json").read_bytes()).engines
    for engine in engines:
        package = (fp4.folder / engine.file).read_bytes()
        assert packed_name(memoryview(package)) == engine.name
        with zipfile.ZipFile(fp4.folder / engine.file) as archive:
            (entry,) = (name for name in archive.namelist() if name.endswith("wrapper_metadata.json"))
            assert json.loads(archive.read(entry))[TENSORS_KEY] == tensors_text(engine)


def test_who_may_read_the_folder_may_read_its_files(fp4):
    folder = fp4.folder
    mode = stat.S_IMODE(folder.stat().st_mode)
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (mode if path.is_dir() else mode & 0o666), path


def test_building_leaves_nothing_beside_the_artifact(fp4):
    assert [path.name for path in fp4.folder.parent.iterdir()] == ["artifact"]


@pytest.fixture
def workplace() -> Iterator[Path]:
    """A folder with a name as long as a worker's: what hides a path in a package is as long as the path."""
    with tempfile.TemporaryDirectory() as own, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", own)  # `build_tiny` gives its build such a folder as TMPDIR
        with workshop("seko-") as folder:
            place = folder / "head"
            place.mkdir()
            yield place


@pytest.mark.slow
def test_a_piece_compiled_again_elsewhere_has_equal_bytes(fp4, tmp_path, workplace):
    """Another process, folder, hash seed and cache. What goes into a package is not in the cache, where a build of the
    same code beside it would write the same files; and nothing lies where another user could have put it before."""
    again, cache, shared = workplace / "head.pt2", tmp_path / "cache", tmp_path / "shared"
    shared.mkdir()
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from seko_export.backends.aoti import compile_piece\n"
        "from seko_export.backends.workers import make_engine\n"
        "from tests.export.test_build import FP4\n"
        "if __name__ == '__main__':\n"
        "    make_engine(compile_piece, FP4, 'head', Path(sys.argv[1]))\n"
    )
    root = Path(__file__).parents[2]
    environ = os.environ | {
        "PYTHONPATH": str(root),
        "PYTHONHASHSEED": "1",
        CACHE_VARIABLE: str(cache),
        "TMPDIR": str(shared),
        "SEKO_MADE": "",  # compiled, and no copy of what this run has compiled
    }
    command = [sys.executable, "-c", script, str(again)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert again.read_bytes() == (fp4.folder / "engines/head.pt2").read_bytes()
    assert [*cache.rglob("*_metadata.json")] == []
    assert [path for path in shared.rglob("*") if not path.is_dir()] == []


def test_the_compilers_cache_is_the_users_own(monkeypatch, tmp_path):
    """Not torch's default below /tmp, which anyone can make first; a choice of the user's stays."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for unchosen in (default_cache_dir(), None):  # as importing torch leaves it, and without it
        monkeypatch.delenv(CACHE_VARIABLE) if unchosen is None else monkeypatch.setenv(
            CACHE_VARIABLE, unchosen
        )
        assert Path(private_cache()).is_relative_to(tmp_path)
    Path(private_cache()).chmod(0o777)
    with pytest.raises(MachineError, match=r"may be written to by others .* set XDG_CACHE_HOME"):
        private_cache()
    for chosen in ("/chosen", f"{default_cache_dir()}-ci"):
        monkeypatch.setenv(CACHE_VARIABLE, chosen)
        assert private_cache() == chosen


@pytest.mark.parametrize("name", sorted(make_pieces(FP4)))
def test_engine_equals_eager(fp4, name):
    """Outputs within rounding, in every slot that the call does not write the caches keep their bytes."""
    piece = make_pieces(FP4)[name]
    eager, engine = _random_inputs(piece), _random_inputs(piece)
    before = _random_inputs(piece)
    with torch.no_grad():
        wanted = FlatModule(piece)(*eager)
    outputs = _load(fp4.folder, name)(list(engine))
    assert len(outputs) == len(wanted)
    for got, expected in zip(outputs, wanted, strict=True):
        assert got.dtype == expected.dtype
        if expected.is_floating_point():
            assert relative_error(got, expected) <= STEP[torch.float32]
        else:
            assert same_bytes(got, expected)
    for i, argument in enumerate(piece.signature):
        if argument.name in piece.mutates:
            unwritten = torch.ones(argument.shape[0], dtype=torch.bool)
            unwritten[_written(piece, eager)] = False
            assert same_bytes(engine[i][unwritten], before[i][unwritten])
            assert not torch.equal(engine[i][~unwritten], before[i][~unwritten])
        else:
            assert same_bytes(engine[i], before[i])


def test_engine_writes_the_same_fp4_bytes(fp4):
    """K and V that no order of summation can change: codes and scale bytes are equal, in every slot.

    V is its bias, the matrix being zero. K is its bias of ones and minus ones, whose rms is 1 whatever the order,
    times norm weights that are FP4 values, less a mean of 0: an ulp away from no boundary between two codes.
    """
    piece = make_pieces(FP4)["block"]
    generator = torch.Generator().manual_seed(3)
    inputs = dict(zip((a.name for a in piece.signature), _random_inputs(piece), strict=True))
    dim = FP4.model.dim
    inputs["weights.self_attn.qkv.weight"].zero_()
    bias = inputs["weights.self_attn.qkv.bias"]
    bias[dim : 2 * dim] = torch.randint(0, 2, (dim,), generator=generator) * 2.0 - 1
    bias[2 * dim :] = torch.randn(dim, generator=generator)
    values = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])[torch.randint(0, 7, (dim,), generator=generator)]
    values[::16] = 6  # the largest of each scale block
    inputs["weights.self_attn.norm_k.weight"].copy_(values)
    inputs["scales.k_mean"].zero_()
    eager = [t.clone() for t in inputs.values()]
    engine = [t.clone() for t in inputs.values()]
    with torch.no_grad():
        FlatModule(piece)(*eager)
    _load(fp4.folder, "block")(list(engine))
    for argument, wanted, got in zip(piece.signature, eager, engine, strict=True):
        if argument.name in piece.mutates:
            assert same_bytes(got, wanted), argument.name
            assert wanted[_written(piece, eager)].any()


@pytest.mark.shows("aoti")
def test_stream_equals_eager_past_two_wraps(fp4):
    """The runtime's latents against the eager session's, with the artifact's own weights."""
    stream = FP4.workload.stream
    chunks = -(-(stream.sink_frames + WRAPS * stream.ring_frames) // stream.chunk_frames) + 1
    with (
        eager_session(FP4, _weights(fp4.folder), golden_text(FP4), [7]) as eager,
        open_artifact(fp4.folder, device="cpu") as artifact,
        open_stacked(artifact, seeds=[7]) as session,
    ):
        for _ in range(chunks):
            wanted, got = eager.run_chunk().to_host(), session.run_chunk().to_host()
            error = relative_error(torch.from_numpy(got), torch.from_numpy(wanted))
            assert error <= TOLERANCES[torch.float32]["lossy"]


@pytest.mark.parametrize("name", first_is_fast(["fp4", "rows"]))
def test_a_stale_ring_is_seen_in_the_cache_by_a_bound_for_bf16(name, request, monkeypatch):
    """A slot that is never renewed moves the latents by less than bf16 rounds; the slot itself is wrong as a whole."""
    scheme = "lossy" if name == "fp4" else "exact"
    slot, built = Ring.slot, request.getfixturevalue(name)
    monkeypatch.setenv(UNCOMPILED, "1")
    with (
        warnings.catch_warnings(action="ignore"),  # torch's own, when its compiler is imported
        mock.patch.object(Ring, "slot", lambda ring, frame: min(slot(ring, frame), 3 + frame % 3)),
        open_artifact(built.folder if name == "fp4" else built.artifact, device="cpu") as artifact,
    ):
        errors = artifact.verify()
    assert errors[-1].golden < TOLERANCES[torch.bfloat16][scheme]
    assert errors[-1].cache > 1.5 * CACHE_TOLERANCES[torch.bfloat16][scheme]
    assert not errors[-1].within


@pytest.mark.slow
def test_rows_at_different_chunks_equal_their_own_runs(rows, monkeypatch):
    """Row 1 starts anew while row 0 goes on past the wrap: each is as if it were alone."""
    monkeypatch.setenv(UNCOMPILED, "1")
    text = golden_text(ROWS)
    text[1] = text[1].flip(-1)
    started = {0: 0, 1: 2}
    chunks = 7
    got: list[np.ndarray] = []
    with (
        warnings.catch_warnings(action="ignore"),  # torch's own, when its compiler is imported
        open_artifact(rows.artifact, device="cpu") as artifact,
        open_stacked(artifact, seeds=[3, 4], text=text) as session,
    ):
        for number in range(chunks):
            if number == started[1]:
                session.restart_row(1, seed=5)
            got.append(session.run_chunk().to_host())
    stream = StreamConfig(32, 32, 3, 1, 6)
    alone = VideoBuild(ROWS.model, VideoConfig(stream, ROWS.workload.schedule, "fp32"), TargetConfig("cpu"))
    weights = _weights(rows.artifact) | alone.workload.schedule.tables(stream)
    for row, seed in ((0, 3), (1, 5)):
        with eager_session(alone, weights, text[row : row + 1], [seed]) as session:
            for number in range(started[row], chunks):
                wanted = session.run_chunk().to_host()
                error = relative_error(torch.from_numpy(got[number][row]), torch.from_numpy(wanted[0]))
                assert error <= TOLERANCES[torch.float32]["exact"], (row, number)


def _load(folder: Path, name: str):
    package = str(folder / f"engines/{name}.pt2")
    return torch._C._aoti.AOTIModelPackageLoader(package, "model", True, 1, -1).boxed_run


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in (folder / "weights").iterdir() for name, t in load_file(file).items()}


def _random_inputs(piece: Piece) -> list[Tensor]:
    """Return inputs of a piece as a stream could give them, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for argument in piece.signature:
        name, shape, dtype = argument.name, argument.shape, argument.dtype
        if name == "token_index":
            tensor = torch.randperm(FP4.workload.stream.cache_tokens, generator=generator)[: shape[0]]
        elif name == "valid_tokens":
            tensor = torch.full(shape, 100)
        elif name in ("frames", "write_slots"):
            tensor = torch.arange(4, 4 + shape[1]).expand(shape)
        elif name.startswith("scales."):
            tensor = torch.full(shape, 2.0**-6)
        elif dtype == torch.uint8:
            # codes: any byte; scales: positive E4M3 numbers, as the quantiser writes them
            tensor = torch.randint(0, 256 if "codes" in name else 0x78, shape, generator=generator)
        elif not dtype.is_floating_point:
            tensor = torch.ones(shape)
        else:
            tensor = torch.randn(shape, generator=generator) * (0.05 if name.startswith("weights.") else 1)
        inputs.append(tensor.to(dtype).contiguous())
    return inputs


def _written(piece: Piece, inputs: list[Tensor]) -> Tensor:
    by_name = dict(zip((a.name for a in piece.signature), inputs, strict=True))
    return by_name["token_index" if "token_index" in by_name else "write_slots"].flatten()  # of the one row


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield a file's bytes and, of a zip, each entry's, names included."""
    yield "", path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as package:
            for entry in package.infolist():
                yield entry.filename, entry.filename.encode() + package.read(entry)


def _needles(folder: Path) -> list[bytes]:
    user, host = getpass.getuser(), socket.gethostname()
    names = [str(path) for path in local_prefixes()]
    names += [str(folder.parent), str(Path.home()), sysconfig.get_path("purelib"), f"torchinductor_{user}"]
    names += [f"{tempfile.gettempdir()}/", f"/home/{user}"]
    names += [name for name in (user, host) if len(name) >= 8]  # a shorter one may be met by chance
    return [name.encode() for name in names if len(name) >= 5]
