"""A matrix with zeros in fewer bytes of an ONNX file: its other values, and one byte for the gap before each.

    places = CumSum(Cast(gaps)) - 1
    matrix = Reshape(ScatterElements(zeros, places, values), shape)

These are standard operators since opset 11, and depend on constants alone: onnxruntime computes them once, as it loads
the file, and runs a plain MatMul or Gemm. A gap of more than 255 takes a zero among the values for each 255.

In float32 a value costs 5 bytes so, where ONNX's own sparse initialisers cost 12: 8 of them for an index, since
onnx.checker accepts no narrower ones. Those are written only for opsets before 11.

>>> gaps, values = gapped(np.float32([[0, 0], [0, 5]]))
>>> gaps.tolist(), values.tolist()
([4], [5.0])
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, SparseTensorProto, TensorProto
from onnx.helper import make_node
from onnx.numpy_helper import from_array, to_array

from coresieve.graphs.protos import opset, tensors, uses

FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16}
PACKED_SINCE = 11  # ScatterElements, CumSum
WORDS = 700  # bytes for the nodes and names of one matrix
INDEX = 8  # of a sparse initialiser
SPARSE_SINCE = 6  # version of the file format
ZERO, ONE = "coresieve.zero", "coresieve.one"
PARTS = ("gaps", "steps", "sums", "places", "size", "zeros", "values", "flat", "shape")


def packed(model: ModelProto) -> tuple[ModelProto, list[str]]:
    """The same graph, matrices packed where that is smaller, and the names of those."""
    made = ModelProto()
    made.CopyFrom(model)
    del made.graph.initializer[:], made.graph.node[:]
    names, nodes = [], []
    taken = {t.name for t in tensors(model.graph)} | {
        name for n in model.graph.node for name in (*n.input, *n.output)
    }
    inner = {name for node in model.graph.node for name in set(uses(node)) - set(node.input)}
    for tensor in model.graph.initializer:
        array = to_array(tensor) if tensor.data_type in FLOATS and len(tensor.dims) == 2 else np.empty((0, 0))
        own = {f"{tensor.name}.{part}" for part in PARTS}
        free = tensor.name not in inner and not own & taken
        if free and opset(model) >= PACKED_SINCE and _size(array) < 0.95 * array.nbytes:
            held, steps = _pack(array, tensor.name)
            made.graph.initializer.extend(held)
            nodes += steps
            names.append(tensor.name)
        elif free and opset(model) < PACKED_SINCE and 0 < _sparse_size(array) < 0.95 * array.nbytes:
            made.graph.sparse_initializer.append(sparsified(array, tensor.name))
            made.ir_version = max(made.ir_version, SPARSE_SINCE)
        else:
            made.graph.initializer.append(tensor)
    if names:
        made.graph.initializer.extend(from_array(np.array(k), name) for k, name in enumerate((ZERO, ONE)))
    made.graph.node.extend([*nodes, *model.graph.node])
    return made, names


def unpacked(model: ModelProto, names: list[str]) -> ModelProto:
    """The inverse of `packed`."""
    made = ModelProto()
    made.CopyFrom(model)
    del made.graph.initializer[:], made.graph.node[:]
    held = {t.name: t for t in model.graph.initializer}
    parts = {f"{name}.{part}" for name in names for part in PARTS} | ({ZERO, ONE} if names else set())
    for name in names:
        gaps, values, shape = (to_array(held[f"{name}.{part}"]) for part in ("gaps", "values", "shape"))
        array = np.zeros(shape, values.dtype)
        array.reshape(-1)[np.cumsum(gaps, dtype=np.int64) - 1] = values
        made.graph.initializer.append(from_array(array, name))
    made.graph.initializer.extend(t for t in model.graph.initializer if t.name not in parts)
    made.graph.node.extend(
        n for n in model.graph.node if not parts & set(n.output) and n.output[0] not in names
    )
    return made


def gapped(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gap before each value, and the values, row by row."""
    flat = np.ascontiguousarray(array).reshape(-1)
    places = _places(flat)
    gaps = np.diff(places, prepend=-1)
    ends = np.cumsum((gaps - 1) // 255 + 1) - 1
    steps = np.full(ends[-1] + 1 if len(ends) else 0, 255, np.uint8)
    steps[ends] = (gaps - 1) % 255 + 1
    values = np.zeros(len(steps), flat.dtype)
    values[ends] = flat[places]
    return steps, values


def _places(flat: np.ndarray) -> np.ndarray:
    """Of all that is not 0 bit for bit: -0.0 stays what it is."""
    return np.flatnonzero(np.ascontiguousarray(flat).view(f"u{flat.itemsize}"))


def _size(array: np.ndarray) -> int:
    """Bytes of a packed matrix, or a little less: what gaps of more than 255 cost is not counted."""
    return WORDS + len(_places(array.reshape(-1))) * (1 + array.itemsize)


def _sparse_size(array: np.ndarray) -> int:
    return len(_places(array.reshape(-1))) * (INDEX + array.itemsize)


def _pack(array: np.ndarray, name: str) -> tuple[list[TensorProto], list[NodeProto]]:
    gaps, values = gapped(array)
    own = {part: f"{name}.{part}" for part in PARTS}
    size, shape = np.array([array.size]), np.array(array.shape)
    arrays = {"gaps": gaps, "values": values, "size": size, "shape": shape}
    steps = [
        ("Cast", [own["gaps"]], own["steps"], {"to": TensorProto.INT64}),
        ("CumSum", [own["steps"], ZERO], own["sums"], {}),
        ("Sub", [own["sums"], ONE], own["places"], {}),
        ("ConstantOfShape", [own["size"]], own["zeros"], {"value": from_array(np.zeros(1, array.dtype))}),
        ("ScatterElements", [own["zeros"], own["places"], own["values"]], own["flat"], {"axis": 0}),
        ("Reshape", [own["flat"], own["shape"]], name, {}),
    ]
    held = [from_array(value, own[part]) for part, value in arrays.items()]
    return held, [make_node(op, inputs, [output], output, **how) for op, inputs, output, how in steps]


def sparsified(array: np.ndarray, name: str) -> SparseTensorProto:
    """Values and where they stand in the rows one after another.

    >>> made = sparsified(np.float32([[0, 0], [0, 5]]), "w")
    >>> to_array(made.indices).tolist(), list(made.dims)
    ([3], [2, 2])
    """
    places = _places(array.reshape(-1))
    values = from_array(np.ascontiguousarray(array.reshape(-1)[places]), name)
    indices = from_array(places.astype(np.int64), f"{name}_indices")
    return SparseTensorProto(values=values, indices=indices, dims=array.shape)
