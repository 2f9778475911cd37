"""Laws of the draws: unbiased whatever fixes their number, never more edges than draws, exact where that is cheaper."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import coresieve as cs
from coresieve.methods.promise import Promise

UNBIASED = ["corenet", "uniform", "l1", "l2", "l1l2"]

pytestmark = pytest.mark.filterwarnings("ignore::coresieve.errors.CoresieveWarning")


def matrix(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach().double()


@functools.cache
def calibrated(method: str, rows: int, edges: int) -> cs.Ready:
    """One layer whose weights (of both signs) and inputs are within a factor 3 of each other: no edge is rare."""
    generator = torch.Generator().manual_seed(7)
    model, x = nn.Sequential(nn.Linear(edges, rows)), 0.5 + torch.rand(60, edges, generator=generator)
    for p in model.parameters():
        size, sign = (
            torch.rand(p.shape, generator=generator),
            torch.randint(0, 2, p.shape, generator=generator),
        )
        p.data = (0.5 + size) * (2 * sign - 1)
    return cs.calibrate(model, x, method=method)


def ratios(ready: cs.Ready, runs: int, **budget: float) -> Tensor:
    """w_hat / w: runs x rows x edges."""
    w = matrix(ready.model[0])
    return torch.stack([matrix(ready.compress(seed=seed, **budget).model[0]) / w for seed in range(runs)])


def largest_z(x: Tensor) -> float:
    """How many of its own standard errors the mean over runs is away from 1, at the worst place; rounding is free."""
    error = x.std(dim=0) / len(x) ** 0.5
    return float(((x.mean(dim=0) - 1).abs() / (error + 1e-6)).max())


@pytest.mark.parametrize("keep", [0.02, 0.1, 0.3, 0.8])
@pytest.mark.parametrize("method", UNBIASED)
def test_weights_are_unbiased_when_a_size_is_asked_for(method, keep):
    """E[w_hat] = w, though the blocks' sizes follow the luck of the blocks before, and though 440 * 0.02 = 8
    parameters are fewer than the 40 rows. The mean over all edges, over each row's and over each column's: 52
    statistics, each within 5 standard errors; false alarm below 1e-4 with fresh seeds (normal tails give 3e-5)."""
    x = ratios(calibrated(method, rows=40, edges=10), runs=300, keep=keep)
    assert 0 < float((x != 0).double().mean()) <= 1.05 * keep + 2 / 440
    assert largest_z(x.mean(dim=(1, 2))) < 5
    assert largest_z(x.mean(dim=1)) < 5
    assert largest_z(x.mean(dim=2)) < 5


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.04, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("shape", [(8, 12), (2, 20), (1, 30)])
@pytest.mark.parametrize("method", UNBIASED)
def test_every_weight_is_unbiased(method, shape, keep):
    """The same edge by edge with 2000 seeds: at most 104 statistics, within 6 standard errors, and their mean within
    5; false alarm below 1e-4 with fresh seeds (normal tails give 8e-7)."""
    x = ratios(calibrated(method, *shape), runs=2000, keep=keep)
    assert largest_z(x.mean(dim=(1, 2))) < 5
    assert largest_z(x.flatten(1)) < 6


@pytest.mark.parametrize("m", [1, 3, 6])
def test_weights_are_unbiased_in_theory_mode_and_no_more_edges_than_draws_stay(monkeypatch, m):
    """63 statistics within 5 standard errors: false alarm below 1e-4 with fresh seeds. And nnz <= m, always."""
    monkeypatch.setattr(Promise, "draws", lambda self, seen, S: np.full(S.shape, float(m)))
    ready = calibrated("corenet", 2, 30)
    x = ratios(ready, runs=500, eps=0.5)
    assert largest_z(x.flatten(1)) < 5
    assert largest_z(x.mean(dim=(1, 2))) < 5
    w = matrix(ready.model[0])
    for sign in (w > 0, w < 0):
        assert int((sign.sum(dim=1)).min()) > m  # else the row would be exact, and this would show nothing
        assert (((x != 0) & sign).sum(dim=2) <= m).all()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    keep=st.sampled_from([0.02, 0.1, 0.3, 0.5, 0.7]),
    method=st.sampled_from([*UNBIASED, "corenet+", "corenet++"]),
)
def test_signs_stay_and_zeros_stay_zero(seed, keep, method):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 8))
    for p in model.parameters():
        p.data = torch.randint(-2, 3, p.shape, generator=generator).float()
    small = cs.compress(model, torch.rand(40, 9, generator=generator), keep=keep, method=method, seed=seed)
    w, w_hat = matrix(model[0]), matrix(small.model[0])
    assert (w * w_hat >= 0).all()
    assert (w_hat[w == 0] == 0).all()


@settings(max_examples=40)
@given(rows=st.integers(1, 6), edges=st.integers(1, 9), seed=st.integers(0, 2**31), signed=st.booleans())
def test_a_row_is_exact_where_the_theory_asks_for_more_draws_than_it_has_edges(rows, edges, seed, signed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(edges, rows))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    x = 0.1 + torch.rand(40, edges, generator=generator)
    small = cs.compress(model, x * (1 - 2 * signed), eps=0.9, delta=0.5, method="corenet", seed=seed)
    assert torch.equal(matrix(small.model[0]), matrix(model[0]))
    line = small.report.layers[0]
    assert (line.rows_exact, line.draws, line.after) == (rows, 0, line.before)
    assert "allows no saving" in small.report.notes[0]


def test_a_part_with_as_many_draws_as_edges_is_exact_and_one_with_fewer_is_drawn(monkeypatch):
    ready = calibrated("corenet", 2, 30)
    w = matrix(ready.model[0])
    edges = torch.stack([(w > 0).sum(dim=1), (w < 0).sum(dim=1)], dim=1).double().numpy()
    monkeypatch.setattr(Promise, "draws", lambda self, seen, S: edges - [[0, 1], [1, 0]])
    small = ready.compress(eps=0.5)
    exact = matrix(small.model[0]) == w
    assert (exact[0][w[0] > 0]).all()
    assert (exact[1][w[1] < 0]).all()
    assert not (exact[0][w[0] < 0]).all()
    assert not (exact[1][w[1] > 0]).all()
    assert small.report.layers[0].rows_exact == 0
