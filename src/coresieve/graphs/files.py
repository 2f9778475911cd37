"""An ONNX file with a report, a certificate and a seal in its metadata_props.

    coresieve.format    1
    coresieve.seal      SHA-256 of the whole file, with the seal's own digits as zeros
    coresieve           JSON: the header, the layers, and the digest of the network that the file was made of

Every byte is covered: a changed weight, node or word is refused, and so is a file that another program wrote anew. It
is no signature. A file without these entries is anybody's, and is read as such.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import onnx
import torch
from google.protobuf.message import EncodeError
from onnx import ModelProto, StringStringEntryProto
from onnx.external_data_helper import uses_external_data
from onnxruntime import InferenceSession

from coresieve import __version__, digests, storage
from coresieve.errors import FileError, ForwardError, stored
from coresieve.graphs.model import OnnxModel
from coresieve.graphs.packing import packed, unpacked
from coresieve.graphs.pieces import as_array, session
from coresieve.graphs.protos import parse, tensors
from coresieve.graphs.writing import written
from coresieve.sample import Batch

FORMAT = 1
KEYS = FORMAT_KEY, SEAL_KEY, KEY = "coresieve.format", "coresieve.seal", "coresieve"
BLANK = "0" * 64
SEAL = re.compile(re.escape(SEAL_KEY.encode()) + rb"\x12\x40([0-9a-f]{64})")  # as protobuf writes the entry
TOLERANCE = 1e-3  # of the largest output: another order of adding


def save(
    path: storage.PathLike, model: OnnxModel, header: dict[str, Any], *, sparse: bool, example: Batch | None
) -> None:
    """Write the graph with its layers as they are now. It has been run before it takes the name."""
    name, network = storage._plain_path(path), digests.weights(model)

    graph, told = written(model)

    def make(sparse: bool) -> bytes:
        return sealed(graph, header, told, network, name, sparse)

    raw, running = runnable(make, sparse, name)
    if example is not None:
        check_answers(running, model, example, name)
    replace(path, raw)


def runnable(make: Callable[[bool], bytes], sparse: bool, path: str) -> tuple[bytes, InferenceSession]:
    """A file's bytes, and them running: packed, unless this onnxruntime cannot unpack."""
    try:
        return (raw := make(sparse)), session(raw, path)
    except FileError:
        if not sparse:
            raise
    return (raw := make(False)), session(raw, path)


def sealed(
    graph: ModelProto, header: dict[str, Any], told: Any, network: str, path: str, sparse: bool
) -> bytes:
    """The file's bytes. `network` is the digest that a certificate in the header speaks of."""
    model, names = packed(graph) if sparse else (ModelProto.FromString(graph.SerializeToString()), [])
    inner = {"version": __version__, "header": header, "layers": told, "network": network, "packed": names}
    kept = [entry for entry in graph.metadata_props if entry.key not in KEYS]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    for key, value in zip(KEYS, (str(FORMAT), BLANK, json.dumps(inner, separators=(",", ":"))), strict=True):
        model.metadata_props.append(StringStringEntryProto(key=key, value=value))
    try:
        raw = model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise FileError(f"{path}, of more than 2 GB", "what one ONNX file can hold",
                        "small.save(...) as safetensors") from error  # fmt: skip
    found = list(SEAL.finditer(raw))
    assert found, "protobuf writes an entry's key before its value"
    start, end = found[-1].span(1)
    return raw[:start] + hashlib.sha256(raw).hexdigest().encode() + raw[end:]


def check_answers(running: InferenceSession, model: OnnxModel, example: Batch, path: str) -> None:
    """onnxruntime answers the example as the model does."""
    batch = model.sized(example if isinstance(example, dict) else {model.inputs[0]: example})
    with torch.no_grad():
        answer = model(**batch)
    before = list(answer.values()) if isinstance(answer, dict) else [answer]
    compare(running, {name: as_array(value) for name, value in model.bound(**batch).items()}, before, path)


def compare(running: InferenceSession, feeds: dict[str, Any], before: list[Any], path: str) -> None:
    try:
        after = running.run(None, feeds)
    except Exception as error:
        raise ForwardError(f"{path}, which onnxruntime fails to run ({' '.join(str(error).split())[:400]})",
                           "a model that is the same computation for any number of inputs",
                           "a forward without sizes that are computed in Python") from error  # fmt: skip
    for old, new in zip(before, after, strict=True):
        if not torch.is_tensor(old) or not old.is_floating_point() or not isinstance(new, np.ndarray):
            continue
        was = old.detach().cpu().double().numpy()
        off = np.abs(was - new).max(initial=0.0) if was.shape == new.shape else np.inf
        if not off <= TOLERANCE * max(np.abs(was).max(initial=0.0), 1e-30):
            raise ForwardError(
                f"{path}, which answers otherwise than the model: shape {new.shape} for {was.shape}, off by {off:.2g}",
                "a model whose forward is the same computation for all inputs",
                "a forward without branches on the values, and model.eval()",
            )  # fmt: skip


def replace(path: storage.PathLike, raw: bytes) -> None:
    def write(file: BinaryIO) -> None:
        file.write(raw)

    storage._replace(storage._plain_path(path), write)


# --- Reading ------------------------------------------------------------------------------------------------


def is_onnx(path: storage.PathLike | str) -> bool:
    return os.fsdecode(path).lower().endswith(".onnx")


def load(path: storage.PathLike) -> tuple[OnnxModel, dict[str, Any] | None]:
    """The model, and the header where coresieve wrote the file."""
    name, proto, inner = _read(path)
    with stored("list of layers"):
        model = OnnxModel.of(proto, name, None if inner is None else inner["layers"])
    if inner is None:
        return model, None
    own = digests.weights(model)
    if inner["network"] != own:
        model.stands_for = {own: str(inner["network"])}
    return model, inner["header"]


def read_header(path: storage.PathLike) -> dict[str, Any]:
    """The header of a file, and under "file" what is in it, without running it."""
    _, proto, inner = _read(path)
    held = {t.name: (t.data_type, list(t.dims)) for t in proto.graph.initializer}
    held |= {s.values.name: (s.values.data_type, list(s.dims)) for s in proto.graph.sparse_initializer}
    names = {kind: onnx.helper.tensor_dtype_to_np_dtype(kind).name for kind, _ in held.values()}
    about = {
        "format": None if inner is None else FORMAT,
        "version": None if inner is None else inner["version"],
        "bytes": os.path.getsize(path),
        "opset": {o.domain or "ai.onnx": o.version for o in proto.opset_import},
        "packed": [] if inner is None else inner["packed"],
        "tensors": {name: {"dtype": names[kind], "shape": dims} for name, (kind, dims) in held.items()},
    }
    return {**({} if inner is None else inner["header"]), "file": about}


def _read(path: storage.PathLike) -> tuple[str, ModelProto, dict[str, Any] | None]:
    name = storage._plain_path(path)
    with storage._opened(name) as file:
        raw = file.read()
    proto = parse(raw, name)
    notes = {entry.key: entry.value for entry in proto.metadata_props if entry.key in KEYS}
    if not notes:
        return name, proto, None
    if notes.get(FORMAT_KEY, "").isdecimal() and int(notes[FORMAT_KEY]) > FORMAT:
        raise FileError(f"{name} has format {notes[FORMAT_KEY]}", f"format {FORMAT} or older",
                        "a newer version of coresieve, which wrote this file")  # fmt: skip
    found = [m for m in SEAL.finditer(raw) if m[1].decode() == notes.get(SEAL_KEY)]
    if not any(_seal(raw, m) == m[1].decode() for m in found) or any(True for _ in _outside(raw)):
        raise FileError(f"{name} was changed since coresieve wrote it (its seal does not match)",
                        "the file as it was", "fetching it or writing it again")  # fmt: skip
    with stored("header"):
        inner = json.loads(notes[KEY])
        for key, kind in (
            ("version", str),
            ("header", dict),
            ("layers", list),
            ("network", str),
            ("packed", list),
        ):
            if not isinstance(inner[key], kind):
                raise TypeError(f"{key} is a {type(inner[key]).__name__}")
        return name, unpacked(proto, inner["packed"]), inner


def _seal(raw: bytes, found: re.Match[bytes]) -> str:
    start, end = found.span(1)
    return hashlib.sha256(raw[:start] + BLANK.encode() + raw[end:]).hexdigest()


def _outside(raw: bytes) -> Iterator[onnx.TensorProto]:
    """Tensors whose numbers are in another file, which no seal covers."""
    proto = ModelProto.FromString(raw)
    return (t for t in tensors(proto.graph) if uses_external_data(t))
