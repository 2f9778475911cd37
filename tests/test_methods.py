"""Every method on every awkward network: one table against another, the same promises for all.

A method in the library's `METHODS` is tested here by itself; a network is added in `networks.py`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure

import coresieve as cs
from coresieve.layers.low_rank import LowRank
from coresieve.methods import METHODS, Method, resolve
from coresieve.sample import batches
from networks import NETWORKS, build, relu_net

pytestmark = pytest.mark.filterwarnings("ignore::coresieve.errors.CoresieveWarning")

TABLE: dict[str, Method] = {name: resolve(name) for name in METHODS} | {
    "magnitude (global)": cs.Magnitude(scope="global"),
    "amplify=3": cs.CoreNet(amplify=3),
}
CORENETS = [name for name, method in TABLE.items() if isinstance(method, cs.CoreNet)]
SAMPLING = [name for name, method in TABLE.items() if method.random]
MAGNITUDE = ["magnitude", "magnitude (global)"]
KEEP = 0.3

every_pair = pytest.mark.parametrize(("method", "name"), [(m, n) for n in NETWORKS for m in TABLE])
every_corenet = pytest.mark.parametrize(("method", "name"), [(m, n) for n in NETWORKS for m in CORENETS])


@functools.cache
def network(name: str) -> tuple[nn.Module, Any]:
    return build(name)


@functools.cache
def calibrated(method: str, name: str) -> cs.Ready:
    model, sample = network(name)
    return cs.calibrate(model, sample, method=TABLE[method], seed=5)


@functools.cache
def compressed(method: str, name: str) -> cs.Compressed:
    model, sample = network(name)
    return cs.compress(model, sample, keep=KEEP, method=TABLE[method], seed=5)


def answers(model: nn.Module, sample: Any) -> Any:
    """What the network says to the sample's first batch, in eval mode."""
    model, batch = copy.deepcopy(model).eval(), next(batches(sample))
    with torch.no_grad():
        return model(**batch) if isinstance(batch, dict) else model(batch)


def tensors(answer: Any) -> list[Tensor]:
    return [x for x in tree_leaves(answer) if torch.is_tensor(x)]


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bits(model: nn.Module) -> dict[str, tuple]:
    return {name: (t.dtype, t.shape, raw(t)) for name, t in model.state_dict().items()}


def nonzero(model: nn.Module) -> int:
    return sum(int(torch.count_nonzero(p)) for p in model.parameters())


def pruned(small: cs.Compressed) -> bool:
    return any(layer.dead_neurons for layer in small.report.layers)


def ties(model: nn.Module) -> set[frozenset[str]]:
    """Which names stand for the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


# --- The answer ---------------------------------------------------------------------------------------------


@every_pair
def test_the_same_forward_with_the_same_shapes_and_types(method, name):
    model, sample = network(name)
    small = compressed(method, name).model
    before, after = answers(model, sample), answers(small, sample)
    assert tree_structure(after) == tree_structure(before)
    assert [(x.shape, x.dtype) for x in tensors(after)] == [(x.shape, x.dtype) for x in tensors(before)]
    assert all(bool(torch.isfinite(x).all()) for x in (*tensors(after), *small.parameters()))
    assert {p.dtype for p in small.parameters()} == {p.dtype for p in model.parameters()}


@every_pair
def test_what_was_frozen_tied_hooked_or_training_still_is(method, name):
    model, small = network(name)[0], compressed(method, name).model
    modules = dict(small.named_modules(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        assert modules[path].training == module.training
        assert not modules[path]._forward_hooks
        assert not modules[path]._forward_pre_hooks
    trainable = {path: p.requires_grad for path, p in model.named_parameters()}
    assert all(
        p.requires_grad == trainable.get(path, p.requires_grad) for path, p in small.named_parameters()
    )
    if method != "svd":  # its layers have other names
        assert ties(small) == ties(model)


@every_pair
def test_the_report_tells_the_truth(method, name):
    model, small = network(name)[0], compressed(method, name)
    report = small.report
    stays = nonzero(model) - report.parameters_before
    assert nonzero(small.model) == stays + report.parameters_after
    assert all(0 <= layer.after <= layer.before for layer in report.layers if method != "svd")
    assert all(layer.error is None or layer.error >= 0 for layer in report.layers)
    assert cs.report.Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert max(map(len, str(report).splitlines())) < 80


# --- What must not change -----------------------------------------------------------------------------------


@every_pair
def test_the_original_and_global_randomness_are_untouched(method, name, tmp_path):
    model, sample = network(name)
    model.register_forward_hook(hook := lambda *_: None)

    def all_there_is():
        modules = [
            (id(m), m.training, dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()
        ]
        grads = [(id(p), p.requires_grad, p.grad) for p in model.parameters()]
        x = [raw(t) for t in tree_leaves(sample) if torch.is_tensor(t)]
        return bits(model), modules, grads, x

    def randomness():
        return random.getstate(), str(np.random.get_state()), raw(torch.random.get_rng_state())  # noqa: NPY002

    try:
        before, state = all_there_is(), randomness()
        small = cs.compress(model, sample, keep=KEEP, method=TABLE[method], seed=6)
        small.save(tmp_path / "small.safetensors")
        assert all_there_is() == before
        assert randomness() == state
        theirs = {p.data_ptr() for p in small.model.parameters() if p.numel()}
        assert not theirs & {p.data_ptr() for p in model.parameters()}
    finally:
        for key, value in list(model._forward_hooks.items()):
            if value is hook:
                del model._forward_hooks[key]


# --- Size ---------------------------------------------------------------------------------------------------


def most_allowed(report: cs.report.Report, keep: float) -> float:
    """The budget, 0.5 % of it more, and 2 parameters more a layer for rounding whole draws."""
    return keep * report.parameters_before * 1.005 + 2 * len(report.layers)


@every_pair
def test_no_more_stays_than_the_budget(method, name):
    for keep, seed in itertools.product((0.02, 0.1, 0.6), range(2)):
        report = calibrated(method, name).compress(keep=keep, seed=seed).report
        exact = method in MAGNITUDE or method == "svd"
        budget = keep * report.parameters_before + 1e-6
        assert report.parameters_after <= (budget if exact else most_allowed(report, keep))


@functools.cache
def hundred_thousand(method: str, kind: str = "usual") -> cs.Ready:
    """A network of 103,630 parameters. "usual" has inputs of both signs, so that few neurons are dead; in "even" all
    edges are about as important, so that all rows ask for about the same number of draws; in "uneven" rows differ in
    scale, as those of trained networks do."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, sample = relu_net(220, 300, 120, 10), torch.randn(256, 220)
        if kind == "even":
            sample = 1 + 0.05 * torch.rand(256, 220)
            for p in model.parameters():
                p.data = 0.5 + 0.05 * torch.rand(p.shape)
        if kind == "uneven":
            for layer in model[::2]:
                scale = torch.exp(1.5 * torch.randn(len(layer.bias)))
                layer.weight.data *= scale[:, None]
                layer.bias.data *= scale
    return cs.calibrate(model, sample, method=TABLE[method])


def assert_lands_on(budget: float, report: cs.report.Report) -> None:
    assert report.parameters_before == 103_630
    assert abs(report.parameters_after - budget) <= 0.005 * budget


@pytest.mark.parametrize("keep", [0.02, 0.1, 0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("method", [*SAMPLING, *MAGNITUDE])
def test_keep_lands_within_half_a_percent_of_the_budget(method, keep):
    report = hundred_thousand(method).compress(keep=keep, seed=1).report
    assert_lands_on(keep * 103_630, report)
    if method in MAGNITUDE:
        assert report.parameters_after == int(keep * 103_630 + 1e-9)


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("method", ["corenet", "uniform", "l1"])
def test_keep_lands_there_too_when_all_edges_are_about_as_important(method, keep):
    """The share of distinct edges among m draws of n jumps from 63 % to all where m = n leaves a row exact."""
    assert_lands_on(keep * 103_630, hundred_thousand(method, "even").compress(keep=keep, seed=1).report)


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("method", [m for m in SAMPLING if m != "amplify=3"])
def test_keep_lands_there_too_when_rows_differ_in_scale(method, keep):
    """A few rows of a layer do not tell how many edges the others bring."""
    for seed in range(8):
        report = hundred_thousand(method, "uneven").compress(keep=keep, seed=seed).report
        assert_lands_on(keep * 103_630, report)


@functools.cache
def skewed(rows: int, edges: int, heavy: float) -> cs.Ready:
    """Rows whose first edge takes nearly all draws: as many draws as edges bring few of the others."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(edges, rows, bias=False))
    model[0].weight.data = 0.5 + torch.rand(rows, edges, generator=generator)
    model[0].weight.data[:, 0] *= heavy
    x = 1 + 0.1 * torch.rand(50, edges, generator=generator)
    return cs.calibrate(model, x, method="corenet", points=50)


@pytest.mark.parametrize(("rows", "edges", "heavy", "keep"), [(4, 2000, 18e3, 0.2), (40, 500, 15e3, 0.05)])
def test_a_row_that_turns_exact_does_not_burst_the_budget(rows, edges, heavy, keep):
    """There a row jumps from a tenth of its edges to all of them, which are more than all that may stay."""
    for seed in range(10):
        report = skewed(rows, edges, heavy).compress(keep=keep, seed=seed).report
        assert report.parameters_after <= 1.01 * keep * report.parameters_before


def test_the_last_block_stays_four_deviations_away_where_few_edges_take_most_draws():
    """Of m draws nine in ten fall on one edge, so the number of others varies nearly as much as a Poisson number."""
    ready = skewed(1, 2000, 18e3)
    sizes = np.array([ready.compress(keep=0.05, seed=seed).report.parameters_after for seed in range(60)])
    assert sizes.mean() + 3 * sizes.std() <= 100
    assert sizes.mean() > 60


@pytest.mark.parametrize("keep", [0.02, 0.1, 0.3, 0.5, 0.8, 0.95])
def test_svd_takes_the_largest_ranks_that_fit(keep):
    small = hundred_thousand("svd").compress(keep=keep)
    left = keep * 103_630 - small.report.parameters_after
    assert left >= 0
    for layer in small.report.layers:
        cost = layer.rows + layer.edges
        factored = isinstance(small.model.get_submodule(layer.name), LowRank)
        could_grow = factored and (layer.rank + 1) * cost < layer.before
        assert not could_grow or cost > left


@pytest.mark.parametrize("method", TABLE)
def test_more_budget_is_less_error(method):
    """Fixed seeds; the gaps are wide (a factor of 2 and more between the sizes)."""
    errors = [hundred_thousand(method).compress(keep=keep).report.error for keep in (0.1, 0.5, 0.95)]
    assert errors[0] > errors[1] > errors[2]


# --- Seeds --------------------------------------------------------------------------------------------------


@every_pair
def test_the_same_seed_gives_the_same_bits(method, name):
    again = calibrated(method, name).compress(
        keep=KEEP, seed=5
    )  # and calibrate + compress is what compress() does
    assert bits(again.model) == bits(compressed(method, name).model)
    assert again.report.to_dict() | {"seconds": 0} == compressed(method, name).report.to_dict() | {
        "seconds": 0
    }


@pytest.mark.parametrize("name", ["plain", "residual", "tied_two_biases", "bfloat16", "negative_inputs"])
@pytest.mark.parametrize("method", TABLE)
def test_another_seed_differs_where_there_is_chance(method, name):
    other = calibrated(method, name).compress(keep=KEEP, seed=6)
    assert (bits(other.model) != bits(compressed(method, name).model)) == TABLE[method].random


@every_pair
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_nothing_overflows_or_is_divided_by_zero_on_the_way(method, name):
    for keep in (0.02, 0.4):
        calibrated(method, name).compress(keep=keep)


# --- Nothing to save ----------------------------------------------------------------------------------------


def assert_same_on_S(ready: cs.Ready, small: cs.Compressed) -> None:
    """Neurons that are dead on S may be gone, so only points of S can be asked."""
    assert ready.observed.measuring.inputs
    for batch in ready.observed.measuring.inputs:
        new, old = (tensors(answers(model, [batch])) for model in (small.model, ready.model))
        torch.testing.assert_close(new, old)


@every_pair
def test_keeping_all_changes_nothing(method, name):
    ready = calibrated(method, name)
    small = ready.compress(keep=1.0)
    assert_same_on_S(ready, small)
    if not pruned(small):
        assert bits(small.model) == bits(network(name)[0])
        assert small.report.kept == 1
        assert not any(layer.error for layer in small.report.layers)
        assert not small.report.error


@every_corenet
def test_where_the_theory_allows_no_saving_all_that_speaks_stays(method, name):
    ready = calibrated(method, name)
    small = ready.compress(eps=0.5)
    assert_same_on_S(ready, small)
    assert small.report.guarantee
    for layer in small.report.layers:
        told = next(note for note in small.report.notes if f"in layer {layer.name} at eps=0.5" in note)
        if "allows no saving" in told:
            left = layer.rows - (layer.dead_neurons or 0)
            whole = "its one row stays exact" if left == 1 else f"all {left:,} rows stay exact"
            some = f"{layer.rows_exact:,} of {left:,} rows stay exact, the others all but their edges"
            assert (whole if layer.rows_exact == left else some) in told
    if small.report.kept == 1:
        assert bits(small.model) == bits(network(name)[0])
        assert "Every row stays exact" in small.report.guarantee
    else:  # only what carries nothing on S may go
        assert pruned(small) or name in ("zero_layer", "all_dead", "dead_inputs", "zero_inputs")


# --- Files --------------------------------------------------------------------------------------------------


@every_pair
def test_a_file_gives_back_the_same_bits(method, name, tmp_path):
    _model, sample = network(name)
    small = compressed(method, name)
    small.save(tmp_path / "small.safetensors")
    skeleton = build(name, seed=1)[0]
    if (method, name) == ("svd", "bare_linear"):  # a module cannot turn itself into another one
        skeleton = LowRank(12, 5, rank=1)
    loaded = cs.load(tmp_path / "small.safetensors", into=skeleton)
    assert loaded.model is skeleton
    assert bits(loaded.model) == bits(small.model)
    assert ties(loaded.model) == ties(small.model)
    assert loaded.report.to_dict() | {"seconds": 0} == small.report.to_dict() | {"seconds": 0}
    new, old = tensors(answers(loaded.model, sample)), tensors(answers(small.model, sample))
    assert [raw(x) for x in new] == [raw(x) for x in old]


# --- Neurons that leave -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["corenet+", "corenet++"])
def test_dead_neurons_leave_from_both_matrices(method):
    small = compressed(method, "dead_neurons")
    dead = [layer.dead_neurons for layer in small.report.layers]
    first, second, third = (small.model[i] for i in (0, 2, 4))
    assert dead[0] >= 5
    assert dead[1] >= 1
    assert first.weight.shape == (30 - dead[0], 12)
    assert first.bias.shape == (30 - dead[0],)
    assert second.weight.shape == (20 - dead[1], 30 - dead[0])
    assert third.weight.shape == (4, 20 - dead[1])
    assert (second.in_features, second.out_features) == (30 - dead[0], 20 - dead[1])


@pytest.mark.parametrize("name", ["skip_from_dead", "batch_norm", "used_twice", "two_names"])
def test_neurons_that_go_elsewhere_too_stay(name):
    model, small = network(name)[0], compressed("corenet+", name)
    assert [p.shape for p in small.model.parameters()] == [p.shape for p in model.parameters()]
    if name == "skip_from_dead":
        assert any("dead neurons of first stay" in note for note in small.report.notes)


def test_one_neuron_stays_where_all_are_dead():
    small = compressed("corenet+", "all_dead")
    assert small.model[2].out_features == 1


# --- What is left alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "exact", "word"),
    [
        ("tied_embedding", ["embedding", "head"], "shares a parameter with embedding"),
        ("one_bias_two_weights", ["first", "second"], "shares its bias"),
        ("never_runs", ["never"], "never ran"),
        ("attention", ["attention", "attention.out_proj"], "attention"),
        ("transformer", ["1.self_attn", "1.norm1"], "LayerNorm"),
        ("weight_norm", ["2"], "parametrization"),
        ("batch_norm", ["1"], "BatchNorm1d"),
    ],
)
@pytest.mark.parametrize("method", TABLE)
def test_what_cannot_be_compressed_stays_exact_and_is_reported(method, name, exact, word):
    model, small = network(name)[0], compressed(method, name)
    assert any(word in note for note in small.report.notes)
    for part in exact:
        assert bits(small.model.get_submodule(part)) == bits(model.get_submodule(part))
        assert all(part != layer.name for layer in small.report.layers)


@pytest.mark.parametrize("method", TABLE)
def test_excluded_layers_stay_exact(method):
    model, sample = network("plain")
    small = cs.compress(model, sample, keep=0.2, method=TABLE[method], exclude=["2"])
    assert bits(small.model[2]) == bits(model[2])
    assert [layer.name for layer in small.report.layers] == ["0", "4"]
    assert any("2 stays exact: excluded" in note for note in small.report.notes)
