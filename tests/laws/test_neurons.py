"""Laws of whole networks: hidden neurons have no order, and those that are dead on S may leave unseen."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import coresieve as cs
from networks import relu_net

pytestmark = pytest.mark.filterwarnings("ignore::coresieve.errors.CoresieveWarning")

widths = st.tuples(st.integers(1, 8), st.integers(1, 12), st.integers(1, 12), st.integers(1, 5))
seeds = st.integers(0, 2**31)


def network(widths: tuple[int, ...], seed: int, dead: float = 0.0) -> tuple[nn.Sequential, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = relu_net(*widths).double()
        for layer in model[:-1:2]:
            layer.bias.data[torch.rand(layer.out_features) < dead] = -100
        return model, torch.rand(30, widths[0], dtype=torch.float64)


def sensitivities(model: nn.Module, x: Tensor) -> list[Tensor]:
    ready = cs.calibrate(model, x, method="corenet", points=len(x))
    return [seen.statistics.read(slice(None)) for seen in ready.observed.seen]


@settings(max_examples=30)
@given(widths=widths, seed=seeds)
def test_permuting_hidden_neurons_permutes_rows_and_then_columns(widths, seed):
    model, x = network(widths, seed)
    order = torch.randperm(widths[1], generator=torch.Generator().manual_seed(seed))
    other = copy.deepcopy(model)
    other[0].weight.data, other[0].bias.data = model[0].weight[order], model[0].bias[order]
    other[2].weight.data = model[2].weight[:, order]
    s, t = sensitivities(model, x), sensitivities(other, x)
    torch.testing.assert_close(t[0], s[0][order])
    torch.testing.assert_close(t[1], s[1][:, torch.cat([order, torch.tensor([widths[1]])])])
    torch.testing.assert_close(t[2], s[2])


@settings(max_examples=40)
@given(widths=widths, seed=seeds, dead=st.sampled_from([0.2, 0.7, 1.0]))
def test_dead_neurons_leave_and_nothing_changes_on_S(widths, seed, dead):
    """Theory mode on so small a network draws nothing, so what is left of the difference is neuron pruning."""
    model, x = network(widths, seed, dead)
    ready = cs.calibrate(model, x, method="corenet+", points=len(x))
    small = ready.compress(eps=0.5)
    before, after = model[::2], small.model[::2]
    for k, line in enumerate(small.report.layers[:-1]):
        with torch.no_grad():
            silent = int((model[: 2 * k + 2](x).amax(dim=0) == 0).sum())
        gone = min(silent, widths[k + 1] - 1)  # one neuron stays where all are dead
        assert line.dead_neurons == gone
        assert after[k].out_features == after[k].weight.shape[0] == before[k].out_features - gone
        assert after[k + 1].in_features == after[k + 1].weight.shape[1] == before[k + 1].in_features - gone
    with torch.no_grad():
        torch.testing.assert_close(small.model(x), model(x))


def test_neuron_pruning_is_not_idle():
    """Guards the law above: it meets networks with dead neurons, and far fewer parameters after."""
    model, x = network((8, 12, 12, 3), 1, dead=0.7)
    small = cs.compress(model, x, eps=0.5, method="corenet+", points=30)
    assert sum(line.dead_neurons or 0 for line in small.report.layers) >= 8
    assert sum(p.numel() for p in small.model.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())


def test_points_that_are_repeated_or_reordered_teach_nothing_new():
    model, x = network((6, 10, 8, 3), 2)
    one = cs.calibrate(model, x, method="corenet", points=30)
    two = cs.calibrate(model, torch.cat([x, x.flip(0)]), method="corenet", points=60)
    for a, b in zip(one.observed.seen, two.observed.seen, strict=True):
        torch.testing.assert_close(a.statistics.s, b.statistics.s)
        torch.testing.assert_close(a.statistics.delta_mean(), b.statistics.delta_mean())
