"""The schedule's times, the sampler's formula, and the noise: known answers, independence, moments."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.errors import UsageError
from seko_export.families.layers import sampler
from seko_export.families.layers.sampler import Advance, Noise, gaussian, philox
from tests.support.tolerances import BOX_MULLER, ULP, relative_error
from tests.truth.eager_stream import same_bytes

SHAPE = (4, 6, 5)  # 120 numbers a frame
INT64 = st.integers(-(2**63), 2**63 - 1)


def draw_noise(seeds, frames, draw=0, shape=SHAPE):
    return gaussian(torch.tensor(seeds), torch.tensor(frames), torch.tensor([draw]), shape)


def philox_in_python(counter, key):
    """Salmon et al., SC11, written with Python's own integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's kat_vectors, philox4x32 with 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    got = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in got) == words
    assert tuple(philox_in_python(counter, key)) == words


@settings(max_examples=25)
@given(seed=INT64, frame=st.integers(0, 2**63 - 1), draw=st.integers(0, 2**31))
def test_noise_is_philox_of_seed_frame_and_draw(seed, frame, draw):
    """Each group of four numbers from its own counter; 64 bits of the seed and of the frame count.

    A word becomes a float32 before its logarithm is taken: near 1 that moves the radius by more than all roundings.
    """
    noise = draw_noise([seed], [[frame]], draw, (1, 2, 5)).flatten()
    low, high = 0xFFFFFFFF, seed % 2**64
    wanted = []
    for group in range(3):
        counter = (group, frame & low, frame >> 32, draw)
        words = philox_in_python(counter, (high & low, high >> 32))
        unit = [float(torch.tensor((w >> 8) + 0.5)) / 2**24 for w in words]
        for i in (0, 2):
            radius, angle = math.sqrt(-2 * math.log(unit[i])), 2 * math.pi * unit[i + 1]
            wanted += [radius * math.cos(angle), radius * math.sin(angle)]
    assert (noise.double() - torch.tensor(wanted[:10]).double()).abs().max() <= BOX_MULLER[torch.float32]


def test_equal_keys_give_equal_bytes_wherever_they_stand():
    """Not the chunk, not the row, not the neighbours: only seed, absolute frame and draw."""
    whole = draw_noise([5], [[0, 1, 2, 3, 4, 5]])
    for size in (1, 2, 3):
        for first in range(0, 6, size):
            part = draw_noise([5], [list(range(first, first + size))])
            assert same_bytes(part, whole[:, :, first : first + size])
    batch = draw_noise([9, 5, 5], [[7, 8], [2, 3], [4, 2]])
    assert same_bytes(batch[1], whole[0, :, 2:4])
    assert same_bytes(batch[2, :, 1], whole[0, :, 2])
    assert same_bytes(whole, draw_noise([5], [[0, 1, 2, 3, 4, 5]]))


LARGEST_INDEX = 2**31 - 1


def test_no_counter_is_an_index_to_the_compiler():
    """What it takes for an index, numbers of a range times constants, is computed in 32 bits on a GPU.

    So every factor of a large constant comes from the outside or has gone through a bit operation.
    """

    def draw(seeds, frames, number):
        return gaussian(seeds, frames, number, SHAPE)

    numbers = (torch.tensor([5]), torch.tensor([[0, 1]]), torch.tensor([0]))
    traced = make_fx(draw)(*numbers).graph
    factors = [
        node.args[0]
        for node in traced.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        if isinstance(node.args[1], int)
        and abs(node.args[1]) * SHAPE[0] * SHAPE[1] * SHAPE[2] > LARGEST_INDEX
    ]
    assert len(factors) == 20  # two a round
    arithmetic = (torch.ops.aten.mul, torch.ops.aten.add, torch.ops.aten.arange)
    for factor in factors:
        while factor.target in (torch.ops.aten.expand.default, torch.ops.aten.unsqueeze.default):
            factor = factor.args[0]
        assert factor.target.overloadpacket not in arithmetic, f"{factor} = {factor.target} may be an index"


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")  # what its compiler imports
@pytest.mark.gpu
def test_the_noise_of_a_compiled_kernel_is_the_formulas():
    """The seeds, frames and shape of a real stream; counters reach far beyond what 32 bits hold times a constant."""
    shape, numbers = (16, 60, 104), (torch.tensor([2**40 + 3]), torch.tensor([[7, 2**33]]), torch.tensor([1]))
    on_gpu = [number.cuda() for number in numbers]
    kernel = torch.compile(make_fx(lambda *arguments: gaussian(*arguments, shape))(*on_gpu), fullgraph=True)
    noise = kernel(*on_gpu).cpu()
    assert (noise - gaussian(*numbers, shape)).abs().max() <= 2 * BOX_MULLER[torch.float32]


@pytest.mark.parametrize(
    ("key", "other_key"),
    [
        ((0, 0, 0), (1, 0, 0)),
        ((0, 0, 0), (2**32, 0, 0)),
        ((0, 0, 0), (-1, 0, 0)),
        ((-1, 0, 0), (2**32 - 1, 0, 0)),
        ((2**63 - 1, 0, 0), (-(2**63), 0, 0)),
        ((0, 0, 0), (0, 1, 0)),
        ((0, 1, 0), (0, 1 + 2**32, 0)),
        ((0, 0, 0), (0, 2**62, 0)),
        ((0, 0, 0), (0, 0, 1)),
        ((1, 0, 0), (0, 1, 0)),
    ],
)
def test_different_keys_give_unrelated_noise(key, other_key):
    shape = (16, 20, 20)
    a, b = (draw_noise([seed], [[frame]], draw, shape).flatten() for seed, frame, draw in (key, other_key))
    assert (a != b).float().mean() > 0.99
    assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 5 / math.sqrt(a.numel())  # 5 sigma


def test_moments_of_a_big_draw():
    """A million numbers; each bar is 5 standard errors of that moment of N(0, 1)."""
    x = draw_noise([1234], [list(range(10))], shape=(16, 80, 80)).flatten().double()
    n = x.numel()
    assert n > 1_000_000
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.square().mean() - 1) < 5 * math.sqrt(2 / n)
    assert abs(x.pow(3).mean()) < 5 * math.sqrt(15 / n)
    assert abs(x.pow(4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((x[:-1] * x[1:]).mean()) < 5 / math.sqrt(n)  # a pair shares its radius, not its sign
    assert x.abs().max() < math.sqrt(2 * math.log(2**25))
    inside = (x.abs() < 1).double().mean()
    assert abs(inside - math.erf(1 / math.sqrt(2))) < 5 * math.sqrt(0.217 / n)


@pytest.mark.parametrize("word", [0, 0xFF, 0xFFFFFFFF])
def test_the_extreme_words_give_finite_noise(monkeypatch, word):
    """Word 0 must not become log(0), nor the largest a number beyond the stated bound."""
    monkeypatch.setattr(sampler, "philox", lambda counter, _key: (torch.full_like(counter[0], word),) * 4)
    noise = draw_noise([0], [[0]])
    assert noise.isfinite().all()
    assert noise.abs().max() <= math.sqrt(2 * math.log(2**25)) * (1 + ULP[torch.float32])


def test_a_frame_whose_size_is_no_multiple_of_four():
    assert same_bytes(
        draw_noise([3], [[1]], shape=(1, 1, 7)).flatten(),
        draw_noise([3], [[1]], shape=(1, 2, 4)).flatten()[:7],
    )


def test_warped_schedule_is_self_forcings():
    schedule = Schedule.warped()
    assert schedule.timesteps == pytest.approx((1000.0, 937.5, 2500 / 3, 625.0), rel=1e-15)
    assert schedule.sigmas == tuple(t / 1000 for t in schedule.timesteps)
    assert schedule.context_timestep == 0.0
    assert schedule.shift == 5.0
    assert Schedule.warped((1000.0, 500.0), shift=1.0).timesteps == (1000.0, 500.0)


def test_schedule_tables():
    stream = StreamConfig(32, 32, chunk_frames=3, sink_frames=0, ring_frames=3, batch=2)
    tables = Schedule((1000.0, 600.0), context_timestep=2.0).tables(stream)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tables.items()} == {
        "schedule.timestep": ((3, 2, 3), torch.float32),
        "schedule.sigma": ((2, 1), torch.float32),
        "schedule.sigma_next": ((2, 1), torch.float32),
        "schedule.draw": ((2, 1), torch.int64),
        "schedule.first_draw": ((1,), torch.int64),
        "schedule.context_timestep": ((1,), torch.float32),
    }
    assert all(t.is_contiguous() for t in tables.values())
    assert tables["schedule.timestep"][:, 1, 2].tolist() == [1000.0, 600.0, 2.0]
    assert tables["schedule.context_timestep"].tolist() == [2.0]
    assert tables["schedule.sigma"].flatten().tolist() == [1.0, pytest.approx(0.6)]
    assert tables["schedule.sigma_next"].flatten().tolist() == [pytest.approx(0.6), 0.0]
    draws = [*tables["schedule.first_draw"].tolist(), *tables["schedule.draw"].flatten().tolist()]
    assert len(set(draws)) == 3  # no noise is used twice in a chunk


@pytest.mark.parametrize(
    ("timesteps", "context", "named"),
    [
        ((), 0.0, "()"),
        ((1000.0, 1000.0), 0.0, "must fall"),
        ((500.0, 750.0), 0.0, "must fall"),
        ((1001.0,), 0.0, "1001.0"),
        ((500.0, 0.0), 0.0, "(0, 1000]"),
        ((500.0, -1.0), 0.0, "-1.0"),
        ((float("nan"),), 0.0, "nan"),
        ((1000.0,), -1.0, "context_timestep"),
        ((1000.0,), 1000.5, "1000.5"),
        ((1000.0,), float("nan"), "nan"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(timesteps, context, named):
    with pytest.raises(UsageError) as raised:
        Schedule(timesteps, context)
    assert named in str(raised.value)


@pytest.mark.parametrize("shift", [0.0, -5.0, float("nan"), float("inf")])
def test_a_shift_that_cannot_be_is_refused(shift):
    with pytest.raises(UsageError):
        Schedule.warped(shift=shift)
    with pytest.raises(UsageError):
        Schedule((1000.0,), shift=shift)


def make_advance():
    model = ModelConfig(name="m", layers=1, dim=32, heads=2, ffn_dim=8, in_channels=4, out_channels=4)
    stream = StreamConfig(32, 48, chunk_frames=2, sink_frames=0, ring_frames=2, batch=2)
    x, v = torch.randn(2, 2, 4, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    return model, stream, x, v, torch.tensor([3, 4]), torch.tensor([[0, 1], [8, 9]])


NONE_GIVEN = torch.zeros(2, dtype=torch.int64)


def test_advance_is_the_formula():
    model, stream, x, v, seeds, frames = make_advance()
    sigma, after, draw = torch.tensor([0.9375]), torch.tensor([0.625]), torch.tensor([2])
    got = Advance(model, stream)(x, v, sigma, after, seeds, frames, draw, NONE_GIVEN)
    noise = gaussian(seeds, frames, draw, (4, 4, 6)).double()
    wanted = (1 - 0.625) * (x.double() - 0.9375 * v.double()) + 0.625 * noise
    assert relative_error(got, wanted) <= ULP[torch.float32]


def test_the_last_pass_gives_the_clean_latents():
    """Exactly: noise times 0 adds nothing."""
    model, stream, x, v, seeds, frames = make_advance()
    sigma, draw = torch.tensor([0.625]), torch.tensor([4])
    got = Advance(model, stream)(x, v, sigma, torch.zeros(1), seeds, frames, draw, NONE_GIVEN)
    assert torch.equal(got, x - sigma * v)


def test_the_first_latents_are_draw_zero():
    model, stream, x, _, seeds, frames = make_advance()
    got = Noise(model, stream)(seeds, frames, torch.tensor([0]), x, NONE_GIVEN)
    assert got.shape == (2, 4, 2, 4, 6)
    assert got.is_contiguous()
    assert same_bytes(got, gaussian(seeds, frames, torch.tensor([0]), (4, 4, 6)))


@pytest.mark.parametrize("frame_counts", [(0, 1), (2, 0), (1, 2)])
def test_conditioning_frames_are_neither_drawn_nor_moved(frame_counts):
    """Each row's leading frames are the given ones, the bytes of the others are those of none given."""
    model, stream, x, v, seeds, frames = make_advance()
    count, draw = torch.tensor(frame_counts), torch.tensor([0])
    sigma, after = torch.tensor([0.9375]), torch.tensor([0.625])
    latents = x.masked_fill(torch.ones(2, 1, 2, 1, 1).bool(), torch.nan)  # what is not taken must not leak
    for row, frames_given in enumerate(frame_counts):
        latents[row, :, :frames_given] = x[row, :, :frames_given]
    begun = Noise(model, stream)(seeds, frames, draw, latents, count)
    moved = Advance(model, stream)(x, v, sigma, after, seeds, frames, draw, count)
    drawn = Noise(model, stream)(seeds, frames, draw, latents, NONE_GIVEN)
    free = Advance(model, stream)(x, v, sigma, after, seeds, frames, draw, NONE_GIVEN)
    for row, frames_given in enumerate(frame_counts):
        for frame in range(2):
            is_conditioning = frame < frames_given
            assert same_bytes(begun[row, :, frame], (x if is_conditioning else drawn)[row, :, frame])
            assert same_bytes(moved[row, :, frame], (x if is_conditioning else free)[row, :, frame])
