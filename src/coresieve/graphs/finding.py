"""The layers of a graph: MatMul and Gemm with a constant weight on either side, and the Add of a constant after one.

Each is seen as `y = x W^T + b`, whatever way it is written:

    MatMul(x, V), Gemm(x, V)       W = V^T       rows of x are the points
    Gemm(x, V, transB=1)           W = V
    MatMul(V, x), Gemm(V, x)       W = V         columns of x are the points: x and y are turned
    Gemm(alpha, beta, C)           W = alpha ..., b = beta C

A weight that several of them read the same way is one weight, tied. What else a weight is read by, or in which other
way, decides that it stays exact; `notes` has a line for each part that does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto

from coresieve.graphs.protos import STANDARD, Constants, Root, attributes, subgraphs, uses

FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16}


@dataclass(frozen=True)
class Weight:
    """A matrix W, (out, in): where its numbers are and how they are read. Equal ones are tied."""

    root: str
    turned: bool  # W is the transpose of what is stored
    scale: float
    left: bool

    def array(self, constants: Constants) -> np.ndarray:
        stored = constants.array(self.root)
        return _scaled(stored.T if self.turned else stored, self.scale)


@dataclass(frozen=True)
class Bias:
    root: str
    scale: float

    def array(self, constants: Constants) -> np.ndarray:
        return _scaled(constants.array(self.root).reshape(-1), self.scale)


def _scaled(array: np.ndarray, scale: float) -> np.ndarray:
    return array if scale == 1 else (array * np.float64(scale)).astype(array.dtype)


@dataclass(frozen=True)
class Affine:
    """One layer in the graph. `nodes` are its one or two nodes, by their place."""

    op: str
    input: str
    output: str
    turn_in: bool  # the points are the columns of the input
    weight: Weight
    bias: Bias | None
    nodes: tuple[int, ...]

    @property
    def left(self) -> bool:
        """The weight stands on the left: points are the columns of the output."""
        return self.weight.left


def find(model: ModelProto, constants: Constants) -> tuple[list[Affine], list[str]]:
    """The layers in the order of the graph, and why others are none."""
    search = _Search(model, constants)
    found = search.layers()
    return found, search.notes


def label(node: NodeProto) -> str:
    return node.name or (node.output[0] if node.output else node.op_type)


class _Search:
    def __init__(self, model: ModelProto, constants: Constants):
        self.graph, self.constants = model.graph, constants
        self.model, self.ranks = model, None
        self.notes: list[str] = []
        self.readers: dict[str, list[int]] = {}
        for index, node in enumerate(self.graph.node):
            for name in uses(node):
                self.readers.setdefault(name, []).append(index)
        self.outputs = {x.name for x in self.graph.output}

    def layers(self) -> list[Affine]:
        found = {}
        for index, node in enumerate(self.graph.node):
            layer = self._layer(index, node)
            if layer is not None:
                found[index] = layer
        return self._alone(found)

    # --- One node -------------------------------------------------------------------------------------------

    def _layer(self, index: int, node: NodeProto) -> Affine | None:
        if node.domain in STANDARD and node.op_type in ("MatMul", "Gemm"):
            roots = [self.constants.root(name) for name in node.input[:2]]
            if all(roots):
                return None  # a constant itself
            reason = self._why_not(node, roots)
            if reason is None:
                layer = self._gemm(index, node, roots) if node.op_type == "Gemm" else None
                layer = self._matmul(index, node, roots) if node.op_type == "MatMul" else layer
                if layer is not None:
                    return layer
                reason = "its bias is computed, or is no vector with a number for each of its rows"
            self._note(node, reason)
        elif reason := self._holds_weights(node):
            self._note(node, reason)
        return None

    def _note(self, node: NodeProto, reason: str) -> None:
        self.notes.append(f"{label(node)} stays exact: {reason}")

    def _why_not(self, node: NodeProto, roots: list[Root | None]) -> str | None:
        root = roots[0] or roots[1]
        if root is None:
            made = [self.constants.nodes.get(name) for name in node.input[:2]]
            if any(x is not None and x.op_type == "DequantizeLinear" for x in made):
                return "its weight is quantized"
            steps = [x.op_type for x in made if x is not None and self._computed_from_constants(x)]
            if steps:
                return f"its weight is computed in the graph, by {steps[0]} (fold constants to compress it)"
            return "both its factors are computed, so it has no weight of its own"
        dims, kind = self.constants.dims(root.name), self.constants.type(root.name)
        if len(dims) != 2:
            return f"its weight has {len(dims)} dimension{'s' * (len(dims) != 1)}, where a matrix has 2"
        if kind not in FLOATS:
            return f"its weight is {TensorProto.DataType.Name(kind)}, which coresieve does not compute with"
        if not math.prod(dims):
            return "it has no edges"
        return None

    def _computed_from_constants(self, node: NodeProto) -> bool:
        """Whether nothing that it computes from depends on the inputs."""
        names = uses(node)
        makers = [self.constants.nodes.get(name) for name in names if self.constants.root(name) is None]
        return all(maker is not None and self._computed_from_constants(maker) for maker in makers) and (
            bool(names) or node.op_type == "Constant"
        )

    def _holds_weights(self, node: NodeProto) -> str | None:
        if any(inner.op_type in ("MatMul", "Gemm") for g in subgraphs(node) for inner in g.node):
            return f"what is inside of {node.op_type} is left alone"
        if self._computed_from_constants(node):
            return None
        for name in node.input:
            root = self.constants.root(name) if name else None
            dims = () if root is None else self.constants.dims(root.name)
            if len(dims) > 1 and math.prod(dims) > max(dims):
                return f"{node.op_type} is not a layer that coresieve compresses"
        return None

    def _matmul(self, index: int, node: NodeProto, roots: list[Root | None]) -> Affine:
        left = roots[0] is not None
        root = roots[0] or roots[1]
        assert root is not None
        weight = Weight(root.name, root.transposed if left else not root.transposed, 1.0, left)
        layer = Affine("MatMul", node.input[1 if left else 0], node.output[0], left, weight, None, (index,))
        return self._with_bias(layer)

    def _gemm(self, index: int, node: NodeProto, roots: list[Root | None]) -> Affine | None:
        given = attributes(node)
        left = roots[0] is not None
        root = roots[0] or roots[1]
        assert root is not None
        own, other = ("transA", "transB") if left else ("transB", "transA")
        stored_turned = root.transposed != bool(given.get(own, 0))
        weight = Weight(
            root.name, stored_turned if left else not stored_turned, given.get("alpha", 1.0), left
        )
        turn_in = bool(given.get(other, 0)) != left
        bias, beta = None, given.get("beta", 1.0)
        if len(node.input) > 2 and node.input[2] and beta != 0:
            bias = self._bias(node.input[2], self._rows(weight), beta, left, rank=2)
            if bias is None:
                return None
        return Affine("Gemm", node.input[1 if left else 0], node.output[0], turn_in, weight, bias, (index,))

    def _rows(self, weight: Weight) -> int:
        return self.constants.dims(weight.root)[1 if weight.turned else 0]

    def _with_bias(self, layer: Affine) -> Affine:
        """The MatMul, and the Add that follows it where that adds a number to each of its rows."""
        readers = self.readers.get(layer.output, [])
        if len(readers) != 1 or layer.output in self.outputs:
            return layer
        add = self.graph.node[readers[0]]
        if add.op_type != "Add" or add.domain not in STANDARD or list(add.input).count(layer.output) != 1:
            return layer
        other = next(name for name in add.input if name != layer.output)
        dims = self._dims(other)
        if dims is None or ((layer.left or len(dims) > 1) and self._rank(layer.output) is None):
            return layer
        rank = self._rank(layer.output) if layer.left or len(dims) > 1 else len(dims)
        bias = self._bias(other, self._rows(layer.weight), 1.0, layer.left, rank or 0)
        if bias is None or self.constants.type(bias.root) != self.constants.type(layer.weight.root):
            return layer
        return replace(layer, output=add.output[0], bias=bias, nodes=(*layer.nodes, readers[0]))

    def _dims(self, name: str) -> tuple[int, ...] | None:
        root = self.constants.root(name)
        if root is None:
            return None
        dims = self.constants.dims(root.name)
        return dims[::-1] if root.transposed else dims

    def _bias(self, name: str, rows: int, scale: float, left: bool, rank: int) -> Bias | None:
        """A constant with one number for each row, in a shape that adds no dimension to the output."""
        dims = self._dims(name)
        if dims is None or len(dims) > rank or not dims or rank < 1 + left:
            return None
        lines, wanted = (dims[:-2], (rows, 1)) if left else (dims[:-1], (rows,))
        if dims[len(lines) :] != wanted or math.prod(lines) != 1:
            return None
        root = self.constants.root(name)
        assert root is not None
        return Bias(root.name, scale)

    def _rank(self, name: str) -> int | None:
        if self.ranks is None:
            self.ranks = _ranks(self.model)
        return self.ranks.get(name)

    # --- All together ---------------------------------------------------------------------------------------

    def _alone(self, found: dict[int, Affine]) -> list[Affine]:
        """Those whose weights nothing else reads, or reads in another way. Of a bias each layer has its own."""
        ways: dict[str, set[Weight]] = {}
        reads: dict[str, int] = {}
        for layer in found.values():
            root = layer.weight.root
            ways.setdefault(root, set()).add(layer.weight)
            reads[root] = reads.get(root, 0) + 1
        alone = []
        for index, layer in found.items():
            root = layer.weight.root
            if len(ways[root]) == 1 and self._reads(root) == reads[root]:
                alone.append(layer)
            else:
                self._note(self.graph.node[index], "another node reads its weight too, or in another way")
        return alone

    def _reads(self, root: str) -> int:
        """How often a constant is read, in the end: what Identity and Transpose do with it are no reads."""
        total, names = 0, [root]
        while names:
            name = names.pop()
            total += name in self.outputs
            for index in self.readers.get(name, []):
                node = self.graph.node[index]
                inner = self.constants.root(node.output[0]) if node.output else None
                if inner is not None and inner.name == root:
                    names.append(node.output[0])
                else:
                    total += 1
        return total


def _ranks(model: ModelProto) -> dict[str, int]:
    """How many dimensions each tensor has, where the graph tells."""
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # what cannot be inferred is not known; the inference of onnx raises many kinds
        graph = model.graph
    return {
        x.name: len(x.type.tensor_type.shape.dim)
        for x in (*graph.value_info, *graph.input, *graph.output)
        if x.type.tensor_type.HasField("shape")
    }
