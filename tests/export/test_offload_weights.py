"""`--offload-layers`, `--offload-text`: the same bytes as with the weights on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seko_export.artifact.describe import describe
from seko_export.backends import EAGER
from seko_export.config.pool import PoolConfig
from seko_export.errors import UsageError
from seko_runtime.format.manifest import Weight
from tests.support.stacked import eager_session
from tests.support.tiers import first_is_fast
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights

from .test_offload_cache import config_of, life_of

LAYOUTS = {
    "exact": {},
    "fp4, rings": {"scheme": "fp4", "layer_rings": (3, 6, 6, 6), "layers": 6},
    "a cache a pass, on the host, too": {"offload_cache": True, "pass_caches": True},
}


@pytest.mark.shows("offload")
@pytest.mark.parametrize("layout", first_is_fast(LAYOUTS))
def test_layers_on_the_host_give_the_bytes_of_layers_on_the_device(layout: str) -> None:
    config = config_of(**LAYOUTS[layout])  # type: ignore[arg-type]
    wan, text = random_wan_weights(config.model), random_text(config.model, 2)
    weights = EagerStream(config, wan, text).weights
    lives = []
    for chosen in (config, config.changed(offload_layers=True)):
        with eager_session(chosen, weights, text, [5, 6]) as session:
            assert bool(session.manifest.host_weights) == chosen.target.offload_layers
            lives.append(list(life_of(session, text)))
    assert lives[0] == lives[1]


def test_only_layers_stay_on_the_host() -> None:
    config = config_of().changed(offload_layers=True)
    table = tuple(
        Weight(name, (1,), "float32", "w") for name in ("blocks.1.self_attn.qkv.weight", "head.head.weight")
    )
    assert describe(config, EAGER, table, {}).host_weights == {"blocks.1.self_attn.qkv.weight"}


@pytest.mark.parametrize("option", ["offload_text", "offload_layers"])
def test_several_ranks_refuse(option: str) -> None:
    config = config_of()
    with pytest.raises(UsageError, match="is for one GPU, and --ranks 2"):
        config.changed(target=replace(config.target, ranks=2, **{option: True}))


def test_a_pool_may_have_them() -> None:
    assert config_of(batch=1).changed(offload_layers=True, pool=PoolConfig(3, (1, 2))).target.offload_layers


@pytest.mark.parametrize("option", ["--offload-text", "--offload-layers"])
def test_backends_without_copies_refuse(option: str, invoke, tmp_path: Path) -> None:
    done = invoke(
        "build", "--preset", "sample", option, "--backend", "onnx", "--target", "cpu", "-o", tmp_path / "a"
    )
    assert (done.exit_code, (tmp_path / "a").exists()) == (2, False)
    assert "has no weights on the host yet" in done.stderr


def test_no_text_encoder_is_no_text_encoder_on_the_host(invoke, tmp_path: Path) -> None:
    done = invoke("build", "--preset", "tiny", "--offload-text", "--target", "cpu", "-o", tmp_path / "a")
    assert done.exit_code == 2
    assert "--offload-text: this build has no text encoder" in done.stderr
