"""An ONNX file as a graph that is whole: its external data loaded, its functions inlined, of a version that runs.

`Constants` answers which tensors of a graph are constant, however they are written: as an initialiser, a sparse one,
a Constant node, or one of these behind Identity and Transpose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.inliner
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto
from onnx.external_data_helper import load_external_data_for_model, uses_external_data
from onnx.numpy_helper import to_array

from coresieve.errors import FileError

OLDEST = 7  # onnxruntime's own limit; before it, operators broadcast in another way
STANDARD = ("", "ai.onnx")


def parse(raw: bytes, path: str) -> ModelProto:
    """The graph in these bytes, with what it keeps in other files beside `path`."""
    model = ModelProto()
    try:
        model.ParseFromString(raw)
    except DecodeError as error:
        raise FileError(f"{path} is cut short, damaged or no ONNX file", "an ONNX model",
                        "exporting or fetching it again") from error  # fmt: skip
    if not model.graph.output or not model.opset_import:
        raise FileError(f"{path} holds no ONNX graph", "an ONNX model", "the file that the exporter wrote")
    check_version(model, path)
    load_outside(model, path)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    return model


def check_version(model: ModelProto, path: str) -> None:
    newest = onnx.defs.onnx_opset_version()
    for opset in model.opset_import:
        if opset.domain in STANDARD and not OLDEST <= opset.version <= newest:
            given = f"{path} of opset {opset.version}"
            hint = (
                f"onnx.version_converter.convert_version(model, {min(17, newest)})"
                if opset.version < OLDEST
                else "a newer onnx and onnxruntime, or exporting with an older opset"
            )
            raise FileError(given, f"an opset from {OLDEST} to {newest}", hint)


def load_outside(model: ModelProto, path: str) -> None:
    """Weights that the file keeps in other files: they stand beside it, whole, or it is an error that names them."""
    folder = os.path.dirname(os.path.abspath(path))
    places = [_place(tensor) for tensor in tensors(model.graph) if uses_external_data(tensor)]
    for name in dict.fromkeys(place.location for place in places):
        file = os.path.join(folder, name)
        hint = f"copying {name} along, or onnx.save(onnx.load(path), new) where it is whole: that writes one file"
        given = f"{path} keeps weights in {name!r}, which"
        if os.path.isabs(name) or ".." in name.split("/"):
            raise FileError(
                f"{given} is outside of its folder", "a file beside it", "onnx.save(...) as one file"
            )
        if not os.path.isfile(file):
            raise FileError(f"{given} is not there", f"that file in {folder}", hint)
        needed = max(place.end for place in places if place.location == name)
        if (size := os.path.getsize(file)) < needed:
            raise FileError(f"{given} is cut short", f"{needed:,} bytes; it has {size:,}", hint)
    try:
        load_external_data_for_model(model, folder)
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise FileError(
            f"{path} keeps weights elsewhere ({error})", "files beside it", "onnx.save(...) as one file"
        ) from error


@dataclass(frozen=True)
class _Place:
    location: str
    end: int


def _place(tensor: TensorProto) -> _Place:
    told = {entry.key: entry.value for entry in tensor.external_data}
    try:
        end = int(told.get("offset", 0)) + int(told.get("length", 0))
    except ValueError:
        end = 0
    return _Place(told.get("location", ""), end)


# --- Walking ------------------------------------------------------------------------------------------------


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """All tensors with numbers in a graph, those in attributes and subgraphs too."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors
        for inner in subgraphs(node):
            yield from tensors(inner)


def uses(node: NodeProto) -> list[str]:
    """The names that a node reads, those that its subgraphs take from outside too."""
    return [name for name in node.input if name] + [n for g in subgraphs(node) for n in _outside(g)]


def _outside(graph: GraphProto) -> list[str]:
    own = {x.name for x in graph.input} | initialised(graph)
    found: list[str] = []
    for node in graph.node:
        found += [name for name in uses(node) if name not in own]
        own |= set(node.output)
    return found + [x.name for x in graph.output if x.name not in own]


def initialised(graph: GraphProto) -> set[str]:
    return {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}


def attributes(node: NodeProto) -> dict:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def opset(model: ModelProto) -> int:
    return max(o.version for o in model.opset_import if o.domain in STANDARD)


# --- Constants ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Root:
    """Where a constant's numbers are, and whether it is read transposed."""

    name: str
    transposed: bool = False


class Constants:
    """The constant tensors of a graph."""

    def __init__(self, graph: GraphProto):
        self.dense = {t.name: t for t in graph.initializer}
        self.sparse = {s.values.name: s for s in graph.sparse_initializer}
        self.nodes = {output: node for node in graph.node for output in node.output}

    def root(self, name: str) -> Root | None:
        """Its numbers' home, behind any Identity and Transpose; None for what is computed, or no plain tensor."""
        if name in self.dense or name in self.sparse:
            return Root(name)
        node = self.nodes.get(name)
        if node is None or node.domain not in STANDARD:
            return None
        if node.op_type == "Constant":
            return Root(name) if _value(node) is not None else None
        if node.op_type not in ("Identity", "Transpose"):
            return None
        root = self.root(node.input[0])
        if root is None or node.op_type == "Identity":
            return root
        turned = self.dims(root.name)
        swaps = list(attributes(node).get("perm", [1, 0])) == [1, 0]
        return Root(root.name, not root.transposed) if len(turned) == 2 and swaps else None

    def dims(self, name: str) -> tuple[int, ...]:
        if name in self.dense:
            return tuple(self.dense[name].dims)
        if name in self.sparse:
            return tuple(self.sparse[name].dims)
        value = _value(self.nodes[name])
        assert value is not None
        return tuple(value.dims) if isinstance(value, TensorProto) else value.shape

    def type(self, name: str) -> int:
        """The element type, as ONNX numbers them."""
        if name in self.dense:
            return self.dense[name].data_type
        if name in self.sparse:
            return self.sparse[name].values.data_type
        value = _value(self.nodes[name])
        assert value is not None
        if isinstance(value, TensorProto):
            return value.data_type
        return onnx.helper.np_dtype_to_tensor_dtype(value.dtype)

    def array(self, name: str) -> np.ndarray:
        if name in self.dense:
            return to_array(self.dense[name])
        if name in self.sparse:
            return densified(self.sparse[name])
        value = _value(self.nodes[name])
        assert value is not None
        return to_array(value) if isinstance(value, TensorProto) else value


def _value(node: NodeProto) -> TensorProto | np.ndarray | None:
    """What a Constant node holds, where it is a dense tensor of numbers."""
    given = attributes(node)
    if isinstance(given.get("value"), TensorProto):
        return given["value"]
    for name, dtype in (("value_float", np.float32), ("value_floats", np.float32)):
        if name in given:
            return np.asarray(given[name], dtype)
    return None


def densified(sparse: SparseTensorProto) -> np.ndarray:
    values, indices, dims = to_array(sparse.values), to_array(sparse.indices), tuple(sparse.dims)
    dense = np.zeros(dims, values.dtype)
    if indices.ndim == 2:
        dense[tuple(indices.T)] = values
    else:
        dense.reshape(-1)[indices] = values
    return dense
