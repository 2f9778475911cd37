"""The paper's sensitivities as a (max, times) matrix product.

    s_ij = max_x  |w_ij| a_j(x) / z_i(x)  =  |w_ij| max_x a_j(x) r_i(x),      r = 1 / z,

where z_i is the denominator of the edge's own sign, z_i^+ or z_i^- (Algorithm 2, the first loop).

Few points can be an edge's maximum: one with a large a_j, or a large r. With a typical rho(x) for the r of all rows,

    a_j(x) r_i(x)  =  (a_j(x) rho(x)) (r_i(x) / rho(x))  <=  (a_j(x) rho(x)) max_y (r_i(y) / rho(y)),

so an edge's points are visited by falling a_j rho, a row in each lane of a vector, until what lies ahead is too
small for every lane. Nothing is approximated: the bound is rounded up, and the products are those of a plain
loop, bit for bit. A dozen visits of 256 are usual; where many points tie (activations 0 or 1) all are visited
(`python -m benchmarks.sensitivities` measures both).

>>> w, a, s = torch.tensor([[1.0, 3.0, -2.0]]), torch.ones(2, 3), torch.zeros(1, 3)
>>> max_times(w, a, *map(reciprocal, denominators(w, a)), s)
>>> s
tensor([[0.2500, 0.7500, 1.0000]])
"""

from __future__ import annotations

import functools
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

PRODUCTS = 1 << 20  # held at a time without numba: four MiB of float32
ROWS = 256  # in a temporary block of the weights: fewer slow torch's product, more only cost memory
EDGES = 128  # per panel: their maxima stay in the first cache
GROUP = 4  # points between two looks at the bound; a power of two
BUCKETS = 64  # of an edge's points, in place of a sort
TURNED = 16  # edges sorted at once: a cache line of activations
LINE = 16  # numbers at the end of an edge's list, lest all lists begin in the same cache sets
AHEAD = 4  # edges between asking for a list and reading it
RHO = 1e-30  # the least rho, and its reciprocal the largest: their quotients stay in the range of float32
EVEN = 1.01  # the largest rho over the least, below which the order is by a_j alone


def reciprocal(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1/z, and 0 where z is too small to divide by: such a point contributes nothing.

    >>> reciprocal(torch.tensor([0.0, 4.0]))
    tensor([0.0000, 0.2500])
    """
    return z.reciprocal().masked_fill_(z < torch.finfo(z.dtype).tiny, 0)


@torch.no_grad()
def denominators(
    w: Float[Tensor, "rows edges"],
    a: Float[Tensor, "points edges"],
    bias: Float[Tensor, " rows"] | None = None,
) -> tuple[Float[Tensor, "rows points"], Float[Tensor, "rows points"]]:
    """z_plus and z_minus: what the positive and the negative edges of each row carry at each point.

    The bias is one more edge, whose input is 1. Beside the answers, memory holds one block of ROWS x edges.

    >>> denominators(torch.tensor([[2.0, -3.0]]), torch.tensor([[1.0, 1.0], [0.0, 5.0]]))
    (tensor([[2., 0.]]), tensor([[ 3., 15.]]))
    """
    z_plus, z_minus = (w.new_empty(len(w), len(a)) for _ in range(2))
    buffer = w.new_empty(min(ROWS, len(w)), w.shape[1])
    for rows in _blocks(len(w), ROWS):
        part = buffer[: len(w[rows])]
        torch.mm(torch.clamp(w[rows], min=0, out=part), a.T, out=z_plus[rows])
        torch.mm(part.sub_(w[rows]), a.T, out=z_minus[rows])  # w^- = w^+ - w, exactly
    if bias is not None:
        z_plus += bias.clamp(min=0)[:, None]
        z_minus -= bias.clamp(max=0)[:, None]
    return z_plus, z_minus


@torch.no_grad()
def max_times(
    w: Float[Tensor, "rows edges"],
    a: Float[Tensor, "points edges"],
    r_plus: Float[Tensor, "rows points"],
    r_minus: Float[Tensor, "rows points"],
    s: Float[Tensor, "rows edges"],
) -> None:
    """Raise s, in place, to the sensitivities these points show; call again with further points.

    Takes a >= 0, r >= 0 and s >= 0, all finite. A sensitivity is at most 1, and 0 where w is 0.

    >>> w, s = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.5, 0.5]])
    >>> max_times(w, torch.ones(1, 2), torch.full((1, 1), 1 / 4), torch.zeros(1, 1), s)
    >>> s
    tensor([[0.5000, 0.7500]])
    """
    if not (s.numel() and len(a)):
        return
    if fast_path(w, a):
        _compiled_max_times(w.contiguous(), a, r_plus, r_minus, s)
    else:
        _plain_max_times(w, a, r_plus, r_minus, s)


def fast_path(w: Tensor, a: Tensor) -> bool:
    """Whether max_times runs compiled: numba is here, and these are float32 or float64 on the CPU."""
    on_cpu = w.device.type == a.device.type == "cpu"
    return on_cpu and w.dtype == a.dtype and w.dtype in (torch.float32, torch.float64) and _has_numba()


def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def _blocks(length: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, length, step)]


def _plain_max_times(w: Tensor, a: Tensor, r_plus: Tensor, r_minus: Tensor, s: Tensor) -> None:
    """max_times in torch alone, PRODUCTS products at a time: any device, any dtype."""
    points = max(1, min(len(a), PRODUCTS // max(1, w.shape[1])))
    rows = max(1, PRODUCTS // max(1, points * w.shape[1]))
    for x in _blocks(len(a), points):
        for i in _blocks(len(w), rows):
            of_plus, of_minus = ((a[x] * r[i, x, None]).amax(1) for r in (r_plus, r_minus))
            new = torch.where(w[i] > 0, of_plus, of_minus).mul_(w[i].abs()).clamp_(max=1)
            torch.maximum(s[i], new.masked_fill_(w[i] == 0, 0), out=s[i])


def _compiled_max_times(w: Tensor, a: Tensor, r_plus: Tensor, r_minus: Tensor, s: Tensor) -> None:
    """max_times by the compiled kernels, on as many threads as torch may use."""
    lanes, threads, answer = _lanes(w.element_size()), torch.get_num_threads(), s.contiguous()
    slots = -(-len(a) // GROUP) * GROUP
    rho = _typical(r_plus, r_minus)
    values = w.new_empty(w.shape[1], slots + LINE)  # more than needed, lest all edges share cache sets
    places = w.new_empty(values.shape, dtype=torch.int32)
    bounds = w.new_empty(w.shape[1], slots // GROUP + 1)
    lists = [x.numpy() for x in (values, places, bounds)]
    arrays = [x.detach().contiguous().numpy() for x in (w, r_plus, r_minus, answer)]
    inputs, typical = a.detach().numpy(), rho.numpy()
    order, raise_rows = _kernels()

    def sort(first: int, last: int) -> None:
        order(inputs, typical, *lists, 2 * lanes, first, last)

    def visit(first: int, last: int) -> None:
        shapes = ((len(a) + lanes, 2, lanes), (2, lanes), (EDGES, lanes), (lanes, EDGES + lanes))
        raise_rows(*arrays, *lists, typical, *(w.new_zeros(x).numpy() for x in shapes), first, last)

    _share(sort, tiles=w.shape[1], threads=threads)
    _share(visit, tiles=-(-len(w) // lanes), threads=threads)
    if answer is not s:
        s.copy_(answer)


def _typical(r_plus: Tensor, r_minus: Tensor) -> Tensor:
    """rho(x), a number to divide by even where r is 0; 1 throughout, and then exact, where all are about the same."""
    rho = (r_plus.sum(dim=0) + r_minus.sum(dim=0)).nan_to_num_(1.0).clamp_(RHO, 1 / RHO)
    return rho.fill_(1) if rho.max() < EVEN * rho.min() else rho


def _share(work: Callable[[int, int], None], tiles: int, threads: int) -> None:
    """Deal contiguous ranges of tiles to threads: ours, since the kernel lets go of the interpreter's lock.

    numba's own threads are left alone: their layer may forbid calls from two threads, or a later fork.
    """
    threads = max(1, min(threads, tiles))
    if threads == 1:
        return work(0, tiles)
    cuts = [tiles * k // threads for k in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, cuts[:-1], cuts[1:]))
    return None


# ---- the kernel -------------------------------------------------------------------------------------------
# Plain functions here, so that this module imports without numba and costs nothing until the first call.


@functools.cache
def _kernels() -> tuple[Any, ...]:
    """_order and _row_tiles, compiled on first use (a few seconds) and read from numba's cache from then on."""
    import numba
    from numba.extending import intrinsic, register_jitable

    global visit_points, transpose
    visit_points, transpose = intrinsic(_visit_points), intrinsic(_transpose)
    for inner in (_sort_keys, _order_edge, _bound_groups, _lay_out, _limit, _signs, _raise_to):
        register_jitable(inner)
    options = {"nogil": True, "error_model": "numpy"}  # numpy: a division by zero is infinite
    try:
        return tuple(numba.njit(cache=True, **options)(f) for f in (_order, _row_tiles))
    except RuntimeError:  # no folder that a cache could be written to
        return tuple(numba.njit(**options)(f) for f in (_order, _row_tiles))


visit_points: Any = None  # the two intrinsics: globals, because numba does not cache a function with closures
transpose: Any = None


@functools.cache
def _lanes(itemsize: int) -> int:
    """Numbers in one vector register of this machine."""
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    width = 64 if features.get("avx512f") else 32 if features.get("avx") else 16
    return width // itemsize


def _order(a, rho, values, places, bounds, step, first, last):
    """Edges first..last: the points of each by falling a_j rho, up to a bucket's width."""
    points = len(a)
    columns = np.empty((TURNED, points), a.dtype)
    scaled, ordered = np.empty((2, points), a.dtype)
    keys, counts = np.empty(points, np.int32), np.empty(BUCKETS + 1, np.int32)
    zero, tiny = a.dtype.type(0), np.finfo(a.dtype).tiny
    for left in range(first, last, TURNED):
        n = min(TURNED, last - left)
        for x in range(points):
            for j in range(n):
                columns[j, x] = a[x, left + j]
        for j in range(n):
            for x in range(points):
                least = tiny if columns[j, x] > zero else zero  # below tiny, a_j rho is not rounded but lost
                product = columns[j, x] * rho[x]
                scaled[x] = product if product > least else least
            _sort_keys(scaled, keys, counts)
            edge = left + j
            _order_edge(columns[j], scaled, ordered, keys, counts, step, values[edge], places[edge])
            _bound_groups(ordered, bounds[edge])


def _sort_keys(scaled, keys, counts):
    """The bucket of each point, the largest numbers in the first; and where each bucket starts."""
    top = low = scaled[0]
    for x in scaled:
        top = x if x > top else top
        low = x if x < low else low
    last = scaled.dtype.type(BUCKETS - 1)
    width = scaled.dtype.type(BUCKETS) / (top - low)
    for x in range(len(scaled)):
        key = (top - scaled[x]) * width
        keys[x] = np.int32(key if key < last else last)  # what is not a number is last, too
    counts[:] = 0
    for key in keys:
        counts[key + 1] += 1
    for key in range(BUCKETS):
        counts[key + 1] += counts[key]


def _order_edge(a, scaled, ordered, keys, counts, step, values, places):
    """Lay out one edge's points, bucket by bucket; `places` is where a point's r begin in a tile."""
    for x in range(len(a)):
        k = counts[keys[x]]
        counts[keys[x]] = k + 1
        values[k], places[k], ordered[k] = a[x], x * step, scaled[x]
    values[len(a) :], places[len(a) :] = 0, 0


def _bound_groups(ordered, bounds):
    """bounds[k] is the largest a_j rho from group k on, and -1 where all are seen."""
    bounds[len(bounds) - 1] = -1
    bound = ordered.dtype.type(0)
    for k in range(len(bounds) - 2, -1, -1):
        for x in range(k * GROUP, min(len(ordered), (k + 1) * GROUP)):
            bound = ordered[x] if ordered[x] > bound else bound
        bounds[k] = bound


def _row_tiles(w, r_plus, r_minus, s, values, places, bounds, rho, r, limits, best, lines, first, last):
    """Tiles first..last of the rows, one row per lane; best and lines hold one panel of edges."""
    lanes = len(lines)
    rows, edges = w.shape
    signs = np.empty(EDGES, np.int32)
    for top in range(first * lanes, min(rows, last * lanes), lanes):
        bottom = min(rows, top + lanes)
        _lay_out(r_plus[top:bottom], lines, r[:, 0])
        _lay_out(r_minus[top:bottom], lines, r[:, 1])
        _limit(r, rho, limits)
        for left in range(0, edges, EDGES):
            right = min(edges, left + EDGES)
            _signs(w, top, bottom, left, right, signs)
            for j in range(right - left):
                visit_points(values, places, bounds, r, limits, signs, best, left, j)
            _raise_to(s, w, top, bottom, left, right, best, lines)


def _lay_out(own, lines, r):
    """A tile's r, the rows of one point side by side; rows that are not there stay 0."""
    lanes, points = len(lines), own.shape[1]
    lines[:] = 0
    for left in range(0, points, lanes):
        n = min(lanes, points - left)
        for i in range(len(own)):
            for x in range(n):
                lines[i, x] = own[i, left + x]
        transpose(lines, r[left : left + lanes])


def _limit(r, rho, limits):
    """The largest r / rho of each row and sign, rounded up."""
    points, signs, lanes = len(rho), r.shape[1], r.shape[2]
    one, tiny = r.dtype.type(1), np.finfo(r.dtype).tiny
    even = rho.min() == one == rho.max()  # and nothing is rounded, so that ties end the search
    slack, floor = (one, r.dtype.type(0)) if even else (one + 8 * np.finfo(r.dtype).eps, tiny)
    limits[:] = 0
    for x in range(points):
        inverse = one / rho[x]
        for sign in range(signs):
            for i in range(lanes):
                limits[sign, i] = max(limits[sign, i], r[x, sign, i] * inverse, min(r[x, sign, i], tiny))
    for sign in range(signs):
        for i in range(lanes):
            if limits[sign, i] > 0:
                limits[sign, i] = limits[sign, i] * slack + floor


def _signs(w, top, bottom, left, right, signs):
    """One number an edge, whose bit i tells that the weight of row i is negative."""
    signs[:] = 0
    for i in range(bottom - top):
        bit = np.int32(1 << i)
        for j in range(right - left):
            signs[j] |= bit if w[top + i, left + j] < 0 else np.int32(0)


def _raise_to(s, w, top, bottom, left, right, best, lines):
    """s[i, j] = max(s[i, j], min(1, |w[i, j]| best[j, i])); where 0 meets infinity nothing is larger."""
    lanes, one = len(lines), w.dtype.type(1)
    for j in range(0, right - left, lanes):
        transpose(best[j : j + lanes], lines[:, j : j + lanes])
    for i in range(bottom - top):
        for j in range(right - left):
            old, new = s[top + i, left + j], abs(w[top + i, left + j]) * lines[i, j]
            new = one if new > one else new
            s[top + i, left + j] = new if new > old else old


class _Vectors:
    """LLVM's vectors of one array's numbers, as wide as this machine's registers."""

    def __init__(self, context: Any, builder: Any, array_type: Any) -> None:
        from llvmlite import ir

        self.ir, self.context, self.builder = ir, context, builder
        self.itemsize = array_type.dtype.bitwidth // 8
        self.lanes = _lanes(self.itemsize)
        self.number = context.get_value_type(array_type.dtype)
        self.integer = ir.IntType(array_type.dtype.bitwidth)
        self.vector = ir.VectorType(self.number, self.lanes)
        self.bits = ir.VectorType(self.integer, self.lanes)

    def place(self, pointer: Any, k: int) -> Any:
        """The address of the k-th vector from `pointer` on."""
        at = self.builder.gep(pointer, [self.ir.IntType(64)(k * self.lanes)])
        return self.builder.bitcast(at, self.vector.as_pointer())

    def line(self, array: Any, k: int) -> Any:
        """The address of a matrix's k-th line."""
        stride = self.builder.extract_value(array.strides, 0)
        at = self.builder.ptrtoint(array.data, stride.type)
        k = stride.type(k) if isinstance(k, int) else k
        at = self.builder.add(at, self.builder.mul(stride, k))
        return self.builder.inttoptr(at, array.data.type)

    def load(self, pointer: Any, k: int = 0) -> Any:
        return self.builder.load(self.place(pointer, k), align=self.itemsize)

    def store(self, value: Any, pointer: Any, k: int = 0) -> None:
        self.builder.store(value, self.place(pointer, k), align=self.itemsize)

    def maximum(self, x: Any, y: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def splat(self, number):
        one = self.builder.insert_element(
            self.ir.Constant(self.vector, self.ir.Undefined), number, self.ir.IntType(32)(0)
        )
        return self.shuffle(one, one, [0] * self.lanes)

    def prefetch(self, pointer: Any) -> None:
        """Ask for what will be read soon; any address may be asked for."""
        byte, number = self.ir.IntType(8).as_pointer(), self.ir.IntType(32)
        kind = self.ir.FunctionType(self.ir.VoidType(), [byte, number, number, number])
        ask = self.builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        self.builder.call(ask, [self.builder.bitcast(pointer, byte), number(0), number(3), number(1)])

    def shuffle(self, x: Any, y: Any, order: list[int]) -> Any:
        index = self.ir.IntType(32)
        mask = self.ir.Constant(self.ir.VectorType(index, len(order)), [index(k) for k in order])
        return self.builder.shuffle_vector(x, y, mask)


def _visit_points(typing_context, values, places, bounds, r, limits, signs, best, left, j):
    """best[j] = max_x a_j(x) r(x), each lane with the r of its sign, until no point ahead can raise any lane."""
    from numba import types
    from numba.core import cgutils

    def codegen(context, builder, signature, arguments):
        v, j, word = _Vectors(context, builder, values), arguments[8], cgutils.intp_t
        lanes, edge = v.ir.IntType(v.lanes), builder.add(arguments[7], arguments[8])
        list_of, at, bound_of, own, limit_of, sign_of, answer = (
            context.make_array(t)(context, builder, x)
            for t, x in zip(signature.args[:7], arguments, strict=False)
        )
        lists = [v.line(x, edge) for x in (list_of, at, bound_of)]
        for array in (list_of, at, bound_of):
            v.prefetch(v.line(array, builder.add(edge, word(AHEAD))))
        bits = builder.trunc(builder.load(builder.gep(sign_of.data, [j])), lanes)
        negative = builder.bitcast(bits, v.ir.VectorType(v.ir.IntType(1), v.lanes))
        limit = builder.select(negative, v.load(limit_of.data, 1), v.load(limit_of.data, 0))

        def product(k, g):
            here = [builder.add(builder.mul(k, word(GROUP)), word(g))]
            a, place = (builder.load(builder.gep(x, here)) for x in lists[:2])
            r_x = builder.gep(own.data, [builder.sext(place, word)])
            return builder.fmul(v.splat(a), builder.select(negative, v.load(r_x, 1), v.load(r_x, 0)))

        before, loop = builder.block, builder.append_basic_block("group")
        done = builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        k, so_far = builder.phi(word), builder.phi(v.vector)
        highest = [product(k, g) for g in range(GROUP)]
        while len(highest) > 1:  # a tree: maxima in a row would wait for each other
            highest = [v.maximum(x, y) for x, y in zip(highest[::2], highest[1::2], strict=True)]
        raised, following = v.maximum(highest[0], so_far), builder.add(k, word(1))
        bound = builder.load(builder.gep(lists[2], [following]))
        ahead = builder.fcmp_ordered(">", builder.fmul(v.splat(bound), limit), raised)
        for phi, start, new in ((k, word(0), following), (so_far, v.vector(None), raised)):
            phi.add_incoming(start, before)
            phi.add_incoming(new, loop)
        builder.cbranch(builder.icmp_unsigned("!=", builder.bitcast(ahead, lanes), lanes(0)), loop, done)
        builder.position_at_end(done)
        v.store(raised, v.line(answer, j))
        return context.get_dummy_value()

    return types.void(values, places, bounds, r, limits, signs, best, left, j), codegen


def _transpose(typing_context, source, target):
    """Turn a square of lanes x lanes numbers: log2(lanes) perfect shuffles of its lines."""
    from numba import types

    def codegen(context, builder, signature, arguments):
        v = _Vectors(context, builder, source)
        old, new = (
            context.make_array(t)(context, builder, x) for t, x in zip(signature.args, arguments, strict=True)
        )
        lines, half = [v.load(v.line(old, k)) for k in range(v.lanes)], v.lanes // 2
        low = [k // 2 + k % 2 * v.lanes for k in range(v.lanes)]
        high = [k + half for k in low]
        for _ in range(v.lanes.bit_length() - 1):
            pairs = zip(lines[:half], lines[half:], strict=True)
            lines = [v.shuffle(x, y, order) for x, y in pairs for order in (low, high)]
        for k, line in enumerate(lines):
            v.store(line, v.line(new, k))
        return context.get_dummy_value()

    return types.void(source, target), codegen
