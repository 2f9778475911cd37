"""Laws of the sensitivities s, whatever the weights and inputs are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from coresieve.layers import Layer
from coresieve.statistics import Statistics

sizes = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 12))  # rows, edges, points
seeds = st.integers(0, 2**31)
signs = st.booleans()


def problem(size: tuple[int, int, int], seed: int, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, biases and inputs, a quarter of them 0; float64, so that only the law is at stake."""
    rows, edges, points = size
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.where(torch.rand(shape, generator=generator) < 0.25, 0.0, x)

    a = draw(points, edges)
    return draw(rows, edges), draw(rows), a if signed else a.abs()


def statistics(w: Tensor, b: Tensor | None, *batches: Tensor) -> Statistics:
    result = Statistics.empty(*w.shape, biases=int(b is not None), dtype=torch.float64)
    for a in batches:
        result.update(w, a, b)
    return result


def s_of(w: Tensor, b: Tensor | None, *batches: Tensor) -> Tensor:
    return statistics(w, b, *batches).read(slice(None))


@given(size=sizes, seed=seeds, signed=signs)
def test_their_sum_is_between_1_and_the_number_of_edges_and_at_most_the_points(size, seed, signed):
    """Lemma "Sensitivity Bound", for each sign: 1 <= S <= edges where a point speaks at all, and S <= |S| (2 |S|)."""
    w, b, a = problem(size, seed, signed)
    s, full = s_of(w, b, a), torch.cat([w, b[:, None]], dim=1)
    inputs = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
    assert ((s >= 0) & (s <= 1)).all()
    assert (s[full == 0] == 0).all()
    for sign in (full > 0, full < 0):
        S, edges = (s * sign).sum(dim=1), sign.sum(dim=1)
        speaks = (sign[:, None, :] & (inputs != 0)).any(dim=2).any(dim=1)
        assert (S[~speaks] == 0).all()
        assert (S[speaks] >= 1 - 1e-9).all()
        assert (edges - S >= -1e-9).all()
        assert ((2 if signed else 1) * len(a) - S >= -1e-9).all()


@given(size=sizes, seed=seeds, signed=signs, scale=st.floats(1e-3, 1e3))
def test_scaling_a_row_leaves_them_alone(size, seed, signed, scale):
    w, b, a = problem(size, seed, signed)
    torch.testing.assert_close(s_of(scale * w, scale * b, a), s_of(w, b, a))


@given(size=sizes, seed=seeds, signed=signs, scale=st.floats(1e-3, 1e3))
def test_scaling_the_inputs_leaves_them_alone_when_there_is_no_bias(size, seed, signed, scale):
    w, _, a = problem(size, seed, signed)
    torch.testing.assert_close(s_of(w, None, scale * a), s_of(w, None, a))
    each = scale ** torch.linspace(-1, 1, len(a), dtype=a.dtype)[:, None]  # point by point, too
    torch.testing.assert_close(s_of(w, None, each * a), s_of(w, None, a))


@given(size=sizes, seed=seeds, signed=signs)
def test_flipping_the_signs_of_a_row_leaves_them_alone(size, seed, signed):
    w, b, a = problem(size, seed, signed)
    torch.testing.assert_close(s_of(-w, -b, a), s_of(w, b, a))


@given(size=sizes, seed=seeds, signed=signs)
def test_permuting_inputs_rows_or_points(size, seed, signed):
    w, b, a = problem(size, seed, signed)
    s, generator = s_of(w, b, a), torch.Generator().manual_seed(seed)
    rows, edges, points = (torch.randperm(n, generator=generator) for n in (*w.shape, len(a)))
    with_bias = torch.cat([edges, torch.tensor([len(edges)])])
    torch.testing.assert_close(s_of(w[:, edges], b, a[:, edges]), s[:, with_bias])
    torch.testing.assert_close(s_of(w[rows], b[rows], a), s[rows])
    torch.testing.assert_close(s_of(w, b, a[points]), s)


@given(size=sizes, seed=seeds, signed=signs, cut=st.integers(0, 12))
def test_they_are_the_largest_over_the_parts_of_a_sample(size, seed, signed, cut):
    w, b, a = problem(size, seed, signed)
    assume(0 < cut < len(a))
    first, second = s_of(w, b, a[:cut]), s_of(w, b, a[cut:])
    torch.testing.assert_close(s_of(w, b, a), torch.maximum(first, second))
    torch.testing.assert_close(s_of(w, b, a[:cut], a[cut:]), torch.maximum(first, second))
    torch.testing.assert_close(s_of(w, b, a, a), s_of(w, b, a))  # seeing a point twice shows nothing new


@given(size=sizes, seed=seeds)
def test_inputs_of_both_signs_are_two_points_of_one_sign(size, seed):
    """The appendix: sensitivities over {a_pos, a_neg}; a bias belongs to a_pos."""
    w, b, a = problem(size, seed, signed=True)
    positive, negative = s_of(w, b, a.clamp(min=0)), s_of(w, torch.zeros_like(b), (-a).clamp(min=0))
    torch.testing.assert_close(s_of(w, b, a), torch.maximum(positive, negative))


@given(size=sizes, seed=seeds, signed=signs)
def test_delta_is_at_least_1_and_the_largest_activation_is_what_it_says(size, seed, signed):
    w, b, a = problem(size, seed, signed)
    seen = statistics(w, b, a)
    assert (seen.delta_mean() >= 1 - 1e-12).all()
    assert torch.equal(seen.largest, a.abs().amax(dim=0))
    positive = statistics(w.abs(), b.abs(), a.abs())
    torch.testing.assert_close(positive.delta_mean(), torch.ones(len(w), dtype=a.dtype))


@settings(max_examples=20)
@given(size=sizes, seed=seeds, signed=signs, narrow=st.sampled_from([torch.bfloat16, torch.float16]))
def test_narrow_numbers_are_computed_in_float32_and_rounded_up(size, seed, signed, narrow):
    """As bfloat16, so at most one part in 128 too large and never too small, however the points are cut up."""
    w, b, a = (x.to(narrow) for x in problem(size, seed, signed))
    exact = s_of(w.double(), b.double(), a.double())
    for batches in ([a], a.split(1)):
        seen = Statistics.empty(*w.shape, biases=1, dtype=narrow)
        for batch in batches:
            seen.update(w, batch, b)
        s = seen.read(slice(None)).double()
        assert (s >= exact * (1 - 1e-4) - 1e-6).all()
        assert (s <= exact * (1 + 1 / 128) + 1e-6).all()
        assert s.max() <= 1


def test_layers_are_read_as_the_statistics_are_laid_out():
    layer = Layer("fc", {"fc": torch.nn.Linear(3, 2)})
    rows = layer.read(slice(None))
    assert rows.shape == layer.shape == (2, 4)
    assert torch.equal(rows[:, 3], layer.module.bias)
    assert s_of(rows[:, :3].double(), rows[:, 3].double(), torch.rand(5, 3).double()).shape == (2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_near_the_ends_of_the_range(dtype):
    """Very large and very small values neither overflow nor lose a sensitivity."""
    top = torch.finfo(dtype).max ** 0.4
    for scale in (top, 1 / top):
        w, a = torch.tensor([[1.0, 3.0, -2.0]], dtype=dtype) * scale, torch.ones(2, 3, dtype=dtype) * scale
        seen = Statistics.empty(1, 3, 0, dtype)
        seen.update(w, a)
        torch.testing.assert_close(seen.s, torch.tensor([[0.25, 0.75, 1.0]], dtype=dtype))
