"""Which entries of a matrix stay, near and mostly below log2 of the number of ways to choose them.

Rows and columns of like density form classes: CoreNet keeps many edges of a busy input and none of a silent one, and
where columns differ that is a tenth of the bound. A row class and a column class make a block, in which entries are
taken to be independent with one density, k of n. Walked row by row, the number s of entries that go between two that
stay comes with probability p (1 - p)^s; coded by that law each costs H(p) / p bits, which is the bound. A symbol is s,
or `skip`: so many go, count on from there. The law needs no table in the file, for k and n make it.

>>> kept = np.random.default_rng(0).random((100, 100)) < 0.1
>>> out = Writer()
>>> entries = encode(out, kept)
>>> print(len(out.whole()), "bytes, where", round(bound(10_000, int(kept.sum())) / 8), "are the bound")
626 bytes, where 598 are the bound
>>> bool((decode(Reader(out.whole()), 100, 100).index == entries.index).all())
True
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from coresieve.compact import rans
from coresieve.compact.rans import entropy
from coresieve.compact.side import Reader, Writer

SURE = 31  # bits of a probability


@dataclass(frozen=True)
class Entries:
    """The entries that stay, block by block: in this order their values follow."""

    index: np.ndarray  # of each, row * columns + column
    by_column: np.ndarray  # how many there are of each column class, in the same order


def bound(n: int, k: int) -> float:
    """log2 of the number of ways to choose k of n, in bits."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def encode(out: Writer, kept: np.ndarray) -> Entries:
    """Where a matrix of booleans is True."""
    rows, columns = np.nonzero(kept)
    lines = _classes(rows, columns, kept.shape)
    row_class, column_class = lines
    row_place, column_place = (_places(c) for c in lines)
    heights, widths = (np.bincount(c, minlength=1) for c in lines)
    block = column_class[columns] * len(heights) + row_class[rows]
    order = np.argsort(block.astype(np.uint16), kind="stable")
    rows, columns, block = rows[order], columns[order], block[order]

    sizes, counts = (
        np.outer(widths, heights).ravel(),
        np.bincount(block, minlength=widths.size * heights.size),
    )
    tables, skips = _laws(counts, sizes)
    walked = row_place[rows] * widths[column_class[columns]] + column_place[columns]
    gap = np.diff(walked, prepend=-1) - 1
    first = np.flatnonzero(np.diff(block, prepend=-1))
    gap[first] = walked[first]
    many, rest = np.divmod(gap, skips[block])
    symbols = np.repeat(skips[block].astype(np.uint8), many + 1)
    symbols[np.cumsum(many + 1) - 1] = rest
    skipped = np.bincount(block, many, minlength=len(counts)).astype(np.int64)

    out.numbers([len(heights), len(widths)], row_class, column_class, counts, skipped)
    out.code(rans.encode(symbols, counts + skipped, tables))
    return Entries(rows.astype(np.int64) * kept.shape[1] + columns, _by_column(counts, widths))


def decode(read: Reader, height: int, width: int) -> Entries:
    """The same entries; ValueError where these are none of a matrix of this size."""
    classes = read.numbers(2)
    lines = read.numbers(height), read.numbers(width)
    if any(
        not 1 <= n <= len(c) + 1 or (len(c) and c.max() >= n) for n, c in zip(classes, lines, strict=True)
    ):
        raise ValueError("a class that is out of range")
    heights, widths = (np.bincount(c, minlength=n) for c, n in zip(lines, classes, strict=True))
    sizes = np.outer(widths, heights).ravel()
    counts, skipped = read.numbers(len(sizes)), read.numbers(len(sizes))
    tables, skips = _laws(np.minimum(counts, sizes), sizes)
    if (counts > sizes).any() or (skipped * skips > sizes).any():
        raise ValueError("a block that holds more than its size")
    symbols = rans.decode(read.code(), counts + skipped, tables)
    index = np.empty(int(counts.sum()), np.int64)
    row_order, column_order = (np.argsort(c, kind="stable") for c in lines)
    if not _walk(symbols, counts, skips, (row_order, heights), (column_order, widths), width, index):
        raise ValueError("an entry outside its block")
    return Entries(index, _by_column(counts, widths))


def _by_column(counts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    return counts.reshape(len(widths), -1).sum(axis=1)


def _places(classes: np.ndarray) -> np.ndarray:
    """Each one's place among those of its class."""
    order = np.argsort(classes, kind="stable")
    starts = np.cumsum(np.bincount(classes, minlength=1)) - np.bincount(classes, minlength=1)
    places = np.empty_like(classes)
    places[order] = np.arange(len(classes)) - starts[classes[order]]
    return places


# --- Densities ----------------------------------------------------------------------------------------------


def _classes(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Of rows and columns, by powers of 2 of their odds; only where that pays for telling them."""
    one = [np.zeros(n, np.int64) for n in shape]
    by_row, by_column = _odds(rows, shape[0], shape[1]), _odds(columns, shape[1], shape[0])
    ways = itertools.product((one[0], by_row), (one[1], by_column))
    return min(ways, key=lambda way: _price(rows, columns, *way))


def _odds(lines: np.ndarray, many: int, size: int) -> np.ndarray:
    kept = np.bincount(lines, minlength=many)
    power = np.floor(np.log2((kept + 0.5) / (size - kept + 0.5)))
    return np.unique(power, return_inverse=True)[1].astype(np.int64)


def _price(rows: np.ndarray, columns: np.ndarray, row_class: np.ndarray, column_class: np.ndarray) -> float:
    """About how many bits: the classes', two bytes for each block, and the entries'."""
    heights, widths = (np.bincount(c, minlength=1) for c in (row_class, column_class))
    counts = np.bincount(
        column_class[columns] * len(heights) + row_class[rows], minlength=heights.size * widths.size
    )
    sizes = np.outer(widths, heights).ravel()
    entries = sum(bound(int(n), int(k)) for n, k in zip(sizes, counts, strict=True))
    return entropy(heights) + entropy(widths) + 16 * len(sizes) + entries


def _laws(counts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each block the frequencies of 0, 1, 2, ... and, as their last symbol, of `skip`, which is its number."""
    tables, skips = np.zeros((len(counts), 256), np.int64), np.ones(len(counts), np.int64)
    _fill(counts.astype(np.int64), sizes.astype(np.int64), tables, skips)
    return tables, skips


@rans.compiled
def _fill(counts, sizes, tables, skips):
    """In whole numbers, so that every machine makes the same law. It ends where less than 1 of 4096 would be left."""
    for block in range(len(counts)):
        k, n, f = counts[block], sizes[block], tables[block]
        if k == n:
            f[0] = rans.TOTAL  # nothing is ever skipped
        elif k * rans.TOTAL < n:
            f[:255], f[255] = 1, rans.TOTAL - 255
            skips[block] = 255
        elif k > 0:
            miss = ((n - k) << SURE) // n
            tail, start, s = 1 << SURE, 0, 0
            while s < 255 and (s == 0 or (tail - (tail * miss >> SURE)) * rans.TOTAL >= 1 << SURE):
                tail = tail * miss >> SURE
                end = min((((1 << SURE) - tail) * rans.TOTAL) >> SURE, rans.TOTAL - 1)
                f[s] = end - start
                start = end
                s += 1
            f[s] = rans.TOTAL - start
            skips[block] = s


@rans.compiled
def _walk(symbols, counts, skips, by_row, by_column, stride, index):
    row_order, heights = by_row
    column_order, widths = by_column
    read, found, block, left = 0, 0, 0, 0
    for c in range(len(widths)):
        top = 0
        for r in range(len(heights)):
            i, j = 0, 0
            for _ in range(counts[block]):
                s = np.int64(symbols[read])
                read += 1
                while s == skips[block] and counts[block] < heights[r] * widths[c]:
                    j += s
                    if read == len(symbols):
                        return False
                    s = np.int64(symbols[read])
                    read += 1
                j += s
                if j >= widths[c]:
                    i += j // widths[c]
                    j %= widths[c]
                if i >= heights[r]:
                    return False
                index[found] = row_order[top + i] * stride + column_order[left + j]
                found += 1
                j += 1
            top += heights[r]
            block += 1
        left += widths[c]
    return read == len(symbols)
