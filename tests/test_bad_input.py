"""Bad input gets an error that says what was given, what was expected, what to try; nothing is half-done."""

from __future__ import annotations

import contextlib
import copy
import random
import subprocess
import sys
import threading
import warnings
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import coresieve as cs
from coresieve.errors import (
    BudgetError,
    CoresieveError,
    CoresieveWarning,
    DomainError,
    ForwardError,
    LayerError,
    MethodError,
    NonFiniteError,
    SampleError,
    StaleError,
)

METHODS = ["corenet", "corenet+", "corenet++", "uniform", "l1", "l2", "l1l2", "svd", "magnitude"]
NAN, INF = float("nan"), float("inf")
X = torch.rand(60, 6, generator=torch.Generator().manual_seed(0))
A = X.numpy()


# ---- models and samples -----------------------------------------------------------------------------------


def net(edges: int = 6, hidden: int = 8, out: int = 3, seed: int = 0, **how: Any) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(edges, hidden, **how), nn.ReLU(), nn.Linear(hidden, out, **how))


class Does(nn.Module):
    """A network whose forward is any function of itself and its inputs; `parts` are what else it holds."""

    def __init__(self, does: Callable, **parts: Any):
        super().__init__()
        self.n, self.does = net(), does
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.does(self, *args, **kwargs)


def put(value: float, what: str = "weight", layer: int = 0, **how: Any) -> nn.Sequential:
    """A network with one weight or bias replaced."""
    model = net(**how)
    with torch.no_grad():
        getattr(model[layer], what).view(-1)[1] = value
    return model


def fill(value: float, layer: int, **how: Any) -> nn.Sequential:
    """A network with all weights of one layer replaced."""
    model = net(**how)
    with torch.no_grad():
        model[layer].weight.fill_(value)
    return model


def spoilt(value: float, rows: Any = slice(None)) -> torch.Tensor:
    x = X.clone()
    x[rows, 2] = value
    return x


def compress(model: Any = None, sample: Any = None, **how: Any) -> cs.Compressed:
    model = net() if model is None else model
    return cs.compress(
        model, X if sample is None else sample, **({"keep": 0.5} | {"method": "corenet"} | how)
    )


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].shape == other[k].shape and torch.equal(one[k].nan_to_num(), other[k].nan_to_num())
        for k in one
    )


# ---- what is checked of every error -----------------------------------------------------------------------


@contextlib.contextmanager
def refused(kind: type[CoresieveError], *words: str) -> Iterator[pytest.ExceptionInfo]:
    """This error, in our three parts, with these words."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert isinstance(error, CoresieveError)
    assert error.given
    assert error.expected
    assert error.hint
    for word in words:
        assert word in str(error)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def ambient() -> tuple:
    return (
        random.getstate(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
    )


@contextlib.contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Weights, statistics, training flags, hooks and every global random state are as they were."""

    def rest() -> tuple:
        modules = list(model.modules())
        flags = [m.training for m in modules], [p.requires_grad for p in model.parameters()]
        return *flags, [type(m) for m in modules], hooks(model), ambient()

    is_model = isinstance(model, nn.Module)
    before = (bits(model), rest()) if is_model else None
    state, numpy_state = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    yield
    assert torch.equal(state, torch.get_rng_state())
    assert all(np.array_equal(a, b) for a, b in zip(numpy_state, np.random.get_state(), strict=True))  # noqa: NPY002
    if before is not None:
        assert alike(before[0], bits(model))
        assert before[1] == rest()


# ---- budgets, seeds, methods: refused before a single batch is read ----------------------------------------


class NeverRead:
    def __iter__(self):
        raise AssertionError("the sample was read although the call could not succeed")


BAD_BUDGETS = {
    "none": ({}, BudgetError, "exactly one"),
    "two": ({"keep": 0.1, "eps": 0.5}, BudgetError, "exactly one"),
    "keep 0": ({"keep": 0}, BudgetError, "keep=0"),
    "keep negative": ({"keep": -0.1}, BudgetError, "keep=-0.1"),
    "keep above 1": ({"keep": 1.5}, BudgetError, "keep=1.5"),
    "keep nan": ({"keep": NAN}, BudgetError, "keep=nan"),
    "keep inf": ({"keep": INF}, BudgetError, "keep=inf"),
    "keep a string": ({"keep": "0.1"}, BudgetError, "keep='0.1'"),  # keep=0.1 would look right
    "keep True": ({"keep": True}, BudgetError, "keep=True"),
    "keep False": ({"keep": False}, BudgetError, "keep=False"),
    "keep a list": ({"keep": [0.1]}, BudgetError, "keep=[0.1]"),
    "keep two numbers": ({"keep": torch.tensor([0.1, 0.2])}, BudgetError, "keep="),
    "keep complex": ({"keep": 1j}, BudgetError, "keep=1j"),
    "keep NumPy's complex": ({"keep": np.complex64(0.5)}, BudgetError, "keep=np.complex64"),
    "keep beyond float": ({"keep": 10**400}, BudgetError, "(0, 1]"),
    "keep a torch nan": ({"keep": torch.tensor(NAN)}, BudgetError, "nan"),
    "eps 0": ({"eps": 0}, BudgetError, "eps=0"),
    "eps 1": ({"eps": 1}, BudgetError, "eps=1"),
    "eps negative": ({"eps": -0.1}, BudgetError, "eps=-0.1"),
    "eps nan": ({"eps": NAN}, BudgetError, "eps=nan"),
    "eps a string": ({"eps": "0.5"}, BudgetError, "eps='0.5'"),
    "eps True": ({"eps": True}, BudgetError, "eps=True"),
    "delta 0": ({"eps": 0.5, "delta": 0}, BudgetError, "delta=0"),
    "delta 1": ({"eps": 0.5, "delta": 1}, BudgetError, "delta=1"),
    "delta negative": ({"eps": 0.5, "delta": -1}, BudgetError, "delta=-1"),
    "delta nan": ({"eps": 0.5, "delta": NAN}, BudgetError, "delta=nan"),
    "delta a string": ({"eps": 0.5, "delta": "0.05"}, BudgetError, "delta='0.05'"),
    "delta True": ({"eps": 0.5, "delta": True}, BudgetError, "delta=True"),
    "delta with keep": ({"keep": 0.5, "delta": 2}, BudgetError, "delta=2"),
}
BAD_SEEDS = [-1, 1.0, 1.5, "0", True, np.int64(-3), np.float64(3), NAN]


@pytest.mark.parametrize(("how", "kind", "word"), BAD_BUDGETS.values(), ids=BAD_BUDGETS)
def test_a_bad_budget_is_refused_before_the_sample_is_read(how, kind, word):
    with refused(kind, word):
        cs.compress(net(), NeverRead(), method="corenet", **how)
    with refused(kind, word):
        cs.calibrate(net(), X, method="corenet").compress(**how)


@pytest.mark.parametrize("name", [m for m in METHODS if not m.startswith("corenet")])
def test_eps_wants_a_method_with_a_theory(name):
    with refused(MethodError, "eps=0.5", name, "corenet"):
        cs.compress(net(), NeverRead(), eps=0.5, method=name)
    with refused(MethodError, "eps=0.5", name, "corenet"):
        cs.calibrate(net(), X, method=name).compress(eps=0.5)


@pytest.mark.parametrize("seed", BAD_SEEDS, ids=repr)
def test_a_bad_seed_is_refused(seed):
    with refused(DomainError, f"seed={seed!r}", "whole number"):
        cs.compress(net(), NeverRead(), keep=0.5, seed=seed)
    with refused(DomainError, f"seed={seed!r}", "whole number"):
        cs.calibrate(net(), X).compress(keep=0.5, seed=seed)


@pytest.mark.parametrize("seed", [np.int64(3), np.int32(3), np.uint8(3)], ids=repr)
def test_a_numpy_integer_is_a_seed(seed):
    assert alike(bits(compress(seed=seed).model), bits(compress(seed=3).model))


@pytest.mark.parametrize("seed", [2**31, 2**32, 2**63, 2**64 - 1, 2**64, 2**70])
def test_a_huge_seed_works_or_is_refused(seed):
    try:
        one, other = compress(seed=seed), compress(seed=seed)
    except DomainError:
        return
    assert alike(bits(one.model), bits(other.model))
    assert not alike(bits(one.model), bits(compress(seed=0).model))


NUMBERS = [
    np.float64(0.5),
    np.float32(0.5),
    np.float16(0.5),
    np.array(0.5),
    torch.tensor(0.5),
    Fraction(1, 2),
    Decimal("0.5"),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("where", ["keep", "eps", "delta"])
def test_other_numbers_work_or_the_error_says_what_they_are(where, number):
    how = {"keep": {}, "eps": {"keep": None}, "delta": {}}[where]
    said, small = "", None
    try:
        small = compress(**(how | {where: number}))
    except BudgetError as error:  # "keep=0.5: expected a share in (0, 1]" would puzzle anyone
        said = str(error)
    if small is None:
        kind = type(number).__name__
        assert {"ndarray": "array", "Tensor": "tensor"}.get(kind, kind) in said
    else:
        assert alike(bits(small.model), bits(compress(**(how | {where: 0.5})).model))


def test_numpys_double_is_a_number():
    assert alike(bits(compress(keep=np.float64(0.5)).model), bits(compress(keep=0.5).model))


@pytest.mark.parametrize(
    "how",
    [
        {"eps": 1e-300},
        {"eps": 5e-324},
        {"eps": 1 - 1e-12},
        {"eps": 0.5, "delta": 1e-300},
        {"eps": 0.5, "delta": 5e-324},
        {"eps": 0.5, "delta": 1 - 1e-12},
        {"keep": 0.5, "delta": 5e-324},
        {"keep": 5e-324},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::coresieve.errors.CoresieveWarning")
def test_numbers_at_the_very_edge_work_or_are_refused(how):
    with contextlib.suppress(CoresieveError):  # and no OverflowError
        small = cs.compress(net(), X, method="corenet", **how)
        assert small.report.kept <= 1
        assert str(small)


BAD_METHODS = {
    "a slip": ("corent", "method='corenet'"),
    "capitals": ("CORENET", "method='corenet'"),
    "a space": ("svd ", "method='svd'"),
    "too many": ("corenet+++", "method='corenet++'"),
    "unlike any": ("foo", "one of sieve, "),
    "empty": ("", "one of sieve, "),
    "a number": (3, "method=3"),
    "bytes": (b"corenet", "method=b'corenet'"),
    "a list": (["corenet"], "method=['corenet']"),
    "unhashable": ({}, "method={}"),
    "the class CoreNet": (cs.CoreNet, "CoreNet()"),
    "the class SVD": (cs.SVD, "SVD()"),
}


@pytest.mark.parametrize(("method", "word"), BAD_METHODS.values(), ids=BAD_METHODS)
def test_an_unknown_method_is_refused_with_a_suggestion(method, word):
    with refused(MethodError, word):
        cs.compress(net(), NeverRead(), keep=0.5, method=method)
    with refused(MethodError, word):
        cs.calibrate(net(), NeverRead(), method=method)


BAD_SETTINGS = {
    "amplify 0": lambda: cs.CoreNet(amplify=0),
    "amplify negative": lambda: cs.CoreNet(amplify=-1),
    "amplify a fraction": lambda: cs.CoreNet(amplify=1.5),
    "amplify a string": lambda: cs.CoreNet(amplify="8"),
    "amplify True": lambda: cs.CoreNet(amplify=True),
    "amplify nan": lambda: cs.CoreNet(amplify=NAN),
    "prune_neurons a string": lambda: cs.CoreNet(prune_neurons="no"),
    "prune_neurons 2": lambda: cs.CoreNet(prune_neurons=2),
    "scope": lambda: cs.Magnitude(scope="globl"),
    "scope a list": lambda: cs.Magnitude(scope=[]),
}


@pytest.mark.parametrize("make", BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_a_bad_setting_is_refused_where_it_is_made(make):
    with refused(MethodError):
        make()


@pytest.mark.parametrize("points", [1, 0, -1, 1.5, "9", True, NAN], ids=repr)
def test_points_is_a_whole_number_of_at_least_2(points):
    with refused(SampleError, f"points={points!r}"):
        cs.compress(net(), NeverRead(), keep=0.5, points=points)


@pytest.mark.parametrize("points", [2, 10**9, 10**30, np.int64(9)], ids=repr)
def test_more_points_than_there_are_take_all(points):
    assert compress(points=points).report.points == min(points, len(X))


# ---- include and exclude ----------------------------------------------------------------------------------

BAD_PATTERNS = {
    "include nothing there": ({"include": ["nope"]}, "'nope'"),
    "exclude nothing there": ({"exclude": ["nope"]}, "'nope'"),
    "one of two": ({"include": ["0", "nope"]}, "'nope'"),
    "a module that is no layer": ({"include": ["1"]}, "'1'"),
    "the empty name": ({"include": [""]}, "''"),
    "an open bracket": ({"include": ["["]}, "'['"),
    "exclude all": ({"exclude": ["*"]}, "leave no layer"),
    "exclude what is included": ({"include": ["0"], "exclude": ["0"]}, "leave no layer"),
    "include nothing": ({"include": []}, "include="),
    "include None": ({"include": None}, "include=None"),
    "include a number": ({"include": 3}, "include=3"),
    "include a class": ({"include": [nn.Linear]}, "include="),
    "exclude bytes": ({"exclude": b"0"}, "exclude="),
}


@pytest.mark.parametrize(("how", "word"), BAD_PATTERNS.values(), ids=BAD_PATTERNS)
def test_a_pattern_that_selects_nothing_is_refused(how, word):
    with refused(LayerError, word):
        cs.compress(net(), NeverRead(), keep=0.5, **how)


@pytest.mark.parametrize(
    ("how", "layers"),
    [
        ({"include": "0"}, ["0"]),
        ({"exclude": "2"}, ["0"]),
        ({"include": "*"}, ["0", "2"]),
        ({"include": {"0"}}, ["0"]),
        ({"include": ["[02]"], "exclude": ("2",)}, ["0"]),
    ],
    ids=["include a string", "exclude a string", "a star", "a set", "brackets and a tuple"],
)
def test_patterns_in_any_clothes(how, layers):
    report = compress(**how).report
    assert [line.name for line in report.layers] == layers
    assert len(report.notes) == 2 - len(layers)


# ---- NaN and infinity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("what", ["weight", "bias"])
@pytest.mark.parametrize(("layer", "name"), [(0, "layer 0 (8 x 6)"), (2, "layer 2 (3 x 8)")])
def test_non_finite_parameters_are_refused_with_the_layers_name(value, what, layer, name):
    model = put(value, what, layer)
    with untouched(model), refused(NonFiniteError, name, {"weight": "weights", "bias": "biases"}[what], "1 "):
        cs.compress(model, NeverRead(), keep=0.5)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_refuses_them(method):
    with refused(NonFiniteError, "layer 2 (3 x 8)"):
        compress(put(NAN, layer=2), method=method)
    with refused(NonFiniteError, "layer 0 (8 x 6)"):
        compress(sample=spoilt(NAN), method=method)


def test_the_root_has_a_name_too():
    model = nn.Linear(6, 3)
    with torch.no_grad():
        model.weight[0] = NAN
    with refused(NonFiniteError, "6 NaN", "(3 x 6)") as caught:
        compress(model)
    assert "layer  (" not in str(caught.value)


NON_FINITE = {
    "NaN in the sample": (net, lambda: spoilt(NAN), "layer 0 (8 x 6)"),
    "infinity in the sample": (net, lambda: spoilt(INF), "layer 0 (8 x 6)"),
    "too large for float32": (net, lambda: X.double() * 1e300, "layer 0 (8 x 6)"),
    "too large for float16": (lambda: net().half(), lambda: X * 1e30, "layer 0 (8 x 6)"),
    "float16 overflows inside": (lambda: fill(6e4, 0).half(), lambda: X, "layer 0 (8 x 6)"),
    "float32 overflows inside": (lambda: fill(3e38, 0), lambda: X, "layer 0 (8 x 6)"),
    "float32 overflows at the end": (lambda: fill(3e38, 2), lambda: X, "layer 2 (3 x 8)"),
    "after the last layer": (lambda: Does(lambda m, x: m.n(x) / 0), lambda: X, "output"),
    "another parameter": (
        lambda: Does(lambda m, x: m.n(x * m.p), p=nn.Parameter(torch.tensor(NAN))),
        lambda: X,
        "layer n.0 (8 x 6)",
    ),
    "the second batch": (net, lambda: [X[:20], spoilt(NAN)[20:]], "layer 0 (8 x 6)"),
    "the second batch of a stream": (net, lambda: iter([X[:20], spoilt(NAN)[20:]]), "layer 0 (8 x 6)"),
}


@pytest.mark.parametrize(("make", "sample", "word"), NON_FINITE.values(), ids=NON_FINITE)
@pytest.mark.parametrize("method", ["corenet", "corenet++", "svd"])
def test_non_finite_activations_are_refused_with_the_layers_name(make, sample, word, method):
    model = make().train()
    with untouched(model), refused(NonFiniteError, word):
        compress(model, sample(), method=method)


@pytest.mark.parametrize("value", [NAN, INF])
def test_no_candidates_are_judged_on_nan(value):
    """A few bad points are met wherever they fall: among those that calibrate, or among those that judge."""
    x = torch.rand(210, 6, generator=torch.Generator().manual_seed(1))
    assert compress(sample=x, method="corenet++").report.points_judging >= 60
    ready = cs.calibrate(net(), x, method="corenet++")
    judges = torch.cat([batch for batch in ready.observed.judging.inputs if torch.is_tensor(batch)])
    bad = x.clone()
    bad[(x[:, None] == judges).all(dim=2).any(dim=1), 0] = value
    with refused(NonFiniteError, "layer 0 (8 x 6)"):
        cs.calibrate(net(), bad, method="corenet++")


@pytest.mark.parametrize("method", METHODS)
def test_reweighed_weights_that_overflow_are_an_error_and_not_a_network(method):
    """A weight that is drawn grows by 1/(m q), which float16 may not hold."""
    model = net(64, 64, 64)
    with torch.no_grad():
        model[0].weight.mul_(2e5)
    sample = torch.rand(200, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    said, small = "", None
    try:
        small = compress(model.half(), sample, keep=0.05, method=method)
    except NonFiniteError as error:
        said = str(error)
    if small is None:
        assert "in layer 0 (" in said
    else:
        assert all(bool(torch.isfinite(p).all()) for p in small.model.parameters())


def test_weights_that_leave_float32_when_reweighed_are_an_error_too():
    model = net(64, 64, 64)
    with torch.no_grad():
        model[0].weight.mul_(1e38).mul_(10)
        model[2].weight.mul_(1e-30)
    sample = torch.rand(200, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    with untouched(model), refused(NonFiniteError, "too large for torch.float32 in layer 0 (64 x 64)"):
        compress(model, sample, keep=0.05)
    assert compress(model, sample, keep=0.05, method="magnitude").report.kept > 0


def test_factors_that_leave_float16_are_an_error_too():
    """The singular value of a matrix may be far larger than its largest entry."""
    model = net(64, 64, 64)
    with torch.no_grad():
        model[0].weight.fill_(2e4)
    sample = torch.rand(200, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    with untouched(model.half()), refused(NonFiniteError, "too large for torch.float16 in layer 0 (64 x 64)"):
        compress(model, sample, method="svd")


@pytest.mark.parametrize("scale", [2.0**-80, 2.0**80])
@pytest.mark.parametrize("method", METHODS)
def test_weights_whose_squares_leave_float32_are_weights(scale, method):
    model = net()[0]
    plain = compress(copy.deepcopy(model), method=method, keep=0.3).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    scaled = compress(model, method=method, keep=0.3).model
    for small, large in zip(plain.parameters(), scaled.parameters(), strict=True):
        if method != "svd":
            torch.testing.assert_close(large / scale, small)
    torch.testing.assert_close(scaled(X) / scale, plain(X), rtol=1e-3, atol=1e-3)


# ---- samples -----------------------------------------------------------------------------------------------


class Opens:
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return X


BAD_SAMPLES: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (list, "0 points"),
    "an empty tuple": (lambda: (), "0 points"),
    "an empty tensor": (lambda: X[:0], "0 points"),
    "an empty array": (lambda: A[:0], "0 points"),
    "an empty batch": (lambda: [X[:0]], "0 points"),
    "an empty stream": (lambda: iter(()), "0 points"),
    "an empty dataset": (lambda: DataLoader(TensorDataset(X[:0]), batch_size=7), "0 points"),
    "all dropped": (lambda: DataLoader(TensorDataset(X), batch_size=100, drop_last=True), "0 points"),
    "one point": (lambda: X[:1], "1 point"),
    "one point in a batch": (lambda: [X[:1]], "1 point"),
    "one point of a stream": (lambda: iter([X[:1]]), "1 point"),
    "None": (lambda: None, "NoneType"),
    "a number": (lambda: 3, "int"),
    "a string": (lambda: "abc", "str"),
    "bytes": (lambda: b"abc", "bytes"),
    "a dict": (lambda: {"x": X}, "dict"),
    "a model": (net, "Linear"),
    "only __getitem__": (Opens, "Opens"),
    "a 0-d tensor": (lambda: torch.tensor(1.0), ""),
    "a 0-d array": (lambda: np.array(1.0), ""),
    "strings": (lambda: ["a", "b"], "str"),
    "Nones": (lambda: [None, None], "NoneType"),
    "numbers": (lambda: [1, 2, 3], "int"),
    "numpy's numbers": (lambda: [np.float64(3)], "float64"),
    "a range": (lambda: range(3), "int"),
    "lists of numbers": (lambda: X.tolist(), "float"),
    "a ragged list": (lambda: [[1.0, 2.0], [3.0]], "float"),
    "0-d tensors": (lambda: [torch.tensor(1.0)] * 3, "dimension"),
    "empty tuples": (lambda: [(), ()], "tuple"),
    "tuples of strings": (lambda: [("a", "b")], "str"),
    "nested tuples": (lambda: [((X, X), 1)], "tuple"),
    "empty dicts": (lambda: [{}], ""),
    "dicts without tensors": (lambda: [{"input": "abc"}], ""),
    "loaders": (lambda: [DataLoader(TensorDataset(X))], "DataLoader"),
    "an array of objects": (lambda: A.astype(object), "object"),
    "an array of strings": (lambda: A.astype(str), "str"),
    "an array of dates": (lambda: np.zeros((60, 6), "M8[s]"), "datetime64"),
    "a structured array": (lambda: np.zeros(60, [("a", "f4")]), ""),
    "batches of objects": (lambda: [A.astype(object)] * 2, "object"),
    "dicts of objects": (lambda: [{"input": A.astype(object)}], "object"),
    "a sparse tensor": (lambda: X.to_sparse(), "sparse"),
    "a tensor without data": (lambda: X.to("meta"), "meta"),
    "a quantized tensor": (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.quint8), "quantized"),
    "a nested tensor": (lambda: torch.nested.nested_tensor([X[0], X[1, :3]]), "nested"),
    "batches of nested tensors": (lambda: [torch.nested.nested_tensor([X[0], X[1]])], "nested"),
    "a masked array": (lambda: np.ma.masked_array(A, mask=A > 0.9), "masked"),
}


@pytest.mark.parametrize(("sample", "word"), BAD_SAMPLES.values(), ids=BAD_SAMPLES)
@pytest.mark.parametrize("method", ["corenet", "corenet++"])
@pytest.mark.filterwarnings("ignore:.*quantized", "ignore:The PyTorch API of nested")
def test_a_bad_sample_is_refused(sample, word, method):
    model = net().train()
    with untouched(model), refused(SampleError, word):
        cs.compress(model, sample(), keep=0.5, method=method)


@pytest.mark.parametrize(
    "sample", [torch.rand(6), np.ones(6, np.float32), [torch.rand(6)]], ids=["tensor", "array", "list"]
)
def test_one_point_without_its_dimension_is_not_taken_for_many(sample):
    with refused(CoresieveError):
        compress(sample=sample)


def test_an_exhausted_stream_is_empty():
    stream = iter([X])
    list(stream)
    with refused(SampleError, "0 points"):
        compress(sample=stream)


def readonly(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def mapped(folder) -> np.ndarray:
    np.save(folder / "x.npy", A)
    return np.load(folder / "x.npy", mmap_mode="r")


ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "every other column": lambda: np.repeat(A, 2, axis=1)[:, ::2],
    "backwards": lambda: A[::-1].copy()[::-1],
    "Fortran": lambda: np.asfortranarray(A),
    "read-only": lambda: readonly(A),
    "big-endian": lambda: A.astype(">f4"),
    "float64": lambda: A.astype(np.float64),
    "float16": lambda: A.astype(np.float16),
    "a matrix": lambda: np.asmatrix(A),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize(
    "dress", [lambda a: a, lambda a: [a], lambda a: [{"input": a}]], ids=["plain", "list", "dict"]
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_arrays_however_they_lie_in_memory(make, dress):
    small, plain = (
        compress(sample=dress(make())),
        compress(sample=torch.tensor(np.asarray(make()).astype(np.float32))),
    )
    assert alike(bits(small.model), bits(plain.model))


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_memory_map_is_an_array(tmp_path):
    assert alike(bits(compress(sample=mapped(tmp_path)).model), bits(compress().model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", [torch.float64, torch.float16, torch.bfloat16, torch.float32])
def test_a_sample_of_another_float_is_moved(dtype, own):
    x = X.to(torch.float16).to(dtype)
    model = net().to(own)
    small = compress(model, x)
    assert alike(bits(small.model), bits(compress(model, x.to(own)).model))
    assert all(p.dtype == own for p in small.model.parameters())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_a_sample_that_cannot_be_moved_safely_is_the_models_own_error(dtype):
    with refused(ForwardError, "RuntimeError", str(dtype), ", 6)"):
        compress(sample=(X * 9).to(dtype))


def test_integers_reach_a_model_that_looks_them_up():
    model = Does(lambda m, i: m.n(m.e(i)), e=nn.Embedding(10, 6))
    for sample in (torch.arange(60) % 10, [{"i": torch.arange(60) % 10}], (np.arange(60) % 10)[::-1]):
        report = compress(model, sample).report
        assert report.points == report.points_needed
        assert any("Embedding" in note for note in report.notes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sample_the_model_takes_as_it_is_stays_so(dtype):
    """The first parameter may have a dtype of its own."""
    model = Does(lambda m, x: m.n(x) * m.p, p=nn.Parameter(torch.ones(3, dtype=dtype)))
    model(X)
    assert compress(model).report.error is not None


# ---- loaders -----------------------------------------------------------------------------------------------

DATA = TensorDataset(X, torch.zeros(60))
Pair = namedtuple("Pair", "x y")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(X)


class Lying(Stream):
    def __len__(self):
        return 1000


class Dicts(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        return {"x": A[i], "y": np.float32(1)}


class Breaks(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        if i == 30:
            raise ValueError("the disk is gone")
        return X[i]


LOADERS: dict[str, tuple[Callable[[], Any], int]] = {
    "in order": (lambda: DataLoader(DATA, batch_size=7, num_workers=0), 60),
    "shuffled": (lambda: DataLoader(DATA, batch_size=7, shuffle=True), 60),
    "drop_last": (lambda: DataLoader(DATA, batch_size=7, drop_last=True), 56),
    "one at a time": (lambda: DataLoader(DATA, batch_size=1), 60),
    "batches made before": (lambda: DataLoader([X[:30], X[30:]], batch_size=None), 60),
    "a batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 9, False)),
        60,
    ),
    "a batch sampler of one's own": (lambda: DataLoader(DATA, batch_sampler=[[0, 1, 2], range(3, 60)]), 60),
    "an iterable dataset": (lambda: DataLoader(Stream(), batch_size=7), 60),
    "an iterable dataset that lies": (lambda: DataLoader(Lying(), batch_size=7), 60),
    "a generator": (lambda: (x for x in X.split(20)), 60),
    "a generator of single points": (lambda: (x for x in X.split(1)), 60),
    "zip": (lambda: zip(X.split(20), range(3), strict=True), 60),
    "a deque": (lambda: deque(X.split(20)), 60),
    "pairs": (lambda: [(X[:30], "a"), (X[30:], "b")], 60),
    "lists": (lambda: [[X[:30], 0], [X[30:], 1]], 60),
    "named tuples": (lambda: [Pair(X, None)], 60),
    "dicts": (lambda: [{"input": X[:30]}, {"input": X[30:]}], 60),
    "a collate that makes more of them": (
        lambda: DataLoader(
            DATA, batch_size=7, collate_fn=lambda b: torch.stack([x for x, _ in b]).repeat(3, 1)
        ),
        60,  # as many as the loader counts; which of them are new it cannot say
    ),
    "a mask that hides nothing": (lambda: np.ma.masked_array(A, mask=False), 60),
    "an empty batch among others": (lambda: [X[:0], X[:30], X[:0], X[30:]], 60),
    "batches of many dtypes": (lambda: [X[:20], X[20:40].double(), X[40:].half()], 60),
}


@pytest.mark.parametrize(("sample", "points"), LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("method", ["corenet", "corenet++"])
def test_a_sample_in_any_clothes(sample, points, method):
    model = net().train()
    with untouched(model):
        report = cs.compress(model, sample(), keep=0.5, method=method, points=1000).report
    assert report.points + report.points_judging == points
    assert report.points >= 2 * points / 3


def test_a_stream_gives_most_of_its_points_to_the_calibration():
    """However many points judge, a sample that is too small gives them at most a third."""
    stream = cs.compress(net(), (x for x in torch.rand(98, 6).split(7)), keep=0.5, method="corenet++").report
    assert stream.points_judging > 0
    assert stream.points >= 2 * stream.points_judging


def test_a_stream_without_end_is_read_as_far_as_needed():
    read = []

    def endless():
        while True:
            read.append(1)
            yield X

    report = compress(sample=endless(), method="corenet++").report
    assert report.points > 2
    assert len(read) < 20


def test_dicts_are_arguments():
    model = Does(lambda m, x, y: m.n(x) * y[:, None])
    report = compress(model, DataLoader(Dicts(), batch_size=7)).report
    assert report.points == report.points_needed


@pytest.mark.parametrize(
    "mask", [torch.ones(6), torch.ones(1, 6), torch.tensor(1.0)], ids=["6", "1 x 6", "0-d"]
)
def test_what_is_shared_by_all_points_counts_no_points(mask):
    model = Does(lambda m, x, mask: m.n(x * mask))
    assert compress(model, [{"x": X, "mask": mask}], points=20).report.points == 20
    with contextlib.suppress(SampleError):  # where it comes first
        assert compress(model, [{"mask": mask, "x": X}], points=20).report.points == 20


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(5)], ids=["global", "its own"])
def test_shuffling_is_reproducible_and_leaves_no_trace(generator):
    loader = DataLoader(DATA, batch_size=7, shuffle=True, generator=generator)
    state = None if generator is None else generator.get_state()
    one = compress(sample=loader, points=20)
    torch.rand(3)
    assert alike(bits(one.model), bits(compress(sample=loader, points=20).model))
    assert state is None or torch.equal(state, generator.get_state())


# ---- models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [None, nn.Linear, net().state_dict(), [net()], lambda x: x, X],
    ids=["None", "class", "state_dict", "list", "function", "tensor"],
)
def test_a_model_is_a_module(model):
    with refused(LayerError, type(model).__name__, "torch.nn.Module"):
        cs.compress(model, NeverRead(), keep=0.5)


def with_meta() -> nn.Module:
    return net(device="meta")


def partly_meta() -> nn.Module:
    model = net()
    model[2].to("meta")
    return model


def in_float8() -> nn.Module:
    model = net()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return model


NO_LAYER: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "empty": (nn.Sequential, "Sequential"),
    "identity": (nn.Identity, "Identity"),
    "a convolution": (lambda: nn.Sequential(nn.Conv1d(1, 1, 1)), "0 stays exact: Conv1d"),
    "only lazy": (lambda: nn.Sequential(nn.LazyLinear(8)), "not initialised"),
    "complex": (lambda: net(dtype=torch.complex64), "complex64"),
    "float8": (in_float8, "float8"),
    "scripted": (lambda: torch.jit.script(net()), "ScriptModule"),
    "traced": (lambda: torch.jit.trace(net(), X), "Traced"),
    "on the meta device": (with_meta, "meta"),
    "partly on the meta device": (partly_meta, "meta"),
}


@pytest.mark.parametrize(("make", "word"), NO_LAYER.values(), ids=NO_LAYER)
@pytest.mark.filterwarnings("ignore")
def test_a_model_without_a_layer_to_compress_is_refused_with_the_reasons(make, word):
    with refused(LayerError, word):
        cs.compress(make(), NeverRead(), keep=0.5)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_model_has_no_layer_to_compress():
    quantized = torch.ao.quantization.quantize_dynamic(net(), {nn.Linear}, dtype=torch.qint8)
    with refused(LayerError, "without a layer"):
        cs.compress(quantized, NeverRead(), keep=0.5)


def test_lazy_layers_are_not_filled_behind_the_users_back():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))
    with refused(LayerError, "0", "not initialised"):
        cs.compress(model, X, keep=0.5)
    assert isinstance(model[0], nn.LazyLinear)
    assert isinstance(model[0].weight, nn.UninitializedParameter)


def raiser(error: BaseException) -> Callable:
    def does(model, x):
        model.n(x)
        raise error

    return does


BAD_FORWARDS: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "too narrow": (lambda: net(5), X, ", 6)"),
    "a stream too narrow": (net, [torch.rand(4, 5)] * 3, "5)"),
    "ragged batches": (net, [X, torch.rand(60, 4)], "4)"),
    "an argument is missing": (lambda: Does(lambda m, x, y: m.n(x + y)), X, "'y'"),
    "labels are no arguments": (lambda: Does(lambda m, x, y: m.n(x + y)), [(X, X)], "'y'"),
    "an argument too many": (lambda: Does(lambda m, x: m.n(x)), [{"x": X, "z": X}], "'z'"),
    "a dict without it": (lambda: Does(lambda m, x, y: m.n(x + y)), [{"x": X}], "'y'"),
    "keys that are no names": (net, [{1: X}], "strings"),
    "single points": (net, list(X), ""),
    "a tuple of inputs and labels": (net, (X, torch.zeros(60)), ""),
    "its own error": (lambda: Does(raiser(RuntimeError("boom"))), X, "RuntimeError from Does.forward"),
    "braces and newlines": (lambda: Does(raiser(ValueError("a\n{x} %s"))), X, "a\n{x} %s"),
    "StopIteration": (lambda: Does(raiser(StopIteration())), X, "StopIteration"),
    "no memory": (lambda: Does(raiser(MemoryError())), X, "MemoryError"),
    "without end": (lambda: Does(lambda m, x: m(x)), X, "RecursionError"),
}


@pytest.mark.parametrize(("make", "sample", "word"), BAD_FORWARDS.values(), ids=BAD_FORWARDS)
def test_the_models_own_error_comes_with_our_context(make, sample, word):
    model = make().train()
    with untouched(model), refused(ForwardError, word, ".forward") as caught:
        compress(model, sample)
    assert isinstance(caught.value.__cause__, Exception)
    assert type(caught.value.__cause__).__name__ in str(caught.value)


def test_the_layer_where_it_failed_is_named():
    with refused(ForwardError, "layer n.0 (8 x 6)"):
        compress(Does(lambda m, x: m.n(x[:, :5])))
    with refused(ForwardError, "layer b (3 x 7)"):
        compress(Does(lambda m, x: m.b(m.n[:2](x)), b=nn.Linear(7, 3)))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_passes_through_and_the_model_is_put_back(stop):
    model = Does(raiser(stop())).train()
    with untouched(model), pytest.raises(stop):
        compress(model)


class WearsOut(nn.Module):
    def __init__(self, calls: int):
        super().__init__()
        self.n, self.left = net(), calls

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("worn out")
        return self.n(x)


@pytest.mark.parametrize("calls", range(6))
def test_wherever_a_forward_fails_the_model_is_put_back(calls):
    model = WearsOut(calls).train()
    with untouched(model), refused(ForwardError, "worn out"):
        cs.compress(model, X, keep=0.5, method="corenet++")


def test_a_layer_that_never_runs_stays_exact_and_is_a_line_in_the_report():
    model = Does(lambda m, x: m.n(x), unused=nn.Linear(4, 4))
    for method in METHODS:
        small = compress(model, method=method)
        assert any(note.startswith("unused stays exact") for note in small.report.notes)
        assert torch.equal(small.model.unused.weight, model.unused.weight)
    with refused(SampleError, "no layer to compress runs"):
        compress(model, include=["unused"])


def test_unsupported_modules_stay_exact_and_are_lines_in_the_report():
    parts = {
        "w": nn.Parameter(torch.ones(3)),
        "c": nn.Conv1d(3, 3, 1),
        "norm": nn.LayerNorm(3),
        "bi": nn.Bilinear(3, 3, 3),
        "rnn": nn.GRU(3, 3, batch_first=True),
    }

    def does(m, x):
        y = m.norm(m.n(x) * m.w)
        y = m.c(y[:, :, None])[:, :, 0]
        return m.rnn(m.bi(y, y)[:, None])[0]

    model = Does(does, **parts)
    small = compress(model)
    for name in ("what the model holds itself (w)", "c", "norm", "bi", "rnn"):
        assert any(note.startswith(f"{name} stays exact") for note in small.report.notes)
    kept = bits(small.model)
    assert all(torch.equal(v, kept[k]) for k, v in bits(model).items() if not k.startswith("n."))


def tied() -> nn.Module:
    model = Does(lambda m, x: m.head(m.n[:2](x)), e=nn.Embedding(3, 8), head=nn.Linear(8, 3, bias=False))
    model.head.weight = model.e.weight
    return model


def views() -> nn.Module:
    model, storage = net(), torch.rand(56)
    model[0].weight, model[0].bias = nn.Parameter(storage[:48].view(8, 6)), nn.Parameter(storage[48:])
    return model


def overlapping() -> nn.Module:
    model = net(6, 6, 6)
    model[2].weight = nn.Parameter(model[0].weight.data.T)
    return model


def expanded() -> nn.Module:
    model = net()
    model[0].weight = nn.Parameter(torch.rand(1, 6).expand(8, 6))
    return model


def pruned_by_torch() -> nn.Module:
    model = net()
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def parametrized() -> nn.Module:
    model = net()
    parametrizations.orthogonal(model[0])
    return model


def inference() -> nn.Module:
    with torch.inference_mode():
        return net()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Linear(6, 3),
    "frozen": lambda: net().requires_grad_(False),
    "half frozen": lambda: nn.Sequential(net().requires_grad_(False), nn.ReLU(), nn.Linear(3, 2)),
    "tied to an embedding": tied,
    "weight and bias in one storage": views,
    "layers in one storage": overlapping,
    "rows in one storage": expanded,
    "pruned by torch": pruned_by_torch,
    "parametrized": parametrized,
    "compiled": lambda: torch.compile(net()),
    "data parallel": lambda: nn.DataParallel(net()),
    "made in inference mode": inference,
    "in-place ReLU": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
    "returns a tuple": lambda: Does(lambda m, x: (m.n(x), 1)),
    "returns a dict": lambda: Does(lambda m, x: {"a": [None, m.n(x)]}),
    "returns None": lambda: Does(lambda m, x: [m.n(x), None][1]),
    "returns whole numbers": lambda: Does(lambda m, x: m.n(x).argmax(1)),
    "returns a number": lambda: Does(lambda m, x: len(m.n(x))),
    "returns an array": lambda: Does(lambda m, x: m.n(x).numpy()),
    "returns nothing of some": lambda: Does(lambda m, x: m.n(x)[:0]),
    "returns a scalar": lambda: Does(lambda m, x: m.n(x).mean()),
    "returns a view that requires a gradient": lambda: Does(lambda m, x: m.n(x).requires_grad_(True)),
    "returns a sparse tensor": lambda: Does(lambda m, x: m.n(x).to_sparse()),
    "turns gradients on": lambda: Does(torch.enable_grad()(lambda m, x: m.n(x))),
    "keeps what it computed": lambda: Does(lambda m, x: setattr(m, "last", m.n(x)) or m.last),
    "swallows everything": lambda: Does(swallow),
    "refuses fewer neurons": lambda: Does(narrow),
}


def swallow(model, x):
    try:
        return model.n(x)
    except:  # noqa: E722
        return x.new_zeros(len(x), 3)


def narrow(model, x):
    h = model.n[1](model.n[0](x))
    assert h.shape[1] == 8
    return model.n[2](h)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("method", ["corenet", "corenet++", "svd", "magnitude"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_awkward_models_are_compressed_and_left_alone(make, method):
    model = make().train()
    with untouched(model):
        small = compress(model, method=method)
    assert 0 < small.report.kept <= 0.5
    assert hooks(small.model) == hooks(model)
    assert str(small)


def test_a_frozen_model_stays_frozen_and_a_trainable_one_trainable():
    for frozen in (True, False):
        for method in METHODS:
            small = compress(net().requires_grad_(not frozen), method=method)
            assert all(p.requires_grad != frozen for p in small.model.parameters())


def test_a_compiled_model_gives_an_ordinary_one():
    assert type(compress(torch.compile(net())).model) is nn.Sequential


def test_a_model_that_cannot_be_copied_is_refused():
    model = Does(lambda m, x: m.n(x), lock=threading.Lock())
    with untouched(model), refused(CoresieveError, "Does", "copied"):
        compress(model)


def test_names_are_shown_as_they_are():
    parts = [("[red]", nn.Linear(6, 8)), ("relu", nn.ReLU()), ("[/x]", nn.Linear(8, 3))]
    small = compress(nn.Sequential(OrderedDict(parts)))
    assert "[red]" in str(small)
    assert "[/x]" in str(small)


@pytest.mark.parametrize("method", METHODS)
def test_layers_without_a_weight_are_no_fault_of_the_models_forward(method):
    for hidden, out in ((0, 3), (4, 0)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = net(6, hidden, out)
        model(X)
        with contextlib.suppress(LayerError, SampleError):
            compress(model, method=method)


# ---- layers that see nothing, or not always ----------------------------------------------------------------


def experts(model, x):
    """Of two experts one gets the lines whose first number is large."""
    large = x[..., 0] > model.bar
    y = x.new_zeros(*x.shape[:-1], 4)
    y[large], y[~large] = model.a(x[large]), model.b(x[~large])
    return model.o(y.relu())


def routed(bar: float) -> nn.Module:
    model = Does(experts, a=nn.Linear(6, 4), b=nn.Linear(6, 4), o=nn.Linear(4, 3), bar=bar)
    del model.n
    return model


def skips(model, x):
    return model.n(model.a(x).relu() if x.shape[1] % 2 else x)


def above_the_middle(model, x):
    y = model.n(x)
    return y[y[..., 0] > y[..., 0].median()]


def only_some(model, x):
    h = model.n[:2](x)
    return model.n[2](h[h[..., 0] > 0.2]).sum()


UNEVEN: dict[str, Callable[[], nn.Module]] = {
    "an expert without a point": lambda: routed(2.0),
    "an expert with few points": lambda: routed(0.95),
    "a layer that some batches skip": lambda: Does(skips, a=nn.Linear(6, 6)),
    "None for some batches": lambda: Does(lambda m, x: [None, m.n(x)][x.shape[1] % 2]),
    "outputs of any length": lambda: Does(above_the_middle),
    "lines of any number": lambda: Does(only_some),
}
POSITIONS = [torch.rand(20, k, 6, generator=torch.Generator().manual_seed(k)) for k in (2, 3, 4, 5)]


@pytest.mark.parametrize("make", UNEVEN.values(), ids=UNEVEN)
@pytest.mark.parametrize("sample", [[X[:5], X[5:40], X[40:]], POSITIONS], ids=["2-d", "3-d"])
@pytest.mark.parametrize("method", METHODS)
def test_layers_that_see_other_points_in_each_batch(make, sample, method):
    model = make()
    with untouched(model):
        small = compress(model, sample, method=method)
    assert small.report.kept <= 0.51
    if method in ("svd", "magnitude"):  # with keep=1 they change nothing, so each answer meets its own
        assert (compress(model, sample, keep=1.0, method=method).report.error or 0) < 1e-5


# ---- the model is put back, whatever it does ---------------------------------------------------------------


def normed() -> nn.Module:
    parts = {"norm": nn.BatchNorm1d(8), "drop": nn.Dropout(0.5)}
    model = Does(lambda m, x: m.n[2](m.drop(m.norm(m.n[0](x)).relu())), **parts)
    model.train()
    model.drop.eval()
    return model


def test_training_mode_is_left_alone():
    model = normed()
    with untouched(model):
        small = compress(model)
    assert [m.training for m in small.model.modules()] == [m.training for m in model.modules()]
    plain = normed().eval()
    plain.load_state_dict(model.state_dict())
    assert alike(
        bits(small.model), bits(compress(plain).model)
    )  # what was measured was measured in eval mode


class Stubborn(nn.Module):
    """A network that cannot be put into eval mode, and says so when half of it has been."""

    def __init__(self):
        super().__init__()
        self.n, self.drop = net(), nn.Dropout()

    def train(self, mode: bool = True):
        self.n.train(mode)
        if not mode:
            raise ValueError("only training")
        return self

    def forward(self, x):
        return self.drop(self.n(x))


def test_a_model_that_cannot_be_put_into_eval_mode_is_put_back():
    model = Stubborn()
    with untouched(model), pytest.raises(ValueError, match="only training"):
        compress(model)


def switches(model, x):
    model.norm.train()
    return model.norm(model.n(x))


def counts(model, x):
    model.count += 1
    return model.n(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Does(switches, norm=nn.BatchNorm1d(3)).eval(),
        lambda: Does(counts, count=nn.Buffer(torch.zeros(()))),
    ],
    ids=["switches its own norm to training", "counts its calls"],
)
def test_what_a_forward_changes_is_put_back(make):
    model = make()
    with untouched(model):
        compress(model)


def rebinds(model, x):
    model.count = model.count + 1
    return model.n(x)


def grows(model, x):
    model.count = torch.cat([model.count.view(-1), x.new_ones(1)])
    return model.n(x)


def resizes(model, x):
    model.count.resize_(5).fill_(1)
    return model.n(x)


def registers(model, x):
    model.register_buffer("last", x.mean(), persistent=False)
    return model.n(x)


def forgets(model, x):
    model.count = None
    return model.n(x)


@pytest.mark.parametrize(
    "does", [rebinds, grows, resizes, registers, forgets], ids=lambda does: does.__name__
)
def test_buffers_that_a_forward_replaces_are_put_back(does):
    model = Does(does, count=nn.Buffer(torch.zeros(())))
    count = model.count
    with untouched(model):
        compress(model)
        if does is not resizes:  # its memory was read by NumPy meanwhile, so it cannot
            cs.certify(model, net(), X)
    assert model.count is count
    assert dict(model.named_buffers()).keys() == {"count"}
    assert not model._non_persistent_buffers_set


def test_an_embedding_that_shortens_its_rows_is_put_back():
    model = Does(lambda m, i: m.n(m.e(i)), e=nn.Embedding(10, 6, max_norm=0.1))
    with untouched(model):
        compress(model, torch.arange(60) % 10)


BUFFERS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.zeros(3, device="meta"),
    "NaN": lambda: torch.full((3,), NAN),
    "complex": lambda: torch.zeros(2, dtype=torch.complex64),
    "expanded": lambda: torch.zeros(1).expand(5),
    "quantized": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_buffers_of_any_kind_are_no_hindrance(make):
    assert compress(Does(lambda m, x: m.n(x), b=nn.Buffer(make()))).report.error is not None


@pytest.mark.parametrize("method", ["corenet", "corenet++"])
def test_a_sample_that_breaks_off_leaves_the_model_as_it_was(method):
    def breaks():
        yield X[:20]
        raise ValueError("the disk is gone")

    for sample in (
        breaks(),
        DataLoader(Breaks(), batch_size=7),
        DataLoader(Breaks(), batch_size=7, shuffle=True),
    ):
        model = normed()
        with (
            untouched(model),
            pytest.raises(ValueError, match="the disk is gone"),
        ):  # theirs, or a SampleError
            cs.compress(model, sample, keep=0.5, method=method)


def doubles(model, x):
    return model.n(x.mul_(2))


INPUTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a tensor": lambda: (x := X.clone(), x),
    "a read-only array": lambda: (x := readonly(A), x),
    "a list": lambda: ([x := X.clone()], x),
    "dicts": lambda: ([{"x": (x := X.clone())}], x),
    "a loader": lambda: (DataLoader([x := X.clone()], batch_size=None), x),
}


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("method", ["corenet", "corenet++"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_that_works_in_place_changes_no_sample(make, method):
    sample, x = make()
    compress(Does(doubles), sample, method=method, points=60)
    assert np.array_equal(np.asarray(x), A)


@pytest.mark.parametrize("method", ["corenet", "corenet++"])
def test_a_model_that_works_in_place_is_compressed_like_one_that_does_not(method):
    ready = cs.calibrate(Does(doubles), X.clone(), method=method)
    plain = cs.calibrate(Does(lambda m, x: m.n(x * 2)), X.clone(), method=method).compress(keep=0.5)
    for _ in range(2):
        small = ready.compress(keep=0.5)
        assert alike(bits(small.model), bits(plain.model))
        assert small.report.error == pytest.approx(plain.report.error)


@pytest.mark.parametrize("method", METHODS)
def test_the_errors_of_layers_before_an_in_place_relu(method):
    models = [nn.Sequential(*net()[:1], nn.ReLU(inplace=inplace), *net()[2:]) for inplace in (False, True)]
    plain, in_place = (compress(model, method=method).report for model in models)
    assert [line.error for line in in_place.layers] == pytest.approx([line.error for line in plain.layers])


@pytest.mark.parametrize(
    "does",
    [
        lambda m, x: m.n[2](F.hardtanh_(m.n[0](x), 0, 0.1)),
        lambda m, x: m.n[2](m.n[0](x).sigmoid_()),
        lambda m, x: m.n(x).sigmoid_(),
        lambda m, x: m.n[2](m.n[0](x).relu_().add_(1)),
    ],
    ids=["hardtanh_", "sigmoid_", "sigmoid_ at the end", "add_"],
)
def test_what_is_not_relu_is_not_taken_for_it_because_it_works_in_place(does):
    """The theorem is proved for ReLU between the layers and nothing else."""
    assert not cs.calibrate(Does(does), X, method="corenet").observed.is_chain


def test_an_in_place_relu_is_relu():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    assert cs.calibrate(model, X, method="corenet").observed.is_chain


@pytest.mark.parametrize("method", ["corenet", "corenet++"])
def test_a_model_that_draws_random_numbers_moves_no_global_state(method):
    """Dropout that forgot about eval mode, or a sampling layer."""
    model = Does(lambda m, x: m.n(F.dropout(x, 0.5)))
    with untouched(model):
        ready = cs.calibrate(model, X, method=method)
        one, other = ready.compress(keep=0.5), ready.compress(keep=0.5)
    assert alike(bits(one.model), bits(other.model))
    assert one.report.error == other.report.error


class Augments(Dataset):
    """Draws from the global generators of Python and NumPy, as many do."""

    def __len__(self):
        return 60

    def __getitem__(self, i):
        return X[i] * (random.random() + float(np.random.rand()))  # noqa: NPY002


@pytest.mark.parametrize("method", ["corenet", "corenet++"])
def test_what_users_draw_from_other_generators_follows_the_seed_and_moves_none(method):
    noisy = Does(lambda m, x: m.n(x) + random.random() + float(np.random.rand()))  # noqa: NPY002
    for model, sample in ((net(), DataLoader(Augments(), batch_size=7)), (noisy, X)):
        with untouched(model):
            one, other = compress(model, sample, method=method), compress(model, sample, method=method)
        assert alike(bits(one.model), bits(other.model))
        assert one.report.error == other.report.error


def test_a_report_draws_no_random_number():
    """The library that prints it does, when it is imported."""
    code = "import random, coresieve.report as r; random.seed(1); s = random.getstate(); " \
           "str(r.Report('m', 'b', 0, '')); exit(s != random.getstate())"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("method", METHODS)
def test_the_default_device_is_of_no_account(method):
    model = net()
    with torch.device("meta"):
        small = compress(model, method=method)
    assert alike(bits(small.model), bits(compress(model, method=method).model))


def closure() -> nn.Module:
    inner = net()
    return Does(lambda m, x: inner(x), n2=inner)


def patched() -> nn.Module:
    model = net()
    model.forward = lambda x: nn.Sequential.forward(model, x)
    return model


@pytest.mark.parametrize("make", [closure, patched], ids=["a closure", "a patched forward"])
@pytest.mark.parametrize("method", METHODS)
def test_a_copy_that_still_runs_the_originals_layers_is_refused(make, method):
    """Else the answer is the uncompressed network, and its error a proud 0."""
    model = make()
    try:
        small = compress(model, method=method)
    except CoresieveError:
        return
    assert not torch.equal(small.model(X), model(X))
    assert small.report.error


# ---- hooks of the user's own -------------------------------------------------------------------------------


def test_hooks_of_ones_own_run_and_stay():
    model, seen = net(), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    with untouched(model):
        compress(model)
    assert seen


def test_hooks_that_change_what_flows_are_part_of_the_model():
    hooked, plain = net(), Does(lambda m, x: m.n[2](m.n[1](m.n[0](x)) + 1))
    hooked[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert alike(bits(compress(hooked).model), {k[2:]: v for k, v in bits(compress(plain).model).items()})


@pytest.mark.parametrize("method", ["corenet", "corenet++"])
def test_hooks_that_raise_are_the_models_own_error(method):
    def boom(*_):
        raise ValueError("boom")

    for register in (nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook):
        model = net().train()
        register(model[2], boom)
        with untouched(model), refused(ForwardError, "ValueError", "boom"):
            compress(model, method=method)


# ---- the model changed after calibrate() -------------------------------------------------------------------


def reverse_rows(model):
    model.n[0].weight.data = model.n[0].weight.data.flip(0)


def swap_rows(model):
    model.n[0].weight.data[[0, 2]] = model.n[0].weight.data[[2, 0]]


def swap_weights(model):
    w = model.n[0].weight.data
    w[0, 0], w[0, 2] = w[0, 2].clone(), w[0, 0].clone()


def flip_signs_of_two(model):
    w = model.n[0].weight.data.view(-1)
    w[[0, 2]] *= -1


STALE: dict[str, Callable[[Any], Any]] = {
    "in place": lambda m: m.n[0].weight.data.add_(1),
    "one bias": lambda m: m.n[2].bias.data[:1].fill_(7),
    "a new state_dict": lambda m: m.n.load_state_dict(net(seed=5).state_dict()),
    "a new parameter": lambda m: setattr(m.n[0], "weight", nn.Parameter(torch.rand(8, 6))),
    "new data": lambda m: setattr(m.n[0].weight, "data", torch.rand(8, 6)),
    "negated": lambda m: m.n[0].weight.data.neg_(),
    "two signs": flip_signs_of_two,
    "rows reversed": reverse_rows,
    "rows swapped": swap_rows,
    "weights swapped": swap_weights,
    "NaN": lambda m: m.n[0].weight.data.fill_(NAN),
    "double": lambda m: m.double(),
    "half and back": lambda m: m.half().float(),
    "a new layer": lambda m: m.n.__setitem__(0, nn.Linear(6, 8)),
    "a layer less": lambda m: m.n.__delitem__(2),
    "no bias": lambda m: setattr(m.n[0], "bias", None),
    "to the meta device": lambda m: m.to("meta"),
    "the norm's weights": lambda m: m.norm.weight.data.mul_(3),
    "the norm's statistics": lambda m: m.norm.running_mean.add_(3),
}


@pytest.mark.parametrize("change", STALE.values(), ids=STALE)
@pytest.mark.parametrize("method", ["corenet", "svd"])
def test_a_model_that_changed_since_it_was_calibrated_is_stale(change, method):
    model = Does(lambda m, x: m.n(m.norm(x)), norm=nn.BatchNorm1d(6))
    ready = cs.calibrate(model, X, method=method)
    change(model)
    with refused(StaleError, "calibrate()"):
        ready.compress(keep=0.5)


def test_what_says_nothing_of_the_weights_makes_no_model_stale():
    model = net()
    ready = cs.calibrate(model, X)
    first = ready.compress(keep=0.5)
    model.train().requires_grad_(False)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert alike(bits(first.model), bits(ready.compress(keep=0.5).model))


# ---- what is said beside the answer ------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["corenet", "corenet++"])
def test_too_few_points_for_eps_is_a_warning_that_counts(method):
    with pytest.warns(
        CoresieveWarning, match=r"eps=0\.5.*needs? a sample of \d+ points and had \d+"
    ) as caught:
        small = cs.compress(net(), X[:10], eps=0.5, method=method)
    assert len(caught) == 1
    assert "more points" in str(caught[0].message)
    assert small.report.points < small.report.points_needed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cs.compress(net(), X[:10], keep=0.5, method=method)


@pytest.mark.parametrize("keep", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_no_stray_warnings(method, keep):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress(keep=keep, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_errors_measured_under_autocast_are_those_of_the_small_network(method):
    """autocast keeps the narrowed weights of a network it has seen, and would run those."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        error = compress(method=method).report.error
    assert error == pytest.approx(compress(method=method).report.error, rel=0.2, abs=0.02)


def test_dead_neurons_leave_whatever_dtype_the_answer_has():
    dead = compress(Does(lambda m, x: m.n(x)), method="corenet+").report.layers[0].dead_neurons
    assert dead
    report = compress(Does(lambda m, x: m.n(x).double()), method="corenet+").report
    assert report.layers[0].dead_neurons == dead
