"""The image sets of the paper's experiments: where they are found, how they are parted, and how they are fetched.

A set lies in a folder of its own name below `CORESIEVE_DATA` (without it, below the user's cache folder), in any of
the formats of `formats.py`. scikit-learn's digits ship with it and need no folder.

    train         images that train the original networks
    calibration   5,000 more, which trained nothing: the paper's P, from which S and T are drawn
    test          images that judge

Inputs are normalised: each channel's mean becomes 0 and its standard deviation 1, as measured on `train`.

>>> parts = load("digits")
>>> [len(x) for x in (parts.train, parts.calibration, parts.test)], parts.classes
([1000, 297, 500], 10)
>>> abs(float(parts.train.mean())) < 1e-6, round(float(parts.train.std(correction=0)), 4)
(True, 1.0)
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coresieve.errors import FileError, MissingExtraError
from coresieve.lab import formats
from coresieve.lab.formats import Split

CALIBRATION = 5000  # of the training images


@dataclass(frozen=True)
class Parts:
    """Flattened, normalised inputs in three parts that share no image."""

    train: Tensor
    train_labels: Tensor
    calibration: Tensor
    test: Tensor
    test_labels: Tensor

    @property
    def inputs(self) -> int:
        return self.test.shape[1]

    @property
    def classes(self) -> int:
        return int(self.test_labels.max()) + 1


@dataclass(frozen=True)
class Source:
    """A set: the folders that may hold it, how many images it has, and where it is published."""

    title: str
    folders: tuple[str, ...]
    shape: tuple[int, int, int]
    images: tuple[int, int]  # training, test
    home: str = ""
    files: tuple[tuple[str, str], ...] = ()  # (name below home, MD5)
    elsewhere: tuple[str, ...] = ()  # folders where a system's package puts it


_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_BATCHES = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")


def _gzipped(*md5: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{name}.gz", digest) for name, digest in zip(_IDX, md5, strict=True))


SOURCES = {
    "mnist": Source(
        "MNIST", ("mnist", "MNIST"), (1, 28, 28), (60_000, 10_000),
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        _gzipped("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432",
                 "9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "fashion-mnist": Source(
        "Fashion-MNIST", ("fashion-mnist", "fashion_mnist", "FashionMNIST"), (1, 28, 28), (60_000, 10_000),
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        _gzipped("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe",
                 "bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
        elsewhere=("/usr/share/datasets/fashion-mnist",),  # Debian's package dataset-fashion-mnist
    ),
    "cifar10": Source(
        "CIFAR-10", ("cifar10", "cifar-10", "CIFAR10", "cifar-10-batches-bin"), (3, 32, 32), (50_000, 10_000),
        "https://www.cs.toronto.edu/~kriz/",
        (("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
    ),
}  # fmt: skip
NAMES = ("digits", *SOURCES)


def load(name: str, *, train: bool = True) -> Parts:
    """The parts of a set, normalised. Without `train` its images stay out of memory; the others are the same."""
    raw = digits() if name == "digits" else _parted(name)
    mean, std = _scale(raw["train"])
    n = len(raw["train"]) if train else 0
    return Parts(
        train=_normal(raw["train"][:n], mean, std),
        train_labels=torch.from_numpy(raw["train_labels"][:n]),
        calibration=_normal(raw["calibration"], mean, std),
        test=_normal(raw["test"], mean, std),
        test_labels=torch.from_numpy(raw["test_labels"]),
    )


def digest(name: str) -> str:
    """Which images these are, whatever format they came in: the beginning of a SHA-256 of all of them."""
    raw = digits() if name == "digits" else _parted(name)
    whole = hashlib.sha256()
    for key in sorted(raw):
        whole.update(np.ascontiguousarray(raw[key]).data)
    return whole.hexdigest()[:16]


def _scale(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each channel's mean and standard deviation, from counts of the byte values: exact, and in little memory."""
    if images.dtype != np.uint8:
        return images.mean(axis=(0, 2, 3)), images.std(axis=(0, 2, 3))
    counts = [np.bincount(images[:, c].ravel(), minlength=256) for c in range(images.shape[1])]
    values = np.arange(256.0)
    mean = np.array([values @ n / n.sum() for n in counts])
    square = np.array([values**2 @ n / n.sum() for n in counts])
    return mean, np.sqrt(square - mean**2)


def _normal(images: np.ndarray, mean: np.ndarray, std: np.ndarray) -> Tensor:
    x = torch.from_numpy(images.astype(np.float32))
    shape = (1, -1, 1, 1)
    x.sub_(torch.tensor(mean, dtype=torch.float32).view(shape)).div_(
        torch.tensor(std, dtype=torch.float32).view(shape)
    )
    return x.flatten(1)


@functools.lru_cache(maxsize=1)
def _parted(name: str) -> dict[str, np.ndarray]:
    """The set's bytes, 5,000 of its training images set apart; which ones is the same on every machine."""
    (x, y), (x_test, y_test) = read(name)
    order = np.random.default_rng(0).permutation(len(x))
    rest, apart = np.sort(order[CALIBRATION:]), np.sort(order[:CALIBRATION])
    return {
        "train": x[rest],
        "train_labels": y[rest],
        "calibration": x[apart],
        "test": x_test,
        "test_labels": y_test,
    }


@functools.lru_cache(maxsize=1)
def digits() -> dict[str, np.ndarray]:
    """1,797 images of 8 x 8 pixels, values 0 to 16, that ship with scikit-learn; each part holds every digit alike."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as reason:
        raise MissingExtraError("digits without scikit-learn", "the digits that ship with it",
                                "pip install coresieve[lab]") from reason  # fmt: skip
    bunch: Any = load_digits()
    x, y = bunch.images[:, None].astype(np.float32), bunch.target.astype(np.int64)
    train, rest = train_test_split(range(len(y)), train_size=1000, stratify=y, random_state=0)
    calibration, test = train_test_split(rest, train_size=297, stratify=y[rest], random_state=0)
    return {"train": x[train], "train_labels": y[train], "calibration": x[calibration], "test": x[test],
            "test_labels": y[test]}  # fmt: skip


# --- Finding ------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Where sets are looked for: CORESIEVE_DATA, or the user's cache folder."""
    given = os.environ.get("CORESIEVE_DATA")
    return Path(given).expanduser() if given else cache()


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "coresieve"


def source(name: str) -> Source:
    if name not in SOURCES:
        raise FileError(f"the data set {name!r}", f"one of {', '.join(NAMES)}", "coresieve data list")
    return SOURCES[name]


def places(name: str) -> Iterator[Path]:
    """The folders that may hold a set, those that are there."""
    here = source(name)
    roots = [base / sub for base in dict.fromkeys((folder(), cache())) for sub in here.folders]
    yield from (place for place in (*roots, *map(Path, here.elsewhere)) if place.is_dir())


def find(name: str) -> tuple[str, Path, Callable[[], tuple[Split, Split]]] | None:
    """(format, folder, how to read it) of the first whole copy of a set; None when there is none."""
    for place in places(name):
        files = {path.name: path for path in sorted(place.rglob("*")) if path.is_file()}
        for format, reader in (("IDX", _idx), ("binary", _binary), ("parquet", _parquet)):
            read = reader(files, source(name))
            if read is not None:
                return format, place, read
    return None


def _idx(files: dict[str, Path], _: Source) -> Callable[[], tuple[Split, Split]] | None:
    four = [files.get(name) or files.get(f"{name}.gz") for name in _IDX]
    found = [path for path in four if path is not None]
    if len(found) < len(_IDX):
        return None
    return lambda: (formats.idx_pair(*found[:2]), formats.idx_pair(*found[2:]))


def _binary(files: dict[str, Path], here: Source) -> Callable[[], tuple[Split, Split]] | None:
    found = [files[name] for name in _BATCHES if name in files]
    if len(found) < len(_BATCHES):
        return None
    return lambda: (formats.binary(found[:-1], here.shape), formats.binary(found[-1:], here.shape))


def _parquet(files: dict[str, Path], _: Source) -> Callable[[], tuple[Split, Split]] | None:
    shards = [path for name, path in files.items() if name.endswith(".parquet")]
    train, test = ([p for p in shards if p.name.startswith(split)] for split in ("train", "test"))
    if not (train and test):
        return None
    return lambda: (formats.parquet(train), formats.parquet(test))


def read(name: str) -> tuple[Split, Split]:
    """The set as its files hold it: training and test images with their labels, checked."""
    here, found = source(name), find(name)
    if found is None:
        looked = ", ".join(str(base / here.folders[0]) for base in dict.fromkeys((folder(), cache())))
        hint = f"coresieve data fetch {name}, or CORESIEVE_DATA=<folder that holds {here.folders[0]}/>"
        raise FileError(f"no {here.title} in {looked}", "its IDX, binary or parquet files there", hint)
    train, test = found[2]()
    for split, (x, y), n in (("training", train, here.images[0]), ("test", test, here.images[1])):
        if len(x) != n or x.shape[1:] != here.shape or not (y.min() >= 0 and y.max() <= 9):
            given = f"{len(x):,} {split} images of shape {x.shape[1:]}, labels {y.min()} to {y.max()}, in {found[1]}"
            raise FileError(given, f"the {n:,} images of shape {here.shape}, labels 0 to 9, of {here.title}",
                            f"coresieve data fetch {name}")  # fmt: skip
    return train, test


def listed() -> list[dict[str, Any]]:
    """What is here: a line for each set."""
    lines: list[dict[str, Any]] = [
        {
            "name": "digits",
            "title": "scikit-learn's digits",
            "images": 1797,
            "format": "package",
            "folder": None,
        }
    ]
    for name, here in SOURCES.items():
        found = find(name)
        lines.append({"name": name, "title": here.title, "images": sum(here.images),
                      "format": found and found[0], "folder": found and str(found[1])})  # fmt: skip
    return lines
