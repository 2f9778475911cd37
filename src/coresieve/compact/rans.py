"""An entropy coder for bytes: range asymmetric numeral systems, four of them interleaved (Duda 2013, Giesen 2014).

A symbol of frequency f out of 4096 costs log2(4096 / f) bits, fractions included. The state x, kept in [2^16, 2^32),
takes a symbol in by x -> (x // f) * 4096 + x % f + (the frequencies before it), and gives it back by the inverse. Four
states take turns, so that a processor works on four symbols at once. Symbols come in runs, each with its own table.

Whole numbers only: every machine decodes the same bytes alike.

>>> symbols = np.array([0, 0, 1, 0, 2, 0, 0, 0] * 1000, np.uint8)
>>> tables = np.stack([frequencies(np.bincount(symbols, minlength=256))])
>>> code = encode(symbols, [8000], tables)
>>> len(code), round(8000 * (0.75 * np.log2(4 / 3) + 0.25 * 3) / 8)      # beside the entropy
(1072, 1061)
>>> bool((decode(code, [8000], tables) == symbols).all())
True
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

PRECISION = 12
TOTAL = 1 << PRECISION
LANES = 4
LOW = 1 << 16  # a state below it takes in the next 16 bits
START = 4 * LANES  # bytes of the states in front

Counts = Sequence[int] | np.ndarray


def compiled(kernel):
    """By numba, once for all processes where a folder for its cache can be written."""
    try:
        return numba.njit(cache=True, nogil=True)(kernel)
    except RuntimeError:
        return numba.njit(nogil=True)(kernel)


def frequencies(counts: np.ndarray) -> np.ndarray:
    """How often each of 256 symbols comes in 4096: never 0 for one that comes at all."""
    total = counts.sum()
    if not total:
        return np.zeros(256, np.int64)
    f = np.where(counts > 0, np.maximum(1, np.rint(counts * (TOTAL / total))), 0).astype(np.int64)
    while (extra := int(f.sum()) - TOTAL) != 0:  # one at a time, where it costs least
        step = 1 if extra > 0 else -1
        with np.errstate(divide="ignore", invalid="ignore"):
            cost = np.where(f > max(step, 0), counts * np.log(f / (f - step)), np.inf)
        f[np.argmin(cost)] -= step
    return f


def entropy(counts: np.ndarray) -> float:
    """Bits of that many symbols of each kind, all together."""
    some = counts[counts > 0]
    return float((some * np.log2(some.sum() / some)).sum()) if len(some) else 0.0


def encode(symbols: np.ndarray, counts: Counts, tables: np.ndarray) -> bytes:
    """`symbols`, the first counts[0] of them by tables[0], and so on."""
    if not len(symbols):
        return b""
    words = np.empty(len(symbols) + 1, np.uint16)
    states = np.full(LANES, LOW, np.int64)
    n = _encode(symbols, np.asarray(counts, np.int64), np.asarray(tables, np.int64), states, words)
    return states.astype("<u4").tobytes() + words[:n][::-1].astype("<u2").tobytes()


def decode(code: bytes | memoryview, counts: Counts, tables: np.ndarray) -> np.ndarray:
    """What `encode` was given; ValueError for what it did not make."""
    runs, tables = np.asarray(counts, np.int64), np.asarray(tables, np.int64)
    n = int(runs.sum())
    if n == 0 and not len(code):
        return np.empty(0, np.uint8)
    used = tables[runs > 0]
    if len(code) < START or len(code) % 2 or (used < 0).any() or (used.sum(axis=1) != TOTAL).any():
        raise ValueError("a code or a table that is malformed")
    states = np.frombuffer(code, "<u4", LANES).astype(np.int64)
    words = np.frombuffer(code, "<u2", offset=START)
    symbols = np.empty(n, np.uint8)
    if not _decode(words, runs, tables, states, symbols):
        raise ValueError("a code that does not end where it should")
    return symbols


@compiled
def _encode(symbols, counts, tables, states, words):
    written, i = 0, len(symbols)
    before = np.empty(256, np.int64)
    for t in range(len(counts) - 1, -1, -1):
        f, total = tables[t], 0
        for s in range(256):
            before[s] = total
            total += f[s]
        for _ in range(counts[t]):
            i -= 1
            s, lane = symbols[i], i & (LANES - 1)
            x = states[lane]
            if x >= f[s] << (32 - PRECISION):
                words[written] = x & 0xFFFF
                written += 1
                x >>= 16
            states[lane] = ((x // f[s]) << PRECISION) + x % f[s] + before[s]
    return written


@compiled
def _decode(words, counts, tables, states, symbols):
    read, i = 0, 0
    symbol, size, place = np.empty(TOTAL, np.uint8), np.empty(TOTAL, np.int64), np.empty(TOTAL, np.int64)
    for t in range(len(counts)):
        if counts[t] == 0:
            continue
        start = 0
        for s in range(256):
            for k in range(tables[t, s]):
                symbol[start + k], size[start + k], place[start + k] = s, tables[t, s], k
            start += tables[t, s]
        for _ in range(counts[t]):
            lane = i & (LANES - 1)
            x = states[lane]
            slot = x & (TOTAL - 1)
            symbols[i] = symbol[slot]
            x = size[slot] * (x >> PRECISION) + place[slot]
            if x < LOW:
                if read == len(words):
                    return False
                x = (x << 16) | np.int64(words[read])
                read += 1
            states[lane] = x
            i += 1
    for lane in range(LANES):
        if states[lane] != LOW:
            return False
    return read == len(words)
