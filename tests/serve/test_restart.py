"""Processes that are killed and started again, and eight viewers that come and go: bytes are the runtime's."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from seko_runtime import Pool
from seko_serve.client import AsyncClient
from seko_serve.live import manager
from seko_serve.protocol import Media
from tests.runtime import toy_pool

from .bounded import comes
from .clients import session_of, to_the_end
from .conftest import NewClient, Starter
from .fleet_soak import PROMPTS, alone
from .forked import toy_process
from .processes import free_port
from .test_server import http, pictures, watch

pytestmark = [pytest.mark.slow, pytest.mark.quiet, pytest.mark.limit_s(120)]


@pytest.mark.shows("saved")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
async def test_the_same_tokens_go_on_in_a_new_process(how: signal.Signals, tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "store"
    url = f"http://127.0.0.1:{port}"
    clients = [AsyncClient(url) for _ in range(3)]
    with toy_process(port, folder, 2) as first:
        for seed, client in enumerate(clients):
            await client.open(codecs=["rgb24"], prompt=PROMPTS[seed], seed=seed, fps=1)  # however busy
        media = [(await watch(client, 7))[0] for client in clients]
        while len({file.name[:16] for file in folder.glob("*.record*")}) < len(clients):
            for seen, client in zip(media, clients, strict=True):
                seen += (await watch(client, 1))[0]
        first.send_signal(how)
        for seen, client in zip(media, clients, strict=True):
            rest, code = await to_the_end(client)
            seen += rest
            assert code == ("" if how is signal.SIGKILL else "stopping")
        assert first.wait(60) == (0 if how is signal.SIGHUP else -how)  # once all is saved
    with toy_process(port, folder, 2):
        for seed, (seen, client) in enumerate(zip(media, clients, strict=True)):
            await client.resume()
            again = (await watch(client, 5))[0]
            assert again[0].serial == seen[-1].serial + 1
            assert again[0].discontinuity == (again[0].first <= seen[-1].first)
            if how is not signal.SIGKILL:
                assert again[0].first == seen[-1].first + 1
            expected = alone(seed, PROMPTS[seed], max(seen[-1].chunk, again[-1].chunk) + 1)
            for packet in (*seen, *again):
                assert np.array_equal(pictures([packet])[0], expected[packet.first])
            assert [packet.first for packet in again] == [*range(again[0].first, again[0].first + len(again))]
        for client in clients:
            await client.close()
    assert not list(folder.glob("*.record*"))


async def test_a_killed_process_leaves_no_token_and_no_prompt_in_its_log_or_its_files(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "store"
    with toy_process(port, folder, 1) as server:
        client = await AsyncClient(f"http://127.0.0.1:{port}").open(codecs=["rgb24"], prompt="secret words")
        await watch(client, 5)
        await client.drop()
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        written = server.written() + b"".join(file.read_bytes() for file in folder.iterdir())
    for secret in (client._resume, "secret words"):
        assert secret.encode() not in written
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


@contextmanager
def eight() -> Iterator[Pool]:
    with toy_pool.open_pool(8) as pool:
        yield pool


async def test_eight_sessions_that_join_leave_pause_and_come_back_have_the_runtimes_bytes(
    start: Starter, tmp_path: Path, new_client: NewClient
) -> None:
    server = start(eight, snapshots=str(tmp_path / "store"), snapshot_every=3, lease_s=0.2)

    async def viewer(seed: int) -> None:
        choose = random.Random(seed)
        await asyncio.sleep(choose.random())
        client, prompt = new_client(server), PROMPTS[seed % len(PROMPTS)]
        await client.open(codecs=["rgb24"], prompt=prompt, seed=seed)
        media: list[Media] = []
        for _ in range(6):
            media += (await watch(client, choose.randrange(1, 5)))[0]
            what = choose.choice(["go on", "pause", "drop", "leave for long", "drop unheard"])
            if what == "pause":
                await client.send("pause")
                await asyncio.sleep(choose.random() / 5)
                await client.send("play")
            elif what in ("drop", "drop unheard"):
                if what == "drop unheard":
                    media += (await watch(client, 1, acknowledge=False))[0]
                await client.drop()
                await asyncio.sleep(choose.random() / 20)
                await client.resume()
            elif what == "leave for long":
                await client.drop()
                await comes(lambda: session_of(client) not in server.manager.sessions)
                await client.resume()
        await client.close()
        assert [packet.serial for packet in media] == list(range(len(media)))
        expected = await asyncio.to_thread(alone, seed, prompt, media[-1].chunk + 1)
        assert np.array_equal(pictures(media), expected[: len(media)])

    async with asyncio.TaskGroup() as viewers:
        for seed in range(8):
            viewers.create_task(viewer(seed))
    assert server.manager.admission.free == 8


@pytest.mark.parametrize("saved", [True, False])
async def test_one_whose_viewer_is_gone_gives_its_row_to_one_who_waits_and_goes_on_later(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool, new_client: NewClient
) -> None:
    """A session that cannot be saved keeps its row for the lease."""
    monkeypatch.setattr(manager, "AWAITED_LEASE_S", 0.1)
    monkeypatch.setattr(manager, "REAP_S", 0.05)
    server = start(max_sessions=1, snapshots=str(tmp_path / "store") if saved else None, lease_s=3600)
    url = f"{server.url}/v1/sessions"
    gone = await new_client(server).open(codecs=["rgb24"], prompt=PROMPTS[0], seed=3)
    media, _ = await watch(gone, 2)
    await gone.drop()
    await asyncio.sleep(0.5)
    assert len(server.manager.sessions) == 1  # nobody wants its row
    token = "join"
    for _ in range(60 if saved else 3):
        status, answer = await asyncio.to_thread(http, url, "POST", {"prompt": PROMPTS[1]}, "", token)
        if status == 201:
            break
        token = answer["error"]["queue_token"]
        await asyncio.sleep(answer["error"]["retry_after"] / 2)
    assert (status == 201) == saved
    if saved:
        await asyncio.to_thread(http, f"{url}/{answer['id']}", "DELETE")
    await gone.resume()
    more, _ = await watch(gone, 2)
    assert np.array_equal(pictures(media + more), alone(3, PROMPTS[0], 4)[: len(media + more)])
