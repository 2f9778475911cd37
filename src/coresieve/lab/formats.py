"""The three ways in which image sets are kept in files, each read into (images, labels) of whole numbers.

    IDX        one file of images and one of labels, gzipped or plain          MNIST's own format
    binary     records of one label byte and the bytes of one image           CIFAR-10's "binary version"
    parquet    a column of encoded pictures and one of labels, in shards      how Hugging Face lays sets out

Images are (n, channels, height, width) bytes, labels (n,) whole numbers.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "two-idx3-ubyte"
>>> _ = path.write_bytes(bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3]) + bytes(range(6)))
>>> idx(path).tolist()
[[[0, 1, 2]], [[3, 4, 5]]]
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coresieve.errors import FileError, MissingExtraError

Split = tuple[np.ndarray, np.ndarray]  # images and labels

_UNSIGNED_BYTES = 8  # the code of this type in an IDX file, the only one that image sets use


def idx_pair(images: Path, labels: Path) -> Split:
    """Images and labels from a file each."""
    x, y = idx(images), idx(labels)
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        given = f"{images.name} of shape {x.shape} beside {labels.name} of shape {y.shape}"
        raise FileError(given, "n images (n, height, width) and n labels", "the two files of one split")
    return x[:, None], y.astype(np.int64)


def idx(path: Path) -> np.ndarray:
    """An IDX file: 0, 0, the type, the number of dimensions, their sizes in 4 bytes each, the bytes."""
    raw = _bytes(path)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != _UNSIGNED_BYTES:
        raise FileError(
            f"{path}, which begins with {raw[:4].hex(' ') or 'nothing'}",
            "an IDX file of bytes, which begins with 00 00 08",
            "fetching it again",
        )
    start = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw[4:start], ">u4").tolist())
    size = int(np.prod(shape, dtype=np.int64))
    if len(raw) != start + size:
        raise FileError(
            f"{path} of {len(raw):,} bytes", f"{start + size:,} for shape {shape}", "fetching it again"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _bytes(path: Path) -> bytes:
    """The file's bytes, unzipped where they are gzipped, whatever its name says."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as reason:
        raise FileError(f"{path} ({reason})", "a whole file", "fetching it again") from reason


def binary(paths: Sequence[Path], shape: tuple[int, int, int]) -> Split:
    """Batches of records, a label byte and an image each."""
    record, parts = 1 + int(np.prod(shape)), []
    for path in paths:
        raw = np.frombuffer(_bytes(path), np.uint8)
        if not len(raw) or len(raw) % record:
            given = f"{path} of {len(raw):,} bytes"
            raise FileError(given, f"whole records of {record:,} bytes", "fetching it again")
        parts.append(raw.reshape(-1, record))
    records = np.concatenate(parts)
    return records[:, 1:].reshape(-1, *shape), records[:, 0].astype(np.int64)


def parquet(paths: Sequence[Path]) -> Split:
    """Shards with a column of pictures, a struct that holds their encoded `bytes`, and one named `label`."""
    duckdb, image = _readers()
    shards = [str(path) for path in paths]
    try:
        columns = duckdb.sql("describe select * from read_parquet($shards)", params={"shards": shards})
        kinds = {name: kind for name, kind, *_ in columns.fetchall()}
        pictures = next(
            (n for n, kind in kinds.items() if kind.replace('"', "").startswith("STRUCT(bytes BLOB")), None
        )
        if pictures is None or "label" not in kinds:
            given = f"{shards[0]} with the columns {', '.join(kinds)}"
            raise FileError(given, "a column of pictures and one named label", "the set as its hub keeps it")
        query = f'select "{pictures}".bytes as picture, label from read_parquet($shards)'
        rows = duckdb.sql(query, params={"shards": shards}).fetchnumpy()
    except duckdb.Error as reason:
        given = f"{shards[0]} ({str(reason).splitlines()[0]})"
        raise FileError(given, "a parquet file that can be read", "fetching it again") from reason
    try:
        decoded = [np.asarray(image.open(io.BytesIO(picture))) for picture in rows["picture"]]
        images = np.stack(decoded)
    except (OSError, ValueError) as reason:
        given = f"{shards[0]}, with a picture that cannot be decoded ({reason})"
        raise FileError(given, "pictures of one size", "fetching it again") from reason
    images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images), np.asarray(rows["label"], np.int64)


def _readers() -> tuple[Any, Any]:
    try:
        import duckdb
        from PIL import Image
    except ImportError as reason:
        raise MissingExtraError(
            "a parquet file without duckdb and pillow", "what reads it", "pip install coresieve[lab]"
        ) from reason
    return duckdb, Image
