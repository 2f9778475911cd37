"""Where the bytes of a network's file went: by tensor, by layer, beside what they were and the bound of each.

>>> import tempfile
>>> from torch import nn
>>> from coresieve.storage import save_model
>>> path = Path(tempfile.mkdtemp()) / "small.safetensors"
>>> save_model(path, nn.Linear(3, 2), {})
>>> [(layer.name, layer.bytes, layer.kept) for layer in by_layer(weighed(path), [])]
[('(model)', 32, 8)]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from coresieve.cli_arguments import is_onnx
from coresieve.compact.bounds import Least, least
from coresieve.report import LayerReport


@dataclass(frozen=True)
class Part:
    """One tensor in the file."""

    name: str
    dense: int  # bytes of all its entries
    width: int  # bytes of one
    positions: int  # bytes that tell which entries are there
    values: int
    coded: bool  # else all entries are written as they are
    least: Least

    @property
    def bytes(self) -> int:
        return self.positions + self.values


@dataclass
class Layer:
    """The tensors of one layer. `before`: bytes of the original's, where a report tells its size."""

    name: str
    parts: list[Part] = field(default_factory=list)
    before: int | None = None

    @property
    def positions(self) -> int:
        return sum(part.positions for part in self.parts)

    @property
    def coded(self) -> int:
        return sum(part.values for part in self.parts if part.coded)

    @property
    def plain(self) -> int:
        return sum(part.values for part in self.parts if not part.coded)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def dense(self) -> int:
        return sum(part.dense for part in self.parts)

    @property
    def kept(self) -> int:
        return sum(part.least.kept for part in self.parts)

    @property
    def bound(self) -> float:
        return sum(part.least.bytes for part in self.parts)


def weighed(path: Path, rounding: str = "") -> list[Part]:
    """The tensors of a file of any kind that the commands read."""
    if is_onnx(path):
        return _onnx(path, rounding)
    from safetensors.torch import load_file

    from coresieve import storage

    if not storage.is_ours(path):
        return [_part(name, tensor, rounding) for name, tensor in load_file(path).items()]
    told = storage.read_header(path)["file"]["tensors"]
    return [
        _part(name, tensor, rounding, told[name]["bytes"], told[name].get("positions"))
        for name, tensor in storage.read_tensors(path).items()
    ]


def _part(
    name: str, tensor: Tensor, rounding: str, size: int | None = None, positions: int | None = None
) -> Part:
    size, where = tensor.nbytes if size is None else size, min(positions or 0, size or 0)
    return Part(
        name,
        tensor.nbytes,
        tensor.element_size(),
        where,
        size - where,
        positions is not None,
        least(tensor, rounding),
    )


def _onnx(path: Path, rounding: str) -> list[Part]:
    """Initialisers; those of a packed matrix are one part, its gaps the positions."""
    import numpy as np
    import torch
    from onnx import ModelProto
    from onnx.numpy_helper import to_array

    from coresieve.graphs.files import _read
    from coresieve.graphs.packing import PARTS

    _, graph, inner = _read(path)
    names = [] if inner is None else inner["packed"]
    raw = ModelProto.FromString(path.read_bytes()).graph
    sizes = {t.name: t.ByteSize() for t in raw.initializer}
    where = {name: sizes.get(f"{name}.gaps", 0) for name in names}
    whole = {name: sum(sizes.get(f"{name}.{part}", 0) for part in PARTS) for name in names}
    arrays = {t.name: to_array(t) for t in graph.graph.initializer}
    for sparse in raw.sparse_initializer:
        name = sparse.values.name
        where[name], whole[name] = sparse.indices.ByteSize(), sparse.ByteSize()
        values, places = to_array(sparse.values), to_array(sparse.indices)
        arrays[name] = np.zeros(tuple(sparse.dims), values.dtype)
        arrays[name][
            np.unravel_index(places, tuple(sparse.dims)) if places.ndim == 1 else tuple(places.T)
        ] = values
    sizes |= whole
    return [
        _part(name, torch.from_numpy(np.array(array)), rounding, sizes[name], where.get(name))
        for name, array in arrays.items()
        if array.dtype.kind in "fiub"
    ]


def by_layer(parts: Sequence[Part], lines: Iterable[LayerReport]) -> list[Layer]:
    """In the order of the report, the others after it, by the name before the last dot."""
    layers = {line.name: Layer(line.name) for line in lines}
    sizes = {line.name: line.rows * line.edges for line in lines}
    known = sorted(layers, key=len, reverse=True)
    for part in parts:
        owner = next((name for name in known if part.name == name or part.name.startswith(f"{name}.")), None)
        owner = part.name.rpartition(".")[0] if owner is None else owner
        layers.setdefault(owner, Layer(owner)).parts.append(part)
    for layer in layers.values():
        width = max((part.width for part in layer.parts), default=4)
        layer.before = sizes[layer.name] * width if layer.name in sizes else layer.dense
        layer.name = layer.name or "(model)"
    return [layer for layer in layers.values() if layer.parts]
