"""Encoders of sound: what a decoder makes of the packets is the tone, in packets that a client can begin with."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_serve.errors import ServeError
from seko_serve.media.sound import ENCODERS, chosen_codec, facts
from seko_serve.protocol import Codec

RATE, HERTZ = 16_000, 440.0


def tone(samples: int) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * HERTZ * np.arange(samples) / RATE)).astype(np.float32)


def heard(codec: Codec, packets: list[bytes], rate: int) -> np.ndarray:
    if codec is Codec.PCM:
        return np.frombuffer(b"".join(packets), "<i2").astype(np.float32) / 32767
    if codec is Codec.AAC:
        with av.open(io.BytesIO(b"".join(packets)), format="aac") as container:
            return np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
    context = av.CodecContext.create("opus", "r")
    context.sample_rate, context.layout = rate, "mono"
    return np.concatenate(
        [frame.to_ndarray()[0] for packet in packets for frame in context.decode(av.Packet(packet))]
    )


def pitch(samples: np.ndarray, rate: int) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * rate / len(samples))


@pytest.mark.parametrize("codec", sorted(ENCODERS), ids=lambda codec: codec.name)
def test_a_tone_in_pieces_is_that_tone_and_lasts_as_long(codec: Codec) -> None:
    encoder = ENCODERS[codec](RATE)
    sound, packets = tone(RATE), []
    for begin in range(0, RATE, 1_777):
        packets += encoder.encode(sound[begin : begin + 1_777])
    packets += encoder.finish()
    rate = encoder.packet_rate
    total = sum(count for _, count in packets) / rate
    assert 1.0 - 1e-9 <= total < 1.2
    samples = heard(codec, [payload for payload, _ in packets], rate)
    middle = samples[rate // 4 : rate // 2]
    assert abs(pitch(middle, rate) - HERTZ) < 5
    assert abs(np.abs(middle).max() - 0.5) < 0.05


@given(st.lists(st.integers(0, 3_000), max_size=12))
def test_pcm_keeps_every_sample_in_any_pieces(sizes: list[int]) -> None:
    encoder = ENCODERS[Codec.PCM](RATE)
    sound = tone(sum(sizes))
    packets, begin = [], 0
    for size in sizes:
        packets += encoder.encode(sound[begin : begin + size])
        begin += size
    assert sum(count for _, count in packets) == len(sound)
    decoded = np.frombuffer(b"".join(payload for payload, _ in packets), "<i2") / 32767
    assert np.allclose(decoded, sound, atol=1 / 32767)


def test_what_is_too_loud_is_clipped() -> None:
    ((payload, _),) = ENCODERS[Codec.PCM](RATE).encode(np.array([2.0, -2.0], np.float32))
    assert np.frombuffer(payload, "<i2").tolist() == [32767, -32767]


def test_codecs_are_chosen_and_unknown_rates_refused() -> None:
    assert chosen_codec(("mp3", "opus")) is Codec.OPUS
    with pytest.raises(ServeError, match="sound codecs"):
        chosen_codec(("h264",))
    with pytest.raises(ServeError, match="no rate of 12345"):
        ENCODERS[Codec.AAC](12_345)


@pytest.mark.parametrize("codec", sorted(ENCODERS), ids=lambda codec: codec.name)
def test_a_decoder_returns_the_sound_behind_the_delay_that_is_told(codec: Codec) -> None:
    encoder = ENCODERS[codec](RATE)
    times = np.arange(RATE) / RATE
    sweep = (0.5 * np.sin(2 * np.pi * (200 + 1_000 * times) * times)).astype(np.float32)
    packets = [payload for payload, _ in [*encoder.encode(sweep), *encoder.finish()]]
    rate = encoder.packet_rate
    decoded = heard(codec, packets, rate)
    wanted = np.interp(np.arange(rate) / rate, times, sweep)
    lags = range(4_000)
    best = max(lags, key=lambda lag: float(np.dot(decoded[lag : lag + rate // 2], wanted[: rate // 2])))
    assert abs(best - encoder.delay) <= rate // 1000  # a millisecond: the resampler's own
    assert facts(codec, RATE) == {"rate": rate, "delay": encoder.delay, "channels": 1}
