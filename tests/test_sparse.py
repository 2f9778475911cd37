"""Accelerated layers: every way against the dense product, what is replaced, and what it stays good for."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import coresieve as cs
from coresieve import sparse
from coresieve.errors import BudgetError, LayerError
from coresieve.kernels import jobs
from coresieve.kernels import sparse_product as room
from networks import build, relu_net

SHAPES = [
    (1, 1),
    (1, 7),
    (3, 2),
    (10, 300),
    (300, 3),
    (15, 40),
    (16, 16),
    (17, 20),
    (33, 50),
    (100, 129),
    (64, 784),
]
BATCHES = (0, 1, 2, 3, 7, 8, 9, 16, 17, 31, 64, 65, 130)


def weights(rows, inputs, density, seed=0):
    """With an empty row, a full row, and rows of very different lengths."""
    rng = np.random.default_rng([rows, inputs, seed])
    w = rng.standard_normal((rows, inputs)).astype(np.float32)
    w[rng.random((rows, inputs)) >= density * rng.uniform(0, 2, (rows, 1))] = 0
    w[3:4], w[5:6] = 0, 1
    return w


def thinned(model, density=0.1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data *= torch.rand(module.weight.shape, generator=generator) < density
    return model


def layer(rows=40, inputs=50, names=None, density=0.2, bias=True):
    """A SparseLinear that runs some way of ours, and the nn.Linear it stands for."""
    dense = thinned(nn.Linear(inputs, rows, bias=bias), density)
    with torch.no_grad():
        made = room.csr(dense.weight.numpy())
        b = None if dense.bias is None else dense.bias.numpy().copy()
    return sparse.SparseLinear(made, b, names or {1: "panels 1", 8: "panels 8"}), dense


def close(a, b):
    return torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-4)


# ---- the products -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.0, 0.02, 0.1, 0.6])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_agrees_with_the_dense_product(shape, density):
    w = weights(*shape, density)
    bias = np.random.default_rng(1).standard_normal(shape[0]).astype(np.float32)
    rows = room.csr(w)
    np.testing.assert_array_equal(rows.dense(), w)
    for b in (bias, None):
        for name, make in sparse.ways(rows).items():
            run = make(rows, b)
            for batch in BATCHES:
                x = torch.randn(batch, shape[1])
                exact = F.linear(
                    x.double(),
                    torch.from_numpy(w).double(),
                    None if b is None else torch.from_numpy(b).double(),
                )
                assert close(run(x), exact), (name, batch)


def test_ours_are_among_the_ways():
    names = sparse.ways(room.csr(weights(64, 784, 0.1)))
    assert {"dense", "torch sparse", "scipy", "panels 1", "panels 8"} <= set(names)
    assert any(name.startswith("slabs") for name in names) == bool(room.slab_shapes())


def test_inputs_that_two_bytes_cannot_number_are_left_to_others():
    w = np.zeros((2, 70_000), np.float32)
    w[1, 69_999] = 2
    rows = room.csr(w)
    assert set(sparse.ways(rows)) == {"dense", "torch sparse", "scipy"}
    x = torch.randn(3, 70_000)
    for make in sparse.ways(rows).values():
        assert close(make(rows, None)(x), F.linear(x, torch.from_numpy(w)))


@pytest.mark.parametrize("where", ["torch's threads", "Python's"])
def test_threads_share_the_work(where, monkeypatch):
    monkeypatch.setattr(jobs, "WORTH", 1)
    monkeypatch.setattr(room, "WORTH", 1)
    if where == "Python's":
        monkeypatch.setattr(jobs, "_torch_threads", lambda: None)
    w = weights(133, 70, 0.3)
    rows, x = room.csr(w), torch.randn(70, 70)
    before = torch.get_num_threads()
    try:
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            for name, make in sparse.ways(rows).items():
                assert close(make(rows, None)(x), x @ torch.from_numpy(w).T), (name, threads)
    finally:
        torch.set_num_threads(before)


def test_calls_at_the_same_time_do_not_share_work_space():
    fast, dense = layer(200, 300)
    wrong = []

    def many(seed):
        x = torch.randn(9, 300, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            exact = dense(x)
            wrong.extend(seed for _ in range(200) if not close(fast(x), exact))

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


OTHER_MACHINES = {
    "AVX2": ("haswell", "+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+sse4.2", 8, True),
    "AVX": ("sandybridge", "+avx,+sse4.2", 8, False),
    "neither": ("generic", "", 4, False),
}
ELSEWHERE = """
import numpy as np, torch
from coresieve import sparse
from coresieve.kernels import sparse_product as room
from test_sparse import weights, close
assert (room.lanes(), bool(room.slab_shapes())) == ({lanes}, {slabs}), (room.lanes(), room.slab_shapes())
for shape in ((3, 2), (17, 20), (100, 129)):
    rows = room.csr(w := weights(*shape, 0.2))
    for name, make in sparse.ways(rows).items():
        for batch in (1, 3, 8, 33, 65):
            x = torch.randn(batch, shape[1])
            assert close(make(rows, None)(x), x @ torch.from_numpy(w).T), (name, batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("machine", OTHER_MACHINES)
def test_machines_with_narrower_vectors(machine, tmp_path):
    """The same code, compiled for them; the vectors asked for are those that are there."""
    cpu, features, lanes, slabs = OTHER_MACHINES[machine]
    told = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    here = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    code = ELSEWHERE.format(lanes=lanes, slabs=slabs)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **told, "PYTHONPATH": here},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_numba_the_others_do(monkeypatch):
    monkeypatch.setattr(room, "_has_numba", lambda: False)
    model = thinned(relu_net(60, 80, 5), 0.05)
    fast = cs.accelerate(model, batch=4, seconds=0.02)
    x = torch.randn(4, 60)
    assert close(fast(x), model(x))


def test_slabs_put_rows_of_a_length_together():
    """Sorted, rows of 1 and of 100 weights cost half; rows alike stay where they are."""
    counts = np.array([1, 100] * 40)
    order, straight = room._order(counts, 16)
    assert straight == 0
    assert (np.diff(counts[order]) >= 0).all()
    order, straight = room._order(np.full(83, 10), 16)
    assert (straight, order.tolist()) == (80, list(range(83)))


# ---- the module -------------------------------------------------------------------------------------------


def test_shapes_as_of_a_linear_layer():
    fast, dense = layer()
    for shape in [(50,), (0, 50), (3, 50), (2, 3, 50), (2, 0, 50), (2, 1, 4, 50)]:
        x = torch.randn(shape)
        assert fast(x).shape == dense(x).shape
        assert close(fast(x), dense(x))
    x = torch.randn(50, 9).T
    assert close(fast(x), dense(x))  # not contiguous
    x = torch.randn(9, 100)[:, ::2]
    assert close(fast(x), dense(x))
    z = torch.randn(9, 50, dtype=torch.complex64).conj().imag  # a lazy minus sign
    assert z.is_neg()
    assert close(fast(z), dense(z))


def test_wrong_inputs_fail_as_torch_does():
    fast, dense = layer()
    for x in (torch.randn(3, 49), torch.randn(3, 50).double(), torch.tensor(1.0)):
        with pytest.raises(RuntimeError) as exact:
            dense(x)
        with pytest.raises(RuntimeError) as ours:
            fast(x)
        assert str(ours.value) == str(exact.value)


def test_gradients_to_the_input_are_right_and_the_layer_has_none():
    fast, dense = layer()
    x = torch.randn(4, 50, requires_grad=True)
    (expected,) = torch.autograd.grad(dense(x).square().sum(), x)
    (ours,) = torch.autograd.grad(fast(x).square().sum(), x)
    assert close(ours, expected)
    assert not list(fast.parameters())
    assert not fast(x.detach()).requires_grad
    _, tangent = torch.func.jvp(fast, (x.detach(),), (torch.ones(4, 50),))
    assert close(tangent, F.linear(torch.ones(4, 50), dense.weight))
    assert close(torch.func.vmap(fast)(x.detach()), dense(x))


def test_state_dict_is_the_dense_one():
    fast, dense = layer()
    state = fast.state_dict()
    assert list(state) == list(dense.state_dict())
    assert all(torch.equal(state[name], value) for name, value in dense.state_dict().items())
    _, other = layer(density=0.5)
    other.bias.data += 1
    fast.load_state_dict(other.state_dict())
    x = torch.randn(8, 50)
    assert close(fast(x), other(x))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        fast.load_state_dict(nn.Linear(50, 41).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        fast.load_state_dict({"weight": other.weight.data})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fast.load_state_dict({**other.state_dict(), "more": torch.zeros(1)})
    assert close(fast(x), other(x))  # as it was


def test_copies_and_pickles_are_independent():
    fast, dense = layer()
    x = torch.randn(8, 50)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        other.load_state_dict({"weight": torch.zeros(40, 50), "bias": torch.zeros(40)})
        assert not other(x).any()
        assert close(fast(x), dense(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moved_to_another_dtype_it_is_dense_there_and_comes_back(dtype):
    fast, dense = layer()
    x = torch.randn(8, 50)
    expected = dense(x)
    fast, dense = fast.to(dtype), dense.to(dtype)
    assert fast(x.to(dtype)).dtype == dtype
    assert torch.equal(fast(x.to(dtype)), dense(x.to(dtype)))
    if dtype == torch.float64:
        assert close(fast.float()(x), expected)
        assert fast._moved is None


def test_autocast_and_tracing_see_a_dense_layer():
    fast, dense = layer()
    x = torch.randn(8, 50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fast(x), dense(x))
    traced = torch.jit.trace(fast, x)
    other = torch.randn(8, 50)
    assert close(traced(other), dense(other))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_without_a_graph_break():
    fast, dense = layer()
    compiled = torch.compile(nn.Sequential(fast, nn.ReLU()), backend="aot_eager", fullgraph=True)
    x = torch.randn(8, 50)
    assert close(compiled(x), dense(x).relu())
    x.requires_grad_()
    (ours,) = torch.autograd.grad(compiled(x).sum(), x)
    (expected,) = torch.autograd.grad(dense(x).relu().sum(), x)
    assert close(ours, expected)


# ---- accelerate -------------------------------------------------------------------------------------------


def test_a_sparse_network_gets_faster_layers_and_says_so():
    model = thinned(relu_net(784, 600, 10), 0.05).train()
    before = copy.deepcopy(model.state_dict())
    fast = cs.accelerate(model, batch=(64, 1), seconds=0.1)
    assert isinstance(fast[0], sparse.SparseLinear)
    assert fast.training
    assert fast[0].training
    assert isinstance(model[0], nn.Linear)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    told = fast.acceleration
    assert told.batches == [1, 64]
    first = told.layers[0]
    assert first.ratio[64][1] > 1.5  # 5 % of the work; on any machine
    assert first.bytes_after == fast[0].nbytes < first.bytes_before
    assert min(first.microseconds[64], key=first.microseconds[64].get) == first.chosen[64]
    assert "batch 64" in str(told)
    assert "784" in str(told)
    x = torch.rand(64, 784)
    for n in (1, 5, 64):
        assert close(fast(x[:n]), model(x[:n]))


def test_dense_layers_stay_as_they_are():
    model = relu_net(30, 40, 4)
    fast = cs.accelerate(model, batch=8)
    assert [type(m) for m in fast] == [type(m) for m in model]
    assert {x.note for x in fast.acceleration.layers} == {"dense: no weight is 0"}


def test_dense_wins_a_tie():
    """By a margin, and in most turns: an accelerated layer must not be slower."""
    dense, ours = [1.0] * 8, [0.97] * 8
    assert sparse.choose({"dense": dense, "panels 8": ours}) == "dense"
    assert sparse.choose({"dense": dense, "panels 8": [0.5] * 8}) == "panels 8"
    assert (
        sparse.choose({"dense": dense, "panels 8": [0.5] * 5 + [1.5] * 3}) == "dense"
    )  # not in three of four
    assert (
        sparse.choose({"dense": dense, "panels 8": [0.5] * 8, "scipy": [0.1] * 3}) == "panels 8"
    )  # left the race


def test_what_compress_answers():
    model, x = build("plain")
    small = cs.compress(model, x, keep=0.3, method="magnitude")
    fast = cs.accelerate(small, batch=4, seconds=0.02)
    assert isinstance(fast, nn.Module)
    assert close(fast(x), small(x))
    thin = cs.compress(model, x, keep=0.3, method="svd")
    assert close(cs.accelerate(thin, batch=4, seconds=0.02)(x), thin(x))


@pytest.mark.parametrize("name", ["bare_linear", "tied_two_biases", "used_twice", "two_names", "residual", "nested",
                                  "three_dimensions", "bfloat16", "float64", "weight_norm", "attention",
                                  "transformer", "tied_embedding", "batch_norm"])  # fmt: skip
def test_networks_of_all_kinds(name, monkeypatch):
    """Whatever is found fastest: here everything that may be replaced is."""
    monkeypatch.setattr(
        sparse, "choose", lambda times: next((n for n in times if n.startswith("panels")), "dense")
    )
    model, x = build(name)
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Linear) and "weight" in module._parameters:
            module.weight.data[..., ::2] = 0
    fast = cs.accelerate(model, batch=4, seconds=0)
    with torch.no_grad():
        a, b = model(x), fast(x)
    a, b = (v["logits"] if isinstance(v, dict) else v for v in (a, b))
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    if name in ("bfloat16", "float64"):
        assert not any(isinstance(m, sparse.SparseLinear) for m in fast.modules())
        assert "only float32" in str(fast.acceleration)
    if name == "transformer":
        assert "past its forward" in str(fast.acceleration)
    if name == "bare_linear":
        assert isinstance(fast, sparse.SparseLinear)
    if name == "two_names":
        assert fast[0] is fast[2]


def test_hooks_stay_and_pruned_layers_are_left_alone(monkeypatch):
    monkeypatch.setattr(sparse, "choose", lambda times: "panels 1")
    model = thinned(relu_net(20, 30, 30, 4), 0.3)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with torch.no_grad():
        prune.l1_unstructured(model[2], "weight", 0.5)
    fast = cs.accelerate(model, batch=2, seconds=0)
    fast(torch.randn(2, 20))
    assert seen == [(2, 30)]
    assert isinstance(fast[0], sparse.SparseLinear)
    assert type(fast[2]) is nn.Linear


@pytest.mark.parametrize("batch", [0, -1, 1.5, True, (), (1, 0), "64", None])
def test_bad_batch_sizes(batch):
    with pytest.raises(BudgetError, match="batch="):
        cs.accelerate(nn.Linear(3, 3), batch=batch)


def test_no_model():
    with pytest.raises(LayerError, match="a model of type int"):
        cs.accelerate(3)
    with pytest.raises(LayerError, match="meta device"):
        cs.accelerate(nn.Linear(3, 3, device="meta"))
