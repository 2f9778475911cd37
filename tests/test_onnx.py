"""ONNX, in and out: layers found however they are written, graphs run around them, files that onnxruntime runs."""

import copy
import json
import os
import pickle
import subprocess
import sys
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
from onnx.numpy_helper import from_array, to_array
from safetensors.torch import save_model
from torch import nn

import coresieve as cs
import networks
from coresieve import cli, digests
from coresieve.errors import (
    AlteredError,
    DomainError,
    FileError,
    ForwardError,
    LayerError,
    MissingExtraError,
    SampleError,
)
from coresieve.graphs.packing import packed, unpacked
from coresieve.layers.low_rank import LowRank

RNG = np.random.default_rng(0)


def numbers(*shape, dtype="float32"):
    return RNG.normal(size=shape).astype(dtype)


def graph(nodes, held=(), inputs=None, outputs=None, opset=17, kind=TensorProto.FLOAT):
    """A model of these nodes. Inputs and outputs are {name: shape}."""
    ends = [
        [make_tensor_value_info(name, kind, shape) for name, shape in given.items()]
        for given in (inputs or {"x": ["n", 6]}, outputs or {"y": ["n", 5]})
    ]
    body = make_graph(
        list(nodes), "g", *ends, [from_array(array, name) for name, array in dict(held).items()]
    )
    return make_model(body, opset_imports=[make_opsetid("", opset)], ir_version=8)


def answers(path, **inputs):
    """What onnxruntime itself says."""
    if isinstance(path, onnx.ModelProto):
        path = path.SerializeToString()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feeds = {name: x.numpy() if torch.is_tensor(x) else x for name, x in inputs.items()}
    return session.run(None, feeds)


def read(model, tmp_path, name="model.onnx"):
    path = tmp_path / name
    onnx.save(model, path)
    return cs.from_onnx(path)


def traced(model, x, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(), (x,), path, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "n"}}
        )
    return path


def linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


# --- Layers, however they are written -------------------------------------------------------------------------


def gemm(inputs, **how):
    return [make_node("Gemm", inputs, ["y"], "fc", **how)]


V, b = numbers(6, 5), numbers(5)
ROWS = {
    "matmul": ([make_node("MatMul", ["x", "V"], ["y"], "fc")], {"V": V}),
    "add": ([make_node("MatMul", ["x", "V"], ["h"], "fc"), make_node("Add", ["h", "b"], ["y"])], {"V": V, "b": b}),
    "add before": (
        [make_node("MatMul", ["x", "V"], ["h"], "fc"), make_node("Add", ["b", "h"], ["y"])],
        {"V": V, "b": b},
    ),
    "wide bias": (
        [make_node("MatMul", ["x", "V"], ["h"], "fc"), make_node("Add", ["h", "b"], ["y"])],
        {"V": V, "b": b[None]},
    ),
    "gemm": (gemm(["x", "V", "b"]), {"V": V, "b": b}),
    "gemm turned": (gemm(["x", "V", "b"], transB=1), {"V": V.T.copy(), "b": b[None]}),
    "gemm scaled": (gemm(["x", "V", "b"], alpha=0.5, beta=2.0), {"V": V, "b": b}),
    "gemm without bias": (gemm(["x", "V"], alpha=3.0), {"V": V}),
    "beta of 0": (gemm(["x", "V", "b"], beta=0.0), {"V": V, "b": b}),
    "constant nodes": (
        [
            make_node("Constant", [], ["V"], value=from_array(V)),
            make_node("Constant", [], ["b"], value_floats=b.tolist()),
            *gemm(["x", "V", "b"]),
        ],
        {},
    ),
    "behind others": (
        [
            make_node("Transpose", ["Vt"], ["Vtt"], perm=[1, 0]),
            make_node("Identity", ["Vtt"], ["V"]),
            *gemm(["x", "V"]),
        ],
        {"Vt": V.T.copy()},
    ),
}  # fmt: skip

W, c = numbers(5, 6), numbers(5, 1)
COLUMNS = {  # x is (6, n): a point is a column
    "matmul": ([make_node("MatMul", ["W", "x"], ["y"], "fc")], {"W": W}),
    "add": ([make_node("MatMul", ["W", "x"], ["h"], "fc"), make_node("Add", ["h", "c"], ["y"])], {"W": W, "c": c}),
    "gemm": (gemm(["W", "x", "c"]), {"W": W, "c": c}),
    "gemm turned": (gemm(["W", "x", "c"], transA=1, alpha=2.0, beta=0.5), {"W": W.T.copy(), "c": c}),
}  # fmt: skip
TURNED = {  # x is (6, n) and its points are columns; those of y are rows, or the other way round
    "turned in": (gemm(["x", "V", "b"], transA=1), {"V": V, "b": b}, [6, "n"], ["n", 5]),
    "turned out": (gemm(["W", "x"], transB=1), {"W": W}, ["n", 6], [5, "n"]),
}


def check_layer(model, tmp_path, x, layers=1):
    """It is found, answers as onnxruntime does, and so do its compressed files, which read back as they were."""
    (want,) = answers(model, x=x)
    found = read(model, tmp_path)
    assert len(linears(found)) == layers
    np.testing.assert_allclose(found(torch.from_numpy(x)).numpy(), want, rtol=1e-4, atol=1e-5)
    for replace in (halved, thinned):
        small = copy.deepcopy(found)
        for name, layer in linears(small).items():
            small.set_submodule(name, replace(layer).requires_grad_(False))
        made = cs.Compressed(small, cs.compress(nn.Linear(2, 2), torch.rand(9, 2), keep=0.9).report)
        for sparse in (False, True):
            made.export_onnx(tmp_path / "small.onnx", sparse=sparse)
            (got,) = answers(tmp_path / "small.onnx", x=x)
            np.testing.assert_allclose(got, small(torch.from_numpy(x)).numpy(), rtol=1e-4, atol=1e-5)
            back = cs.load(tmp_path / "small.onnx").model
            assert digests.weights(back) == digests.weights(small)
            assert str(back) == str(small)
    assert not np.allclose(got, want)


def halved(layer):
    layer.weight.data[:, ::2] = 0
    return layer


def thinned(layer):
    U, s, Vt = torch.linalg.svd(layer.weight, full_matrices=False)
    right = s[:2, None] * Vt[:2]
    bias = [] if layer.bias is None else [right @ torch.linalg.pinv(layer.weight) @ layer.bias]
    return LowRank.from_factors(U[:, :2], torch.cat([right, *(b[:, None] for b in bias)], 1), bias=bool(bias))


@pytest.mark.parametrize("way", ROWS)
def test_a_layer_with_its_points_in_rows(way, tmp_path):
    nodes, held = ROWS[way]
    check_layer(graph(nodes, held), tmp_path, numbers(7, 6))


@pytest.mark.parametrize("way", COLUMNS)
def test_a_layer_with_its_points_in_columns(way, tmp_path):
    nodes, held = COLUMNS[way]
    check_layer(graph(nodes, held, {"x": [6, "n"]}, {"y": [5, "n"]}), tmp_path, numbers(6, 7))


@pytest.mark.parametrize("way", TURNED)
def test_a_layer_that_is_turned_on_one_side(way, tmp_path):
    nodes, held, given, made = TURNED[way]
    x = numbers(*(7 if size == "n" else size for size in given))
    check_layer(graph(nodes, held, {"x": given}, {"y": made}), tmp_path, x)


def test_three_dimensions(tmp_path):
    nodes = [make_node("MatMul", ["x", "V"], ["h"]), make_node("Add", ["h", "b"], ["y"])]
    shapes = {"x": ["n", "t", 6]}, {"y": ["n", "t", 5]}
    check_layer(graph(nodes, {"V": V, "b": b}, *shapes), tmp_path, numbers(3, 4, 6))


def test_a_bias_that_would_add_a_dimension_is_no_bias(tmp_path):
    nodes = [make_node("MatMul", ["x", "V"], ["h"]), make_node("Add", ["h", "b"], ["y"])]
    model = graph(nodes, {"V": V, "b": b[None, None]}, outputs={"y": [1, "n", 5]})
    (layer,) = linears(read(model, tmp_path)).values()
    assert layer.bias is None
    check_layer(model, tmp_path, numbers(7, 6))


def test_a_bias_of_another_kind_leaves_the_layer_or_stands_beside_it(tmp_path):
    by_column = {"V": numbers(6, 5), "b": numbers(7, 1)}
    model = read(graph(gemm(["x", "V", "b"]), by_column, {"x": [7, 6]}, {"y": [7, 5]}), tmp_path)
    assert not linears(model)
    assert "fc stays exact: its bias is computed, or is no vector" in model.notes[0]
    nodes = [make_node("MatMul", ["x", "V"], ["h"]), make_node("Add", ["h", "b"], ["y"])]
    (layer,) = linears(read(graph(nodes, {"V": V, "b": np.float32(2)}), tmp_path)).values()
    assert layer.bias is None


def test_a_product_that_is_also_an_output_keeps_its_bias_apart(tmp_path):
    nodes = [make_node("MatMul", ["x", "V"], ["h"]), make_node("Add", ["h", "b"], ["y"])]
    model = graph(nodes, {"V": V, "b": b}, outputs={"y": ["n", 5], "h": ["n", 5]})
    found, x = read(model, tmp_path), numbers(4, 6)
    assert linears(found)["V" if "V" in linears(found) else "h"].bias is None
    for got, want in zip(found(torch.from_numpy(x)).values(), answers(model, x=x), strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


def test_a_weight_that_two_layers_share_is_one_weight(tmp_path):
    square, other = numbers(6, 6), numbers(6)
    nodes = [
        make_node("MatMul", ["x", "Q"], ["h"], "first"),
        make_node("Relu", ["h"], ["r"]),
        make_node("Gemm", ["r", "Q", "c"], ["y"], "second"),
    ]
    model = graph(nodes, {"Q": square, "c": other}, outputs={"y": ["n", 6]})
    found = read(model, tmp_path)
    assert found.first.weight is found.second.weight
    small = cs.compress(found, torch.rand(60, 6), keep=0.5, method="magnitude")
    assert small.report.parameters_before == 36 + 6
    small.export_onnx(tmp_path / "small.onnx")
    held = onnx.load(tmp_path / "small.onnx").graph.initializer
    assert sorted(t.name for t in held) == ["Q", "c"]
    back = cs.load(tmp_path / "small.onnx").model
    assert back.first.weight is back.second.weight


def test_a_layer_that_is_used_twice_is_one_layer(tmp_path):
    square = numbers(6, 6)
    nodes = [make_node("MatMul", ["x", "Q"], ["h"]), make_node("MatMul", ["h", "Q"], ["y"])]
    found = read(graph(nodes, {"Q": square}, outputs={"y": ["n", 6]}), tmp_path)
    assert len(linears(found)) == 1
    x = numbers(3, 6)
    np.testing.assert_allclose(found(torch.from_numpy(x)).numpy(), x @ square @ square, rtol=1e-4)


def test_a_weight_that_is_read_in_other_ways_stays_exact(tmp_path):
    square = numbers(6, 6)
    turned = [
        make_node("MatMul", ["x", "Q"], ["h"], "a"),
        make_node("Gemm", ["h", "Q"], ["y"], "b", transB=1),
    ]
    looked_up = [make_node("MatMul", ["x", "Q"], ["h"], "a"), make_node("Add", ["h", "Q"], ["y"], "b")]
    for nodes in (turned, looked_up):
        found = read(graph(nodes, {"Q": square}, {"x": [6, 6]}, {"y": [6, 6]}), tmp_path)
        assert not linears(found)
        assert "a stays exact: another node reads its weight too, or in another way" in found.notes
        (want,) = answers(tmp_path / "model.onnx", x=torch.ones(6, 6))
        np.testing.assert_allclose(found(torch.ones(6, 6)).numpy(), want, rtol=1e-5)


def test_a_bias_that_two_layers_share_is_each_ones_own(tmp_path):
    nodes = [
        make_node("Gemm", ["x", "A", "b"], ["h"], "first"),
        make_node("Gemm", ["h", "B", "b"], ["y"], "second"),
    ]
    found = read(graph(nodes, {"A": numbers(6, 5), "B": numbers(5, 5), "b": b}), tmp_path)
    assert found.first.bias is not found.second.bias
    small = cs.compress(found, torch.rand(50, 6), keep=0.5, method="svd")
    small.export_onnx(tmp_path / "small.onnx")
    assert digests.weights(cs.load(tmp_path / "small.onnx").model) == digests.weights(small.model)


def test_what_is_no_layer_is_a_line_in_the_report(tmp_path):
    scale, zero = np.float32(0.1), np.int8(0)
    inner = make_graph(
        [make_node("MatMul", ["x", "A"], ["z"])], "g", [], [make_tensor_value_info("z", 1, None)]
    )
    nodes = [
        make_node("DequantizeLinear", ["q", "s", "z0"], ["Q"]),
        make_node("MatMul", ["x", "Q"], ["a"], "quantized"),
        make_node("Mul", ["A", "two"], ["A2"]),
        make_node("MatMul", ["x", "A2"], ["b"], "made"),
        make_node("Transpose", ["x"], ["xt"]),
        make_node("MatMul", ["x", "xt"], ["d"], "gram"),
        make_node("MatMul", ["d", "b"], ["e"], "both"),
        make_node("If", ["yes"], ["f"], "choice", then_branch=inner, else_branch=inner),
        make_node("MatMul", ["x", "T"], ["g"], "stack"),
        make_node("MatMul", ["x", "V"], ["h"], "fc"),
        make_node("Sum", ["a", "b", "e", "f", "h"], ["i"]),
        make_node("Add", ["i", "g"], ["y"]),
    ]
    held = {
        "q": np.ones((6, 5), np.int8), "s": scale, "z0": zero, "A": numbers(6, 5), "two": np.float32(2), "V": V,
        "yes": np.array(True), "T": numbers(1, 6, 5),
    }  # fmt: skip
    model = graph(nodes, held, {"x": ["n", 6]}, {"y": [1, "n", 5]})
    found, x = read(model, tmp_path), numbers(4, 6)
    assert list(linears(found)) == ["fc"]
    np.testing.assert_allclose(
        found(torch.from_numpy(x)).numpy(), answers(model, x=x)[0], rtol=1e-4, atol=1e-4
    )
    notes = "\n".join(found.notes)
    for line in (
        "quantized stays exact: its weight is quantized",
        "made stays exact: its weight is computed in the graph, by Mul",
        "gram stays exact: both its factors are computed",
        "choice stays exact: what is inside of If is left alone",
        "stack stays exact: its weight has 3 dimensions",
    ):
        assert line in notes
    small = cs.compress(found, x.repeat(9, 0), keep=0.5, method="magnitude")
    assert "gram" in str(small.report)
    small.export_onnx(tmp_path / "small.onnx")
    ops = [node.op_type for node in onnx.load(tmp_path / "small.onnx").graph.node]
    assert ops.count("DequantizeLinear") == ops.count("If") == 1


def test_a_graph_without_layers_says_why(tmp_path):
    nodes = [make_node("Mul", ["V", "two"], ["U"]), make_node("MatMul", ["x", "U"], ["y"], "fc")]
    model = graph(nodes, {"V": V, "two": np.float32(2)})
    with pytest.raises(LayerError, match=r"without a layer to compress\n.*computed in the graph, by Mul"):
        cs.compress(read(model, tmp_path), torch.rand(20, 6), keep=0.5)


# --- As a module ----------------------------------------------------------------------------------------------

SAME = ["plain", "dead_neurons", "no_bias", "one_neuron", "three_dimensions", "residual", "used_twice",
        "tied_two_biases", "float64", "float16", "batch_norm", "negative_inputs"]  # fmt: skip


@pytest.mark.parametrize("method", ["corenet++", "svd", "magnitude"])
@pytest.mark.parametrize("name", SAME)
def test_the_same_compression_as_of_the_module_that_was_exported(name, method, tmp_path):
    module, x = networks.build(name)
    model = cs.from_onnx(traced(module, x[:2], tmp_path / "model.onnx"))
    want, got = (cs.compress(m, x, keep=0.4, method=method) for m in (module, model))
    assert [(r.name, r.before, r.dead_neurons) for r in got.report.layers] == [
        (r.name.replace("first", "first"), r.before, r.dead_neurons) for r in want.report.layers
    ]
    assert got.report.error == pytest.approx(want.report.error, rel=1e-3, abs=1e-6)
    got.export_onnx(tmp_path / "small.onnx")
    (ran,) = answers(tmp_path / "small.onnx", x=x[:9])
    rough = 2e-2 if x.dtype == torch.float16 else 1e-4
    with torch.no_grad():
        np.testing.assert_allclose(ran, want.model.eval()(x[:9]).numpy(), rtol=rough, atol=rough)


def test_layers_see_what_onnxruntime_hands_them(tmp_path):
    module, x = networks.build("plain")
    path = traced(module, x[:2], tmp_path / "model.onnx")
    model, seen = cs.from_onnx(path), []
    for layer in linears(model).values():
        layer.register_forward_hook(lambda layer, args, output: seen.append(args[0]))
    model(x)
    whole = onnx.load(path)
    inputs = [node.input[0] for node in whole.graph.node if node.op_type == "Gemm"][1:]
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inputs)
    for mine, theirs in zip(seen[1:], answers(whole, x=x)[1:], strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-5, atol=1e-6)


def test_copies_share_the_graph_and_not_the_weights(tmp_path):
    module, x = networks.build("plain")
    model = cs.from_onnx(traced(module, x[:2], tmp_path / "model.onnx"))
    before, copied = model(x), copy.deepcopy(model)
    assert copied.plan is model.plan
    linears(copied)["0"].weight.zero_()
    assert torch.equal(model(x), before)
    assert not torch.equal(copied(x), before)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), before)


def test_a_change_around_the_layers_is_another_model(tmp_path):
    def digest(op):
        nodes = [make_node("MatMul", ["x", "V"], ["h"]), make_node(op, ["h"], ["y"])]
        return digests.weights(read(graph(nodes, {"V": V}), tmp_path))

    assert digest("Relu") == digest("Relu") != digest("Tanh")


def test_several_inputs_and_outputs(tmp_path):
    nodes = [
        make_node("MatMul", ["left", "A"], ["h"], "a"),
        make_node("Gather", ["E", "right"], ["e"]),
        make_node("Add", ["h", "e"], ["sum"]),
        make_node("MatMul", ["sum", "V"], ["scores"], "head"),
        make_node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
    ]
    model = graph(
        nodes, {"A": numbers(4, 6), "E": numbers(3, 6), "V": V}, {"left": ["n", 4]}, {"scores": ["n", 5]}
    )
    model.graph.input.append(make_tensor_value_info("right", TensorProto.INT64, ["n"]))
    model.graph.output.append(make_tensor_value_info("best", TensorProto.INT64, ["n"]))
    found = read(model, tmp_path)
    sample = [{"left": torch.rand(40, 4), "right": torch.arange(40) % 3} for _ in range(3)]
    small = cs.compress(found, sample, keep=0.7, method="svd")
    small.export_onnx(tmp_path / "small.onnx")
    want = answers(tmp_path / "small.onnx", **sample[0])
    np.testing.assert_allclose(small(**sample[0])["scores"].numpy(), want[0], rtol=1e-4, atol=1e-5)
    assert np.array_equal(small(**sample[0])["best"].numpy(), want[1])
    with pytest.raises(ForwardError, match=r"inputs left .* float; right .* int64"):
        cs.compress(found, torch.rand(40, 4), keep=0.7)
    with pytest.raises(ForwardError, match="holds fractions"):
        found(torch.rand(2, 4), torch.rand(2))


def test_whole_numbers_become_what_the_graph_declares(tmp_path):
    model = read(graph([make_node("MatMul", ["x", "V"], ["y"])], {"V": V}), tmp_path)
    assert torch.allclose(model(torch.ones(2, 6, dtype=torch.uint8)), torch.ones(2, 6) @ torch.from_numpy(V))
    with pytest.raises(ForwardError, match=r"an input x of shape \(2, 7\): expected x \(any, 6\) float"):
        model(torch.ones(2, 7))


def test_a_constant_can_be_an_output(tmp_path):
    nodes = [make_node("MatMul", ["x", "V"], ["y"]), make_node("Identity", ["b"], ["c"])]
    model = read(graph(nodes, {"V": V, "b": b}, outputs={"y": ["n", 5], "c": [5], "b": [5]}), tmp_path)
    got = model(torch.ones(2, 6))
    assert torch.equal(got["c"], torch.from_numpy(b))
    assert torch.equal(got["b"], torch.from_numpy(b))


def test_training_is_refused_where_there_are_no_gradients(tmp_path):
    model = read(graph([make_node("MatMul", ["x", "V"], ["y"])], {"V": V}), tmp_path)
    small = cs.compress(model, torch.rand(50, 6), keep=0.5, method="magnitude")
    with pytest.raises(DomainError, match="trained where it came from"):
        cs.finetune(small, [(torch.rand(4, 6), torch.tensor([0, 1, 2, 3]))])


# --- A fixed number of inputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [1, 4])
def test_a_batch_that_is_fixed_without_need_is_freed(fixed, tmp_path):
    nodes = [make_node("Gemm", ["x", "V", "b"], ["h"]), make_node("Relu", ["h"], ["y"])]
    model = read(graph(nodes, {"V": V, "b": b}, {"x": [fixed, 6]}, {"y": [fixed, 5]}), tmp_path)
    x = torch.rand(50, 6)
    small = cs.compress(model, x, keep=0.5, method="magnitude")
    small.export_onnx(tmp_path / "small.onnx")
    np.testing.assert_allclose(
        answers(tmp_path / "small.onnx", x=x)[0], small(x).numpy(), rtol=1e-4, atol=1e-6
    )
    assert digests.weights(cs.load(tmp_path / "small.onnx").model) == digests.weights(small.model)


def test_a_batch_that_is_fixed_in_the_graph_is_refused(tmp_path):
    mixed = [
        make_node("MatMul", ["x", "V"], ["h"]),
        make_node("ReduceMean", ["h"], ["m"], axes=[0]),
        make_node("Sub", ["h", "m"], ["y"]),
    ]
    shape = [make_node("Reshape", ["x", "s"], ["r"]), make_node("MatMul", ["r", "V"], ["y"])]
    for nodes in (mixed, shape):
        held = {"V": V, "s": np.array([4, 6])}
        model = read(graph(nodes, held, {"x": [4, 6]}, {"y": [4, 5]}), tmp_path)
        assert model(torch.rand(4, 6)).shape == (4, 5)
        with pytest.raises(ForwardError, match=r"made for batches of 4: .*first dimension is free"):
            cs.compress(model, torch.rand(50, 6), keep=0.5)


# --- Any PyTorch model, as a file -----------------------------------------------------------------------------

UNKNOWN_TO_ONNXRUNTIME = {"bfloat16", "mixed_types"}


@pytest.mark.parametrize("method", ["corenet+", "svd"])
@pytest.mark.parametrize("name", sorted(networks.NETWORKS.keys() - UNKNOWN_TO_ONNXRUNTIME))
def test_every_small_network_runs_in_onnxruntime(name, method, tmp_path):
    model, x = networks.build(name)
    small = cs.compress(model, x, keep=0.5, method=method)
    small.export_onnx(tmp_path / "small.onnx")
    onnx.checker.check_model(tmp_path / "small.onnx")
    batch = x[0] if isinstance(x, list) else x[:11]
    given = (
        {k: v for k, v in batch.items() if torch.is_tensor(v)} if isinstance(batch, dict) else {"x": batch}
    )
    got = answers(tmp_path / "small.onnx", **given)
    with torch.no_grad():
        small.model.eval()
        want = small(**batch) if isinstance(batch, dict) else small(batch)
    want = next(t for t in torch.utils._pytree.tree_leaves(want) if torch.is_tensor(t))
    rough = 2e-2 if want.dtype == torch.float16 else 2e-4
    np.testing.assert_allclose(got[0], want.numpy(), rtol=rough, atol=rough)


def test_bfloat16_is_told_not_to_run():
    model, x = networks.build("bfloat16")
    with pytest.raises(FileError, match=r"which onnxruntime refuses .*float32 where it is bfloat16"):
        cs.compress(model, x, keep=0.5).export_onnx("never.onnx")
    assert not os.path.exists("never.onnx")


def test_removed_neurons_and_ranks_make_the_file_smaller(tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 4)
        )
        x = torch.rand(400, 20)
    model[0].bias.data[::2] = -100
    save_model(model, tmp_path / "model.safetensors")
    dense = os.path.getsize(tmp_path / "model.safetensors")
    small = cs.compress(model, x, keep=0.9, method="corenet+")
    small.export_onnx(tmp_path / "neurons.onnx", sparse=False)
    held = {t.name: tuple(t.dims) for t in onnx.load(tmp_path / "neurons.onnx").graph.initializer}
    assert held["0.weight"] == tuple(small.model[0].weight.shape)
    assert held["0.weight"][0] == held["2.weight"][1] <= 150
    assert os.path.getsize(tmp_path / "neurons.onnx") < 0.6 * dense
    cs.compress(model, x, keep=0.2, method="svd").export_onnx(tmp_path / "ranks.onnx")
    assert os.path.getsize(tmp_path / "ranks.onnx") < 0.3 * dense


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_zeros_take_few_bytes_and_nothing_is_lost(name, tmp_path):
    dtype, path = getattr(torch, name), tmp_path / "small.onnx"
    layer, x = nn.Linear(300, 200, dtype=dtype), torch.rand(60, 300)
    for keep in (0.1, 0.5, 0.99):
        share = min(1.0, keep * (1 + 1 / dtype.itemsize))  # a byte for each gap
        small = cs.compress(layer, x, keep=keep, method="magnitude")
        small.model.weight.data[0, :2] = -0.0
        for sparse, limit in ((True, share), (False, 1.0)):
            small.export_onnx(path, sparse=sparse)
            onnx.checker.check_model(path)
            assert os.path.getsize(path) < limit * layer.weight.nbytes + 5000
            want = small(x[:5].to(dtype)).detach().numpy()
            np.testing.assert_allclose(answers(path, x=x[:5].to(dtype))[0], want, rtol=1e-2, atol=1e-3)
            (back,) = linears(cs.load(path).model).values()
            bits = [w.detach().numpy().tobytes() for w in (back.weight, small.model.weight)]
            assert bits[0] == bits[1]


@pytest.mark.parametrize("far", [[], [0], [254], [255], [0, 256], [255, 510, 1020], [0, 1, 999, 1499]])
def test_gaps_of_any_length(far):
    array = np.zeros((50, 30), "f4")
    array.reshape(-1)[far] = np.arange(1, len(far) + 1)
    nodes = [make_node("MatMul", ["x", "W"], ["y"])]
    made, names = packed(graph(nodes, {"W": array}, {"x": ["n", 50]}, {"y": ["n", 30]}))
    assert names == ["W"]
    assert np.array_equal(answers(made, x=np.eye(50, dtype="f4"))[0], array)
    assert np.array_equal(to_array(unpacked(made, names).graph.initializer[0]), array)


def test_before_opset_11_zeros_are_left_out_by_sparse_initialisers(tmp_path):
    nodes = [make_node("MatMul", ["x", "W"], ["y"])]
    model = graph(nodes, {"W": numbers(60, 50)}, {"x": ["n", 60]}, {"y": ["n", 50]}, opset=10)
    small = cs.compress(read(model, tmp_path), torch.rand(80, 60), keep=0.1, method="magnitude")
    small.export_onnx(tmp_path / "small.onnx")
    assert len(onnx.load(tmp_path / "small.onnx").graph.sparse_initializer) == 1
    back, x = cs.load(tmp_path / "small.onnx"), torch.rand(4, 60)
    assert digests.weights(back.model) == digests.weights(small.model)
    np.testing.assert_allclose(
        answers(tmp_path / "small.onnx", x=x)[0], small(x).numpy(), rtol=1e-4, atol=1e-5
    )


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x) if len(x) > 1 else -self.fc(x)


class Unknown(Branches):
    def forward(self, x):
        return torch.linalg.svdvals(self.fc(x).unsqueeze(1))


@pytest.mark.parametrize(
    ("kind", "told"), [(Branches, "answers otherwise"), (Unknown, "torch.onnx.export refuses")]
)
def test_a_model_that_is_no_graph_is_refused_and_the_old_file_survives(kind, told, tmp_path, capfd):
    path = tmp_path / "small.onnx"
    path.write_text("old")
    small = cs.compress(kind(), torch.rand(60, 6), keep=0.5, method="magnitude")
    with pytest.raises(ForwardError, match=told):
        small.export_onnx(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["small.onnx"]
    assert "graph(" not in "".join(capfd.readouterr())


def test_a_network_loaded_from_safetensors_is_exported_with_an_example(tmp_path):
    model, x = networks.build("plain")
    cs.compress(model, x, keep=0.5).save(tmp_path / "small.safetensors")
    small = cs.load(tmp_path / "small.safetensors", into=model)
    with pytest.raises(SampleError, match="without an example"):
        small.export_onnx(tmp_path / "small.onnx")
    small.export_onnx(tmp_path / "small.onnx", example=x[:1])
    assert answers(tmp_path / "small.onnx", x=x)[0].shape == (300, 4)


# --- What travels in the file ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certified")
    module, x = networks.build("plain")
    model = cs.from_onnx(traced(module, x[:2], folder / "model.onnx"))
    small = cs.compress(model, x, keep=0.5, method="corenet+")
    fresh = torch.rand(200, 12, generator=torch.Generator().manual_seed(1))
    cs.certify(model, small, fresh)
    small.export_onnx(folder / "small.onnx")
    return folder, model, small, fresh


def test_report_certificate_and_rows_travel(certified):
    folder, model, small, fresh = certified
    back = cs.load(folder / "small.onnx")
    assert str(back).splitlines()[:3] == str(small).splitlines()[:3]
    assert cs.verify(model, back, fresh) == []
    _, x = networks.build("plain")
    with pytest.raises(SampleError, match="which the calibration also holds"):
        cs.certify(model, back, x)


def test_the_same_network_is_the_same_file(certified, tmp_path):
    folder, _, small, _ = certified
    small.export_onnx(tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (folder / "small.onnx").read_bytes()


def test_a_changed_byte_anywhere_is_refused(certified, tmp_path):
    folder, *_ = certified
    raw = bytearray((folder / "small.onnx").read_bytes())
    for place in [*range(0, len(raw), max(1, len(raw) // 150)), len(raw) - 1]:
        raw[place] ^= 1
        (tmp_path / "bad.onnx").write_bytes(raw)
        try:
            back = cs.load(tmp_path / "bad.onnx")
            assert back.certificate is None  # the flip hit the name of the entries: another tool's file
            assert back.report.method == "another tool's"
        except FileError:
            pass
        raw[place] ^= 1
    for cut in (1, 100, len(raw) // 2):
        (tmp_path / "bad.onnx").write_bytes(raw[:-cut])
        with pytest.raises(FileError):
            cs.load(tmp_path / "bad.onnx")


def test_a_file_that_another_program_changed_is_refused(certified, tmp_path):
    folder, *_ = certified
    model = onnx.load(folder / "small.onnx")
    next(t for t in model.graph.initializer if t.name == "0.bias").CopyFrom(
        from_array(np.zeros(30, "f4"), "0.bias")
    )
    onnx.save(model, tmp_path / "changed.onnx")
    with pytest.raises(FileError, match=r"was changed since coresieve wrote it"):
        cs.load(tmp_path / "changed.onnx")
    for entry in model.metadata_props:
        if entry.key == "coresieve.format":
            entry.value = "2"
    onnx.save(model, tmp_path / "newer.onnx")
    with pytest.raises(FileError, match=r"has format 2: expected format 1 or older.*newer version"):
        cs.load(tmp_path / "newer.onnx")


def test_changed_weights_are_not_saved_with_their_certificate(certified, tmp_path):
    folder, *_ = certified
    small = cs.load(folder / "small.onnx")
    linears(small.model)["0"].bias.add_(1)
    with pytest.raises(AlteredError):
        small.export_onnx(tmp_path / "small.onnx")


def test_the_certificate_of_a_module_travels_with_its_export(tmp_path):
    model, x = networks.build("plain")
    small = cs.compress(model, x, keep=0.5, method="magnitude")
    fresh = torch.rand(200, 12, generator=torch.Generator().manual_seed(1))
    cs.certify(model, small, fresh)
    small.export_onnx(tmp_path / "small.onnx")
    back = cs.load(tmp_path / "small.onnx")
    assert cs.verify(model, back, fresh) == []
    back.export_onnx(tmp_path / "again.onnx")
    assert cs.verify(model, cs.load(tmp_path / "again.onnx"), fresh) == []
    linears(back.model)["0"].weight.zero_()
    with pytest.raises(AlteredError):
        back.export_onnx(tmp_path / "again.onnx")


def test_weights_for_another_graph_are_refused(certified, tmp_path):
    _, model, small, _ = certified
    small.save(tmp_path / "small.safetensors")
    assert cs.load(tmp_path / "small.safetensors", into=copy.deepcopy(model)).certificate is not None
    module, x = networks.build("plain")
    other = cs.from_onnx(traced(nn.Sequential(*module, nn.Tanh()), x[:2], tmp_path / "other.onnx"))
    with pytest.raises(FileError, match="belongs to another graph"):
        cs.load(tmp_path / "small.safetensors", into=other)
    with pytest.raises(LayerError, match="no skeleton"):
        cs.load(tmp_path / "other.onnx", into=other)


# --- Bad files ------------------------------------------------------------------------------------------------


def refused(raw, tmp_path, match):
    path = tmp_path / "bad.onnx"
    path.write_bytes(raw if isinstance(raw, bytes) else raw.SerializeToString())
    with pytest.raises(FileError, match=match):
        cs.from_onnx(path)


def test_what_is_no_onnx_file(tmp_path):
    whole = graph([make_node("MatMul", ["x", "V"], ["y"])], {"V": V}).SerializeToString()
    refused(b"", tmp_path, "holds no ONNX graph")
    refused(b"not an onnx file at all", tmp_path, "cut short, damaged or no ONNX file")
    refused(whole[: len(whole) // 2], tmp_path, "cut short, damaged or no ONNX file")
    with pytest.raises(FileError, match="No such file"):
        cs.from_onnx(tmp_path / "none.onnx")
    with pytest.raises(FileError, match="is a folder"):
        cs.from_onnx(tmp_path)


def test_opsets_that_nobody_runs(tmp_path):
    nodes = [make_node("MatMul", ["x", "V"], ["h"]), make_node("Relu", ["h"], ["y"])]
    refused(
        graph(nodes, {"V": V}, opset=99),
        tmp_path,
        r"of opset 99: expected an opset from 7 to \d+. Try: a newer",
    )
    refused(graph(nodes, {"V": V}, opset=5), tmp_path, "of opset 5.*convert_version")
    strange = graph([nodes[0], make_node("Sieve", ["h"], ["y"], domain="my.own")], {"V": V})
    refused(strange, tmp_path, "which onnxruntime refuses")
    strange.opset_import.append(make_opsetid("my.own", 1))
    refused(strange, tmp_path, "which onnxruntime refuses .*Sieve")


def test_graphs_that_are_not_whole(tmp_path):
    late = [
        make_node("Relu", ["h"], ["y"]),
        make_node("MatMul", ["x", "V"], ["g"]),
        make_node("Relu", ["g"], ["h"]),
    ]
    refused(graph(late, {"V": V}), tmp_path, "reads 'h' before it is made")
    refused(graph([make_node("MatMul", ["q", "V"], ["y"])], {"V": V}), tmp_path, "nothing makes 'q'")
    refused(graph([make_node("MatMul", ["x", "V"], ["h"])], {"V": V}), tmp_path, "nothing makes 'y'")


def test_weights_in_other_files(tmp_path):
    big = numbers(60, 50)
    model = graph(
        [make_node("MatMul", ["x", "V"], ["y"], "fc")], {"V": big}, {"x": ["n", 60]}, {"y": ["n", 50]}
    )
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    found = cs.from_onnx(tmp_path / "model.onnx")
    assert np.array_equal(linears(found)["fc"].weight.T.numpy(), big)
    small = cs.compress(found, torch.rand(99, 60), keep=0.5, method="magnitude")
    small.export_onnx(tmp_path / "small.onnx")
    (tmp_path / "w.bin").write_bytes((tmp_path / "w.bin").read_bytes()[:-1])
    with pytest.raises(
        FileError, match=r"keeps weights in 'w.bin', which is cut short: expected 12,000 bytes"
    ):
        cs.from_onnx(tmp_path / "model.onnx")
    (tmp_path / "w.bin").unlink()
    with pytest.raises(
        FileError, match=r"keeps weights in 'w.bin', which is not there.* copying w.bin along"
    ):
        cs.from_onnx(tmp_path / "model.onnx")
    assert answers(tmp_path / "small.onnx", x=numbers(3, 60))[0].shape == (3, 50)  # one file, whole
    away = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    for entry in away.graph.initializer[0].external_data:
        entry.value = "../../etc/passwd" if entry.key == "location" else entry.value
    refused(away, tmp_path, "outside of its folder")


def test_without_the_extra_there_is_a_clear_word(tmp_path):
    code = (
        "import sys; sys.modules['onnxruntime'] = None; import coresieve as cs\n"
        "try: cs.from_onnx('model.onnx')\n"
        "except cs.errors.MissingExtraError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "without onnxruntime" in run.stdout
    assert "coresieve[onnx]" in run.stdout, run.stderr
    assert issubclass(MissingExtraError, ImportError)


def test_nothing_imports_onnx_that_does_not_need_it():
    code = (
        "import sys, torch, coresieve as cs; from coresieve import inputs, cli\n"
        "cs.compress(torch.nn.Linear(4, 3), torch.rand(30, 4), keep=0.5)\n"
        "print({'onnx', 'onnxruntime'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "set()", run.stderr


# --- From the shell -------------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    """A folder with an ONNX model and data, and a way to run a command there."""
    monkeypatch.chdir(tmp_path)
    module, x = networks.build("plain")
    traced(module, x[:2], "model.onnx")
    np.savez("x.npz", x=x.numpy(), extra=np.zeros(3))
    np.save("fresh.npy", np.random.default_rng(5).random((300, 12), dtype="f4"))

    def run(*tokens):
        code = cli.main([*map(str, tokens)])
        return code, *capsys.readouterr()

    return run


def test_an_onnx_model_is_compressed_inspected_certified_and_verified(shell):
    code, out, err = shell(
        "compress", "model.onnx", "--calibration", "x.npz", "--keep", "0.5", "-o", "small.onnx"
    )
    assert (code, err) == (0, "")
    assert "Saved small.onnx" in out
    assert "the original is" in out
    code, out, _ = shell("inspect", "small.onnx")
    assert code == 0
    assert "sieve, keep=0.5" in out
    assert "(float32)" in out
    code, out, _ = shell("certify", "model.onnx", "small.onnx", "--heldout", "fresh.npy", "--write")
    assert code == 0
    code, out, _ = shell("verify", "small.onnx", "--model", "model.onnx", "--heldout", "fresh.npy")
    assert code == 0
    assert "Confirmed" in out
    np.save("other.npy", np.random.default_rng(6).random((300, 12), dtype="f4"))
    code, out, _ = shell("verify", "small.onnx", "--model", "model.onnx", "--heldout", "other.npy")
    assert code == 3
    assert "the held-out inputs are not those of the certificate" in out
    code, out, _ = shell("inspect", "small.onnx", "--json")
    assert json.loads(out)["certificate"]["digests"]["compressed"]


def test_a_small_onnx_network_from_a_search(shell):
    tokens = [
        "model.onnx",
        "--data",
        "x.npz",
        "--heldout",
        "fresh.npy",
        "--max-flips",
        "30%",
        "--method",
        "magnitude",
    ]
    code, _, err = shell("smallest", *tokens)
    assert code == 0, err
    code, out, _ = shell("verify", "small.onnx", "--model", "model.onnx", "--heldout", "fresh.npy")
    assert code == 0
    assert "Confirmed" in out


def test_methods_are_compared_on_an_onnx_model(shell):
    code, out, _ = shell(
        "compare", "model.onnx", "--data", "x.npz", "--keep", "0.5", "--methods", "svd", "--json"
    )
    assert code == 0
    assert json.loads(out)["rows"][0]["failed"] is None


def test_several_inputs_come_from_one_file(shell):
    nodes = [
        make_node("MatMul", ["a", "A"], ["h"]),
        make_node("Add", ["h", "c"], ["s"]),
        make_node("MatMul", ["s", "V"], ["y"]),
    ]
    onnx.save(graph(nodes, {"A": numbers(4, 6), "V": V}, {"a": ["n", 4], "c": ["n", 6]}), "two.onnx")
    np.savez("two.npz", a=numbers(80, 4), c=numbers(80, 6))
    tokens = ["two.onnx", "--data", "two.npz", "--keep", "0.7"]
    code, _, err = shell("compress", *tokens, "-o", "small.onnx", "--method", "svd")
    assert code == 0, err
    code, _, _ = shell("compare", *tokens, "--methods", "svd")
    assert code == 0
    code, _, err = shell("compress", *tokens[:2], "x.npz", *tokens[3:], "-o", "other.onnx")
    assert code == 1
    assert "expected an array named 'a'" in err
    np.savez("short.npz", a=numbers(80, 4), c=numbers(79, 6))
    code, _, err = shell("compress", *tokens[:2], "short.npz", *tokens[3:], "-o", "other.onnx")
    assert "80 of a, 79 of c: expected as many of each" in err


def test_what_a_command_refuses(shell):
    tokens = ["--data", "x.npz", "--keep", "0.5"]
    code, _, err = shell("compress", "model.onnx", *tokens, "--weights", "w.safetensors")
    assert code == 1
    assert "it holds its weights" in err
    code, _, err = shell("compress", "nets:build", *tokens)
    assert code == 1
    assert "without --weights" in err
    code, _, err = shell("compress", "model.onnx", *tokens, "-o", "model.onnx", "--force")
    assert code == 1
    assert "is one of the inputs" in err
    code, _, err = shell("compress", "none.onnx", *tokens)
    assert code == 1
    assert "none.onnx does not exist" in err
    code, out, _ = shell("inspect", "model.onnx")
    assert code == 0
    assert "0.weight  float32 (30, 12)" in out
