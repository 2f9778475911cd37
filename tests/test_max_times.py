"""The (max, times) product against a literal loop in float64, on both of its paths."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from coresieve.kernels import max_times as room
from coresieve.kernels.max_times import denominators, fast_path, max_times, reciprocal

SHAPES = [
    (1, 1, 1),
    (1, 5, 3),
    (3, 1, 2),
    (4, 7, 1),
    (16, 16, 128),  # exact tiles
    (17, 33, 129),  # one more than a tile in every dimension
    (15, 31, 127),
    (5, 1030, 9),  # two panels of edges and a bit
    (50, 20, 260),
]


def literal(w, a, bias=None) -> np.ndarray:
    """The definition, one edge and one point at a time."""
    w, a = w.double().numpy(), a.double().numpy()
    bias = np.zeros(len(w)) if bias is None else bias.double().numpy()
    s = np.zeros(w.shape)
    for (i, j), weight in np.ndenumerate(w):
        sign = 1 if weight > 0 else -1
        for point in a:
            z = np.maximum(sign * w[i], 0) @ point + max(sign * bias[i], 0)
            if z > 0:
                s[i, j] = max(s[i, j], abs(weight) * point[j] / z)
    return s


def problem(rows, edges, points, dtype=torch.float32):
    """Weights and activations with every degenerate case that the shape has room for."""
    generator = torch.Generator().manual_seed(rows + edges + points)
    w = torch.randn(rows, edges, generator=generator)
    a = torch.randn(points, edges, generator=generator).relu()
    if rows > 2:
        w[0] = -w[0].abs()  # a row of one sign
        w[1] = 0  # an empty row
    if edges > 2:
        w[:, 1] = 0
        a[:, 2] = 0  # a dead neuron
    if points > 2:
        a[1] = 0  # every denominator is 0 there
    return w.to(dtype), a.to(dtype)


def sensitivities(w, a, bias=None):
    s = torch.zeros_like(w)
    max_times(w, a, *map(reciprocal, denominators(w, a, bias)), s)
    return s


@pytest.fixture(params=["compiled", "plain"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(room, "_has_numba", lambda: False)
    else:
        pytest.importorskip("numba")
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_the_literal_loop(shape, dtype, path):
    w, a = problem(*shape, dtype)
    assert fast_path(w, a) == (path == "compiled")
    np.testing.assert_allclose(sensitivities(w, a).numpy(), literal(w, a), rtol=1e-5, atol=1e-12)


def test_the_bias_is_an_edge_with_input_one(path):
    w, a = problem(20, 30, 40)
    bias = torch.linspace(-1, 1, 20)
    extended = sensitivities(torch.cat([w, bias[:, None]], 1), torch.cat([a, torch.ones(40, 1)], 1))
    torch.testing.assert_close(sensitivities(w, a, bias), extended[:, :-1])
    np.testing.assert_allclose(sensitivities(w, a, bias).numpy(), literal(w, a, bias), rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_paths_agree(shape, monkeypatch):
    pytest.importorskip("numba")
    w, a = problem(*shape)
    compiled = sensitivities(w, a)
    monkeypatch.setattr(room, "_has_numba", lambda: False)
    torch.testing.assert_close(compiled, sensitivities(w, a), rtol=1e-5, atol=0)


def unfriendly(kind, points, edges, dtype):
    x = torch.randn(points, edges, generator=torch.Generator().manual_seed(3)).to(dtype)
    return {
        "zeros": torch.zeros_like(x),
        "constant": torch.ones_like(x),
        "ties": (x > 0).to(dtype),
        "parallel": x[:, :1].exp().expand_as(x),  # all edges are ordered alike, and all rows
        "heavy": (8 * x).exp(),
        "uneven": x.relu() * (8 * x[:, :1]).exp(),
        "denormal": x.abs() * torch.finfo(dtype).tiny / 8,
        "one edge": x.relu() * (torch.arange(edges) == 0),
    }[kind]


KINDS = ["zeros", "constant", "ties", "parallel", "heavy", "uneven", "denormal", "one edge"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 3, 1), (17, 35, 61), (40, 131, 256)])
def test_what_is_not_visited_changes_no_bit(shape, kind, dtype):
    """Against every product: with the r of those inputs, and with r of any size that do not belong to them."""
    pytest.importorskip("numba")
    rows, edges, points = shape
    w, _ = problem(rows, edges, points, dtype)
    a = unfriendly(kind, points, edges, dtype)
    generator = torch.Generator().manual_seed(4)
    tiny = torch.finfo(dtype).tiny
    wild = [(torch.randn(rows, points, generator=generator) * 20).to(dtype).exp() for _ in range(2)]
    for r_plus, r_minus in (map(reciprocal, denominators(w, a)), wild, [r * tiny for r in wild]):
        scale = 1e-3 / max(1e-3, float((a.amax(0) * w.abs().amax(0)).max()))  # lest all be 1
        compiled, plain = torch.zeros_like(w), torch.zeros_like(w)
        max_times(w * scale, a, r_plus, r_minus, compiled)
        room._plain_max_times(w * scale, a, r_plus, r_minus, plain)
        products = torch.where(
            (w > 0)[:, None], a * r_plus[..., None], a * r_minus[..., None]
        )  # rows, points, edges
        literal = ((w * scale).abs() * products.amax(1)).clamp(max=1)
        assert torch.equal(compiled, plain)
        assert torch.equal(compiled, literal)


def test_two_batches_are_one(path):
    w, a = problem(20, 40, 150)
    r_plus, r_minus = map(reciprocal, denominators(w, a))
    s = torch.zeros_like(w)
    for x in (slice(0, 37), slice(37, None)):
        max_times(w, a[x], r_plus[:, x], r_minus[:, x], s)
    torch.testing.assert_close(s, sensitivities(w, a), rtol=1e-6, atol=0)


def test_what_s_already_holds_is_kept(path):
    w, a = problem(20, 40, 30)
    s = torch.full_like(w, 0.3)
    max_times(w, a, *map(reciprocal, denominators(w, a)), s)
    torch.testing.assert_close(s, sensitivities(w, a).clamp(min=0.3))


def test_a_sensitivity_is_at_most_one(path):
    w, a, s = torch.tensor([[2.0, -2.0, 0.0]]), torch.ones(1, 3), torch.zeros(1, 3)
    max_times(w, a, torch.full((1, 1), 3.0), torch.full((1, 1), 1e38), s)
    assert s.tolist() == [[1, 1, 0]]


def test_zero_weight_stays_zero_when_the_product_overflows(path):
    w, a, s = torch.tensor([[0.0, -0.0, 1e-45]]), torch.full((1, 3), 1e8), torch.zeros(1, 3)
    max_times(w, a, torch.full((1, 1), 1e37), torch.full((1, 1), 1e37), s)
    assert s.tolist() == [[0, 0, 1]]


def test_a_denominator_below_tiny_contributes_nothing(path):
    w, a = torch.tensor([[1.0, -1.0]]), torch.tensor([[1e-39, 2.0]])
    assert sensitivities(w, a).tolist() == [[0, 1]]


def test_views_and_gradients_are_taken_as_they_are(path):
    w, a = problem(20, 40, 30)
    expected = sensitivities(w, a)
    views = w.T.contiguous().T, a.T.contiguous().T
    torch.testing.assert_close(sensitivities(*views), expected)
    s = torch.zeros(40, 20).T
    max_times(w.requires_grad_(), a, *map(reciprocal, denominators(w, a)), s)
    torch.testing.assert_close(s, expected)


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0)])
def test_nothing_in_nothing_out(shape, path):
    rows, edges, points = shape
    assert sensitivities(torch.ones(rows, edges), torch.ones(points, edges)).tolist() == [[0] * edges] * rows


def test_denominators_cross_their_blocks(monkeypatch):
    monkeypatch.setattr(room, "ROWS", 7)
    w, a = problem(30, 20, 10, torch.float64)
    z_plus, z_minus = denominators(w, a)
    torch.testing.assert_close(z_plus, w.relu() @ a.T)
    torch.testing.assert_close(z_minus, (-w).relu() @ a.T)


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_threads_change_nothing(threads):
    """Neither the answer nor anybody's settings."""
    numba = pytest.importorskip("numba")
    w, a = problem(50, 40, 30)
    r, expected, s = [reciprocal(z) for z in denominators(w, a)], torch.zeros_like(w), torch.zeros_like(w)
    max_times(w, a, *r, expected)
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(threads)
    try:
        max_times(w, a, *r, s)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before[0])
    assert torch.equal(s, expected)
    assert numba.get_num_threads() == before[1]


def test_one_thread_starts_no_other(monkeypatch):
    monkeypatch.setattr(room, "ThreadPoolExecutor", None)
    spans = []
    room._share(lambda first, last: spans.append((first, last)), tiles=7, threads=1)
    assert spans == [(0, 7)]


def test_threads_share_every_tile_once():
    spans = []
    room._share(lambda first, last: spans.append((first, last)), tiles=7, threads=3)
    assert [tile for span in sorted(spans) for tile in range(*span)] == list(range(7))


def test_without_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # importing it now fails
    w, a = problem(17, 33, 20)
    assert not fast_path(w, a)
    np.testing.assert_allclose(sensitivities(w, a).numpy(), literal(w, a), rtol=1e-5, atol=1e-12)


def test_other_types_take_the_plain_path():
    w, a = problem(4, 5, 6)
    assert not fast_path(w.half(), a.half())
    assert not fast_path(w.double(), a)
    assert not fast_path(w.to("meta"), a.to("meta"))


def test_the_plain_path_crosses_its_blocks(monkeypatch):
    monkeypatch.setattr(room, "_has_numba", lambda: False)
    w, a = problem(17, 33, 20)
    expected = sensitivities(w, a)
    for products in (1, 40, 33 * 20 * 3):  # below a row's edges; a point at a time; three rows at a time
        monkeypatch.setattr(room, "PRODUCTS", products)
        assert torch.equal(sensitivities(w, a), expected)
