"""What the theorem is said to promise of a network: no more than it does, and the same for every kind of sample."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import coresieve as cs
from coresieve.budget import Budget
from networks import relu_net


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return relu_net(10, 40, 40, 3)


def inputs(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", ["corenet", "corenet++"])
def test_a_stream_brings_as_many_points_as_the_promise_asks_for(model, method):
    """|P| is inside the logarithm of |S| where candidates are judged, and a stream does not say its |P|."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small = cs.compress(model, iter(inputs(2000, 10).split(100)), eps=0.5, method=method)
    assert small.report.points == small.report.points_needed
    assert small.report.a_priori_missing == ""


def test_inputs_of_several_positions_are_not_promised_anything(model):
    """The theorem's probability is for one position; an input of seven fails up to seven times as often."""
    single = cs.compress(model, inputs(500, 10), eps=0.5, method="corenet").report
    several = cs.compress(model, inputs(500, 7, 10), eps=0.5, method="corenet").report
    assert single.a_priori_missing == ""
    assert "several positions" in several.a_priori_missing
    assert several.a_priori is None
    assert cs.compress(model, inputs(500, 1, 10), eps=0.5, method="corenet").report.a_priori_missing == ""


def test_rows_that_lost_what_was_silent_are_not_called_exact(model):
    dead = relu_net(10, 40, 40, 3)
    dead.load_state_dict(model.state_dict())
    dead[0].bias.data[::3] = -100
    kept = cs.compress(model, inputs(500, 10), eps=0.5, method="corenet").report
    pruned = cs.compress(dead, inputs(500, 10), eps=0.5, method="corenet+").report
    assert kept.a_priori == pruned.a_priori == 0
    assert kept.parameters_after == kept.parameters_before
    assert kept.a_priori_told() == "eps = 0 (every row is exact)."
    assert pruned.parameters_after < pruned.parameters_before
    assert "every row is exact" not in pruned.a_priori_told()
    assert "silent on all of the sample" in pruned.a_priori_told()


def test_a_probability_is_never_rounded_up_to_1(model):
    ready = cs.calibrate(model, inputs(2000, 10), method="corenet", delta=1e-8)
    promise = ready._promise(Budget.of(eps=0.5, delta=1e-8))
    assert promise is not None
    assert "with probability at least 1 - 1e-08 every output" in promise.sentence()
