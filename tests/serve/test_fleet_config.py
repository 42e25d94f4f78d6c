"""The configuration of a fleet: the page's example, what is refused and by which sentence, and artifacts in tars."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from seko_export.artifact.packing import pack_artifact
from seko_runtime.errors import ArtifactError
from seko_runtime.format.own_folders import make_own_folder
from seko_serve.fleet.artifacts import artifact_folder
from seko_serve.fleet.command import main
from seko_serve.fleet.config import FleetConfig, ModelConfig, read_config
from seko_serve.run import url_host
from seko_serve.settings import LOOPBACK
from seko_serve.store.base import StoreError

pytest.importorskip("yaml", reason="needs seko-serve[ray]")
PAGE = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text(encoding="utf-8")
LEAST = "models: [{artifact: a}]\nsnapshots: s\n"


def config_of(folder: Path, text: str) -> FleetConfig:
    file = folder / "fleet.yaml"
    file.write_text(text)
    return read_config(file)


def test_the_pages_example_is_a_configuration(tmp_path: Path) -> None:
    config = config_of(tmp_path, PAGE.split("```yaml\n")[1].split("```")[0])
    assert [model.retired for model in config.models] == [False, True]
    assert (config.gateways, config.sessions_per_key, config.directory[:5]) == (2, 8, "redis")


def test_the_page_names_every_field() -> None:
    table = PAGE.split("## Configuration")[1].split("## What a client sees")[0]
    for kind in (FleetConfig, ModelConfig):
        assert [field.name for field in fields(kind) if f"`{field.name}`" not in table] == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is no table"),
        ("a: [", "is no YAML"),
        ("models: []\nsnapshots: s\n", "models is empty"),
        ("snapshots: s\n", "lacks the field 'models'"),
        ("models: [{}]\nsnapshots: s\n", r"models\[0\] lacks the field 'artifact'"),
        (f"{LEAST}boxes: 3\n", "has the unknown field 'boxes'"),
        (f"{LEAST}port: '8000'\n", "port is '8000', expected a value of type int"),
        (f"{LEAST}port: true\n", "port is True, expected a value of type int"),
        (f"{LEAST}allowed_origins: a\n", "allowed_origins is no list"),
        (f"{LEAST}directory: http://a\n", "directory is 'http://a', expected memory"),
        (f"{LEAST}directory: redis://:hush@a:b/0\n", "directory has a port that is no number"),
        (f"{LEAST}directory: redis://:hush@a:0/0\n", "directory has a port that is no number"),
        (f"{LEAST}directory: redis://:hush@a:65536/0\n", "directory has a port that is no number"),
        (
            f"{LEAST}directory: redis://:hush@a:1/b\n",
            "directory ends in a path that is no number of a database",
        ),
        (f"{LEAST}gateways: 0\n", "gateways is 0"),
        ("models: [{artifact: a, boxes: 0}]\nsnapshots: s\n", r"models\[0\]: boxes is 0, expected 1 or more"),
        (
            "models: [{artifact: a, device: bogus}]\nsnapshots: s\n",
            r"models\[0\]: device is 'bogus', expected auto",
        ),
        ("models: [{artifact: a, device: 'cuda:x'}]\nsnapshots: s\n", "device is 'cuda:x', expected auto"),
        ("models: [{artifact: a, device: 'auto:1'}]\nsnapshots: s\n", "device is 'auto:1', expected auto"),
        (f"{LEAST}lease: -5\n", "lease -5: expected seconds above 0"),
        (f"{LEAST}snapshot_every: -1\n", "snapshot_every -1: expected 0 or more"),
        (f"{LEAST}opens_per_second: 0\n", "opens_per_second 0: expected a number above 0"),
        (f"{LEAST}queue: -1\n", "queue -1: expected 0 or more"),
        (f"{LEAST}videos: -1\n", "videos -1: expected 0 or more"),
        (f"{LEAST}picture_hosts: [a@b]\n", "picture_hosts a@b: expected a host such as"),
        (f"{LEAST}stun: a.example.org\n", "stun a.example.org: expected an address such as stun:"),
        (f"{LEAST}allowed_origins: [a]\n", "allowed_origins a: expected an origin such as"),
        (f"{LEAST}snapshots: t\n", "has the field 'snapshots' twice, in lines 2 and 3"),
        (
            "models: [{artifact: a, artifact: b}]\nsnapshots: s\n",
            "has the field 'artifact' twice, in lines 1 and 1",
        ),
        (
            "models: [{artifact: a, boxes: 3, max_boxes: 2}]\nsnapshots: s\n",
            r"max_boxes is 2, expected boxes \(3\)",
        ),
        ("models: [{artifact: a, max_boxes: -1}]\nsnapshots: s\n", "max_boxes is -1, expected"),
        (f"{LEAST}port: 65536\n", "port is 65536, expected 0 to 65535"),
        (f"{LEAST}port: -1\n", "port is -1, expected 0 to 65535"),
        ("models: [{artifact: a, gpus: 1.5}]\nsnapshots: s\n", "gpus is 1.5, expected"),
        ("models: [{artifact: a, gpus: .nan}]\nsnapshots: s\n", "gpus is nan, expected"),
        ("models: [{artifact: a, cpus: .inf}]\nsnapshots: s\n", "cpus is inf, expected"),
        (f"{LEAST}box_url: 'wss://{{hots}}:{{port}}'\n", "box_url is .* expected an address such as"),
        (f"{LEAST}box_url: 'wss://{{host:{{port}}'\n", "box_url is .* expected an address such as"),
        (f"{LEAST}box_url: example.org\n", "box_url is 'example.org', expected an address such as"),
        (f"{LEAST}shrink_after: -1\n", "shrink_after is -1, expected"),
        (f"{LEAST}shrink_after: .inf\n", "shrink_after is inf, expected"),
        ("models: [{artifact: a}, {artifact: a}]\nsnapshots: s\n", "has an artifact twice"),
    ],
)
def test_a_wrong_configuration_is_refused_by_the_fields_name(
    tmp_path: Path, text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=rf"^fleet\.yaml\b.*{sentence}"):
        config_of(tmp_path, text)
    assert main([str(tmp_path / "fleet.yaml")]) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--" not in said
    assert "hush" not in said


@pytest.mark.parametrize(
    "url", ["redis://a", "rediss://:b@a:1/", "redis://a/15", "redis://a?db=1", "unix:///a/b?db=1"]
)
def test_addresses_of_redis_may_lack_a_port_or_a_database(url: str, tmp_path: Path) -> None:
    assert config_of(tmp_path, f"{LEAST}directory: {url}\n").directory == url


def test_an_error_that_is_found_later_names_the_field(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    config = config_of(tmp_path, f"{LEAST}snapshot_key_file: {key}\n")
    with pytest.raises(ValueError, match=r"^snapshot_key_file has 0 bytes, expected 32"):
        config.gateway_settings({})


def test_boxes_are_replaced_if_their_settings_change_and_not_if_they_are_retired(tmp_path: Path) -> None:
    config = config_of(tmp_path, f"{LEAST}host: 10.0.0.1\n")
    (model,) = config.models
    group = config.group(model)
    assert config.group(replace(model, retired=True, boxes=7, max_boxes=9)) == group
    assert replace(config, gateways=3, port=1, shrink_after=1.0).group(model) == group
    others = {config.group(replace(model, artifact="b")), replace(config, lease=5.0).group(model)}
    assert len({group, *others}) == 3


def test_a_box_has_a_gpu_for_each_rank_of_its_artifact() -> None:
    for gpus, ranks in ((1, 1), (0.5, 1), (4, 4), (0, 4)):  # without GPUs the ranks are processes on the CPU
        ModelConfig("a", gpus=gpus).check_ranks(ranks)
    with pytest.raises(ValueError, match="gpus is 1, and the artifact has 4 ranks: expected gpus 4"):
        ModelConfig("a").check_ranks(4)


def test_boxes_listen_on_loopback_if_the_fleet_is_this_machines_alone(tmp_path: Path) -> None:
    key = {"SEKO_SERVE_API_KEY": "k" * 20}
    for more, environment, address in (
        ("", {}, "127.0.0.1"),
        ("", key, "10.0.0.7"),
        ("host: 0.0.0.0", {}, "10.0.0.7"),
        ("box_host: 10.0.0.8", {}, "10.0.0.8"),
    ):
        config = config_of(tmp_path, f"{LEAST}{more}\n")
        assert config.box_address("10.0.0.7", environment) == address


def test_a_machine_without_room_for_the_boxes_is_told(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="needs seko-serve[ray]")
    from seko_serve.fleet.checks import check_room

    config = config_of(tmp_path, "models: [{artifact: a, boxes: 2}]\nsnapshots: s\n")
    check_room(config, {"GPU": 2.0, "CPU": 3.0})
    for resources, sentence in (
        ({"CPU": 3.0}, "need 2 GPUs, this machine has 0"),
        ({"GPU": 2.0, "CPU": 2.0}, "need 2.1 CPUs, this machine has 2"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            check_room(config, resources)


def test_the_scalers_part_of_a_core_counts(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="needs seko-serve[ray]")
    from seko_serve.fleet.checks import check_room

    config = config_of(tmp_path, "models: [{artifact: a, max_boxes: 2}]\nsnapshots: s\n")
    check_room(config, {"GPU": 1.0, "CPU": 1.2})
    with pytest.raises(RuntimeError, match=r"need 1\.2 CPUs, this machine has 1\.1"):
        check_room(config, {"GPU": 1.0, "CPU": 1.1})


@pytest.mark.parametrize(
    ("boxes", "gpus"),
    [
        ((0.6, 0.6, 0.6), 3),
        ((0.5, 0.5, 0.5), 2),
        ((0.3, 0.6, 0.4, 0.7), 2),
        ((0.1,) * 10, 1),
        ((2.0, 0.5), 3),
        ((0.0, 0.0), 0),
    ],
)
def test_no_box_has_parts_of_several_gpus(boxes: tuple[float, ...], gpus: int) -> None:
    pytest.importorskip("redis", reason="needs seko-serve[ray]")
    from seko_serve.fleet.checks import check_room

    models = tuple(ModelConfig(str(number), gpus=share) for number, share in enumerate(boxes))
    config = FleetConfig(models, "s")
    check_room(config, {"GPU": float(gpus), "CPU": 16.0})
    if gpus:
        with pytest.raises(RuntimeError, match=f"need {gpus} GPUs, this machine has {gpus - 1}"):
            check_room(config, {"GPU": gpus - 1.0, "CPU": 16.0})


@pytest.mark.parametrize("host", LOOPBACK)
def test_the_page_of_a_loopback_address_may_open_sockets(host: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, f"{LEAST}host: '{host}'\nport: 8123\n")
    assert f"http://{url_host(host)}:8123" in config.gateway_settings({}).allowed_origins


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_the_address_of_ipv6_is_told_in_brackets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = pytest.importorskip("ray", reason="needs seko-serve[ray]")
    from seko_serve.fleet import command, deployments

    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr("seko_serve.fleet.checks.check_cluster", lambda _: None)
    monkeypatch.setattr(deployments, "apply", lambda _: None)
    config_of(tmp_path, f"{LEAST}host: '::1'\nport: 8123\n")
    assert command.main([str(tmp_path / "fleet.yaml"), "--address", "a:1"]) == 0
    assert "http://[::1]:8123/" in capsys.readouterr().err


class SlowServe:
    """Ray Serve whose applications end after some looks at them; its own wait for their end fails."""

    def __init__(self, looks: dict[str, int]) -> None:
        self.looks = looks
        self.ending: set[str] = set()

    def delete(self, name: str, _blocking: bool = True) -> None:
        self.ending.add(name)
        if _blocking:
            raise TimeoutError(name)

    def status(self) -> SimpleNamespace:
        for name in self.ending.intersection(self.looks):
            self.looks[name] -= 1
            if self.looks[name] < 0:
                del self.looks[name]
        return SimpleNamespace(applications={**self.looks})


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_fleet_waits_for_boxes_that_end_slowly_and_names_those_that_do_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray = pytest.importorskip("ray", reason="needs seko-serve[ray]")
    from seko_serve.fleet import deployments

    monkeypatch.setattr(ray, "get_actor", lambda *_: None)
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr(deployments, "LOOK_S", 0.001)
    for looks, left in ((5, ""), (10**9, "seko-box-a, seko-box-b")):
        slow = SlowServe({"seko": 0, "seko-scaler": 2, "seko-box-a": looks, "seko-box-b": looks, "other": 0})
        monkeypatch.setattr(deployments, "serve", slow)
        monkeypatch.setattr(deployments, "ENDED_S", 0.2 if left else 60.0)
        deployments.remove()
        assert set(slow.looks) == {"other", *left.split(", ")} - {""}
        assert left in caplog.text
        assert bool(caplog.records) == bool(left)


def test_stopping_without_a_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet.yaml", "--stop"]) == 2
    assert "give --address" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_an_address_where_no_cluster_answers_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="needs seko-serve[ray]")
    (tmp_path / "fleet.yaml").write_text(LEAST)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert main([str(tmp_path / "fleet.yaml"), "--address", address]) == 3
    assert capsys.readouterr().err == f"seko-serve: --address: no Ray cluster answers at {address}\n"


def test_a_tar_is_unpacked_once_checked_and_named_by_its_digest(
    small_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert artifact_folder(str(small_artifact), tmp_path / "cache") == small_artifact
    tar, cache = tmp_path / "small.tar", tmp_path / "cache"
    pack_artifact(small_artifact, tar)
    folder = artifact_folder(str(tar), cache)
    assert (folder / "manifest.json").read_bytes() == (small_artifact / "manifest.json").read_bytes()
    unpacked: list[Callable[..., object]] = []
    with monkeypatch.context() as patch:
        patch.setattr("seko_serve.fleet.artifacts.unpack_artifact", unpacked.append)
        assert artifact_folder(str(tar), cache) == folder
    (note,) = cache.glob("*.digest")
    note.write_bytes(b"")  # as a machine may leave it that loses its power
    left, lock = make_own_folder(cache, ".unpacking-")
    os.close(lock)  # of a box that was killed
    assert artifact_folder(str(tar), cache) == folder
    assert not left.exists()
    content, before = bytearray(tar.read_bytes()), tar.stat()
    content[len(content) // 2] ^= 1
    tar.write_bytes(content)
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps times
    with pytest.raises(ArtifactError):
        artifact_folder(str(tar), cache)
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".digest"]
    cache.chmod(0o777)
    with pytest.raises(StoreError, match=r"the cache .* may be written to by others \(mode 0777\)"):
        artifact_folder(str(tar), cache)


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_fleet_of_this_machine_is_checked_before_ray_starts(
    small_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each fault is one sentence that names it, and exit code 3; Ray is not started."""
    ray = pytest.importorskip("ray", reason="needs seko-serve[ray]")
    pytest.importorskip("redis", reason="needs seko-serve[ray]")
    monkeypatch.delenv("SEKO_SERVE_API_KEY", raising=False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    trust = tmp_path / "trust"
    trust.write_text(f"ed25519 {'ab' * 32} somebody\n")
    store = tmp_path / "store"
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens there
        free, used = unused.getsockname()[1], taken.getsockname()[1]
        for sentence, fields in (
            ("was not found; check the path", {"artifact": tmp_path / "none"}),
            ("artifact is built for cpu, opened on cuda:1", {"device": "cuda:1"}),
            ("has no VAE", {}),
            ("is not signed", {"trust": trust}),
            (f"port {used} cannot be listened on: Address already in use", {"port": used}),
            (f"no Redis server answers at 127.0.0.1:{free}\n", {"directory": f"redis://:secret@127.0.0.1:{free}/0"}),
            ("give it mode 0700", {"snapshots": open_folder}),
            ("host is 0.0.0.0, which others reach, and there is no API key", {"host": "0.0.0.0"}),
            ("was not found; check the path", {"api_key_file": tmp_path / "none"}),
            ("ssl_certfile and ssl_keyfile are no certificate", {"ssl_certfile": trust, "ssl_keyfile": trust}),
            ("ca_file", {"ca_file": trust}),
        ):  # fmt: skip
            values: dict[str, object] = {"artifact": small_artifact, "port": 0, "snapshots": store, **fields}
            monkeypatch.setenv("SEKO_TRUST", str(values.pop("trust", "")))
            if not os.environ["SEKO_TRUST"]:
                monkeypatch.delenv("SEKO_TRUST")
            lines = [
                f"models: [{{artifact: {values.pop('artifact')}, device: '{values.pop('device', 'auto')}'}}]"
            ]
            lines += [f"{name}: {value}" for name, value in values.items()]
            (tmp_path / "fleet.yaml").write_text("\n".join(lines))
            assert main([str(tmp_path / "fleet.yaml")]) == 3, sentence
            said = capsys.readouterr().err
            assert sentence in said
            assert said.count("\n") == 1
            assert "secret" not in said


@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize(("options", "address"), [([], "local"), (["--address", "auto"], "auto")])
def test_a_running_cluster_is_changed_only_if_its_address_is_named(
    options: list[str],
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With None Ray joins a cluster of this machine, if there is one, or that of RAY_ADDRESS; "local" starts one."""
    ray = pytest.importorskip("ray", reason="needs seko-serve[ray]")
    pytest.importorskip("redis", reason="needs seko-serve[ray]")
    addresses: list[object] = []

    def init(**named: object) -> None:
        addresses.append(named["address"])
        assert os.environ["RAY_COLOR_PREFIX"] == "0"  # a file shows colours as letters
        raise ConnectionError("\x1b[36mat a place\x1b[39m\n\x1b[31mno Ray here\x1b[0m\n")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr("seko_serve.fleet.checks.check", lambda *_: None)
    monkeypatch.setenv("RAY_COLOR_PREFIX", "")
    monkeypatch.delenv("RAY_COLOR_PREFIX")
    config_of(tmp_path, LEAST)
    assert main([str(tmp_path / "fleet.yaml"), *options]) == 3
    assert addresses == [address]
    assert capsys.readouterr().err == "seko-serve: the fleet does not start: no Ray here\n"
