"""One tensor's bytes: small whole numbers (counts, tables, classes) in front, and the codes that they describe.

    4 bytes   length of the numbers, little endian
    numbers   seven bits a byte, the lowest first, all together deflated
    codes     one after another; the length of each is among the numbers

>>> out = Writer()
>>> out.numbers([3, 300], [0] * 1000)
>>> out.code(b"code")
>>> read = Reader(out.whole())
>>> read.numbers(2).tolist(), int(read.numbers(1000).sum()), bytes(read.code())
([3, 300], 0, b'code')
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

LARGEST = 1 << 26  # bytes that a file may make us inflate


class Writer:
    def __init__(self):
        self._numbers, self._codes = bytearray(), bytearray()

    def numbers(self, *parts: Sequence[int] | np.ndarray) -> None:
        for part in parts:
            for n in np.asarray(part, np.int64).tolist():
                while n > 127:
                    self._numbers.append(128 | n & 127)
                    n >>= 7
                self._numbers.append(n)

    def code(self, code: bytes) -> None:
        self.numbers([len(code)])
        self._codes += code

    def whole(self) -> bytes:
        deflate = zlib.compressobj(9, wbits=-15)
        front = deflate.compress(bytes(self._numbers)) + deflate.flush()
        return len(front).to_bytes(4, "little") + front + bytes(self._codes)


class Reader:
    """In the order of writing; ValueError where there is not as much as is asked for."""

    def __init__(self, whole: bytes | memoryview):
        self._codes = memoryview(whole)[4:]
        front, self._at = self._codes[: int.from_bytes(whole[:4], "little")], 0
        self._codes = self._codes[len(front) :]
        try:
            raw = zlib.decompressobj(wbits=-15).decompress(front, LARGEST)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        self._numbers = _joined(np.frombuffer(raw, np.uint8).astype(np.int64))

    def numbers(self, n: int) -> np.ndarray:
        self._at += n
        if self._at > len(self._numbers):
            raise ValueError("fewer numbers than there should be")
        return self._numbers[self._at - n : self._at]

    def number(self) -> int:
        return int(self.numbers(1)[0])

    def code(self) -> memoryview:
        length = self.number()
        code, self._codes = self._codes[:length], self._codes[length:]
        if len(code) < length:
            raise ValueError("a code that is cut short")
        return code

    def end(self) -> None:
        if self._at < len(self._numbers) or len(self._codes):
            raise ValueError("bytes that nobody asked for")


def _joined(digits: np.ndarray) -> np.ndarray:
    last = np.flatnonzero(digits < 128)
    if not len(last):
        return last
    first = np.concatenate([[0], last[:-1] + 1])
    place = np.arange(last[-1] + 1) - np.repeat(first, last - first + 1)
    if place.max() > 7:  # of a number of 2^56 or more
        raise ValueError("a number that is too large")
    return np.add.reduceat((digits[: len(place)] & 127) << (7 * place), first)
