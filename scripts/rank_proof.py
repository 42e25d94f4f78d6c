"""Prove on this machine's GPUs what docs/several-gpus.md says of ranks: one line a proof, failures as they come.

    python -m scripts.rank_proof [--only NAME] [--kills 50] [--device cpu] [--full] [--work FOLDER]

Tiny models with random weights are built side by side, each in a process of its own; a proof waits for the builds that
it needs. A build of several ranks verifies itself: its chunks on all ranks are compared with those that the eager model
made on one GPU. On a CPU, engines are programs that torch runs op by op. With ``--full`` the artifacts ``one`` and
``several`` have the size of the 1.3B model and of Wan's VAE.
The last line is a JSON object; the exit code is the number of proofs that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seko_runtime import Pool, Session, open_artifact
from seko_runtime.errors import RankLostError
from seko_runtime.sessions.verdict import worst_of
from seko_runtime.video.golden import relative_error
from tests.parallel.rank_faults import beside, is_running, kill_once

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from seko_export.config.video import VideoBuild
    from seko_export.media.sources import MediaSources

PROMPTS = ("a red disc bouncing on a dark background", "a blue square spinning")
FPS, SERVED_CHUNKS = 24.0, 200
KILLERS = 6  # groups that are killed side by side
GOLDEN = "golden_error"
NOTICED_S = 15.0  # a stopped rank is looked for after four seconds


class Proofs:
    """The proofs, by the names of their methods, and the builds that they wait for.

    Parameters
    ----------
    options : argparse.Namespace
        What the command line says.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work: Path = options.work
        self._builds: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, names: list[str]) -> None:
        """Start builds, the first ones first, at most ``--jobs`` at a time."""
        for name in names:
            while sum(build.poll() is None for build in self._builds.values()) >= self.options.jobs:
                time.sleep(0.2)
            command = [sys.executable, "-m", "scripts.rank_proof", "--build", name]
            if self.options.full:
                command += ["--full"]
            command += ["--work", str(self.work), "--device", self.options.device]
            command += ["--ranks", str(self.options.ranks)]
            with (self.work / f"{name}.log").open("wb") as log:
                self._builds[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def built(self, name: str) -> Path:
        """Wait until an artifact is built; return its folder."""
        while name not in self._builds:
            time.sleep(0.2)
        if code := self._builds[name].wait():
            raise RuntimeError(f"the build {name} failed with {code}:\n{self._log(name)[-3000:]}")
        return self.work / name

    def _verified(self, name: str) -> str:
        """Wait for a build; return its error on all ranks against the eager model on one GPU."""
        folder = self.built(name)
        report = json.loads(self._log(name).splitlines()[-1])
        if report[GOLDEN] is None and self.options.device == "cuda":
            raise RuntimeError("nothing was verified: there are fewer GPUs than ranks")
        with open_artifact(folder) as artifact:
            ranks = len(artifact.processes)
            errors = artifact.verify()
        expect(all(error.within for error in errors), f"it does not verify: {errors}")
        return f"{ranks} ranks, golden error {worst_of(errors).size:.2e}, built in {report['build_s']:.0f} s"

    def _log(self, name: str) -> str:
        return (self.work / f"{name}.log").read_text()

    def refused(self) -> str:
        """VoxCPM2 has no ranks, and its build says so."""
        command = [
            "build",
            "--preset",
            "voxcpm2-tiny",
            "--random-weights",
            "0",
            "--ranks",
            "2",
            "--target",
            target_of(self.options),
        ]
        command += ["-o", str(self.work / "voxcpm2")]
        done = subprocess.run(
            [sys.executable, "-m", "seko_export", *command], capture_output=True, text=True, check=False
        )
        said = done.stderr.strip().splitlines()[-1]
        expect(done.returncode == 2 and "runs on one GPU" in said, f"exit code {done.returncode}: {said}")
        return said

    def stream(self) -> str:
        """Sentences and a start picture, which rank 0 alone encodes; chunks past the ring's wrap, decoded on all."""
        return self._alike("one", "several", stream_life)

    def pool(self) -> str:
        """Two sessions of a pool that begin, pause, step back, change prompts and end at different times."""
        return self._alike("one", "several", pool_life)

    def snapshot(self) -> str:
        """A session of several ranks goes on with one GPU, and back: the same bytes as without the journey."""
        with opened(self.built("several")) as pool, pool.open_session(seed=1, prompt=PROMPTS[0]) as session:
            for _ in range(4):
                session.run_chunk()
            session.save(self.work / "of-several")
            expected = session.run_chunk().to_host()
        with opened(self.built("one")) as pool, pool.restore(self.work / "of-several") as session:
            session.save(self.work / "of-one")
            found = session.run_chunk().to_host()
            bound = bound_of(pool)
        error = relative_error(found, expected)
        expect(error <= bound, f"one GPU goes on with an error of {error:.2e}, expected {bound:.2e} at most")
        with opened(self.built("several")) as pool, pool.restore(self.work / "of-one") as session:
            session.save(self.work / "again")
            expect(np.array_equal(session.run_chunk().to_host(), expected), "back on the ranks: other bytes")
        same = (self.work / "of-several").read_bytes() == (self.work / "again").read_bytes()
        expect(same, "the file that came back has other bytes")
        return f"one GPU's next chunk differs by {error:.2e}"

    def padding(self) -> str:
        """464x816 on two ranks: 1,479 tokens of a latent frame, so the second rank has a zero token. On a CPU a small
        picture, likewise."""
        return self._verified("padding")

    def offload(self) -> str:
        """The cache in host memory, over each GPU's own link."""
        return self._verified("offload")

    def lingbot(self) -> str:
        """The tiny lingbot-world, whose camera is split by tokens."""
        return self._verified("lingbot")

    def talk(self) -> str:
        """The tiny Seko-Talk with HuBERT and CLIP on every rank."""
        return self._verified("talk")

    def fast(self) -> str:
        """Fused layers, FP4 cache, fp8 matmuls, 8-bit attention and resident window, as an artifact."""
        return self._verified("fast")

    def stop(self) -> str:
        """A rank that stands still, and one that dies while nothing is asked."""
        folder, seconds = self.built("several"), []
        for rank in range(self.options.ranks):
            with open_artifact(folder) as artifact, artifact.open_session(prompt=PROMPTS[0]) as session:
                session.run_chunk().to_host()
                os.kill(artifact.processes[rank], signal.SIGSTOP if rank % 2 == 0 else signal.SIGKILL)
                begun = time.monotonic()
                try:
                    while True:
                        session.run_chunk().to_host()
                except RankLostError as fault:
                    seconds.append(time.monotonic() - begun)
                    expect(f"rank {rank} of" in str(fault), str(fault))
                expect(not any(map(is_running, artifact.processes)), "a process is left")
        expect(max(seconds) < NOTICED_S, f"noticed only after {max(seconds):.1f} s")
        return "noticed after " + ", ".join(f"{each:.1f}" for each in seconds) + " s"

    def kills(self) -> str:
        """Kills of ranks of two at any moment; where there are four GPUs, a second group on the other two must make
        the same bytes all the while."""
        folder, kills = self.built("two"), self.options.kills
        elsewhere = "cuda:2" if self.options.device == "cuda" and self.options.gpus >= 4 else "auto"
        with (
            beside(folder, elsewhere) as wrong,
            ThreadPoolExecutor(min(kills, KILLERS)) as killers,
        ):
            jobs = [
                killers.submit(kill_once, folder, number % 2, 4.0 * number / kills) for number in range(kills)
            ]
            reports = [job.result() for job in jobs]
        expect(not wrong, f"the group on {elsewhere} was disturbed: {wrong}")
        longest = max(report["seconds"] for report in reports)
        chunks = [report["chunks"] for report in reports]
        return (
            f"{len(reports)} kills, error after {longest:.1f} s at most, {chunks.count(0)} before the first chunk, "
            f"other group on {elsewhere}"
        )

    def serve(self) -> str:
        """A server over all ranks, and two viewers in a process of their own."""
        from scripts.bench.serve import Served, watched

        folder = self.built("several")
        for build in self._builds.values():
            build.wait()  # no chunk is late because of a compiler
        with Served(lambda: opened(folder)) as served:
            report = watched(served.load, 2, FPS, served.chunk_frames, SERVED_CHUNKS)
        said = (
            f"{report['chunks']} chunks to {report['served']} viewers at {FPS:g} fps, {report['late']} late"
        )
        expect(report["chunks"] >= SERVED_CHUNKS, said)
        if self.options.device == "cuda":  # a CPU is too slow for more than one viewer
            expect(report["served"] == 2 and not report["late"], f"{said}, worst {report['worst_ms']} ms")
        return said

    def _alike(self, one: str, several: str, life: Callable[[Pool], list[NDArray[Any]]]) -> str:
        """Live the same life on one GPU and on several; return the largest error of a chunk's latents."""
        with opened(self.built(one)) as pool:
            expected = life(pool)
        with opened(self.built(several)) as pool:
            found = life(pool)
            bound = bound_of(pool)
        errors = [relative_error(*pair) for pair in zip(found, expected, strict=True)]
        said = f"{len(errors)} results, errors up to {max(errors):.2e}"
        expect(max(errors) <= bound, f"{said}, expected {bound:.2e} at most: {errors}")
        return f"{said} of {bound:.2e}"


NEEDS = {
    "refused": (),
    "stop": ("several",),
    "stream": ("one", "several"),
    "pool": ("one", "several"),
    "snapshot": ("one", "several"),
    "padding": ("padding",),
    "offload": ("offload",),
    "lingbot": ("lingbot",),
    "talk": ("talk",),
    "fast": ("fast",),
    "kills": ("two",),
    "serve": ("several",),
}


def stream_life(pool: Pool) -> list[NDArray[Any]]:
    """Return a session's chunks from a start picture, its prompt changed, past the ring's wrap."""
    stream = pool.manifest.workload.stream
    shape = (stream.height, stream.width, 3)
    picture = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    with pool.open_session(seed=3, prompt=PROMPTS[0], image=picture) as session:
        chunks = run(session, 3)
        session.set_prompt(PROMPTS[1], recache=True)
        return chunks + run(session, 2)


def pool_life(pool: Pool) -> list[NDArray[Any]]:
    """Return the chunks of two sessions."""
    with pool.open_session(seed=1, prompt=PROMPTS[0]) as first:
        chunks = run(first, 1)
        with pool.open_session(seed=2, prompt=PROMPTS[1], tenant="ada") as second:
            for number in range(3):
                chunks += [chunk.to_host() for chunk in pool.run([second, first])]
                if number == 1:
                    second.rewind(1)
                    chunks += run(second, 1)
            first.pause()
            chunks += run(second, 1)
            first.resume()
            chunks += [chunk.to_host() for chunk in pool.run([first, second])]
    return chunks


def run(session: Session, chunks: int) -> list[NDArray[Any]]:
    """Make and decode chunks; return their latents."""
    latents = []
    for _ in range(chunks):
        chunk = session.run_chunk()
        latents.append(chunk.to_host())
        expect(bool(chunk.video().any()), "a chunk's frames are black")
    return latents


@contextmanager
def opened(folder: Path) -> Iterator[Pool]:
    """Open an artifact's pool."""
    with open_artifact(folder) as artifact, artifact.open_pool() as pool:
        yield pool


def expect(true: bool, otherwise: str) -> None:
    """Raise an AssertionError with these words if something does not hold."""
    if not true:
        raise AssertionError(otherwise)


def target_of(options: argparse.Namespace) -> str:
    """Return the target of builds."""
    return "auto" if options.device == "cuda" else options.device


def bound_of(pool: Pool) -> float:
    """Return the largest error of latents that an artifact's goldens allow."""
    golden = pool.manifest.workload.golden
    assert golden is not None
    return golden.tolerance


def config_of(name: str, options: argparse.Namespace, folder: Path) -> tuple[VideoBuild, MediaSources]:
    """Return a build by its name; files of models around the transformer are written into a folder."""
    from seko_export import BuildOptions
    from seko_export.media.sources import MediaSources
    from seko_export.options.resolve import resolve_build
    from tests.export.media_files import TEXT, VAE, write_text_encoder, write_vae

    ranks = options.ranks
    asked = partial(BuildOptions, target=target_of(options), no_vae=True, no_text=True)
    if name in ("lingbot", "talk"):
        return family_config(name, options, folder)
    if name == "fast":
        from scripts.bench.ranks import QUANTISED

        quantised: dict[str, Any] = QUANTISED
        config = resolve_build(asked(preset="tiny", **quantised)).config
        return with_four_heads(config).changed(ranks=ranks), MediaSources()
    if name == "offload":
        config = with_four_heads(resolve_build(asked(preset="tiny")).config)
        model = replace(config.model, layers=5)  # of two the device would hold all
        stream = replace(config.workload.stream, offload_cache=True)
        return config.changed(ranks=ranks, model=model, stream=stream), MediaSources()
    if name == "padding":
        height, width = (464, 816) if options.device == "cuda" else (48, 48)
        config = resolve_build(asked(preset="tiny", height=height, width=width)).config
        return config.changed(ranks=2, vae=VAE), MediaSources(vae=write_vae(folder / "vae"))
    if name == "two":
        config = resolve_build(asked(preset="tiny")).config
        return config.changed(ranks=2, vae=VAE), MediaSources(vae=write_vae(folder / "vae"))
    preset = "self-forcing-1.3b" if options.full else "tiny"
    config = resolve_build(asked(preset=preset, sessions=2, batch=(1, 2))).config
    vae, media = VAE, folder / "vae"
    if options.full:
        import torch

        from scripts.random_vae import WAN, write_random_vae
        from seko_export.media.wan_vae.config import VAE_PRESETS, WAN_2_1

        vae, media = VAE_PRESETS[WAN_2_1], folder / "vae.safetensors"
        write_random_vae(media, vae, WAN, seed=0, dtype=torch.bfloat16, device=options.device)
    else:
        config = with_four_heads(config)
        write_vae(media)
    model = replace(config.model, text_dim=TEXT.dim)
    text = write_text_encoder(folder / "text")
    return (
        config.changed(model=model, text=TEXT, vae=vae, ranks=1 if name == "one" else ranks),
        MediaSources(vae=media, text_encoder=text, tokenizer=text / "tokenizer.json"),
    )


def with_four_heads(config: VideoBuild) -> VideoBuild:
    """Return a build whose model has four heads of the same size."""
    model = config.model
    return config.changed(model=replace(model, dim=4 * model.head_dim, heads=4))


def family_config(name: str, options: argparse.Namespace, folder: Path) -> tuple[VideoBuild, MediaSources]:
    """Return the build of another family's tiny preset on two ranks."""
    from seko_export.media.clip.files import clip_config_of
    from seko_export.media.hubert.files import hubert_config_of
    from seko_export.media.sources import MediaSources
    from tests.lingbot.streams import lingbot_config
    from tests.seko_talk.streams import talk_config, write_clip, write_hubert

    scheme = "bf16" if options.device == "cuda" else "fp32"
    target = {"device": options.device, "ranks": 2}
    if name == "lingbot":
        return lingbot_config(scheme).changed(**target), MediaSources()
    hubert, clip = folder / "hubert", folder / "clip.pth"
    write_hubert(hubert, 48)
    write_clip(clip, 32)
    around = {"audio": hubert_config_of(hubert), "image": clip_config_of(clip)}
    config = talk_config(scheme, model={"image_dim": 32}).changed(**target, **around)
    return config, MediaSources(audio_encoder=hubert, image_encoder=clip)


def build(name: str, options: argparse.Namespace) -> None:
    """Build one artifact into the work folder; print the report as JSON."""
    import torch

    from scripts.random_checkpoint import write_random_checkpoint
    from seko_export.build_steps import build_artifact
    from seko_export.host.progress import silent

    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        config, media = config_of(name, options, Path(folder))
        checkpoint = Path(folder) / "checkpoint"
        dtype = torch.bfloat16 if options.full else torch.float32
        write_random_checkpoint(checkpoint, config.model, seed=0, dtype=dtype)
        result = build_artifact(
            config,
            checkpoint,
            options.work / name,
            media=media,
            backend="aoti" if options.device == "cuda" else "compile",
            compiler_cache=False,
            replace=True,
            progress=silent,
        )
    print(json.dumps(asdict(result), default=str), flush=True)


def main() -> int:
    """Prove what the command line names; return how many proofs failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=NEEDS, help="a proof; may be repeated")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="builds side by side"
    )
    parser.add_argument("--full", action="store_true", help="one and several: the size of the 1.3B model")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "seko-rank-proof")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    engines: AbstractContextManager[None] = nullcontext()
    if options.device == "cpu":
        from tests.parallel.conftest import ranks_of_programs

        engines = ranks_of_programs()
    with engines:
        if options.build:
            build(options.build, options)
            return 0
        return prove(options)


def prove(options: argparse.Namespace) -> int:
    """Run the proofs; return how many failed."""
    if options.device == "cuda":
        from seko_runtime.backends.cuda_driver import device_count

        options.gpus = device_count()
        options.ranks = min(options.ranks, options.gpus)
    proofs, begun, failed = Proofs(options), time.monotonic(), []
    chosen = [name for name in NEEDS if not options.only or name in options.only]
    builds = [*dict.fromkeys(build for name in chosen for build in NEEDS[name])]
    with ThreadPoolExecutor(1) as starter:
        starter.submit(proofs.start, builds)
        for name in chosen:
            at = time.monotonic()
            try:
                ending = f"passed: {getattr(proofs, name)()}"
            except Exception as fault:
                traceback.print_exc()
                failed.append(name)
                ending = f"FAILED: {type(fault).__name__}: {str(fault)[:400]}"
            print(f"== {time.monotonic() - at:6.1f} s  {name:8} {ending}", flush=True)
    print(json.dumps({"failed": failed, "proofs": len(chosen), "seconds": round(time.monotonic() - begun)}))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
