"""A sample of inputs, whatever shape it comes in, as batches of points and as a choice among its points.

A sample is a tensor, an array, a `DataLoader` or any iterable of batches; a batch is `x`, `(x, ...)` or a
dict of arguments. Labels and whatever else follows `x` are ignored.

>>> import numpy as np
>>> [len(batch) for batch in batches(np.zeros((600, 3)))]
[256, 256, 88]
>>> count(np.zeros((600, 3)))
600
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from coresieve.errors import SampleError

Batch = Tensor | dict[str, Any]
Sample = Any  # Tensor | ndarray | DataLoader | Iterable of batches
See = Callable[[Batch, np.ndarray], None]

POINTS_A_BATCH = 256  # of a sample that is one tensor: big enough to be fast, small enough for any memory


def batches(sample: Sample) -> Iterator[Batch]:
    """The sample's batches, each a tensor or a dict of arguments."""
    if isinstance(sample, Tensor | np.ndarray):
        sample = as_tensor(sample) if isinstance(sample, Tensor) else sample
        for start in range(0, count(sample) or 0, POINTS_A_BATCH):
            yield as_tensor(sample[start : start + POINTS_A_BATCH])
        return
    if isinstance(sample, str | bytes | Mapping) or not isinstance(sample, Iterable):
        raise SampleError(
            f"a sample of type {type(sample).__name__}",
            "a tensor, an array, a DataLoader or an iterable of batches",
            "pass the inputs as one tensor with a point per row",
        )
    for item in sample:
        yield _batch(item)


def _batch(item: Any) -> Batch:
    if isinstance(item, Mapping):
        return {key: as_tensor(value) for key, value in item.items()}
    if isinstance(item, Sequence) and not isinstance(item, str) and item:
        item = item[0]
    batch = as_tensor(item)
    if not isinstance(batch, Tensor):
        raise SampleError(
            f"a batch holding {type(item).__name__}",
            "a tensor, a tuple that starts with one, or a dict of arguments",
            "convert the inputs to tensors, for example in the loader's collate_fn",
        )
    return batch


def as_tensor(value: Any) -> Any:
    """Arrays as tensors of their own memory, in this machine's byte order; tensors that we cannot index are refused."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise SampleError(
            "an array with masked entries", "numbers everywhere", "array.filled(0), or the whole rows"
        )
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise SampleError(
                f"an array of type {value.dtype.name} ({value.dtype})", "numbers", "array.astype('float32')"
            ) from error
    if torch.is_tensor(value) and (kind := _not_dense(value)):
        hint = "x.dequantize()" if value.is_quantized else "x.to_dense()"
        raise SampleError(f"a {kind} tensor", "a dense tensor that holds its numbers", hint)
    return value


def _not_dense(x: Tensor) -> str:
    """Why we cannot index a tensor and read its numbers; nothing for one that is as most are."""
    kinds = {"meta": x.is_meta, "nested": x.is_nested, "quantized": x.is_quantized}
    strange = next((kind for kind, is_so in kinds.items() if is_so), "")
    return strange or ("" if x.layout == torch.strided else str(x.layout))


def size(batch: Batch) -> int:
    """How many points a batch holds: the length of its tensor, or the length that most of its tensors share."""
    tensors = [batch] if isinstance(batch, Tensor) else [x for x in batch.values() if torch.is_tensor(x)]
    lengths = [x.shape[0] for x in tensors if x.ndim]
    if not lengths:
        raise SampleError("a batch without a dimension of points", "tensors whose first dimension counts points",
                          "add that dimension, for example x.unsqueeze(0)")  # fmt: skip
    return max(lengths, key=lambda n: (lengths.count(n), n))


def take(batch: Batch, index: Tensor) -> Batch:
    """Some of a batch's points; arguments that are not per-point tensors pass through."""
    if isinstance(batch, Tensor):
        return batch[index]
    n = size(batch)
    return {k: v[index] if torch.is_tensor(v) and v.ndim and v.shape[0] == n else v for k, v in batch.items()}


def merged(parts: list[Batch], limit: int) -> list[Batch]:
    """The same points in batches of up to `limit`, where their points have one shape; else as they are."""
    if len({_point_shape(part) for part in parts} | {None}) != 2:
        return parts
    groups: list[list[Batch]] = [[]]
    for part in parts:
        if groups[-1] and sum(map(size, groups[-1])) + size(part) > limit:
            groups.append([])
        groups[-1].append(part)
    return [_joined(group) for group in groups]


def _joined(parts: list[Batch]) -> Batch:
    dicts = [part for part in parts if isinstance(part, dict)]
    if dicts:
        return {key: torch.cat([part[key] for part in dicts]) for key in dicts[0]}
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def _point_shape(batch: Batch) -> tuple | None:
    """What a point of this batch looks like; None when it holds more than tensors with one entry a point."""
    named = {"": batch} if isinstance(batch, Tensor) else batch
    n = size(batch)
    if not all(torch.is_tensor(x) and x.ndim and x.shape[0] == n for x in named.values()):
        return None
    return tuple((key, x.shape[1:], x.dtype) for key, x in named.items())


def count(sample: Sample) -> int | None:
    """How many points a sample holds, or None when only reading it would tell."""
    if isinstance(sample, Tensor | np.ndarray):
        sample = as_tensor(sample) if isinstance(sample, Tensor) else sample
        return sample.shape[0] if sample.ndim else 0
    if isinstance(sample, DataLoader):
        return _count_loader(sample)
    if isinstance(sample, list | tuple):
        return sum(size(_batch(item)) for item in sample)
    return None


def _count_loader(loader: DataLoader) -> int | None:
    drawn = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or type(drawn) is not BatchSampler:
        return None
    try:
        n = len(drawn.sampler)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None
    return n // drawn.batch_size * drawn.batch_size if drawn.drop_last else n


def choose(
    sample: Sample, wanted: Sequence[int], seed: int, see: See = lambda batch, used: None
) -> Iterator[tuple[int, Batch]]:
    """Disjoint uniform subsets of the sample's points, without replacement: (which subset, some of its points).

    `wanted` are the subsets' sizes in order. A sample too small for all of them gives each later subset at most
    a third of its points and the first one the rest. Of a sample that cannot say its size the first points are taken:
    independent points are as good in any order. `see` is shown each batch, and which of its points are taken.
    """
    n = count(sample)
    owner = None if n is None else _owners(n, wanted, seed)
    start = 0
    for batch in batches(sample):
        here = size(batch)
        part = _in_order(start, here, wanted) if owner is None else _owned(owner, start, here)
        start += here
        see(batch, part >= 0)
        for which in range(len(wanted)):
            index = np.flatnonzero(part == which)
            if here and len(index) == here:
                yield which, batch
            elif len(index):
                yield which, take(batch, torch.from_numpy(index))
        if owner is None and start >= wanted[0] + 3 * sum(wanted[1:]):
            return


def _owners(n: int, wanted: Sequence[int], seed: int) -> np.ndarray:
    """For each of n points the subset it belongs to, -1 for none."""
    later = [min(size, n // 3) for size in wanted[1:]]
    sizes = [min(wanted[0], n - sum(later)), *later]
    owner = np.repeat([*range(len(sizes)), -1], [*sizes, n - sum(sizes)])
    return np.random.default_rng([seed, 1]).permutation(owner)


def _owned(owner: np.ndarray, start: int, here: int) -> np.ndarray:
    """The owners of some points; points beyond those that were counted (a loader may make more of them) have none."""
    known = owner[start : start + here]
    return np.pad(known, (0, here - len(known)), constant_values=-1)


def _in_order(start: int, here: int, wanted: Sequence[int]) -> np.ndarray:
    """The same for points start, start + 1, ... of a stream: every third goes to a later subset while one wants it."""
    owner = np.zeros(here, int)
    for k in range(here):
        at = start + k
        later = sum(wanted[1:])
        turn = at // 3 if at % 3 == 2 else later
        if turn < later:
            owner[k] = 1 + int(np.searchsorted(np.cumsum(wanted[1:]), turn, side="right"))
        else:
            before = at - min(later, (at + 1) // 3)
            owner[k] = 0 if before < wanted[0] else -1
    return owner


@contextlib.contextmanager
def private_randomness(sample: Sample, seed: int) -> Iterator[None]:
    """Reading a sample may draw from global generators: lend them a private state and put things back."""
    generator = getattr(sample, "generator", None)
    generator = generator if isinstance(generator, torch.Generator) else None
    state = None if generator is None else generator.get_state()
    with own_randomness(seed):
        try:
            yield
        finally:
            if generator is not None and state is not None:
                generator.set_state(state)


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """The global generators of torch, NumPy and Python start at this seed, and afterwards are as they were."""
    numpys, pythons = np.random.get_state(), random.getstate()  # noqa: NPY002  users' code may draw from it
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed % 2**63)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpys)  # noqa: NPY002
            random.setstate(pythons)
