"""OnnxModel: a graph as an nn.Module. Its layers are real nn.Linear, and its forward runs the graph around them.

Hooks see the layers' inputs, methods rewrite, shrink or replace the layers, and copies share what never changes. What
lies between the layers is run by onnxruntime, so any operator works, on the CPU and without gradients.

Inputs are given in the graph's order, or by name; one output is answered as a tensor, several as a dict. They are cast
to the type that the graph declares. A graph that declares a fixed number of inputs a batch is asked once, on the first
batch of another size, whether it answers each input by itself.

>>> from onnx import helper, numpy_helper, TensorProto
>>> weight = numpy_helper.from_array(np.float32([[1, 2], [3, 4]]), "fc.weight")
>>> ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy"]
>>> nodes = [helper.make_node("MatMul", ["x", "fc.weight"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
>>> graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
>>> model = OnnxModel.of(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
>>> model
OnnxModel(
  (fc): Linear(in_features=2, out_features=2, bias=False)
)
>>> model(torch.tensor([[1.0, -1.0]]))
tensor([[0., 0.]])
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto, TensorProto, ValueInfoProto
from torch import Tensor, nn

from coresieve.errors import FileError, ForwardError
from coresieve.graphs.finding import Affine, Bias, Weight, find
from coresieve.graphs.pieces import Piece, as_array, as_tensor, cut
from coresieve.graphs.protos import Constants, densified, initialised, uses
from coresieve.layers.low_rank import LowRank

PATH = "the graph"
Told = list[
    dict[str, Any]
]  # a layer's name, and the outputs of the one or two that stand for it in the graph


@dataclass(frozen=True)
class Slot:
    """Where in the graph a layer stands, and how it is written there."""

    name: str
    op: str
    input: str
    output: str
    turn_in: bool
    left: bool
    at: int  # the node of the rest before which it comes
    weight: str  # the names that its tensors had
    bias: str


@dataclass(frozen=True)
class Input:
    """One input of the graph. `dims` holds None where the size is free."""

    name: str
    type: int
    dims: tuple[int | None, ...] | None

    @classmethod
    def of(cls, info: ValueInfoProto) -> Input:
        told = info.type.tensor_type
        dims = tuple(d.dim_value or None for d in told.shape.dim) if told.HasField("shape") else None
        return cls(info.name, told.elem_type, dims)

    def describe(self) -> str:
        kind = TensorProto.DataType.Name(self.type).lower()
        sizes = "of any shape" if self.dims is None else f"({', '.join(str(d or 'any') for d in self.dims)})"
        return f"{self.name} {sizes} {kind}"


@dataclass(eq=False)
class Plan:
    """What of a model never changes: the graph without its layers. All copies share it."""

    path: str
    rest: ModelProto  # without the layers' nodes and weights
    slots: list[Slot]
    inputs: list[Input]
    outputs: list[str]
    held: dict[str, Tensor]  # outputs that are constants
    notes: list[str]
    pieces: list[Piece | None] = field(default_factory=list)
    batch_is_free: bool = False  # whether it was seen to answer each input by itself

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    @property
    def batch(self) -> int | None:
        """The number of inputs a batch, where the graph fixes it."""
        sizes = {x.dims[0] for x in self.inputs if x.dims}
        return sizes.pop() if len(sizes) == 1 else None

    def digest(self) -> bytes:
        """SHA-256 of all that is computed around the layers, however the layers are written."""
        made = hashlib.sha256()
        graph = self.rest.graph
        for opset in sorted((o.domain, o.version) for o in self.rest.opset_import):
            made.update(repr(opset).encode())
        for end in (*graph.input, *graph.output):  # sizes are free
            made.update(f"{end.name} {_without_shape(end.type)}".encode())
        for node in graph.node:
            plain = onnx.NodeProto.FromString(node.SerializeToString())
            plain.ClearField("doc_string")
            plain.ClearField("metadata_props")
            made.update(plain.SerializeToString(deterministic=True) + b"\0")
        for tensor in sorted(graph.initializer, key=lambda t: t.name):
            array = onnx.numpy_helper.to_array(tensor)
            told = f"{tensor.name} {tensor.data_type} {array.shape}"
            made.update(told.encode())
            made.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
        for slot in self.slots:
            made.update(repr((slot.name, slot.input, slot.output, slot.turn_in, slot.left)).encode())
        return made.digest()


class OnnxModel(nn.Module):
    """A graph whose layers are submodules. Read one from a file by `coresieve.from_onnx`."""

    graph_sha256: Tensor

    def __init__(self, plan: Plan, layers: Mapping[str, nn.Module]):
        super().__init__()
        self.plan = plan
        self.stands_for: dict[
            str, str
        ] = {}  # digests of these weights -> of the module they were exported from
        for name, layer in layers.items():
            home: nn.Module = self
            *folders, leaf = name.split(".")
            for folder in folders:
                if folder not in home._modules:
                    home.add_module(folder, nn.Module())
                home = home.get_submodule(folder)
            home.add_module(leaf, layer)
        # what is computed around the layers is part of the state: certificates speak of it too
        self.register_buffer("graph_sha256", torch.tensor(list(plan.digest()), dtype=torch.uint8))
        self.eval()

    @classmethod
    def of(cls, model: ModelProto, path: str = PATH, told: Told | None = None) -> OnnxModel:
        """The layers found in a graph, each with its name. `told` are those of a file that coresieve wrote."""
        constants = Constants(model.graph)
        found, notes = find(model, constants)
        names = _names(model, found, told or [], path)
        layers = _modules(found, names, constants)
        slots, rest = _apart(model, found, names, constants)
        slots, layers = _joined(slots, layers, [entry for entry in told or [] if len(entry["outputs"]) == 2])
        inputs = [Input.of(x) for x in rest.graph.input]
        plan = Plan(path, rest, slots, inputs, [x.name for x in rest.graph.output],
                    _constant_outputs(rest), notes)  # fmt: skip
        plan.pieces = _pieces(plan, layers)
        return cls(plan, layers)

    @property
    def notes(self) -> list[str]:
        """What of the graph stays exact, and why."""
        return self.plan.notes

    @property
    def inputs(self) -> list[str]:
        """The names of its inputs."""
        return [x.name for x in self.plan.inputs]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self.bound(*args, **kwargs)
        self._check_batch(given)
        outputs = self._run(given, lambda layer, x: layer(x))
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def bound(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The inputs by name, in the graph's types."""
        names = [x.name for x in self.plan.inputs]
        values = dict(zip(names, args, strict=False)) | dict(kwargs)
        if len(args) > len(names) or set(values) != set(names):
            given = [*(["an unnamed one"] * len(args)), *kwargs]
            wanted = "; ".join(x.describe() for x in self.plan.inputs)
            hint = f"a dict with {', '.join(names)}; from the shell an .npz with arrays of these names"
            raise ForwardError(
                f"{self.plan.path} with inputs {', '.join(given) or 'none'}", f"inputs {wanted}", hint
            )
        return {x.name: _fitted(x, values[x.name], self.plan.path) for x in self.plan.inputs}

    def _check_batch(self, given: dict[str, Any]) -> None:
        """A graph that fixes the number of inputs a batch may still answer each by itself: see, once."""
        fixed = self.plan.batch
        sizes = {len(x) for x in given.values()}
        if fixed is None or self.plan.batch_is_free or sizes == {fixed} or len(sizes) != 1 or sizes == {0}:
            return
        some = torch.arange(fixed) % sizes.pop()
        alone = self._run({name: x[some] for name, x in given.items()}, _unhooked)
        try:
            together = self._run(given, _unhooked)
            free = all(_same(alone[name], together[name], some) for name in alone)
        except (ForwardError, RuntimeError, IndexError):
            free = False
        if not free:
            raise ForwardError(
                f"{self.plan.path}, whose graph is made for batches of {fixed}",
                "a graph whose first dimension is free",
                'exporting with a free one: torch.onnx.export(..., dynamic_axes={"x": {0: "batch"}})',
            )  # fmt: skip
        self.plan.batch_is_free = True

    def sized(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """As many of these inputs, repeated, as the graph wants a batch to have."""
        fixed = None if self.plan.batch_is_free else self.plan.batch
        return batch if fixed is None else {k: x[torch.arange(fixed) % len(x)] for k, x in batch.items()}

    def _run(self, given: Mapping[str, Any], call: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Any]:
        values: dict[str, Any] = dict(given)
        todo = list(self.plan.slots)
        for piece in self.plan.pieces:
            if piece is not None:
                values |= piece.run({name: as_array(values[name]) for name in piece.inputs})
            ready = [slot for slot in todo if slot.input in values]
            for slot in ready:
                values[slot.output] = self._layer(slot, values[slot.input], call)
            todo = [slot for slot in todo if slot not in ready]
        return {name: as_tensor(values.get(name, self.plan.held.get(name))) for name in self.plan.outputs}

    def _layer(self, slot: Slot, value: Any, call: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        layer = self.get_submodule(slot.name)
        x = as_tensor(value).to(next(layer.parameters()).device)
        y = call(layer, x.transpose(-1, -2) if slot.turn_in and x.ndim > 1 else x)
        return y.transpose(-1, -2) if slot.left and x.ndim > 1 else y


def _unhooked(layer: nn.Module, x: Tensor) -> Tensor:
    return layer.forward(x)


def _same(alone: Any, together: Any, some: Tensor) -> bool:
    if not torch.is_tensor(alone) or not torch.is_tensor(together):
        return True
    if len(alone) != len(some) or alone.shape[1:] != together.shape[1:]:
        return False
    if not alone.is_floating_point():
        return torch.equal(alone, together[some])
    off = (alone.double() - together[some].double()).abs()
    return bool(off.amax() <= 1e-3 * alone.double().abs().amax()) if off.numel() else True


def _fitted(told: Input, value: Any, path: str) -> Any:
    """An input in the type that the graph declares, where that loses nothing but precision."""
    if not torch.is_tensor(value):
        return value
    wanted = f"{told.describe()}, as the graph declares it"
    given = f"{path}: an input {told.name} of shape {tuple(value.shape)}"
    if told.dims is not None:
        sizes = zip(value.shape[1:], told.dims[1:], strict=False)
        if value.ndim != len(told.dims) or any(want not in (None, have) for have, want in sizes):
            raise ForwardError(given, wanted, "inputs of that shape, a point per row")
    try:
        dtype = torch.from_numpy(np.empty(0, onnx.helper.tensor_dtype_to_np_dtype(told.type))).dtype
    except TypeError:
        kind = TensorProto.DataType.Name(told.type)
        raise ForwardError(
            f"{path}: an input {told.name} of type {kind}", "numbers", "a graph with float32 inputs"
        ) from None
    if value.is_floating_point() and not dtype.is_floating_point and bool((value != value.round()).any()):
        raise ForwardError(f"{given} that holds fractions", wanted, "whole numbers")
    return value.to(dtype)


# --- From a graph -------------------------------------------------------------------------------------------


def _names(model: ModelProto, found: list[Affine], told: Told, path: str) -> list[str]:
    """A name for each layer: those that the file tells, or what the exporter called its weight, bias or node."""
    if not told:
        names: dict[tuple[Weight, Bias | None], str] = {}
        for layer in found:
            same = layer.weight, layer.bias  # one layer, which is used twice
            names[same] = names.get(same) or _free(_wish(model, layer), list(names.values()))
        return [names[layer.weight, layer.bias] for layer in found]
    ends = ("",), (".down", ".up")
    known = {
        output: entry["name"] + end
        for entry in told
        for output, end in zip(entry["outputs"], ends[len(entry["outputs"]) - 1], strict=True)
    }
    outputs = {layer.output for layer in found}
    if outputs != known.keys():
        raise FileError(f"{path}, whose layers are not those that it tells of",
                        "the file as coresieve wrote it", "writing or fetching it again")  # fmt: skip
    return [known[layer.output] for layer in found]


def _wish(model: ModelProto, layer: Affine) -> str:
    for root, end in ((layer.weight.root, ".weight"), (layer.bias and layer.bias.root, ".bias")):
        if root and root.endswith(end):
            return root.removesuffix(end)
    node = model.graph.node[layer.nodes[0]]
    name = (node.name or layer.output).strip("/").removesuffix("/MatMul").removesuffix("/Gemm")
    return name.replace("/", ".")


def _free(wish: str, taken: list[str]) -> str:
    """A name that a module can have beside those that are taken."""
    reserved = {*dir(OnnxModel), "plan", "stands_for", "graph_sha256", "weight", "bias"}
    name = ".".join(f"{part}_" if part in reserved else part or "_" for part in wish.split("."))
    flat = name.replace(".", "_")
    for tried in itertools.chain([name, flat], (f"{flat}_{k}" for k in itertools.count(2))):
        if not any(f"{tried}.".startswith(f"{t}.") or f"{t}.".startswith(f"{tried}.") for t in taken):
            return tried
    raise AssertionError("there is always another number")


def _modules(found: list[Affine], names: list[str], constants: Constants) -> dict[str, nn.Module]:
    """The layers with their weights. Those read the same way are one parameter, and so are equal biases beside them."""
    made: dict[Any, nn.Parameter] = {}

    def parameter(weight: Weight, part: Weight | Bias) -> nn.Parameter:
        if (weight, part) not in made:
            array = np.array(part.array(constants), order="C")
            made[weight, part] = nn.Parameter(torch.from_numpy(array), requires_grad=False)
        return made[weight, part]

    layers: dict[str, nn.Module] = {}
    for name, affine in zip(names, found, strict=True):
        weight, bias = affine.weight, affine.bias
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = parameter(weight, weight)
        layer.register_parameter("bias", None if bias is None else parameter(weight, bias))
        layer.out_features, layer.in_features = layer.weight.shape
        layers[name] = layer
    return layers


def _apart(
    model: ModelProto, found: list[Affine], names: list[str], constants: Constants
) -> tuple[list[Slot], ModelProto]:
    """The layers' places, and the graph without them and without what only they read."""
    gone = {index for layer in found for index in layer.nodes}
    kept = [(i, node) for i, node in enumerate(model.graph.node) if i not in gone]
    wanted = {x.name for x in model.graph.output} | {layer.input for layer in found}
    while True:  # constants that only the layers read, one step of Identity or Transpose at a time
        read = wanted | {name for _, node in kept for name in uses(node)}
        fewer = [(i, n) for i, n in kept if read & set(n.output) or not _constant(n, constants)]
        if len(fewer) == len(kept):
            break
        kept = fewer
    rest = ModelProto()
    rest.CopyFrom(_shell(model))
    rest.graph.node.extend(node for _, node in kept)
    rest.graph.initializer.extend(t for t in model.graph.initializer if t.name in read)
    for sparse in model.graph.sparse_initializer:
        if sparse.values.name in read:
            rest.graph.initializer.append(onnx.numpy_helper.from_array(densified(sparse), sparse.values.name))
    held = initialised(model.graph)
    slots = [
        Slot(name, layer.op, layer.input, layer.output, layer.turn_in, layer.left,
             sum(i < layer.nodes[-1] for i, _ in kept),
             layer.weight.root if layer.weight.root in held and layer.weight.scale == 1 else "",
             layer.bias.root if layer.bias and layer.bias.root in held and layer.bias.scale == 1 else "")
        for name, layer in zip(names, found, strict=True)
    ]  # fmt: skip
    return slots, rest


def _constant(node: onnx.NodeProto, constants: Constants) -> bool:
    return bool(node.output) and constants.root(node.output[0]) is not None


def _shell(model: ModelProto) -> ModelProto:
    """The model without its nodes and numbers. Initialisers that are listed as inputs are none."""
    shell = ModelProto()
    for kind, value in model.ListFields():
        if kind.name == "graph":
            continue
        if kind.is_repeated:
            getattr(shell, kind.name).extend(value)
        else:
            setattr(shell, kind.name, value)
    held = initialised(model.graph)
    shell.graph.name = model.graph.name
    shell.graph.doc_string = model.graph.doc_string
    shell.graph.input.extend(x for x in model.graph.input if x.name not in held)
    shell.graph.output.extend(model.graph.output)
    return shell


def _joined(
    slots: list[Slot], layers: dict[str, nn.Module], low_rank: Told
) -> tuple[list[Slot], dict[str, nn.Module]]:
    """Thin layers that the file tells to be one layer of low rank, as one."""
    by_output = {slot.output: slot for slot in slots}
    for entry in low_rank:
        name, (down, up) = entry["name"], (by_output.pop(output) for output in entry["outputs"])
        if name not in layers:
            first, second = layers.pop(down.name), layers.pop(up.name)
            assert isinstance(first, nn.Linear)
            assert isinstance(second, nn.Linear)
            both = LowRank(first.in_features, second.out_features, first.out_features, device="meta")
            both.down, both.up = first, second
            layers[name] = both
        by_output[up.output] = Slot(
            name, down.op, down.input, up.output, down.turn_in, up.left, up.at, "", ""
        )
    return [by_output[slot.output] for slot in slots if slot.output in by_output], layers


def _constant_outputs(rest: ModelProto) -> dict[str, Tensor]:
    names = {x.name for x in rest.graph.output}
    return {
        t.name: as_tensor(onnx.numpy_helper.to_array(t).copy())
        for t in rest.graph.initializer
        if t.name in names
    }


def _pieces(plan: Plan, layers: Mapping[str, nn.Module]) -> list[Piece | None]:
    types = {x.name: x.type for x in plan.rest.graph.input}
    free = {name: _without_shape(kind) for name, kind in types.items()}
    for slot in plan.slots:
        dtype = next(layers[slot.name].parameters()).dtype
        element = onnx.helper.np_dtype_to_tensor_dtype(torch.empty(0, dtype=dtype).numpy().dtype)
        free[slot.output] = onnx.helper.make_tensor_type_proto(element, None)
    return cut(plan.rest, {slot.output: slot.input for slot in plan.slots}, free, plan.path)


def _without_shape(kind: onnx.TypeProto) -> onnx.TypeProto:
    """Sizes are free: a layer between may get smaller, and batches are of any size."""
    if not kind.HasField("tensor_type"):
        return kind
    return onnx.helper.make_tensor_type_proto(kind.tensor_type.elem_type, None)
