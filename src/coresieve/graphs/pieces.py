"""What lies between the layers of a graph, in pieces that onnxruntime runs: any operator works.

A tensor's level is the number of layers on the longest way to it. Nodes of one level are one piece, which runs before
the layers that read that level: so each layer runs once, all of a piece's inputs are there when it runs, and there are
no more pieces than layers in a row. What depends on no input is repeated in each piece that reads it, because some
operators want constants there.

A piece never changes and can be shared by any number of copies of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import ModelProto, NodeProto, TensorProto, TypeProto

from coresieve.errors import FileError, ForwardError
from coresieve.graphs.protos import uses

TYPES = {
    "float": TensorProto.FLOAT,
    "double": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int16": TensorProto.INT16,
    "int8": TensorProto.INT8,
    "uint64": TensorProto.UINT64,
    "uint32": TensorProto.UINT32,
    "uint16": TensorProto.UINT16,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
    "string": TensorProto.STRING,
}


class Piece:
    """Some nodes as a network of their own."""

    def __init__(self, model: ModelProto, path: str):
        self.model, self.path = model, path
        self.inputs = [x.name for x in model.graph.input]
        self.outputs = [x.name for x in model.graph.output]
        self._session: onnxruntime.InferenceSession | None = session(model, path)

    def __deepcopy__(self, memo: Any) -> Piece:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_session": None}

    @property
    def types(self) -> dict[str, TypeProto]:
        """Of its outputs, as the runtime tells them."""
        return {x.name: _type(x.type, x.name, self.path) for x in self._running().get_outputs()}

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Its outputs: arrays, or what else an operator may answer."""
        feeds = {name: values[name] for name in self.inputs}
        try:
            return dict(zip(self.outputs, self._running().run(self.outputs, feeds), strict=True))
        except Exception as error:  # its errors share no base class
            ops = ", ".join(dict.fromkeys(node.op_type for node in self.model.graph.node))
            raise ForwardError(
                f"onnxruntime on {self.path}, between its layers ({ops}): {' '.join(str(error).split())[:400]}",
                "inputs that the graph takes",
                "running the file in onnxruntime on one batch",
            ) from error

    def _running(self) -> onnxruntime.InferenceSession:
        if self._session is None:
            self._session = session(self.model, self.path)
        return self._session


def session(model: ModelProto | bytes, path: str) -> onnxruntime.InferenceSession:
    """The graph ready to run, with as many threads as torch has."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is an exception, and nothing on stderr
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch's threads run beside
    raw = model if isinstance(model, bytes) else model.SerializeToString()
    try:
        return onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        told = " ".join(str(error).split())
        raise FileError(f"{path}, which onnxruntime refuses ({told[:400]})", "a graph that it runs",
                        "a newer onnxruntime, another opset, or float32 where it is bfloat16") from error  # fmt: skip


def _type(told: str, name: str, path: str) -> TypeProto:
    """'tensor(float)', as the runtime says it, for a graph."""
    if told.startswith("tensor(") and told[7:-1] in TYPES:
        return onnx.helper.make_tensor_type_proto(TYPES[told[7:-1]], None)
    if told.startswith("seq("):
        return onnx.helper.make_sequence_type_proto(_type(told[4:-1], name, path))
    raise FileError(f"{path} hands {name}, a {told}, from before a layer to behind it", "tensors there",
                    "a graph without the part that needs it")  # fmt: skip


def levels(
    nodes: Sequence[NodeProto],
    layers: Mapping[str, str],
    given: Iterable[str],
    held: Iterable[str],
    path: str = "the graph",
) -> dict[str, int]:
    """How many layers lie on the longest way to each tensor; -1 for what depends on no input.

    layers: their {output: input}. given: the graph's inputs. held: its constants.

    >>> relu = onnx.helper.make_node("Relu", ["h"], ["y"])
    >>> levels([relu], {"h": "x"}, ["x"], ["c"])
    {'c': -1, 'x': 0, 'h': 1, 'y': 1}
    """
    found = dict.fromkeys(held, -1) | dict.fromkeys(given, 0)
    waiting = dict(layers)

    def pass_layers() -> None:
        while done := [y for y, x in waiting.items() if x in found]:
            for y in done:
                found[y] = max(found[waiting.pop(y)], 0) + 1

    pass_layers()
    for node in nodes:
        missing = [name for name in uses(node) if name not in found]
        if missing:
            raise FileError(f"{path}, whose node {node.name or node.op_type} reads {missing[0]!r} before it is made",
                            "nodes in an order in which they can run", "onnx.checker.check_model(path)")  # fmt: skip
        level = max((found[name] for name in uses(node)), default=-1)
        found |= dict.fromkeys(filter(None, node.output), level)
        pass_layers()
    if waiting:
        raise FileError(f"{path}, in which nothing makes {next(iter(waiting.values()))!r}",
                        "a graph that is whole", "onnx.checker.check_model(path)")  # fmt: skip
    return found


def cut(
    rest: ModelProto, layers: Mapping[str, str], types: Mapping[str, TypeProto], path: str
) -> list[Piece | None]:
    """The pieces by level. `types` are those of the inputs and of the layers' outputs."""
    known, wanted = dict(types), {x.name for x in rest.graph.output} | set(layers.values())
    held = {t.name for t in rest.graph.initializer}
    level = levels(rest.graph.node, layers, types.keys() - layers.keys(), held, path)
    nodes = _Nodes(rest, level)
    if lost := wanted - level.keys():
        raise FileError(f"{path}, in which nothing makes {min(lost)!r}", "a graph that is whole",
                        "onnx.checker.check_model(path)")  # fmt: skip
    pieces: list[Piece | None] = []
    for depth in range(max([*level.values(), 0]) + 1):
        outputs = nodes.outputs(depth, wanted)
        piece = Piece(nodes.part(depth, outputs, known), path) if outputs else None
        pieces.append(piece)
        known |= {} if piece is None else piece.types
    return pieces


class _Nodes:
    """The nodes of a graph and their levels."""

    def __init__(self, rest: ModelProto, level: Mapping[str, int]):
        self.rest, self.level = rest, level
        self.nodes = list(rest.graph.node)
        self.depths = [level[next(filter(None, node.output))] for node in self.nodes]
        self.makers = {name: i for i, node in enumerate(self.nodes) for name in node.output if name}

    def outputs(self, depth: int, wanted: set[str]) -> list[str]:
        """What later pieces, layers or the caller read of those of one level, constants among the first."""
        mine = {name for name, i in self.makers.items() if self.depths[i] == depth}
        if depth == 0:
            mine |= {name for name in self.makers if self.level[name] == -1 and name in wanted}
        pairs = zip(self.nodes, self.depths, strict=True)
        later = {name for node, at in pairs if at > depth for name in uses(node)}
        return sorted(mine & (wanted | {name for name in later if self.level[name] == depth}))

    def part(self, depth: int, outputs: list[str], types: Mapping[str, TypeProto]) -> ModelProto:
        """The nodes of one level, and the constant ones that they read, as a graph."""
        own = {i for i, at in enumerate(self.depths) if at == depth}
        names = {name for i in own for name in uses(self.nodes[i])} | set(outputs)
        queue = [name for name in names if self.level[name] == -1]
        while queue:
            maker = self.makers.get(queue.pop())
            if maker is not None and maker not in own:
                own.add(maker)
                queue += uses(self.nodes[maker])
                names |= set(uses(self.nodes[maker]))
        made = {name for i in own for name in self.nodes[i].output}
        held = [t for t in self.rest.graph.initializer if t.name in names]
        given = sorted(names - made - {t.name for t in held})
        graph = onnx.helper.make_graph(
            [self.nodes[i] for i in sorted(own)], "piece",
            [onnx.helper.make_value_info(name, types[name]) for name in given],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            held,
        )  # fmt: skip
        version = max(4, self.rest.ir_version)  # since then constants need not be inputs
        return onnx.helper.make_model(graph, opset_imports=self.rest.opset_import, ir_version=version)


def as_array(value: Any) -> Any:
    """What a piece takes: an array of its own numbers."""
    return value.detach().cpu().contiguous().numpy() if torch.is_tensor(value) else value


def as_tensor(value: Any) -> Any:
    """An array of numbers as a tensor; text, lists and maps as they are."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" else value
