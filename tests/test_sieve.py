"""Sieve's steps one by one, each against what it should be by definition; and all together against other methods."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import coresieve as cs
from coresieve.kernels import submatrices
from coresieve.lab import demo
from coresieve.lab.compare import judge
from coresieve.methods.distance import direction, distance, temperature
from coresieve.methods.moments import Moments, Teacher, costs, moments
from coresieve.methods.refit import refit
from coresieve.methods.selection import Problem, choose_edges, largest
from coresieve.methods.sieve import sizes
from coresieve.methods.sparsegpt import pruned
from coresieve.methods.wanda import best_in_rows
from networks import relu_net


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def trained_network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return relu_net(20, 40, 30, 5)


def job_of(model: nn.Module, x: torch.Tensor, keep: float = 0.2, **settings):
    from coresieve.budget import Budget

    ready = cs.calibrate(model, x, method=cs.Sieve(**settings))
    import copy

    return ready._job(copy.deepcopy(model), Budget.of(keep=keep), 0, None)


# --- Second moments and costs -------------------------------------------------------------------------------


def test_moments_are_those_of_what_the_small_layers_hand_over_and_the_original_answers():
    model, x = trained_network(), normal(200, 20)
    job = job_of(model, x)
    with torch.no_grad():
        job.model[0].weight.mul_(normal(40, 20, seed=1) > 0)
        a = torch.cat([job.model[:2](x), torch.ones(200, 1)], dim=1).double()
        z = model[:3](x).double()
        fit, aside = moments(job, job.works[1], Teacher.original(job))
    assert fit.lines == 175
    torch.testing.assert_close((fit + aside).H, a.T @ a, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close((fit + aside).G, z.T @ a, rtol=1e-5, atol=1e-4)


def test_costs_are_the_mean_squares_of_the_outputs_gradients():
    model, x = trained_network(), normal(3000, 20)
    job = job_of(model, x)
    c = costs(job, Teacher.original(job))
    exact = {}
    for name, cut in (("0", 1), ("2", 3), ("4", 5)):
        z = model[:cut](x).detach().requires_grad_(True)
        out = model[cut:](z) if cut < 5 else z
        exact[name] = sum(
            torch.autograd.grad(out[:, k].sum(), z, retain_graph=True)[0].square().sum(0) for k in range(5)
        )
    most = max(float(values.max()) for values in exact.values())
    for name, values in exact.items():
        torch.testing.assert_close(
            c[name], values / most, rtol=0.25, atol=0.02
        )  # random signs: 3,000 points, 6 sigma
    assert all(p.requires_grad for p in model.parameters())


def test_without_gradients_layers_share_by_their_own_errors_and_the_report_says_so():
    class Blind(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = trained_network()

        def forward(self, x):
            with torch.no_grad():
                return self.body(x)

    small = cs.compress(Blind(), normal(200, 20), keep=0.15)  # in two steps, each of which has it to say
    assert small.report.kept <= 0.15
    for words in ("own error", "polish ended early"):
        assert sum(words in note for note in small.report.notes) == 1
    assert torch.isfinite(small(normal(10, 20))).all()


# --- Which edges, and what they weigh -----------------------------------------------------------------------


def test_refit_is_the_least_squares_solution_of_every_row_on_its_own_edges():
    a, w = normal(300, 30).double(), normal(17, 30, seed=1).double()
    stay = torch.rand(17, 30, generator=seeded(2)) < torch.linspace(0, 1, 17)[:, None]
    W = refit(a.T @ a, w @ a.T @ a, stay)
    for row, mask, target in zip(W, stay, w @ a.T, strict=True):
        expected = torch.zeros(30, dtype=torch.float64)
        if mask.any():
            expected[mask] = torch.linalg.lstsq(a[:, mask], target[:, None]).solution[:, 0]
        torch.testing.assert_close(row, expected)


def test_submatrices_with_and_without_numba_are_the_same(monkeypatch):
    H, edges = normal(9, 9), torch.stack([torch.randperm(9, generator=seeded(b))[:4] for b in range(5)])
    H = H + H.T
    fast = submatrices.submatrices(H, edges).tril()
    monkeypatch.setattr(submatrices, "_compiled", lambda: None)
    assert torch.equal(fast, submatrices.submatrices(H, edges).tril())


def test_refit_of_a_singular_problem_is_finite_and_as_good():
    a = normal(50, 10)
    a[:, 5:] = a[:, :5]  # every edge twice
    H, G = a.T @ a, normal(3, 10, seed=1) @ (a.T @ a)
    W = refit(H, G, torch.ones(3, 10, dtype=torch.bool))
    assert torch.isfinite(W).all()
    torch.testing.assert_close(W @ H, G, rtol=1e-2, atol=1e-1)


def test_chosen_edges_are_nearly_the_best_of_all_choices():
    """Against all 210 choices of 6 out of 10 for one row: the mean excess over 20 problems is below a tenth."""
    excess = []
    for seed in range(20):
        a = normal(100, 10, seed=seed) @ normal(10, 10, seed=seed + 100)
        scale = a.square().sum(0).sqrt()
        a, w = a / scale, normal(1, 10, seed=seed + 200)
        H, G = a.T @ a, w @ (a.T @ a)

        def error(mask, H=H, G=G, w=w):
            v = refit(H, G, mask)
            return float(((v - w) @ H * (v - w)).sum())

        masks = torch.zeros(210, 1, 10, dtype=torch.bool)
        for mask, some in zip(masks, itertools.combinations(range(10), 6), strict=True):
            mask[0, list(some)] = True
        best, middle = min(map(error, masks)), sorted(map(error, masks))[105]
        (chosen,) = choose_edges([Problem(H, G, w, torch.ones(1))], 6)
        excess.append((error(chosen) - best) / (middle - best))
    assert sum(excess) / 20 < 0.1


def test_edges_of_rows_that_cost_more_stay_first():
    H, G = torch.eye(4), torch.ones(2, 4)
    (stay,) = choose_edges([Problem(H, G, G, torch.tensor([1.0, 100.0]))], 4)
    assert stay.sum(dim=1).tolist() == [0, 4]


@pytest.mark.parametrize("k", [0, 1, 7, 19, 20])
def test_exactly_as_many_stay_although_scores_are_equal(k):
    score = torch.tensor([0.0, 1.0, 1.0, 2.0] * 5).reshape(4, 5)
    (stay,) = largest([score], [1.0], k)
    assert int(stay.sum()) == k
    assert score[stay].sum() == score.flatten().sort(descending=True).values[:k].sum()


@pytest.mark.parametrize(
    "scores", [torch.rand(300, 100, generator=seeded()), torch.arange(30_000.0).reshape(300, 100)]
)
def test_the_largest_of_many_are_found_as_by_sorting(scores):
    order = scores.flatten().sort(descending=True).values
    for k in (1, 2, 100, 3000, 15_000, 29_000, 29_999):
        (stay,) = largest([scores], [1.0], k)
        assert torch.equal(scores[stay].sort(descending=True).values, order[:k])


def test_some_rows_stand_for_all():
    one, other = torch.rand(100, 50, generator=seeded()), torch.rand(10, 50, generator=seeded(1))
    whole = largest([one, one], [1.0, 1.0], 1000)
    masks = largest([one, one[::2]], [1.0, 2.0], 1000)
    assert int(masks[1].sum()) * 2 == pytest.approx(int(whole[1].sum()), rel=0.15)
    assert int(largest([other, one], [1.0, 1.0], 50 * 110)[0].sum()) >= 499


# --- The whole ----------------------------------------------------------------------------------------------


def test_small_sizes_are_reached_in_steps_and_large_ones_at_once():
    x = normal(100, 20)
    model = trained_network()
    before = sum(p.numel() for p in model.parameters())
    for keep, steps in ((0.5, [1]), (0.2, [2, 1]), (0.05, [4, 2, 1])):
        job = job_of(model, x, keep)
        assert sizes(job, True) == [k * int(keep * before) for k in steps]
        assert sizes(job, False) == [int(keep * before)]


def test_neurons_that_are_left_without_edges_leave_and_answers_stay():
    model, x = relu_net(12, 30, 4), torch.rand(300, 12, generator=seeded())
    with torch.no_grad():
        model[0].weight[:5] = 0  # constants, which the next biases take over
        model[0].bias[:5] = torch.linspace(-1, 1, 5)
    ready = cs.calibrate(model, x, method=cs.Sieve(polish=0))
    small = ready.compress(keep=0.9)
    assert small.model[0].out_features <= 25
    assert small.model[2].in_features == small.model[0].out_features
    assert small.report.layers[0].dead_neurons >= 5
    assert small.report.error < 0.05


def test_polish_moves_only_edges_that_stay_in_layers_that_are_chosen():
    model, x = trained_network(), normal(500, 20)
    before = {name: p.clone() for name, p in model.named_parameters()}
    rough = cs.compress(model, x, keep=0.5, method=cs.Sieve(polish=0), exclude=["4"])
    fine = cs.compress(model, x, keep=0.5, method=cs.Sieve(polish=3, toward="outputs"), exclude=["4"])
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert torch.equal(fine.model[4].weight, model[4].weight)
    for k in (0, 2):
        assert torch.equal(rough.model[k].weight == 0, fine.model[k].weight == 0)
    assert not torch.equal(rough.model[0].weight, fine.model[0].weight)
    assert all(p.requires_grad and p.grad is None for p in fine.model.parameters())


@pytest.mark.parametrize("toward", ["outputs", "predictions"])
def test_polish_brings_the_outputs_of_fresh_inputs_nearer(toward):
    model, x, fresh = trained_network(), normal(3000, 20), normal(1000, 20, seed=9)

    def off(polish: int) -> float:
        small = cs.compress(model, x, keep=0.3, method=cs.Sieve(polish=polish, toward=toward))
        with torch.no_grad():
            return float(distance(model(fresh), small(fresh), None if toward == "outputs" else 0.1))

    assert off(10) < 0.9 * off(0)


def test_distance_of_votes_forgets_what_they_share_but_for_a_little():
    f = normal(50, 4)
    assert float(distance(f, f + 1, 2.0)) == pytest.approx(0.05, rel=1e-3)  # only the pin of a tenth: 0.1 / 2
    assert float(distance(f, f + 1, None)) == pytest.approx(1, rel=1e-3)
    assert float(distance(f, f, 2.0)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("T", [None, 0.5, 3.0])
def test_directions_see_the_distance_from_near(T):
    """The mean of (direction . d)^2 is the second derivative: 40,000 draws, 6 sigma of its own spread."""
    f, d = 2 * normal(1, 4), normal(1, 4, seed=1).double()
    f = f.double()
    seen = (direction(f.expand(40_000, 4), T, seeded(2)) * d).sum(dim=1).square()
    step = 1e-3
    near = 2 * float(distance(f, f + step * d, T)) / step**2 * (1 if T else 4 / 2)
    assert abs(float(seen.mean()) - near) < 6 * float(seen.std()) / 200


def test_temperature_is_of_votes_only():
    assert temperature([normal(9, 1)]) is temperature([normal(9)]) is temperature([torch.ones(9, 3)]) is None
    assert temperature([3 * normal(1000, 50), None]) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize(
    "x",
    [
        normal(2, 20),
        normal(9, 20).repeat(1, 1) * 1e-20,
        torch.ones(50, 20),
        torch.zeros(50, 20),
        normal(100, 20) * torch.logspace(-12, 12, 20),
        normal(100, 1).expand(100, 20),
    ],
    ids=["two points", "tiny", "constant", "zero", "badly scaled", "one direction"],
)
def test_singular_and_badly_scaled_problems_give_numbers(x):
    small = cs.compress(trained_network(), x.contiguous(), keep=0.3)
    assert all(torch.isfinite(p).all() for p in small.model.parameters())
    assert small.report.kept <= 0.3


def test_settings_are_checked():
    for settings in ({"polish": -1}, {"polish": 1.5}, {"polish": True}, {"toward": "labels"}):
        with pytest.raises(cs.errors.MethodError):
            cs.Sieve(**settings)


def test_without_polish_the_error_is_two_thirds_of_the_next_best_at_every_size():
    parts, model = demo.digits(), demo.network()
    with torch.random.fork_rng(devices=[]):
        demo.train(parts)
    model = demo.train(parts)
    with torch.no_grad():
        f = model(parts.test)
    for keep in (0.5, 0.2, 0.1):
        errors = {}
        for method in (cs.Sieve(polish=0), "sparsegpt", "wanda", "svd", "magnitude"):
            small = cs.compress(model, parts.calibration, keep=keep, method=method)
            with torch.no_grad():
                errors[str(method)] = judge(f, small(parts.test))["error"]
        ours = errors.pop("sieve without polish")
        assert ours <= 2 / 3 * min(errors.values())


# --- The methods of others ----------------------------------------------------------------------------------


def test_wanda_keeps_in_every_row_what_carries_most():
    model, x = nn.Linear(6, 4, bias=False), normal(100, 6)
    small = cs.compress(model, x, keep=0.5, method="wanda")
    score = model.weight.detach().abs() * x.norm(dim=0)
    for row, old, s in zip(small.model.weight.detach(), model.weight.detach(), score, strict=True):
        best = s.argsort(descending=True)[:3]
        assert set(torch.nonzero(row).flatten().tolist()) == set(best.tolist())
        torch.testing.assert_close(row[best], old[best])
    assert best_in_rows(torch.rand(3, 5), 7).sum(dim=1).tolist() == [3, 2, 2]


def test_sparsegpt_is_its_papers_loop_over_columns():
    W, a = normal(5, 9).double(), normal(60, 9, seed=1).double()
    H = a.T @ a
    damped = H + 0.01 * H.diagonal().mean() * torch.eye(9, dtype=torch.float64)
    expected, inverse = W.clone(), torch.linalg.inv(damped)
    cost = W**2 / torch.linalg.cholesky(inverse, upper=True).diagonal() ** 2
    stay = (
        cost >= cost.flatten().sort(descending=True).values[19]
    )  # one block: chosen before any column moves
    for j in range(9):
        rest = torch.linalg.inv(damped[j:, j:])  # what is left to make up for column j
        error = torch.where(stay[:, j], 0.0, expected[:, j]) / rest[0, 0]
        expected[:, j:] -= error[:, None] * rest[0]
        expected[:, j] = torch.where(stay[:, j], expected[:, j], 0.0)
    torch.testing.assert_close(pruned(W, H, 20), expected)


def test_moments_add_up():
    a, z = normal(10, 3), normal(10, 2, seed=1)
    one, two = Moments.empty(2, 3), Moments.empty(2, 3)
    one.add(a[:4], z[:4])
    two.add(a[4:], z[4:])
    both = one + two
    assert both.lines == 10
    torch.testing.assert_close(both.H, (a.T @ a).double())
