"""Save and load: the small network's weights, and what was promised of them, in one sealed safetensors file.

    8 bytes   length of the header, little endian
    header    {"__metadata__": {"coresieve.format": "1", "coresieve.seal": <64 digits>, "coresieve": <JSON>},
               <tensor>: {"dtype": ..., "shape": ..., "data_offsets": ...}, ...}, padded with spaces
    payload   the tensors' bytes, the widest dtype first, then by name

Any safetensors reader opens it; nothing in it is ever run. The inner JSON holds the caller's header, the
structure of the layers whose size compression may change, the names of tied tensors and the SHA-256 of the
payload. The seal is the SHA-256 of all that stands before the payload, with the seal's own digits as zeros.
So every byte of the file is covered, and `read_header` can trust what it reads without reading the payload.
A digest guards against accidents; it is no signature.

A compact file has format 2, and its inner JSON names the tensors that are packed (`coresieve.compact`): to another
reader these are bytes, in ours they come back bit for bit.

The bytes are written and read here rather than by the safetensors library, for three reasons: the library
writes metadata in a random order (the same model would give other bytes each time), it cannot seal its own
header, and it reads through a memory map, whose tensors change or crash when the file does.

>>> import tempfile, torch
>>> model, skeleton = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
>>> path = tempfile.mkdtemp() + "/small.safetensors"
>>> save_model(path, model, {"method": "sieve", "keep": 0.1})
>>> load_model(path, skeleton)
{'method': 'sieve', 'keep': 0.1}
>>> skeleton, torch.equal(skeleton.weight, model.weight)
(Linear(in_features=2, out_features=1, bias=True), True)
>>> read_header(path)["file"]["tensors"]["weight"]
{'dtype': 'float32', 'shape': [1, 2], 'bytes': 8}
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from coresieve import __version__
from coresieve.errors import FileError
from coresieve.layers.low_rank import LowRank

FORMAT, COMPACT = 1, 2  # a file that packs no tensor is of the first, which older versions read

_HEAD = re.compile(rb'\{"__metadata__":\{"coresieve\.format":"(\d{1,9})","coresieve\.seal":"([0-9a-f]{64})",')
_BLANK = "0" * 64
_LONGEST_HEADER = 100_000_000  # the safetensors library refuses a longer one
_FEW = 5  # names listed in an error

_DTYPES = {  # https://github.com/huggingface/safetensors#format
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_KINDS = {"linear": ("in", "out"), "low_rank": ("in", "out", "rank"), "batch_norm": ("features",)}

PathLike = str | os.PathLike[str]
Shape = tuple[int, ...]
Structure = dict[str, dict[str, Any]]
Check = Callable[[dict[str, Any], dict[str, Tensor]], None]


def save_model(
    path: PathLike,
    model: nn.Module,
    header: dict[str, Any],
    *,
    compact: bool = False,
    max_bytes: int | None = None,
) -> None:
    """Write the parameters and persistent buffers of `model`, and `header`, to `path`.

    The file appears whole or not at all: a crash on the way leaves the former file. The same model and header
    give the same bytes. `header` is what JSON can hold (a tuple comes back as a list), without a key "file".
    At most one tensor is copied at a time. `compact`: zeros are left out, the rest is coded; as exact as without.
    A file of more than `max_bytes` is not written.
    """
    path = _plain_path(path)
    inner, tensors = _prepared(model, header, compact)
    # The payload's digest is known only after the payload is written, but its length is: leave the room.
    room = len(_sealed(inner, _BLANK, tensors))
    size = room + sum(tensor.nbytes for tensor in tensors.values())
    if max_bytes is not None and size > max_bytes:
        given = f"a file of {size:,} bytes (its header takes {room:,})"
        hint = f"compress with max_bytes={max(1, 2 * max_bytes - size)}: certificates and later changes take room too"
        raise FileError(given, f"at most {max_bytes:,}", hint)

    def write(file: BinaryIO) -> None:
        digest = hashlib.sha256()

        def put(raw: memoryview) -> None:
            digest.update(raw)
            file.write(raw)

        file.seek(room)
        for tensor in tensors.values():
            put(_bytes(tensor))  # a call, so that this copy is gone before the next is made
        file.seek(0)
        file.write(_sealed(inner, digest.hexdigest(), tensors))

    _replace(path, write)


def file_size(model: nn.Module, header: dict[str, Any], *, compact: bool = False) -> int:
    """Of the file that `save_model` would write, in bytes: all of it, to the last one."""
    inner, tensors = _prepared(model, header, compact)
    return len(_sealed(inner, _BLANK, tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def load_model(path: PathLike, into: nn.Module, check: Check = lambda header, state: None) -> dict[str, Any]:
    """Read `path` into the skeleton `into`, bit for bit, and return the header given to `save_model`.

    The skeleton has the architecture of the original or of the small model: its layers are made smaller where
    the file's are, and its Linear layers replaced where the file's are of low rank. Devices are the
    skeleton's (the CPU for one on "meta"), dtypes the file's. Parameters are new objects: make optimizers
    afterwards. When the file is damaged or does not fit, FileError is raised and the skeleton is as it was; so it is
    when `check`, which is shown the header and all tensors by name before that, raises.
    """
    path = _plain_path(path)
    with _opened(path) as file:
        contents = _contents(path, file)
        plan = _fit(path, contents, into)
        tensors = _payload(path, file, contents)
    check(contents.header, {name: tensors[contents.source(name)] for name in contents.shapes()})
    _pour(contents, plan, tensors, into)
    return contents.header


def read_header(path: PathLike) -> dict[str, Any]:
    """The header, without its tensors; under "file", the sizes and shapes of what is stored.

    What is returned has been checked against the seal; the weights have not been read.
    """
    path = _plain_path(path)
    with _opened(path) as file:
        contents = _contents(path, file)
    tensors = {
        name: {"dtype": str(spec.dtype).removeprefix("torch."), "shape": list(spec.shape), "bytes": spec.size}
        | ({} if spec.packed is None else {"kept": spec.packed.kept, "positions": spec.packed.positions})
        for name, spec in contents.tensors.items()
    }
    about = {
        "format": contents.format,
        "version": contents.version,
        "bytes": contents.size,
        "structure": contents.structure,
        "aliases": contents.aliases,
        "tensors": tensors,
    }
    return {**contents.header, "file": about}


def read_tensors(path: PathLike) -> dict[str, Tensor]:
    """The tensors, decoded and checked, without a skeleton; a tied one under its first name alone."""
    path = _plain_path(path)
    with _opened(path) as file:
        return _payload(path, file, _contents(path, file))


def is_ours(path: PathLike) -> bool:
    """Whether a file begins as those that `save_model` writes do, whole or not."""
    with _opened(_plain_path(path)) as file:
        file.seek(8)
        return b'"coresieve' in file.read(64)


# --- What is written ----------------------------------------------------------------------------------------


def _prepared(
    model: nn.Module, header: dict[str, Any], compact: bool
) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The inner JSON but for the payload's digest, and the tensors as the file holds them."""
    tensors, aliases = _stored(model)
    inner = {
        "version": __version__,
        "header": _plain(header),
        "structure": _structure(model),
        "aliases": aliases,
    }
    if compact:
        tensors, inner["packed"] = _packed(tensors)
    return inner, tensors


def _packed(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Each as bytes where that is shorter, and {name: [dtype, shape, entries kept, bytes of their positions]}."""
    from coresieve.compact import pack

    packed, told = {}, {}
    for name, tensor in tensors.items():
        code = pack(tensor)
        packed[name] = tensor
        if len(code.code) < tensor.nbytes:
            packed[name] = torch.frombuffer(bytearray(code.code), dtype=torch.uint8)
            told[name] = [_CODES[tensor.dtype], list(tensor.shape), code.kept, code.positions]
    order = sorted(packed, key=lambda name: (-packed[name].element_size(), name))
    return {name: packed[name] for name in order}, told


def _stored(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, in the file's order, and {name: the name that its tensor is stored under}."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        _check_storable(name, tensor)
        first = seen.setdefault(_memory(tensor), name)
        if first == name:
            tensors[name] = tensor.detach()
        else:
            aliases[name] = first
    # Widest first keeps every tensor aligned, as safetensors does; by name, so the bytes are always the same.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return {name: tensors[name] for name in order}, aliases


def _memory(tensor: Tensor) -> object:
    """Equal for two tensors that are the same numbers at the same place; a mere overlap is not equal."""
    if tensor.numel() == 0:
        return id(tensor)  # all empty tensors live at address 0
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride(), flags


def _check_storable(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        given, hint = f"{name!r} is a {type(tensor).__name__}", "keep extra state out of the state_dict"
    elif is_lazy(tensor):
        given, hint = f"{name!r} is not initialized", "run one batch through the model first"
    elif tensor.is_meta:
        given, hint = f'{name!r} is on "meta" and has no values', "load the weights first"
    elif tensor.layout != torch.strided or tensor.is_quantized:
        given, hint = f"{name!r} is sparse or quantized", "save the dense model, and convert after loading"
    elif tensor.dtype not in _CODES:
        given, hint = f"{name!r} is {tensor.dtype}", f"convert it to one of {', '.join(_CODES.values())}"
    elif name == "__metadata__":
        given, hint = f"the name {name!r}", "another name: safetensors keeps this one for itself"
    else:
        return
    raise FileError(given, "tensors that safetensors can hold", hint)


def _structure(model: nn.Module) -> Structure:
    """The sizes of every layer that compression may have made smaller (the original is not known here)."""
    found: Structure = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=False):
        if name.startswith(inside):
            continue
        if isinstance(module, LowRank):
            bias = module.down.bias is not None
            sizes = {"in": module.in_features, "out": module.out_features, "rank": module.rank}
            found[name] = {"kind": "low_rank", **sizes, "bias": bias}
            inside = (*inside, f"{name}." if name else "")
        elif _resizable(module):
            found[name] = _sizes(module)
    return found


def _resizable(module: nn.Module) -> bool:
    """A parametrized layer is not: its weight is computed from other tensors, under other names."""
    if isinstance(module, nn.Linear):
        weight = module._parameters.get("weight")
        return weight is not None and not is_lazy(weight) and weight.ndim == 2
    return isinstance(module, _BatchNorm) and any(True for _ in _vectors(module))


def _sizes(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, nn.Linear):
        out, edges = module.weight.shape
        return {"kind": "linear", "in": edges, "out": out, "bias": module.bias is not None}
    return {"kind": "batch_norm", "features": next(iter(_vectors(module)))[1].shape[0]}


def _vectors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A batch norm's own tensors with one entry per feature (the count of batches has none)."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and not is_lazy(tensor) and tensor.ndim == 1:
            yield name, tensor


def _plain(header: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(header, dict) or "file" in header:
        hint = 'another key: read_header() adds "file"'
        raise FileError("the header", 'a dict without the key "file"', hint)
    try:
        return json.loads(json.dumps(header))
    except (TypeError, ValueError, RecursionError) as error:
        given = f"the header ({error})"
        raise FileError(given, "what JSON can hold", "numbers, strings, lists and dicts") from error


def _sealed(inner: dict[str, Any], payload: str, tensors: Mapping[str, Tensor]) -> bytes:
    """All that stands before the payload: the length, then the header with its seal."""
    notes = {
        "coresieve.format": str(COMPACT if "packed" in inner else FORMAT),
        "coresieve.seal": _BLANK,
        "coresieve": json.dumps({**inner, "payload": payload}, separators=(",", ":")),
    }
    header: dict[str, Any] = {"__metadata__": notes}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        code = _CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        given = f"a header of {len(text):,} bytes"
        raise FileError(given, f"at most {_LONGEST_HEADER:,}", "keep large results in a file of their own")
    head = _HEAD.match(text)
    assert head is not None
    raw = len(text).to_bytes(8, "little") + text
    place = slice(8 + head.start(2), 8 + head.end(2))
    return raw[: place.start] + _seal(raw, place).encode() + raw[place.stop :]


def _seal(raw: bytes, place: slice) -> str:
    return hashlib.sha256(raw[: place.start] + _BLANK.encode() + raw[place.stop :]).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, row by row; a copy only of what is not laid out so, or not on the CPU."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _replace(path: PathLike, write: Callable[[BinaryIO], None]) -> None:
    """Write beside the file, then put the new one in its place in one step."""
    try:
        target = os.path.realpath(path)  # of a link, the file that it points to
        mode = _replaceable(path, target)
        folder, name = os.path.dirname(target), f".coresieve-{os.getpid()}-{secrets.token_hex(4)}.tmp"
        temporary = os.path.join(folder, name)
        file = open(temporary, "xb")  # noqa: SIM115  unlike tempfile's 0600, the mode that the umask asks for
        try:
            with file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if mode is not None:
                os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise _trouble(path, error, "a folder that exists and can be written to") from error
    _sync_folder(os.path.dirname(target))


def _replaceable(path: PathLike, target: str) -> int | None:
    """The mode of the file that is there, if any, which its replacement keeps."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise FileError(f"{_shown(path)} is {kind}", "a file's name", 'a name such as "small.safetensors"')
    if not os.access(target, os.W_OK):
        raise PermissionError(13, "Permission denied", target)
    return stat.S_IMODE(mode)


def _sync_folder(folder: str) -> None:
    """Make the new name itself survive a power cut, where the system lets a folder be opened."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- What is read -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Code:
    """A tensor that is packed."""

    size: int
    kept: int
    positions: int


@dataclass(frozen=True)
class _Spec:
    dtype: torch.dtype
    shape: Shape
    packed: _Code | None = None

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.packed.size if self.packed else math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Contents:
    header: dict[str, Any]
    structure: Structure
    aliases: dict[str, str]
    tensors: dict[str, _Spec]  # in the order of the payload
    payload: str
    version: str
    size: int
    format: int

    def source(self, name: str) -> str:
        return self.aliases.get(name, name)

    def shapes(self) -> dict[str, Shape]:
        names = (*self.tensors, *self.aliases)
        return {name: self.tensors[self.source(name)].shape for name in names}

    def under(self, prefix: str) -> dict[str, str]:
        """{name inside the module: the name it is stored under}"""
        names = (name for name in (*self.tensors, *self.aliases) if name.startswith(f"{prefix}."))
        return {name[len(prefix) + 1 :]: self.source(name) for name in names}


@contextmanager
def _opened(path: PathLike) -> Iterator[BinaryIO]:
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise FileError(f"{_shown(path)} is {kind}", "a file that save() wrote", "the path of that file")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise _trouble(path, error, "a file that can be read") from error


def _contents(path: PathLike, file: BinaryIO) -> _Contents:
    """Everything but the tensors, checked against the seal and against the file's size."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    whole = len(start) == 8 and length <= min(_LONGEST_HEADER, size - 8)
    text = file.read(length if whole else 2)
    if not whole and text != b'{"':
        raise _foreign(path, "is not a safetensors file" if size >= 8 else "is empty or cut short")
    if not whole:
        raise _damaged(path, "is cut short, or its first 8 bytes are damaged")
    head = _HEAD.match(text)
    if head is None:
        raise _unsealed(path, text)
    if int(head[1]) > COMPACT:
        given = f"{_shown(path)} has format {int(head[1])}"
        raise FileError(
            given, f"format {COMPACT} or older", "a newer version of coresieve, which wrote this file"
        )
    place = slice(8 + head.start(2), 8 + head.end(2))
    if _seal(start + text, place) != head[2].decode():
        raise _damaged(path, "has a damaged header (its seal does not match)")
    try:
        contents = _parsed(json.loads(text), size, int(head[1]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"has a malformed header ({error!r})") from error
    expected = 8 + length + sum(spec.size for spec in contents.tensors.values())
    if size != expected:
        what = "is cut short" if size < expected else "has bytes after its end"
        raise _damaged(path, f"{what}: {size:,} bytes where {expected:,} were written")
    return contents


def _parsed(raw: dict[str, Any], size: int, version: int) -> _Contents:
    """The header's JSON as checked values: the seal keeps accidents out, not what somebody else sealed."""
    inner = json.loads(raw.pop("__metadata__")["coresieve"])
    packed = inner["packed"] if version == COMPACT else {}
    tensors, start = {}, 0
    for name, entry in raw.items():
        spec = _Spec(_DTYPES[entry["dtype"]], tuple(map(_natural, entry["shape"])))
        _require(entry["data_offsets"] == [start, start + spec.size], f"offsets of {name!r}")
        start += spec.size
        tensors[name] = _unpacked(spec, *packed[name]) if name in packed else spec
    for name, record in inner["structure"].items():
        for size_name in _KINDS[record["kind"]]:
            _natural(record[size_name])
        _require(record["kind"] == "batch_norm" or type(record["bias"]) is bool, f"structure of {name!r}")
    for name, source in inner["aliases"].items():
        _require(name not in tensors and source in tensors, f"alias {name!r}")
    _require(isinstance(inner["header"], dict), "header")
    return _Contents(
        inner["header"],
        inner["structure"],
        inner["aliases"],
        tensors,
        str(inner["payload"]),
        str(inner["version"]),
        size,
        version,
    )


def _unpacked(spec: _Spec, dtype: str, shape: list[int], kept: int, positions: int) -> _Spec:
    """What a tensor of bytes is, once decoded."""
    _require(spec.dtype == torch.uint8 and len(spec.shape) == 1, "a packed tensor that is not of bytes")
    code = _Code(spec.size, _natural(kept), _natural(positions))
    return _Spec(_DTYPES[dtype], tuple(map(_natural, shape)), code)


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a size")
    return value


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _payload(path: PathLike, file: BinaryIO, contents: _Contents) -> dict[str, Tensor]:
    """The tensors, each in memory of its own, decoded once all their bytes match the digest."""
    digest = hashlib.sha256()
    tensors = {}
    for name, spec in contents.tensors.items():
        plain = spec.packed is None
        tensor = torch.empty(
            spec.shape if plain else (spec.size,), dtype=spec.dtype if plain else torch.uint8, device="cpu"
        )
        raw = _bytes(tensor)  # the memory of the new tensor itself
        if file.readinto(raw) != len(raw):  # pyright: ignore[reportAttributeAccessIssue]
            raise _damaged(path, f"is cut short in {name!r}")
        digest.update(raw)
        tensors[name] = tensor
    if digest.hexdigest() != contents.payload:
        raise _damaged(path, "has damaged weights (their digest does not match)")
    return {name: _decoded(path, name, contents.tensors[name], tensor) for name, tensor in tensors.items()}


def _decoded(path: PathLike, name: str, spec: _Spec, tensor: Tensor) -> Tensor:
    if spec.packed is None:
        return tensor
    from coresieve.compact import unpack

    try:
        return unpack(_bytes(tensor), spec.dtype, spec.shape)
    except (ValueError, MemoryError, RuntimeError) as error:
        raise _damaged(path, f"has a code of {name!r} that cannot be read ({error})") from error


# --- Into the skeleton --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """A layer of the skeleton that is to take the sizes in the file."""

    module: nn.Module
    record: dict[str, Any]

    @property
    def allowed(self) -> bool:
        """Compression only makes layers smaller: one that would have to grow belongs to another network."""
        module, r = self.module, self.record
        if r["kind"] == "batch_norm":
            return (
                isinstance(module, _BatchNorm) and _resizable(module) and r["features"] <= module.num_features
            )
        linear = isinstance(module, nn.Linear) and _resizable(module)
        if not linear and not (r["kind"] == "low_rank" and isinstance(module, LowRank)):
            return False
        assert isinstance(module, nn.Linear | LowRank)
        return r["in"] <= module.in_features and r["out"] <= module.out_features

    @property
    def needed(self) -> bool:
        own, new = self.before(), self.after()
        return any(own.get(name) != new.get(name) for name in own | new)

    def before(self) -> dict[str, Shape | str]:
        """The names and shapes, inside the layer, of the tensors that the change is about."""
        own = {name: _shape(tensor) for name, tensor in self.module.state_dict(keep_vars=True).items()}
        if self.record["kind"] == "low_rank":
            return own
        names = ("weight", "bias", "running_mean", "running_var")
        return {name: own[name] for name in names if name in own}

    def after(self) -> dict[str, Shape]:
        r = self.record
        if r["kind"] == "batch_norm":
            return dict.fromkeys(self.before(), (r["features"],))
        if r["kind"] == "linear":
            return {"weight": (r["out"], r["in"])} | ({"bias": (r["out"],)} if r["bias"] else {})
        down = {"down.weight": (r["rank"], r["in"])} | ({"down.bias": (r["rank"],)} if r["bias"] else {})
        return {**down, "up.weight": (r["out"], r["rank"])}

    def carried_out(self) -> nn.Module:
        """The layer, or its replacement, with the new sizes and, until they are assigned, no values."""
        module, r = self.module, self.record
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if r["kind"] == "low_rank":
            layer = LowRank(r["in"], r["out"], r["rank"], r["bias"], device="meta")
            return layer.requires_grad_(trains).train(module.training)
        for name, shape in self.after().items():
            old, new = getattr(module, name), torch.empty(shape, device="meta")
            parameter = old is None or isinstance(old, nn.Parameter)
            grad = trains if old is None else old.requires_grad
            setattr(module, name, nn.Parameter(new, requires_grad=grad) if parameter else new)
        if isinstance(module, nn.Linear):
            module.in_features, module.out_features = r["in"], r["out"]
            if not r["bias"]:
                module.register_parameter("bias", None)
        elif isinstance(module, _BatchNorm):
            module.num_features = r["features"]
        return module


def _fit(path: PathLike, contents: _Contents, into: nn.Module) -> dict[str, _Change]:
    """The changes that make the file fit the skeleton, or FileError; nothing is changed yet."""
    modules = dict(into.named_modules(remove_duplicate=False))
    changes = {n: _Change(modules[n], record) for n, record in contents.structure.items() if n in modules}
    plan = {name: change for name, change in changes.items() if change.allowed and change.needed}
    hint = "a skeleton made by the same code, with the same sizes, as the model that was compressed"
    wrong = list(_differences(contents.shapes(), _expected(into, plan)))
    if not wrong:
        wrong, hint = list(_apart(contents, modules)), "a skeleton in which these are separate layers"
    if not wrong and "" in plan and plan[""].record["kind"] == "low_rank":
        sizes = tuple(plan[""].record[size] for size in _KINDS["low_rank"])
        wrong, hint = ["the whole model is one layer, of low rank in the file"], f"into=LowRank{sizes}"
    if wrong:
        more = f"; and {len(wrong) - _FEW} more" if len(wrong) > _FEW else ""
        given = f"{_shown(path)} does not fit the skeleton ({'; '.join(wrong[:_FEW])}{more})"
        raise FileError(given, "the architecture of the saved model or of its original", hint)
    return plan


def _expected(into: nn.Module, plan: dict[str, _Change]) -> dict[str, Shape | str]:
    """The names and shapes of the skeleton's tensors, as they will be once `plan` is carried out."""
    shapes = {name: _shape(tensor) for name, tensor in into.state_dict(keep_vars=True).items()}
    for prefix, change in plan.items():
        for name in change.before():
            shapes.pop(_join(prefix, name), None)
        shapes |= {_join(prefix, name): shape for name, shape in change.after().items()}
    return shapes


def _differences(file: Mapping[str, Shape], skeleton: Mapping[str, Shape | str]) -> Iterator[str]:
    for name in (*skeleton, *sorted(file.keys() - skeleton.keys())):
        have, want = file.get(name, "none"), skeleton.get(name, "none")
        if have != want:
            yield f"{name}: {have} in the file, {want} in the skeleton"


def _apart(contents: _Contents, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Layers that are one object in the skeleton, and different ones in the file."""
    first: dict[int, str] = {}
    for prefix, module in modules.items():
        other = first.setdefault(id(module), prefix)
        if other != prefix and contents.under(other) != contents.under(prefix):
            yield f"{other} and {prefix}: different in the file, one shared layer in the skeleton"


def _pour(contents: _Contents, plan: dict[str, _Change], tensors: dict[str, Tensor], into: nn.Module) -> None:
    """Change the skeleton; all that can fail has been done before."""
    homes = _homes(into, plan)
    placed: dict[tuple[str, torch.device], Tensor] = {}  # one tensor for all the names tied to it
    for name in contents.shapes():
        key = contents.source(name), homes[name]
        if key not in placed:
            placed[key] = tensors[key[0]].to(key[1])

    made: dict[int, nn.Module] = {}  # a layer under two names is changed once
    for prefix, change in plan.items():
        layer = made.get(id(change.module)) or change.carried_out()
        made[id(change.module)] = layer
        if layer is not change.module:
            parent, _, leaf = prefix.rpartition(".")
            setattr(into.get_submodule(parent), leaf, layer)

    # Assigned, not copied: the dtype is the file's, and tensors tied in one place only never share memory.
    parameters: dict[tuple[str, torch.device], nn.Parameter] = {}
    state = into.state_dict(keep_vars=True)
    for name, old in state.items():
        key = contents.source(name), homes[name]
        state[name] = placed[key]
        if isinstance(old, nn.Parameter):
            if not (placed[key].is_floating_point() or placed[key].is_complex()):
                old.requires_grad_(False)  # only these can have a gradient
            state[name] = parameters.setdefault(key, nn.Parameter(placed[key], requires_grad=False))
    into.load_state_dict(state, assign=True)


def _homes(into: nn.Module, plan: dict[str, _Change]) -> dict[str, torch.device]:
    """The device of every tensor after `plan`; those of a skeleton without values go to the CPU."""
    homes = {name: _device(tensor) for name, tensor in into.state_dict(keep_vars=True).items()}
    for prefix, change in plan.items():
        home = _device(next(change.module.parameters(), None))
        for name in change.after():
            homes.setdefault(_join(prefix, name), home)
    return homes


def _device(tensor: object) -> torch.device:
    return tensor.device if isinstance(tensor, Tensor) and not tensor.is_meta else torch.device("cpu")


def _shape(tensor: object) -> Shape | str:
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    return "not initialized" if is_lazy(tensor) else tuple(tensor.shape)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# --- Errors -------------------------------------------------------------------------------------------------


def _damaged(path: PathLike, what: str) -> FileError:
    return FileError(f"{_shown(path)} {what}", "the file as save() left it", "fetch it or save it again")


def _foreign(path: PathLike, what: str) -> FileError:
    return FileError(f"{_shown(path)} {what}", "a file that save() wrote", "the path of such a file")


def _unsealed(path: PathLike, text: bytes) -> FileError:
    """Why a header does not begin as ours does."""
    try:
        header = json.loads(text)
        notes = header.get("__metadata__", {})
        safetensors = all(
            set(entry) == {"dtype", "shape", "data_offsets"}
            for entry in header.values()
            if entry is not notes
        )
        ours = any(str(note).startswith("coresieve") for note in notes)
    except (ValueError, AttributeError, TypeError, RecursionError):
        safetensors = ours = False
    if b'"coresieve' in text[:64] or ours:
        return _damaged(path, "has a damaged header, or was written anew by another program")
    if safetensors:
        return _foreign(path, "is a safetensors file that coresieve did not write")
    return _foreign(path, "is not a safetensors file")


def _trouble(path: PathLike, error: OSError, expected: str) -> FileError:
    hints = {
        FileNotFoundError: f"another path; this one is in {_folder(path)!r}",
        PermissionError: "another folder, or ask for the permission",
    }
    hint = hints.get(type(error), "another folder")
    return FileError(f"{_shown(path)} ({error.strerror or error})", expected, hint)


def _folder(path: PathLike) -> str:
    try:
        return os.path.dirname(os.path.abspath(os.fspath(path)))
    except OSError:
        return "a folder that is gone"  # the current one


def _shown(path: PathLike) -> str:
    name = os.fspath(path)
    return repr(name if len(name) < 400 else f"{name[:200]}...{name[-100:]}")


def _plain_path(path: PathLike | bytes) -> str:
    """The path as a string that a file system takes."""
    try:
        name = os.fsdecode(path)
        if b"\0" in os.fsencode(name):
            raise ValueError("it holds a zero byte")
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is one
        given = f"a path of type {type(path).__name__} ({error})"
        raise FileError(given, "a file's name", 'a name such as "small.safetensors"') from error
    return name
