"""The prompt cache: counts, bound, bytes, and an encoder that is not called again. Real tokens are in test_text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_runtime.errors import EngineRunError, TornStreamError, UsageError
from seko_runtime.format.manifest import Buffer, InputSpec, TensorSpec
from seko_runtime.video.text import prompt_key
from tests.support.rows import rows_of

from . import toy, toy_pool, toy_whole
from .toy_whole import PROMPT, open_whole, whole_manifest

PROMPTS = ["a red disc", "a blue ring", "a green square", "a ring drifts", "a disc bounces"]


class Counted:
    """Engines with counted calls."""

    def __init__(self, *names: str) -> None:
        self.calls = dict.fromkeys(names, 0)
        real = toy_whole.eager_engines()

        def counted(name: str) -> Any:
            def run(inputs: list[Any]) -> list[Any]:
                self.calls[name] += 1
                return real[name](inputs)

            return run

        self.engines = {name: counted(name) for name in names}


def text_of(prompt: str) -> torch.Tensor:
    ids = torch.from_numpy(toy_whole.WordIds().ids(prompt))
    return toy_whole.TextEncoder()(ids, toy_whole.whole_weights()["text.table"])


def test_a_prompt_gives_what_its_embeddings_give() -> None:
    with open_whole(2, prompt=["a blue ring", "a red disc"]) as stacked:
        text = torch.cat((text_of("a blue ring"), text_of("a red disc")))
        with open_whole(2, text=text) as two:
            for _ in range(3):
                assert stacked.run_chunk().to_host().tobytes() == two.run_chunk().to_host().tobytes()


def test_a_check_refuses_what_a_prompt_is_refused_for_and_changes_nothing() -> None:
    long = "a red disc bounces drifts"
    with (
        toy_pool.open_pool(cuts_prompts=False) as pool,
        pool.open_session(prompt="a red disc") as session,
        pool.open_session(prompt="a red disc") as other,
    ):
        for refused in (
            lambda: session.set_prompt(long),
            lambda: session.check_prompt(long),
            lambda: pool.check_prompt(long),
        ):
            with pytest.raises(UsageError, match="the prompt has 6 tokens, this artifact takes 5"):
                refused()
        session.check_prompt("a blue ring", recache=True)
        pool.check_prompt("a blue ring")
        assert session.run_chunk().to_host().tobytes() == other.run_chunk().to_host().tobytes()


def test_a_repeat_is_a_hit_and_encodes_nothing_whatever_its_spelling_of_white_space() -> None:
    counted = Counted("text", "prompt")
    with open_whole(engines=counted.engines) as session:
        first = session.run_chunk().to_host()
        session.set_prompt("a blue ring")
        session.restart_row(0)
        other = session.run_chunk().to_host()
        session.set_prompt(f"  {PROMPT.replace(' ', chr(10) + ' ')} ")
        session.restart_row(0)
        assert session.run_chunk().to_host().tobytes() == first.tobytes() != other.tobytes()
        assert counted.calls == {"text": 2, "prompt": 3}
        assert (session.stats.prompt_cache_hits, session.stats.prompt_cache_misses) == (1, 2)


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.sampled_from(PROMPTS), min_size=3, max_size=3), min_size=1, max_size=8),
    st.integers(0, 4),
)
def test_any_order_of_prompts_gives_the_rows_what_they_asked_for(
    turns: list[list[str]], capacity: int
) -> None:
    """Also rows that are held beside rows that are new, and a cache smaller than the batch; counts are an LRU's."""
    cached: list[str] = []
    hits = misses = 0
    with open_whole(3, prompt_cache=capacity, prompt=turns[0]) as session:
        for turn, prompts in enumerate(turns):
            if turn:
                session.set_prompt(prompts)
            for prompt in prompts:
                if prompt in cached:
                    hits += 1
                else:
                    misses += 1
                cached = (
                    [*(other for other in cached if other != prompt), prompt][-capacity:] if capacity else []
                )
            assert (session.stats.prompt_cache_hits, session.stats.prompt_cache_misses) == (hits, misses)
            live = rows_of(session).device()
            for row, prompt in enumerate(prompts):
                assert torch.equal(live.buffers["text.embeddings"][row], text_of(prompt)[0])
                assert torch.equal(live.buffers["prompt.mean"][row], text_of(prompt).mean(1)[0])


def test_another_artifact_is_another_key() -> None:
    keys = {prompt_key(prompt, digest) for prompt in ("a", "b") for digest in ("1" * 64, "2" * 64)}
    assert len(keys) == 4


def test_an_encoder_that_fails_leaves_every_row_as_it_was() -> None:
    fail = [False]

    def text(inputs: list[Any]) -> list[Any]:
        if fail[0] and int(inputs[0][0, 1]) == toy_whole.WORDS.index("green"):
            raise RuntimeError("planted")
        return toy_whole.eager_engines()["text"](inputs)

    with open_whole(2, engines={"text": text}) as session, open_whole(2) as whole:
        fail[0] = True
        with pytest.raises(EngineRunError, match="planted"):
            session.sessions[1].set_prompt("a green square")
        for _ in range(3):
            assert session.run_chunk().to_host().tobytes() == whole.run_chunk().to_host().tobytes()


def test_no_chunk_is_made_of_half_a_prompt() -> None:
    """The prompt program fails when the first row is done: that row is neither run nor begun anew until a prompt is."""
    fail = [False]

    def prompt(inputs: list[Any]) -> list[Any]:
        text, mean = inputs
        if fail[0]:
            mean[0] = text[0].mean(0)
            raise RuntimeError("planted")
        return [toy.Prompt()(*inputs)]

    with open_whole(2, engines={"prompt": prompt}) as session, open_whole(2) as whole:
        for opened in (session, whole):
            opened.run_chunk()
        fail[0] = True
        for change in (lambda: session.set_prompt("a blue ring"), lambda: session.set_text(toy.toy_text(2))):
            with pytest.raises(EngineRunError, match="planted"):
                change()
            with pytest.raises(TornStreamError, match="was set in part when an error came; set it again"):
                session.run_chunk()
        fail[0] = False
        for opened in (session, whole):
            opened.set_prompt("a green square")
            opened.restart_row(1)
        assert session.run_chunk().to_host().tobytes() == whole.run_chunk().to_host().tobytes()


def test_a_session_with_half_a_prompt_is_not_stored(tmp_path: Path) -> None:
    """Not paused and not saved; a row that holds another stream again is whole."""
    fail, real = [False], toy_pool.pool_engines()["prompt"]

    def prompt(inputs: list[Any]) -> list[Any]:
        if fail[0]:
            raise RuntimeError("planted")
        return list(real(inputs))

    with toy_pool.open_pool(1, (1,), engines={"prompt": prompt}) as pool:
        with pool.open_session(prompt=PROMPT) as session:
            session.save(tmp_path / "whole")
            fail[0] = True
            with pytest.raises(EngineRunError, match="planted"):
                session.set_prompt("a blue ring")
            for store in (session.pause, lambda: session.save(tmp_path / "half")):
                with pytest.raises(TornStreamError, match="set it again"):
                    store()
        with pool.restore(tmp_path / "whole") as session:
            session.run_chunk()


def test_what_cannot_be_a_prompt_is_a_usage_error() -> None:
    with open_whole(2) as session:
        with pytest.raises(UsageError, match="lone surrogate"):
            session.set_prompt("a \ud800")
        with pytest.raises(UsageError, match="at most"):
            session.set_prompt("a" * (1 << 17))
        for wrong in (["a"], 1):
            with pytest.raises(UsageError, match="a prompt is a text"):
                session.sessions[0].set_prompt(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least 0"):
        open_whole(prompt_cache=-1)
    with pytest.raises(UsageError, match="both prompt and text"):
        open_whole(prompt="a", text=np.zeros((1, toy.TEXT_TOKENS, toy.TEXT_DIM), np.float32))
    with (
        toy_whole.stacked_session(
            toy.toy_manifest(),
            toy.eager_engines(),
            toy.toy_weights(),
            toy_whole.CpuMemory(),
            seeds=[0],
            text=toy.toy_text(),
        ) as plain,
        pytest.raises(UsageError, match="no text encoder; rebuild it with --text-encoder"),
    ):
        plain.set_prompt("a red disc")


def test_a_cached_prompt_brings_nothing_that_another_input_went_into() -> None:
    """Where the program also reads a picture, a repeat of the sentence keeps each row's own."""

    def prompt(inputs: list[Any]) -> list[Any]:
        text, picture, mean = inputs
        mean.copy_(text.mean(1) + picture)
        return [mean.sum(1)]

    base = whole_manifest(2)
    picture = TensorSpec("picture", (2, toy.CHANNELS), "float32")
    old = next(engine for engine in base.engines if engine.name == "prompt")
    text, mean = old.inputs
    (call,) = base.programs["prompt"]
    manifest = replace(
        base,
        inputs=(InputSpec("picture", (toy.CHANNELS,), "float32", "input.picture", "prompt"),),
        buffers=(*base.buffers, Buffer("input.picture", (2, toy.CHANNELS), "float32", "session")),
        engines=(
            *(engine for engine in base.engines if engine is not old),
            replace(old, inputs=(text, picture, mean)),
        ),
        programs={
            **base.programs,
            "prompt": (replace(call, inputs=(call.inputs[0], "buffer:input.picture", call.inputs[1])),),
        },
    )
    counted = Counted("text")
    pictures = np.arange(2 * toy.CHANNELS, dtype=np.float32).reshape(2, -1)
    with open_whole(
        2, manifest=manifest, engines={**counted.engines, "prompt": prompt}, inputs={"picture": pictures}
    ) as session:
        for words in ("a blue ring", PROMPT, ["a blue ring", PROMPT], ["a red disc", "a blue ring"]):
            session.set_prompt(words)
            means = rows_of(session).device().buffers["prompt.mean"]
            for row, sentence in enumerate([words] * 2 if isinstance(words, str) else words):
                assert torch.equal(means[row], text_of(sentence).mean(1)[0] + torch.from_numpy(pictures[row]))
        session.set_inputs({"picture": pictures + 1})
        assert torch.equal(means[1], text_of("a blue ring").mean(1)[0] + torch.from_numpy(pictures[1] + 1))
        assert counted.calls["text"] == 3  # each sentence once
