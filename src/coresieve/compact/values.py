"""The bits of the values that stay, of any type: of each a symbol, which is coded, and bits, which are not.

    split     symbol: which of at most 256 patterns of sign and exponent; bits: the mantissa, less the zeros in which
              all of them end (13 of 23 for float16's numbers in float32). It is noise: coding it saves nothing
    palette   symbol: which of at most 256 values; no bits
    steps     symbol: a whole number from -127 to 127, which multiplies a step of the row's: rows that were rounded
    plain     one symbol, which costs nothing; bits: all

The cheapest that gives back every bit is taken. Symbols have one table, or one for each column class where that pays.

>>> bits = np.random.default_rng(0).standard_normal(1000).astype(np.float32).view(np.uint32)
>>> out = Writer()
>>> encode(out, bits, torch.float32, [1000], None)
>>> len(out.whole()), bool((decode(Reader(out.whole()), torch.float32, [1000], None) == bits).all())
(3414, True)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from coresieve.compact import rans
from coresieve.compact.rans import Counts, entropy
from coresieve.compact.side import Reader, Writer

MANTISSA = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
MOST = 127  # steps from 0
SHORT = 9  # bits of a step that `rounding` made
LOWER, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
STEPS = 65  # written where the others write how many bits of each value are not coded


def unsigned(dtype: torch.dtype) -> np.dtype:
    return np.dtype(f"<u{dtype.itemsize}")


@dataclass(frozen=True)
class Rows:
    """Which row each value is in, for those that were rounded by rows."""

    index: np.ndarray  # of each value, row * width + column
    width: int
    height: int


def encode(out: Writer, bits: np.ndarray, dtype: torch.dtype, counts: Counts, rows: Rows | None) -> None:
    """`counts` is how many there are of each column class, one class after another."""
    whole = 8 * dtype.itemsize
    ways = [_split(bits, shift) for shift in (0, MANTISSA.get(dtype, whole), whole)]
    if rows is not None and dtype in MANTISSA:
        ways.append(_steps(bits, dtype, rows.index // max(1, rows.width), rows.height))
    _, kind, symbols, told, rest = min((way for way in ways if way is not None), key=lambda way: way[0])
    tables, runs = _tabled(symbols, counts)
    out.numbers([kind, len(tables)], tables.ravel())
    out.code(rans.encode(symbols, runs, tables))
    if kind == STEPS:
        return encode(out, told, dtype, [len(told)], None)
    zeros = _zeros(rest, kind)
    out.numbers([len(told), zeros], told & LOWER, told >> HALF)
    rest = rest >> np.uint64(zeros) if zeros < 64 else rest
    for part, width in zip((rest & LOWER, rest >> HALF), _halves(kind - zeros), strict=True):
        code = np.zeros(-(-len(rest) * width // 8), np.uint8)
        _put(part.astype(np.int64), width, code)
        out.code(code.tobytes())
    return None


def decode(read: Reader, dtype: torch.dtype, counts: Counts, rows: Rows | None) -> np.ndarray:
    """The same bits; ValueError where these are none of such values."""
    kind, many = read.numbers(2).tolist()
    if many not in (1, len(counts)) or (kind > 8 * dtype.itemsize and (kind != STEPS or rows is None)):
        raise ValueError("a kind of values that is unknown")
    tables = read.numbers(256 * many).reshape(many, 256)
    symbols = rans.decode(read.code(), counts if many > 1 else [int(np.sum(counts))], tables)
    if kind == STEPS:
        assert rows is not None
        steps = _numbers(decode(read, dtype, [rows.height], None), dtype)
        return _bits(_scaled(symbols.view(np.int8), steps, rows.index, rows.width), dtype)
    patterns, zeros = read.numbers(2).tolist()
    low, high = read.numbers(patterns).astype(np.uint64), read.numbers(patterns).astype(np.uint64)
    if zeros > kind or (len(symbols) and symbols.max() >= patterns):
        raise ValueError("a pattern that is missing")
    told = low | high << HALF
    bits = (told << np.uint64(kind) if kind < 64 else told * 0).astype(unsigned(dtype))[symbols]
    for width, shift in zip(_halves(kind - zeros), (zeros, zeros + 32), strict=True):
        code = np.frombuffer(read.code(), np.uint8)
        if len(code) != -(-len(bits) * width // 8):
            raise ValueError("fewer or more bits than there should be")
        if width:
            _get(code, width, shift, bits)
    return bits


def _halves(width: int) -> tuple[int, int]:
    return min(width, 32), max(0, width - 32)


# --- Ways to part a value: (price in bits, kind, symbols, what they stand for, uncoded bits) ------------------


def _split(bits: np.ndarray, shift: int) -> tuple | None:
    """The first bits are a symbol, the last `shift` are not coded."""
    bits = bits.astype(np.uint64)
    head = bits >> shift if shift < 64 else np.zeros_like(bits)
    if len(np.unique(head[:1000])) > 256:
        return None
    patterns, symbols, many = np.unique(head, return_inverse=True, return_counts=True)
    if len(patterns) > 256:
        return None
    rest = bits & np.uint64((1 << shift) - 1)
    price = entropy(many) + 32 * len(patterns) + (shift - _zeros(rest, shift)) * len(bits)
    return price, shift, symbols.astype(np.uint8), patterns, rest


def _zeros(rest: np.ndarray, width: int) -> int:
    """In how many zeros all of them end."""
    some = int(np.bitwise_or.reduce(rest)) if len(rest) else 0
    return (some & -some).bit_length() - 1 if some else width


def _steps(bits: np.ndarray, dtype: torch.dtype, rows: np.ndarray, height: int) -> tuple | None:
    """Where the numbers of each row are whole multiples of a step, few enough of it."""
    first = rows == rows[:1]
    if not len(bits) or _multiples(bits[first], dtype, rows[first] * 0, 1) is None:
        return None
    if (found := _multiples(bits, dtype, rows, height)) is None:
        return None
    n, power, step = found
    n //= step[rows]
    top = np.zeros(height, np.int64)
    np.maximum.at(top, rows, np.abs(n))
    short = step  # or a part of this divisor, where that is as short as rounding makes its steps
    for part in range(3, MOST + 1, 2) if _odd(step).max() >> SHORT else ():
        better = (_odd(short) >> SHORT > 0) & (step % part == 0) & (top * part <= MOST)
        short = np.where(better & (_odd(step // part) < _odd(short)), step // part, short)
    symbols = (n * (step // np.maximum(1, short))[rows]).astype(np.int8)
    told = _bits(np.ldexp(short.astype(np.float64), power), dtype)
    if (_bits(symbols * _numbers(told, dtype)[rows], dtype) != bits).any():
        return None  # the step itself is no number of this type
    symbols = symbols.view(np.uint8)
    return entropy(np.bincount(symbols)) + 8 * 256 + 16 * height, STEPS, symbols, told, None


def _multiples(
    bits: np.ndarray, dtype: torch.dtype, rows: np.ndarray, height: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Each number as n 2^power, with the power of its row, and the greatest common divisor of each row's n."""
    numbers = _numbers(bits, dtype)
    if not np.isfinite(numbers).all() or not numbers.all():
        return None
    fraction, exponent = np.frexp(numbers)
    n = np.ldexp(fraction, 53).astype(np.int64)
    exponent += np.frexp(n & -n)[1] - 54
    n //= n & -n
    power = np.full(height, 2**15)
    np.minimum.at(power, rows, exponent)
    exponent -= power[rows]
    if (np.frexp(n)[1] + exponent > 40).any():
        return None
    n <<= exponent
    step = np.zeros(height, np.int64)
    np.gcd.at(step, rows, n)
    return None if (np.abs(n) > MOST * step[rows]).any() else (n, np.where(step, power, 0), step)


def _odd(n: np.ndarray) -> np.ndarray:
    return n // np.maximum(1, n & -n)


# --- Symbols and bits ---------------------------------------------------------------------------------------


def _tabled(symbols: np.ndarray, counts: Counts) -> tuple[np.ndarray, Counts]:
    """A table for each run of counts[i] symbols, or one for all where that is cheaper."""
    runs = np.split(symbols, np.cumsum(counts)[:-1])
    each = np.stack([np.bincount(run, minlength=256) for run in runs])
    together = each.sum(axis=0)
    if sum(map(_price, each)) < _price(together):
        return np.stack([rans.frequencies(c) for c in each]), counts
    return rans.frequencies(together)[None], [len(symbols)]


def _price(counts: np.ndarray) -> float:
    return entropy(counts) + 10 * np.count_nonzero(counts)


def _numbers(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """In float64, which holds all of them."""
    if dtype == torch.bfloat16:
        bits, dtype = bits.astype(np.uint32) << 16, torch.float32
    with np.errstate(invalid="ignore"):  # signalling NaN
        return bits.view(f"<f{dtype.itemsize}").astype(np.float64)


def _bits(numbers: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The inverse, for numbers of that type."""
    if dtype == torch.bfloat16:
        return (numbers.astype("<f4").view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(f"<f{dtype.itemsize}").view(unsigned(dtype))


@rans.compiled
def _put(values, width, out):
    held, bits, written = 0, 0, 0
    for i in range(len(values) if width else 0):
        held |= values[i] << bits
        bits += width
        while bits >= 8:
            out[written] = held & 255
            held >>= 8
            bits -= 8
            written += 1
    if bits:
        out[written] = held


@rans.compiled
def _get(code, width, shift, values):
    held, bits, read = 0, 0, 0
    for i in range(len(values)):
        while bits < width:
            held |= np.int64(code[read]) << bits
            bits += 8
            read += 1
        values[i] |= np.uint64(held & ((1 << width) - 1)) << np.uint64(shift)
        held >>= width
        bits -= width


@rans.compiled
def _scaled(symbols, steps, index, width):
    numbers = np.empty(len(symbols))
    for i in range(len(symbols)):
        numbers[i] = symbols[i] * steps[index[i] // width]
    return numbers
