"""PEFT's configs and headers of LoRAs: patterns mean what they mean in PEFT, and hostile ones are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from scripts.random_lora import random_pairs, write_lora
from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.lora_config import lora_config
from seko_export.checkpoints.lora_files import open_lora
from seko_export.config.model import ModelConfig
from seko_export.errors import CheckpointError

NAMES = [
    f"blocks.{layer}.{inner}"
    for layer in (0, 1, 10)
    for inner in ("attn1.to_q", "attn2.to_out.0", "ffn.net.0.proj", "self_attn.q", "ffn.0")
] + ["proj_out", "time_embedding.0", "q"]
# What users write, and signs whose meaning an engine could miss.
WRITTEN = [
    r"^blocks\.0\..*to_q$", ".*attn1.*", "q", "to_q", "blocks.1", r"blocks\.1\.attn1\.to_q", "attn[12].to_q",
    r"blocks\.\d+\.ffn\.0", r"blocks\.(0|1)\..*", "to_q|to_out.0", r"(?:self_attn|attn1)\.(to_)?q", "", ".",
    r"blocks\.[0-9]{2}\..*", r"[^.]+\.[^.]+\.ffn.*?", r"b.*\b", "^q", "proj_out|", r"x)|(proj_out", r"\w+", "Q",
    r"time_embedding\.0$", r".*\.0", r"blocks.{3}ffn.0",
]  # fmt: skip


def matches(pattern: str) -> list[str]:
    config = lora_config({"lora_alpha": 1, "alpha_pattern": {pattern: 2}}, {})
    return [name for name in NAMES if config.alpha_of(name) == 2]


def in_peft(pattern: str) -> list[str]:
    other = pytest.importorskip("peft.utils.other")
    return [name for name in NAMES if other.get_pattern_key([pattern], name) == pattern]


@pytest.mark.parametrize("pattern", WRITTEN)
def test_what_users_write_means_what_it_means_in_peft(pattern: str) -> None:
    assert matches(pattern) == in_peft(pattern)


_ATOMS = st.sampled_from(
    ["q", "0", "1", r"\.", ".", r"\d", r"\w", "to_", "attn", "blocks", "[0-9]", "[^.]", "^", "$"]
)
_PLAIN = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.tuples(inner, inner).map("|".join),
        inner.map("(?:{})".format),
    ),
    max_leaves=5,
)
_REPEATS = st.sampled_from(["*", "+", "?", "*?", "{2}", "{0,2}", "{1,}"])
_REPEATED = st.tuples(_PLAIN, _REPEATS).map(lambda pair: f"({pair[0]}){pair[1]}")
_EXPRESSIONS = (
    st.lists(_PLAIN | _REPEATED, min_size=1, max_size=4)
    .map("".join)
    .filter(lambda text: sum(text.count(sign) for sign in "*+?{(") <= 24)
)


@given(_EXPRESSIONS)
@settings(max_examples=100, deadline=None)
def test_any_pattern_means_what_it_means_in_peft(pattern: str) -> None:
    assert matches(pattern) == in_peft(pattern)


@pytest.mark.parametrize("field", ["alpha_pattern", "rank_pattern"])
def test_no_pattern_takes_long(field: str) -> None:
    """In a process of its own, as Python's `re` would not end."""
    patterns = (".*.*.*.*X", ".*" * 12 + "X", "(.|.)" * 20 + "X", ".?" * 24 + "X", "(.|.)*X")
    code = (
        "import sys; from seko_export.checkpoints.lora_config import lora_config\n"
        "for pattern in sys.argv[2:]:\n"
        "    config = lora_config({'lora_alpha': 4, 'r': 4, sys.argv[1]: {pattern: 8}}, {})\n"
        "    for layer in range(400):\n"
        "        name = f'base_model.model.blocks.{layer}.' + 'self_attn.' * 9 + 'q'\n"
        "        assert (config.alpha_of(name), config.rank_of(name)) == (4, 4)"
    )
    subprocess.run([sys.executable, "-c", code, field, *patterns], check=True, timeout=60)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?i)q",
        "(?i:q)",
        "(",
        "a{,3}",
        "a{2000}",
        "(?=q)q",
        r"(q)\1",
        r"\pL",
        "[[:alpha:]]",
        "q" * 201,
        "\ud800",
        r"\Z",
        ".?" * 40 + "X",
        ".?" * 90 + "X",
        "(.|.)" * 39 + "X",
        "(.*)" * 40 + "X",
        "(a*)*b",
        "(a+|b)+",
        "(a{2}){3}",
    ],
)
@pytest.mark.parametrize("field", ["alpha_pattern", "rank_pattern"])
def test_patterns_that_are_not_read(field: str, pattern: str) -> None:
    with pytest.raises(NotACheckpointError, match=rf"{field} in its adapter_config.json has .*names out$"):
        lora_config({field: {pattern: 3}}, {})


def test_there_are_not_too_many_patterns() -> None:
    with pytest.raises(
        NotACheckpointError, match=r"alpha_pattern in its adapter_config\.json has 5000 patterns"
    ):
        lora_config({"alpha_pattern": {f"q{number}": 3 for number in range(5000)}}, {})


HUGE = "1" + "0" * 400
WRONG = [
    ("lora_alpha", "1e400", "is inf"),
    ("lora_alpha", HUGE, "is inf"),
    ("lora_alpha", f"-{HUGE}", "is -inf"),
    ("lora_alpha", "NaN", "is nan"),
    ("lora_alpha", "true", "is True"),
    ("lora_alpha", '"4"', "is '4'"),
    ("lora_alpha", "[4]", "is [4]"),
    ("lora_alpha", "1e9", "below 1e+09"),
    ("r", HUGE, "is inf"),
    ("r", "2.5", "a whole number"),
    ("r", "1e400", "is inf"),
    ("alpha_pattern", '{"q": 1e400}', "is inf"),
    ("rank_pattern", f'{{"q": {HUGE}}}', "is inf"),
    ("rank_pattern", "[1]", "expected an object"),
    ("use_rslora", '"false"', "is 'false', expected true or false"),
    ("use_dora", '"true"', "is 'true', expected true or false"),
    ("use_rslora", "1", "is 1, expected true or false"),
    ("bias", '"some"', "is 'some', expected one of none, all, lora_only"),
    ("bias", "[1]", "is [1], expected one of"),
    ("modules_to_save", '"head"', "is 'head', expected a list"),
]


@pytest.mark.parametrize("place", ["config", "header"])
@pytest.mark.parametrize(("field", "value", "sentence"), WRONG)
def test_values_that_no_trainer_writes(
    place: str, field: str, value: str, sentence: str, tmp_path: Path, model: ModelConfig
) -> None:
    """The file, the place in it and the field are named."""
    path, pairs = tmp_path / "lora", random_pairs(model, rank=4, seed=3)
    if place == "config":
        write_lora(path, pairs, "peft", 4)
        config = path / "adapter_config.json"
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {field: "VALUE"}).replace('"VALUE"', value)
        )
        where = "adapter_config.json"
    else:
        write_lora(tmp_path / "whole", pairs, "diffusers", 4)
        save_file(
            load_file(tmp_path / "whole"),
            path,
            {"lora_adapter_metadata": f'{{"transformer.{field}": {value}}}'},
        )
        where = "header (lora_adapter_metadata)"
    with pytest.raises(CheckpointError) as caught:
        open_lora(path)
    message = str(caught.value)
    assert message.startswith(f"--lora {path}: {field} in its {where} ")
    assert sentence in message


@pytest.mark.parametrize("value", ["1e400", HUGE, "nan", "-1", "0"])
def test_alphas_of_kohyas_header(value: str, tmp_path: Path, model: ModelConfig) -> None:
    write_lora(tmp_path / "whole", random_pairs(model, rank=4, seed=3), "lightx2v", 4)
    save_file(load_file(tmp_path / "whole"), tmp_path / "lora", {"ss_network_alpha": value})
    with pytest.raises(CheckpointError, match=r"lora: ss_network_alpha in its header is .*a number above 0"):
        open_lora(tmp_path / "lora")
