"""An OnnxModel as a graph again: the layers as they are now, everything around them as it was.

A layer is written the way it was found: MatMul with an Add, or Gemm; its weight on its side. A layer of low rank is two
of them. A shape that got smaller is smaller in the file. Matrices with zeros are packed afterwards (`packing.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto
from onnx.helper import make_node
from onnx.numpy_helper import from_array
from torch import Tensor, nn

from coresieve.errors import LayerError
from coresieve.graphs.model import OnnxModel, Slot, Told
from coresieve.layers.low_rank import LowRank


def written(model: OnnxModel) -> tuple[ModelProto, Told]:
    """The graph with the layers in it, and which of its tensors are which layer's outputs."""
    rest, told = model.plan.rest, []
    draft = _Draft(rest, {layer.output for layer in model.plan.slots})
    lines = [(slot, _thin(model, slot)) for slot in model.plan.slots]
    for slot, thin in lines:
        for layer in thin:
            draft.lay_out(layer.weight, slot)
    new: dict[int, list[NodeProto]] = {}
    for slot, thin in lines:
        nodes, outputs = draft.layer(slot, thin)
        new.setdefault(slot.at, []).extend(nodes)
        told.append({"name": slot.name, "outputs": outputs})
    graph = ModelProto()
    graph.CopyFrom(rest)
    del graph.graph.node[:]
    if model.plan.batch_is_free:
        for end in (*graph.graph.input, *graph.graph.output):
            _free(end, model.plan.batch)
    for place in range(len(rest.graph.node) + 1):
        graph.graph.node.extend(new.get(place, []))
        graph.graph.node.extend(rest.graph.node[place : place + 1])
    for name, array in draft.arrays.items():
        graph.graph.initializer.append(from_array(array, name))
    return graph, told


def _free(end: ValueInfoProto, batch: int | None) -> None:
    """A number of inputs that the graph fixed without need."""
    dims = end.type.tensor_type.shape.dim
    if dims and dims[0].dim_value == batch:
        dims[0].dim_param = "batch"


@dataclass(frozen=True)
class _Line:
    """One linear layer: a name for its tensors, and the tensors."""

    name: str
    weight: Tensor
    bias: Tensor | None
    wishes: tuple[str, str]  # what they were called


def _thin(model: OnnxModel, slot: Slot) -> list[_Line]:
    module = model.get_submodule(slot.name)
    if isinstance(module, LowRank):
        lines = (("down", module.down), ("up", module.up))
        return [_Line(f"{slot.name}.{end}", m.weight, m.bias, ("", "")) for end, m in lines]
    if type(module) is not nn.Linear:
        raise LayerError(f"{slot.name}, a {type(module).__name__}", "an nn.Linear or LowRank, to write as a graph",
                         "exporting before the layer is replaced")  # fmt: skip
    return [_Line(slot.name, module.weight, module.bias, (slot.weight, slot.bias))]


def _gemm(inputs: list[str], output: str, name: str, flags: dict[str, Any]) -> NodeProto:
    return make_node("Gemm", inputs, [output], name, **flags)


@dataclass
class _Draft:
    """The new tensors and their names."""

    rest: ModelProto
    taken: set[str]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)  # one tensor for a weight that is tied
    inward: dict[int, bool] = field(default_factory=dict)  # of a weight: whether it is stored (in, out)

    def __post_init__(self):
        graph = self.rest.graph
        self.taken |= {x.name for x in (*graph.input, *graph.initializer)}
        self.taken |= {name for node in graph.node for name in node.output}
        self.nodes = {node.name for node in graph.node}

    def lay_out(self, weight: Tensor, slot: Slot) -> None:
        """MatMul cannot turn its weight, so it says how a weight that it shares with a Gemm is stored."""
        if slot.op == "MatMul" or id(weight) not in self.inward:
            self.inward[id(weight)] = slot.op == "MatMul" and not slot.left

    def layer(self, slot: Slot, lines: list[_Line]) -> tuple[list[NodeProto], list[str]]:
        nodes, outputs, x = [], [], slot.input
        for k, line in enumerate(lines):
            last = k == len(lines) - 1
            output = slot.output if last else self._free(f"{line.name}.output")
            turn_in = slot.turn_in if k == 0 else slot.left
            nodes += self._affine(slot, line, x, output, turn_in)
            outputs.append(output)
            x = output
        return nodes, outputs

    def _affine(self, slot: Slot, line: _Line, x: str, output: str, turn_in: bool) -> list[NodeProto]:
        inward, left = self.inward[id(line.weight)], slot.left
        weight = self._tensor(line.weight, line.wishes[0] or f"{line.name}.weight", turned=inward)
        wish = line.wishes[1] or f"{line.name}.bias"
        bias = [] if line.bias is None else [self._tensor(line.bias, wish, column=left)]
        node = self._node(f"{line.name}.{slot.op}")
        if slot.op == "Gemm":
            inputs = [weight, x] if left else [x, weight]
            turns = (
                {"transA": inward, "transB": not turn_in}
                if left
                else {"transA": turn_in, "transB": not inward}
            )
            flags = {name: 1 for name, turn in turns.items() if turn}
            return [_gemm([*inputs, *bias], output, node, flags)]
        inputs = [weight, x] if left else [x, weight]
        if not bias:
            return [make_node("MatMul", inputs, [output], node)]
        product = self._free(f"{line.name}.product")
        add = make_node("Add", [product, *bias], [output], self._node(f"{line.name}.Add"))
        return [make_node("MatMul", inputs, [product], node), add]

    def _tensor(self, tensor: Tensor, wish: str, *, turned: bool = False, column: bool = False) -> str:
        key = id(tensor), turned, column
        if key not in self.names:
            array = tensor.detach().cpu()
            array = array.T if turned else array.unsqueeze(1) if column else array
            self.names[key] = self._free(wish)
            self.arrays[self.names[key]] = np.array(array.numpy(), order="C")
        return self.names[key]

    def _free(self, wish: str) -> str:
        while wish in self.taken:
            wish += "_"
        self.taken.add(wish)
        return wish

    def _node(self, wish: str) -> str:
        while wish in self.nodes:
            wish += "_"
        self.nodes.add(wish)
        return wish
