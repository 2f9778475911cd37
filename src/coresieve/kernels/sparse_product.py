"""y = x W^T + b for a sparse W, two ways: `panels` for several inputs, `slabs` for one.

**panels.** A panel is 1 to 64 inputs side by side: its line j holds what they all have in place j. A row's weights
are walked in order; each is broadcast, multiplied with its line and added to sums that stay in registers. What a
weight costs is two loads and one or two more a vector, so a wide panel is better until it no longer fits the
second cache. Inputs are turned into panels and sums back into answers a square of lanes at a time.

**slabs.** One input leaves nothing to broadcast over, and fetching x_j for each weight alone costs a cycle. Instead
16 rows run side by side, one a lane, and x is looked up in registers: with AVX-512 one instruction picks any 16 of
32 numbers that two registers hold. A group is a window of 32, 64 or 128 consecutive inputs and up to K
weights of each row that fall into it; where a row has fewer, a weight of 0 fills its place. The window starts where the
hindmost of the 16 rows is, so a row may run ahead of another within it: at a density of 10 % three places in
four hold a weight, where windows that do not overlap fill a half. No branch depends on the data.

Rows are put in slabs by their number of weights, since a slab is as long as its longest row.

>>> import numpy as np, torch
>>> w = np.array([[0, 2, 0, 0], [1, 0, 0, 3]] * 8, np.float32)
>>> Panels(csr(w), np.ones(16, np.float32), width=1)(torch.tensor([[1.0, 10.0, 100.0, 1000.0]]))[0, :2]
tensor([  21., 3002.])
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from coresieve.kernels.jobs import WORTH, cores, share
from coresieve.kernels.max_times import _has_numba

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PAD = 4  # a row's weights fill whole multiples of this: the sums of as many are added side by side
ALIGN = 64  # bytes: a cache line and the widest vector
MOST_INPUTS = 1 << 16  # a weight's place is two bytes

# Slabs: registers that hold the window, weights of each row in a group. AVX-512, or AVX2 with half of both.
SHAPES = {16: ((4, 2), (4, 4), (4, 8), (8, 2), (8, 4)), 8: ((2, 1), (2, 2), (4, 2), (4, 4)), 4: ()}
AT_ONCE = {16: 8, 8: 4}  # weights of a row between two looks at the end: sums that do not wait for each other

# Panels: width -> (vectors, weights at once, lanes), for the widest vectors that there are.
WIDTHS = {
    16: {1: (1, 4, 1), 4: (1, 4, 4), 8: (1, 4, 8), 16: (1, 4, 16), 32: (2, 4, 16), 64: (4, 2, 16)},
    8: {1: (1, 4, 1), 4: (1, 4, 4), 8: (1, 4, 8), 16: (2, 4, 8), 32: (4, 2, 8)},
    4: {1: (1, 4, 1), 4: (1, 4, 4), 8: (2, 4, 4), 16: (4, 2, 4)},
}
SORTING = 1.25  # what the slabs of unsorted rows may be longer by


class Rows(NamedTuple):
    """A sparse matrix by rows: of row i, counts[i] weights from starts[i] on, in the order of their columns.

    Zeros fill each row up to a whole multiple of PAD.
    """

    starts: np.ndarray
    counts: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    inputs: int

    @property
    def density(self) -> float:
        return self.counts.sum() / max(1, len(self.counts) * self.inputs)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self[:4])

    def dense(self) -> np.ndarray:
        w = np.zeros((len(self.counts), self.inputs), np.float32)
        i, at = _places(self.starts, self.counts)
        w[i, self.columns[at]] = self.values[at]
        return w


def csr(w: np.ndarray) -> Rows:
    """
    >>> rows = csr(np.array([[0.0, 2.0], [0.0, 0.0], [1.0, 3.0]], np.float32))
    >>> rows.starts, rows.values
    (array([0, 4, 4, 8]), array([2., 0., 0., 0., 1., 3., 0., 0.], dtype=float32))
    """
    i, j = np.nonzero(w)
    counts = np.bincount(i, minlength=len(w))
    starts = np.concatenate([[0], np.cumsum(-(-counts // PAD) * PAD)])
    columns = np.zeros(starts[-1], np.uint16 if w.shape[1] <= MOST_INPUTS else np.int32)
    values = np.zeros(starts[-1], np.float32)
    _, at = _places(starts, counts)
    columns[at], values[at] = j, w[i, j]
    return Rows(starts, counts, columns, values, w.shape[1])


def _places(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of each weight, and where it lies."""
    i = np.repeat(np.arange(len(counts)), counts)
    return i, np.arange(len(i)) + (starts[:-1] - np.cumsum(counts) + counts)[i]


# ---- what runs --------------------------------------------------------------------------------------------

_Job = ctypes.c_int64 * 8


class Product:
    """A packed matrix that multiplies: `product(x)` for x of shape (batch, inputs), float32, contiguous, on the CPU."""

    def __init__(
        self, task: Any, rows: Rows, numbers: Sequence[int], arrays: Sequence[np.ndarray], scratch: int
    ):
        self._task, self.rows, self.work = task, len(rows.counts), int(rows.starts[-1])
        self.arrays, self.scratch = arrays, -(-scratch // ALIGN) * ALIGN
        self._plan = np.array([rows.inputs, self.rows, *numbers, *(a.ctypes.data for a in arrays)], np.int64)
        self._free: list[tuple[Any, int, Tensor]] = []

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def __call__(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        y = torch.empty(batch, self.rows)
        work = self.work * batch
        threads = 1 if work < 2 * WORTH else cores(work, torch.get_num_threads())
        try:  # a job and its work space that no other call uses meanwhile
            job, most, space = self._free.pop()
        except IndexError:
            job, most, space = None, 0, y
        if job is None or most < threads:
            most, space = threads, torch.zeros(threads * self.scratch, dtype=torch.uint8)
            job = _Job(0, 1, 0, 0, 0, self._plan.ctypes.data, space.data_ptr(), self.scratch)
        job[2], job[3], job[4] = x.data_ptr(), y.data_ptr(), batch
        if threads == 1:
            self._task(job)
        else:
            job[0], job[1] = 0, threads
            share(self._task, job, threads)
            job[1] = 1
        self._free.append((job, most, space))
        return y


class Panels(Product):
    """For several inputs, `width` of them side by side; of width 1 it is the plain product by rows."""

    def __init__(self, rows: Rows, bias: np.ndarray | None, width: int):
        kind = list(WIDTHS[lanes()]).index(width)
        vectors, _, across = WIDTHS[lanes()][width]
        b = np.zeros(len(rows.counts), np.float32) if bias is None else bias
        arrays = [rows.starts, rows.columns, rows.values, b]
        scratch = 4 * width * (rows.inputs + across)
        super().__init__(_kernels().panels, rows, [kind, vectors, across], arrays, scratch)


class Slabs(Product):
    """For one input (or few, one after another): AVX-512 or AVX2."""

    def __init__(self, rows: Rows, bias: np.ndarray | None, shape: tuple[int, int]):
        (registers, weights), n = shape, lanes()
        self.order, whole_slabs = _order(rows.counts, n)
        packed = _kernels().lay_out_slabs(
            *rows[:4], self.order, rows.inputs, n, n * registers, weights, AT_ONCE[n] // weights
        )
        whole = -(-len(self.order) // n) * n
        b = np.zeros(whole, np.float32)
        if bias is not None:
            b[: len(bias)] = bias[self.order]
        width = max(n * registers, -(-rows.inputs // n) * n)  # of x, with zeros behind it
        arrays = [*map(_aligned, packed), _aligned(b), self.order]
        numbers = [SHAPES[n].index(shape), weights, n, whole, whole_slabs]
        super().__init__(_kernels().slabs, rows, numbers, arrays, 4 * (whole + width))

    @property
    def filled(self) -> float:
        """Share of the places that hold a weight."""
        return np.count_nonzero(self.arrays[3]) / max(1, self.arrays[3].size)


def _order(counts: np.ndarray, lanes: int) -> tuple[np.ndarray, int]:
    """The rows in the order of their lanes, and how many of them, from the first on, lie as in the answer.

    As they are, when sorting would not shorten the slabs: answers are then stored a vector at a time.
    """

    def length(order: np.ndarray) -> int:
        return int(np.maximum.reduceat(counts[order], np.arange(0, len(order), lanes)).sum())

    plain, ordered = np.arange(len(counts)), np.argsort(counts, kind="stable")
    if length(plain) <= SORTING * length(ordered):
        return plain.astype(np.int32), len(counts) // lanes * lanes
    return ordered.astype(np.int32), 0


def _aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a cache line."""
    space = np.zeros(array.nbytes + ALIGN, np.uint8)
    first = -space.ctypes.data % ALIGN
    answer = space[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    answer[...] = array
    return answer


def available() -> bool:
    return _has_numba()


@functools.cache
def features() -> frozenset[str]:
    """What numba compiles for: the CPU's own, unless NUMBA_CPU_FEATURES says otherwise."""
    from numba.core.registry import cpu_target

    context: Any = cpu_target.target_context
    told = context.codegen().magic_tuple()[2]
    return frozenset(name[1:] for name in told.split(",") if name.startswith("+"))


@functools.cache
def lanes() -> int:
    """float32 numbers in one vector register."""
    return 16 if "avx512f" in features() else 8 if "avx" in features() else 4


def widths(rows: Rows) -> list[int]:
    """Of the panels for this matrix: a square of their lanes must fit into it."""
    least = min(len(rows.counts), rows.inputs)
    return [width for width, (_, _, across) in WIDTHS[lanes()].items() if across <= least]


def slab_shapes() -> tuple[tuple[int, int], ...]:
    return SHAPES[lanes()] if features() & {"avx512f", "avx2"} else ()


# ---- the kernels ------------------------------------------------------------------------------------------
# Plain functions here, so that this module imports without numba and costs nothing until the first call.


class _Compiled(NamedTuple):
    panels: Any
    slabs: Any
    lay_out_slabs: Any


@functools.cache
def _kernels() -> _Compiled:
    """Compiled on first use (a few seconds) and read from numba's cache from then on."""
    import numba
    from numba.extending import intrinsic, register_jitable

    for inner in (_word, _place, _take, _move, _copy, _turn, _row_sum, _slab_sum):
        globals()[inner.__name__[1:]] = intrinsic(inner)  # globals: numba caches no function with closures
    task = numba.types.void(numba.int64)

    def compiled(f: Any) -> Any:
        try:
            made = numba.cfunc(task, cache=True, error_model="numpy")(f)
        except RuntimeError:  # no folder that a cache could be written to
            made = numba.cfunc(task, error_model="numpy")(f)
        _held.append(made)
        address: Any = made.address
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def packer(f: Any) -> Any:
        try:
            return numba.njit(cache=True, nogil=True)(f)
        except RuntimeError:
            return numba.njit(nogil=True)(f)

    register_jitable(_fill_slab)
    slabs = compiled(_slabs) if slab_shapes() else None
    return _Compiled(compiled(_panels), slabs, packer(_lay_out_slabs))


_held: list[Any] = []  # compiled code goes when its object does
word = place = take = move = copy = turn = row_sum = slab_sum = cast("Any", None)  # the intrinsics


def _panels(job):
    """Tiles of rows and panels, in one list; each thread takes a stretch of it."""
    threads, x, y, batch, plan = word(job, 1), word(job, 2), word(job, 3), word(job, 4), word(job, 5)
    inputs, rows, kind, vectors, across = (
        word(plan, 0),
        word(plan, 1),
        word(plan, 2),
        word(plan, 3),
        word(plan, 4),
    )
    starts, columns, values, bias = word(plan, 5), word(plan, 6), word(plan, 7), word(plan, 8)
    width, thread = vectors * across, take(job) if threads > 1 else 0
    panel = word(job, 6) + thread * word(job, 7)
    sums = panel + 4 * width * inputs
    tiles = -(-rows // across)
    last = -(-batch // width) * tiles
    here, end, turned = thread * last // threads, (thread + 1) * last // threads, -1
    while here < end:
        p = here // tiles
        if width == 1:
            panel = x + 4 * inputs * p
        elif p != turned:  # inputs that are not there repeat the last one, and its answer is written again
            for v in range(vectors):
                for j in range(0, inputs, across):
                    left = min(j, inputs - across)
                    corner = panel + 4 * (left * width + v * across)
                    turn(
                        across,
                        x + 4 * left,
                        4 * inputs,
                        width * p + across * v,
                        batch - 1,
                        corner,
                        4 * width,
                        0,
                        across,
                    )
            turned = p
        i = min(here % tiles * across, rows - across)
        for k in range(across):
            first, after = word(starts, i + k), word(starts, i + k + 1)
            row_sum(kind, columns, values, first, after, panel, sums + 4 * width * k, bias + 4 * (i + k))
        for v in range(vectors):
            corner = sums + 4 * across * v
            turn(across, corner, 4 * width, 0, across, y + 4 * i, 4 * rows, width * p + across * v, batch - 1)
        here += 1


def _slabs(job):
    """Slabs of rows and inputs, in one list; each thread takes a stretch of it."""
    threads, x, y, batch, plan = word(job, 1), word(job, 2), word(job, 3), word(job, 4), word(job, 5)
    inputs, rows, kind, weights = word(plan, 0), word(plan, 1), word(plan, 2), word(plan, 3)
    n, whole, straight = word(plan, 4), word(plan, 5), word(plan, 6)
    thread = take(job) if threads > 1 else 0
    starts, bases, codes, values = word(plan, 7), word(plan, 8), word(plan, 9), word(plan, 10)
    bias, order = word(plan, 11), word(plan, 12)
    sums = word(job, 6) + thread * word(job, 7)
    own, slabs = sums + 4 * whole, whole // n
    here, end = thread * batch * slabs // threads, (thread + 1) * batch * slabs // threads
    while here < end:
        p = here // slabs
        first, last = here - p * slabs, min(end - p * slabs, slabs)
        out = y + 4 * rows * p
        copy(own, x + 4 * inputs * p, 4 * inputs)
        for s in range(first, last):
            g, more, k = word(starts, s), word(starts, s + 1), n * s
            slab_sum(kind, own, bases + 4 * g, codes + n * weights * g, values + 4 * n * weights * g, more - g,
                     bias + 4 * k, 4 * k + (out if k < straight else sums))  # fmt: skip
        for k in range(max(n * first, straight), min(n * last, rows)):
            move(out + 4 * place(order, k), sums + 4 * k)
        here = p * slabs + last


def _lay_out_slabs(starts, counts, columns, values, order, inputs, lanes, window, weights, multiple):
    """Groups of each slab, in whole multiples: where their window starts in bytes, places in it, and weights."""
    slabs = (len(order) + lanes - 1) // lanes
    begins = np.zeros(slabs + 1, np.int64)
    here, end = np.zeros((2, slabs, lanes), np.int64)
    for k in range(len(order)):
        here[k // lanes, k % lanes], end[k // lanes, k % lanes] = (
            starts[order[k]],
            starts[order[k]] + counts[order[k]],
        )
    none = (
        np.zeros(0, np.int32),
        np.zeros((0, weights, lanes), np.uint8),
        np.zeros((0, weights, lanes), np.float32),
    )
    for s in range(slabs):  # once to count, once to fill
        groups = _fill_slab(columns, values, here[s].copy(), end[s], inputs, window, weights, False, *none)
        begins[s + 1] = begins[s] + (groups + multiple - 1) // multiple * multiple
    n = begins[slabs]
    bases = np.zeros(n, np.int32)
    codes, numbers = np.zeros((n, weights, lanes), np.uint8), np.zeros((n, weights, lanes), np.float32)
    for s in range(slabs):
        own = bases[begins[s] :], codes[begins[s] :], numbers[begins[s] :]
        _fill_slab(columns, values, here[s], end[s], inputs, window, weights, True, *own)
    return begins, bases, codes, numbers


def _fill_slab(columns, values, here, end, inputs, window, weights, filling, bases, codes, numbers):
    """Each window starts where the hindmost row is; each row puts in what falls into it, up to `weights`."""
    lanes, group = len(here), 0
    most = max(0, (inputs + lanes - 1) // lanes * lanes - window)  # further on it would run over the end of x
    while True:
        hindmost = inputs
        for i in range(lanes):
            if here[i] < end[i]:
                hindmost = min(hindmost, columns[here[i]])
        if hindmost == inputs:
            return group
        base = min(hindmost // lanes * lanes, most)
        if filling:
            bases[group] = 4 * base
        for i in range(lanes):
            k = 0
            while k < weights and here[i] < end[i] and columns[here[i]] < base + window:
                if filling:
                    codes[group, k, i] = columns[here[i]] - base
                    numbers[group, k, i] = values[here[i]]
                here[i] += 1
                k += 1
        group += 1


# ---- the intrinsics: LLVM's vectors -----------------------------------------------------------------------


class _Code:
    """LLVM's instructions on addresses that are plain numbers, and on vectors of float32."""

    def __init__(self, builder: Any):
        from llvmlite import ir

        self.ir, self.builder = ir, builder
        self.word, self.index, self.byte, self.number = (
            ir.IntType(64),
            ir.IntType(32),
            ir.IntType(8),
            ir.FloatType(),
        )

    def vector(self, lanes: int) -> Any:
        return self.number if lanes == 1 else self.ir.VectorType(self.number, lanes)

    def at(self, address: Any, scale: Any, k: Any, plus: int = 0) -> Any:
        """address + scale k + plus."""
        k = self.builder.add(
            address, self.builder.mul(k, self.word(scale) if isinstance(scale, int) else scale)
        )
        return self.builder.add(k, self.word(plus)) if plus else k

    def load(self, address: Any, kind: Any, align: int) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=align)

    def zero(self, lanes: int) -> Any:
        return self.ir.Constant(self.vector(lanes), None)

    def splat(self, number: Any, lanes: int) -> Any:
        if lanes == 1:
            return number
        one = self.builder.insert_element(
            self.ir.Constant(self.vector(lanes), self.ir.Undefined), number, self.index(0)
        )
        return self.shuffle(one, one, [0] * lanes)

    def shuffle(self, x: Any, y: Any, order: list[int]) -> Any:
        mask = self.ir.Constant(self.ir.VectorType(self.index, len(order)), [self.index(k) for k in order])
        return self.builder.shuffle_vector(x, y, mask)

    def multiply_add(self, x: Any, y: Any, z: Any, lanes: int) -> Any:
        """x y + z, rounded once where the machine can."""
        kind = self.vector(lanes)
        name = f"llvm.fmuladd.{'' if lanes == 1 else f'v{lanes}'}f32"
        return self.builder.call(
            self.builder.module.declare_intrinsic(name, (), self.ir.FunctionType(kind, [kind] * 3)), [x, y, z]
        )

    def look_up(self, window: list[Any], code: Any) -> Any:
        """The numbers at places `code` of the window's registers; a byte for each lane."""
        n = code.type.count
        places = self.builder.zext(code, self.ir.VectorType(self.index, n))
        if n == 16:  # any of the 32 numbers in two registers, by the lowest five bits
            found, bit = [self.call("avx512.vpermi2var.ps.512", x, places, y) for x, y in _pairs(window)], 5
        else:  # any of the 8 in one
            found, bit = [self.call("avx2.permps", x, places) for x in window], 3
        while len(found) > 1:  # of each two, by the next bit
            upper = self.builder.icmp_signed("<", self.shifted(places, 31 - bit), self.all(places.type, 0))
            if n == 16:
                upper = self.builder.icmp_unsigned(
                    "!=", self.builder.and_(code, self.all(code.type, 1 << bit)), self.all(code.type, 0)
                )
            found, bit = [self.builder.select(upper, y, x) for x, y in _pairs(found)], bit + 1
        return found[0]

    def call(self, name: str, *arguments: Any) -> Any:
        kind = self.ir.FunctionType(arguments[0].type, [x.type for x in arguments])
        function = self.builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind)
        return self.builder.call(function, arguments)

    def all(self, kind: Any, number: int) -> Any:
        return self.ir.Constant(kind, [kind.element(number)] * kind.count)

    def shifted(self, x: Any, bits: int) -> Any:
        return self.builder.shl(x, self.all(x.type, bits))

    def added(self, parts: list[Any]) -> Any:
        while len(parts) > 1:
            parts = [self.builder.fadd(x, y) for x, y in _pairs(parts)]
        return parts[0]

    def sums(self, first: Any, last: Any, step: int, begin: list[Any], more: Any) -> list[Any]:
        """for k in range(first, last, step): sums = more(k, sums)."""
        before = self.builder.block
        loop, done = (self.builder.append_basic_block(name) for name in ("loop", "done"))
        self.builder.cbranch(self.builder.icmp_signed("<", first, last), loop, done)
        self.builder.position_at_end(loop)
        k, old = self.builder.phi(self.word), [self.builder.phi(x.type) for x in begin]
        new = more(k, old)
        following = self.builder.add(k, self.word(step))
        for phi, start, next_one in zip([k, *old], [first, *begin], [following, *new], strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(next_one, loop)
        self.builder.cbranch(self.builder.icmp_signed("<", following, last), loop, done)
        self.builder.position_at_end(done)
        ends = [self.builder.phi(x.type) for x in begin]
        for phi, start, last_one in zip(ends, begin, new, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(last_one, loop)
        return ends

    def choose(self, among: Any, cases: dict[int, Any]) -> None:
        """Run the case of this number."""
        after = self.builder.append_basic_block("chosen")
        switch = self.builder.switch(among, after)
        for number, case in cases.items():
            block = self.builder.append_basic_block("case")
            switch.add_case(self.word(number), block)
            self.builder.position_at_end(block)
            case()
            self.builder.branch(after)
        self.builder.position_at_end(after)


def _pairs(parts: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(parts[::2], parts[1::2], strict=True))


def _makes(names: int, write: Any, answers: bool = False) -> Any:
    """The typing and the code of an intrinsic whose arguments are all 64-bit numbers."""
    from numba import types

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        answer = write(_Code(builder), *arguments)
        return answer if answers else context.get_dummy_value()

    return (types.int64 if answers else types.void)(*[types.int64] * names), codegen


def _word(typing_context, address, k):
    """The k-th 64-bit number from an address on."""
    return _makes(2, lambda c, address, k: c.load(c.at(address, 8, k), c.word, 8), answers=True)


def _place(typing_context, address, k):
    """The k-th 32-bit number."""

    def write(c, address, k):
        return c.builder.zext(c.load(c.at(address, 4, k), c.index, 4), c.word)

    return _makes(2, write, answers=True)


def _take(typing_context, address):
    """The number at an address, which grows by one: each thread gets another."""

    def write(c, address):
        return c.builder.atomic_rmw(
            "add", c.builder.inttoptr(address, c.word.as_pointer()), c.word(1), "monotonic"
        )

    return _makes(1, write, answers=True)


def _move(typing_context, target, source):
    """Copy one float32."""
    return _makes(2, lambda c, target, source: c.store(c.load(source, c.number, 4), target))


def _copy(typing_context, target, source, size):
    """Copy so many bytes."""

    def write(c, target, source, size):
        from numba.core import cgutils

        target, source = (c.builder.inttoptr(x, c.byte.as_pointer()) for x in (target, source))
        cgutils.raw_memcpy(c.builder, target, source, size, 1)

    return _makes(3, write)


def _turn(typing_context, across, source, stride, first, last, target, step, begin, end):
    """Turn a square of numbers: log2(across) perfect shuffles of its lines.

    Lines first.. of the source and begin.. of the target; those past `last` and `end` are the last one again.
    """

    def write(c, across, source, stride, first, last, target, step, begin, end):
        def line(origin, distance, number, most, k):
            number = c.builder.add(number, c.word(k))
            inside = c.builder.icmp_signed("<", number, most)
            return c.at(origin, distance, c.builder.select(inside, number, most))

        def square(n):
            lines = [c.load(line(source, stride, first, last, k), c.vector(n), 4) for k in range(n)]
            low = [k // 2 + k % 2 * n for k in range(n)]
            high = [k + n // 2 for k in low]
            for _ in range(n.bit_length() - 1):
                pairs = zip(lines[: n // 2], lines[n // 2 :], strict=True)
                lines = [c.shuffle(x, y, order) for x, y in pairs for order in (low, high)]
            for k in range(n):
                c.store(lines[k], line(target, step, begin, end, k))

        sizes = {shape[2] for shape in WIDTHS[lanes()].values()}
        c.choose(across, {n: functools.partial(square, n) for n in sorted(sizes)})

    return _makes(9, write)


def _row_sum(typing_context, kind, columns, values, first, last, panel, answer, bias):
    """answer = bias + sum over k of values[k] panel[columns[k]], for the kind of panel."""

    def write(c, kind, columns, values, first, last, panel, answer, bias):
        def of(vectors, weights, across):
            line = 4 * vectors * across

            def more(k, sums):
                new = []
                for w in range(weights):
                    place = c.load(c.at(columns, 2, k, 2 * w), c.ir.IntType(16), 2)
                    weight = c.splat(c.load(c.at(values, 4, k, 4 * w), c.number, 4), across)
                    at = c.at(panel, line, c.builder.zext(place, c.word))
                    for v in range(vectors):
                        x = c.load(c.builder.add(at, c.word(4 * across * v)), c.vector(across), 4 * across)
                        new.append(c.multiply_add(weight, x, sums[w * vectors + v], across))
                return new

            begin = [c.splat(c.load(bias, c.number, 4), across)] * vectors
            begin += [c.zero(across)] * (vectors * (weights - 1))
            ends = c.sums(first, last, weights, begin, more)
            for v in range(vectors):
                c.store(c.added(ends[v::vectors]), c.builder.add(answer, c.word(4 * across * v)))

        kinds = enumerate(WIDTHS[lanes()].values())
        c.choose(kind, {number: functools.partial(of, *shape) for number, shape in kinds})

    return _makes(8, write)


def _slab_sum(typing_context, kind, x, bases, codes, values, groups, bias, answer):
    """answer = bias + the sums of 16 rows side by side, for the shape of groups."""

    def write(c, kind, x, bases, codes, values, groups, bias, answer):
        n = lanes()
        numbers, bytes_ = c.vector(n), c.ir.VectorType(c.byte, n)

        def of(registers, weights):
            at_once = AT_ONCE[n]
            groups_at_once = at_once // weights

            def more(group, sums):
                new = []
                for g in range(groups_at_once):
                    base = c.builder.zext(c.load(c.at(bases, 4, group, 4 * g), c.index, 4), c.word)
                    begin = c.builder.add(x, base)
                    window = [
                        c.load(c.builder.add(begin, c.word(4 * n * r)), numbers, 4) for r in range(registers)
                    ]
                    for k in range(g * weights, (g + 1) * weights):
                        code = c.load(c.at(codes, n * weights, group, n * k), bytes_, n)
                        weight = c.load(c.at(values, 4 * n * weights, group, 4 * n * k), numbers, 4 * n)
                        new.append(c.multiply_add(weight, c.look_up(window, code), sums[k], n))
                return new

            begin = [c.load(bias, numbers, 4), *[c.zero(n)] * (at_once - 1)]
            c.store(c.added(c.sums(c.word(0), groups, groups_at_once, begin, more)), answer)

        c.choose(kind, {number: functools.partial(of, *shape) for number, shape in enumerate(SHAPES[n])})

    return _makes(8, write)
