"""One pass over the sample against Algorithms 1 and 2 as literal loops, in any batches and from any kind of sample."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import coresieve as cs
from coresieve import theory
from coresieve.budget import Budget
from coresieve.methods.promise import Promise
from coresieve.reference import corenet
from coresieve.statistics import Statistics
from networks import build, relu_net

ALARM = 1e-6  # with a fresh seed, each test of a distribution would reject right code this often

pytestmark = pytest.mark.filterwarnings("ignore::coresieve.errors.CoresieveWarning")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_layers(seed: int, *widths: int, whole: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights and biases; small whole numbers make zeros, dead points and exact cancellation common."""
    gen = rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return gen.integers(-2, 3, shape).astype(float) if whole else gen.standard_normal(shape)

    return [(draw(out, edges), draw(out)) for edges, out in itertools.pairwise(widths)]


def network(layers: list[tuple[np.ndarray, np.ndarray]]) -> nn.Sequential:
    model = relu_net(layers[0][0].shape[1], *(len(b) for _, b in layers)).double()
    for module, (W, b) in zip(model[::2], layers, strict=True):
        module.weight.data, module.bias.data = torch.from_numpy(W), torch.from_numpy(b)
    return model


def sensitivities(ready: cs.Ready) -> list[np.ndarray]:
    return [seen.statistics.read(slice(None)).numpy() for seen in ready.observed.seen]


# --- Against the reference ----------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("inputs", ["positive", "signed"])
@pytest.mark.parametrize("seed", range(6))
def test_all_that_algorithm_1_computes(seed, inputs, whole):
    layers = random_layers(seed, 5, 7, 6, 3, whole=whole)
    points = rng(100 + seed).integers(0, 4, (12, 5)) if whole else rng(100 + seed).random((12, 5))
    points = points - (1.5 if inputs == "signed" and not whole else 2 if inputs == "signed" else 0)
    eps, delta = 0.7, 0.2
    slow = corenet(layers, points, eps, delta, rng(), m=1)
    ready = cs.calibrate(network(layers), np.asarray(points, float), method="corenet", delta=delta)
    report = ready.compress(eps=eps).report
    promise = Promise.of(ready.observed, Budget.of(eps=eps, delta=delta), 1, len(points))

    assert ready.observed.points == len(slow.sample) == 12
    assert (promise.eta, promise.K) == (slow.eta, pytest.approx(slow.K, rel=1e-12))
    for k, seen in enumerate(ready.observed.seen):
        np.testing.assert_allclose(sensitivities(ready)[k], slow.s[k], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(
            seen.statistics.delta_mean().numpy(), slow.Delta[k].mean(axis=0), rtol=1e-9
        )
        np.testing.assert_allclose(seen.statistics.largest.numpy(), np.abs(slow.a[k][:, :-1]).max(axis=0))
        assert seen.statistics.signed == slow.signed[k]
        assert report.layers[k].delta_hat == pytest.approx(slow.delta_hats[k], rel=1e-9)
        assert report.layers[k].eps == pytest.approx(slow.eps_l[k], rel=1e-9)
        S = np.array([[plus.S, minus.S] for plus, minus in slow.parts[k]])
        wanted = [
            theory.draws(x, slow.K, slow.eps_l[k], slow.eta, delta, signed=slow.signed[k]) for x in S.ravel()
        ]
        np.testing.assert_allclose(promise.draws(seen, S).ravel(), np.array(wanted, float), rtol=1e-6)
        assert report.layers[k].sensitivity_mean == pytest.approx(S.sum(axis=1).mean(), rel=1e-5)
        assert report.layers[k].sensitivity_max == pytest.approx(S.sum(axis=1).max(), rel=1e-5)


def test_single_precision_is_right_to_rounding():
    layers, points = random_layers(1, 30, 40, 10), rng(2).random((50, 30))
    slow = corenet(layers, points, 0.5, 0.5, rng(), m=1)
    ready = cs.calibrate(network(layers).float(), points.astype(np.float32), method="corenet", points=50)
    for fast, exact in zip(sensitivities(ready), slow.s, strict=True):
        np.testing.assert_allclose(fast, exact, rtol=1e-4, atol=1e-6)


# --- Draws in distribution ----------------------------------------------------------------------------------


@pytest.fixture
def draws_of(monkeypatch):
    """How often each edge is drawn (runs x rows x edges), by the fast path, at a given m in theory mode."""

    def count(layers, points, m: int, runs: int) -> tuple[np.ndarray, np.ndarray]:
        monkeypatch.setattr(Promise, "draws", lambda self, seen, S: np.full(S.shape, float(m)))
        ready = cs.calibrate(network(layers), points, method="corenet", points=len(points))
        slow = corenet(layers, points, 0.5, 0.5, rng(), m=1)
        q = np.array([plus.q + minus.q for plus, minus in slow.parts[0]])
        w = np.column_stack(layers[0])
        counts = []
        for seed in range(runs):
            module = ready.compress(eps=0.5, seed=seed).model[0]
            w_hat = np.column_stack([module.weight.detach(), module.bias.detach()])
            counts.append(w_hat / np.where(q > 0, w / (m * np.where(q > 0, q, 1)), 1))
        return np.array(counts), q

    return count


@pytest.mark.parametrize("inputs", ["positive", "signed"])
def test_draws_are_multinomial_as_algorithm_2_says(draws_of, inputs):
    """Per row and sign: totals are m; shares follow q (chi-square); one edge's count is Binomial(m, q_j)."""
    m, runs = 5, 800
    layers = random_layers(3, 24, 3)
    points = rng(4).random((6, 24)) - (0.5 if inputs == "signed" else 0)
    counts, q = draws_of(layers, points, m, runs)
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-4)
    counts, w = np.round(counts).astype(int), np.column_stack(layers[0])
    tests = 0
    for i in range(3):
        for sign in (w[i] > 0, w[i] < 0):
            part, p = counts[:, i, sign], q[i, sign]
            assert sign.sum() > m  # else the part would stay exact
            assert (part.sum(axis=1) == m).all()
            assert (part[:, p == 0] == 0).all()
            shares = stats.chisquare(part.sum(axis=0)[p > 0], runs * m * p[p > 0] / p.sum())
            j = int(np.argmax(p))
            seen = np.bincount(part[:, j], minlength=m + 1)
            law = stats.binom.pmf(np.arange(m + 1), m, p[j] / p.sum()) * runs
            last = int(np.flatnonzero(law >= 5)[-1])  # rare counts are pooled into the last common one
            pooled = stats.chisquare([*seen[:last], seen[last:].sum()], [*law[:last], law[last:].sum()])
            tests += 2
            assert min(shares.pvalue, pooled.pvalue) > ALARM
    assert tests == 12


def test_rows_are_drawn_independently_of_each_other(draws_of):
    """Two rows with the same weights: the correlation of their counts is that of noise, 5 standard deviations:
    false alarm below ALARM, seeds fixed."""
    runs, (W, b) = 400, random_layers(5, 24, 1)[0]
    counts, q = draws_of([(np.repeat(W, 2, axis=0), np.repeat(b, 2))], rng(6).random((6, 24)), 4, runs)
    j = int(np.argmax(q[0]))
    assert abs(np.corrcoef(counts[:, 0, j], counts[:, 1, j])[0, 1]) < 5 / np.sqrt(runs)


# --- In any batches -----------------------------------------------------------------------------------------


def assert_same(one: Statistics, two: Statistics) -> None:
    for name in ("s", "s_bias", "delta", "largest"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name), rtol=1e-9, atol=1e-12)
    assert (one.points, one.signed) == (two.points, two.signed)


def observed(sample, name: str = "plain", points: int = 300) -> list[Statistics]:
    """In float64, since Delta of a point whose value nearly cancels is sensitive to rounding."""
    ready = cs.calibrate(build(name)[0].double(), sample, method="corenet", points=points)
    return [seen.statistics for seen in ready.observed.seen]


@pytest.mark.parametrize("name", ["plain", "negative_inputs", "tied_two_biases", "used_twice", "residual"])
def test_batches_of_any_size_show_the_same(name):
    x = build(name)[1]
    whole = observed(x, name)
    for size in (1, 7, 256):
        for one, two in zip(whole, observed(list(x.split(size)), name), strict=True):
            assert_same(one, two)


def test_points_are_positions_too():
    x = build("three_dimensions")[1]
    flat = observed(x.reshape(300, 12), "three_dimensions")
    for one, two in zip(flat, observed(x, "three_dimensions", points=60), strict=True):
        assert_same(one, two)
        assert one.points == 300


class Stream(IterableDataset):
    def __init__(self, x: Tensor):
        self.x = x

    def __iter__(self):
        return iter(self.x)


KINDS = {
    "array": lambda x: x.numpy(),
    "double array": lambda x: x.double().numpy(),
    "array in reverse memory order": lambda x: np.asfortranarray(x.numpy()),
    "loader": lambda x: DataLoader(TensorDataset(x), batch_size=64),
    "loader with labels": lambda x: DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=64),
    "shuffled loader": lambda x: DataLoader(TensorDataset(x), batch_size=64, shuffle=True),
    "streaming loader": lambda x: DataLoader(Stream(x), batch_size=64),
    "list": lambda x: list(x.split(64)),
    "list of arrays with labels": lambda x: [(part.numpy(), 1) for part in x.split(64)],
    "generator": lambda x: (part for part in x.split(64)),
    "dicts": lambda x: [{"input": part} for part in x.split(64)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_sample_shows_the_same(kind):
    x = build("plain")[1]
    for one, two in zip(observed(x), observed(KINDS[kind](x)), strict=True):
        assert_same(one, two)


def test_more_points_raise_sensitivities_and_never_lower_them():
    model, x = build("plain")
    statistics = Statistics.empty(30, 12, 1, torch.float32)
    before = statistics.read(slice(None))
    for batch in x.split(50):
        statistics.update(model[0].weight.detach(), batch, model[0].bias.detach())
        after = statistics.read(slice(None))
        assert (after >= before).all()
        before = after.clone()


# --- Memory -------------------------------------------------------------------------------------------------


def test_what_is_kept_does_not_grow_with_the_points():
    """The weights, a number an edge, a few a row, and the 64 points that errors are measured on: a file of all that is
    kept (whole storages, so that a view of all points would count) is of the same size for ten times the points, but
    for their digests of 8 bytes, which end with ROWS_REMEMBERED (`test_certify.py`)."""
    model = relu_net(64, 256, 256, 8)

    def kept(points: int) -> int:
        ready = cs.calibrate(model, torch.rand(points, 64), method="corenet", points=points)
        assert ready.observed.measuring.points == 64
        torch.save(ready.observed, file := io.BytesIO())
        return len(file.getvalue())

    few, many = kept(300), kept(3000)
    weights, measured = sum(p.numel() for p in model.parameters()), 64 * (64 + 256 + 256 + 8 + 8)
    assert many < few + 12.5 * (3000 - 300) + 2000  # torch.save writes 8 bytes of an array as up to 12.5
    assert many < 4 * (2 * weights + measured) + 12.5 * 3000 + 50_000


MEMORY = """
    import sys, torch, coresieve as cs
    from torch import nn

    dtype, signed, points, batch, width = getattr(torch, sys.argv[1]), sys.argv[2] == "signed", *map(int, sys.argv[3:])
    torch.set_num_threads(1)

    def peak():
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

    def batches(width, points):
        generator = torch.Generator().manual_seed(0)
        for _ in range(points // batch):
            yield torch.rand(batch, width, generator=generator).sub_(0.5 * signed).to(dtype)

    tiny = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(dtype)
    cs.calibrate(tiny, batches(64, 2 * batch), method="corenet", points=2 * batch).compress(keep=0.5)  # compile, import
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(dtype)
    with torch.no_grad():
        model(next(batches(width, batch)))  # what a forward alone needs is not ours
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    start = peak()
    ready = cs.calibrate(model, batches(width, points), method="corenet", points=points)
    print(peak() - start)
"""


def extra_memory(dtype: str, inputs: str, points: int, batch: int, width: int) -> int:
    """Bytes that calibrating needs at its worst. Freed memory goes back at once, or the peak is the allocator's."""
    code = [sys.executable, "-c", textwrap.dedent(MEMORY), dtype, inputs, *map(str, (points, batch, width))]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(code, capture_output=True, text=True, check=True, env=environment)
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("inputs", ["positive", "signed"])
@pytest.mark.parametrize(
    ("dtype", "bytes_each"), [("float32", 4), ("float64", 8), ("bfloat16", 2), ("float16", 2)]
)
@pytest.mark.parametrize("batch", [256, 1024])
def test_memory_beyond_the_weights_is_less_than_twice_the_weights(dtype, bytes_each, batch, inputs):
    """2048 - 2048 - 2048: at most two times the weights and one batch's activations."""
    weights, activations = bytes_each * 2 * 2048 * 2049, bytes_each * batch * 2048 * 3
    assert extra_memory(dtype, inputs, 2 * batch, batch, 2048) <= 2 * weights + activations


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_more_points_need_no_more_memory():
    """4096 - 4096 - 4096, 256 points and 16 times as many: nothing but an allocator's slack more."""
    weights, activations = 4 * 2 * 4096 * 4097, 4 * 256 * 4096 * 3
    few, many = (extra_memory("float32", "positive", points, 256, 4096) for points in (256, 4096))
    assert many <= 2 * weights + activations
    assert many <= few + 4 * activations
