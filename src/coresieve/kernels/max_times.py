"""The paper's sensitivities as a (max, times) matrix product.

    s_ij = max_x  |w_ij| a_j(x) / z_i(x)  =  |w_ij| max_x a_j(x) r_i(x),      r = 1 / z,

where z_i is the denominator of the edge's own sign, z_i^+ or z_i^- (Algorithm 2, the first loop).

A plain loop spends its time choosing between the two r's of a row. Here the vectors run over points, so one
edge has one sign and the choice is an address: a few vectors of a_j stay in registers and meet, row by row,
the r of the edge's sign. That is a multiplication, a maximum and a load per vector: about the price of one
matrix product of the same shape (`python -m benchmarks.sensitivities`).

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

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Float
    from torch import Tensor

PRODUCTS = 1 << 20  # held at a time without numba: four MiB of float32
ROWS = 256  # in a temporary block of the weights: fewer slow torch's product, more only cost memory
VECTORS = (8, 4, 2)  # of one edge's activations in registers: 16 would spill, and few points need fewer
EDGES = 512  # per panel: their activations stay in the second cache while the rows pass by


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
    for rows in _blocks(len(w), ROWS):
        torch.mm(w[rows].clamp(min=0), a.T, out=z_plus[rows])
        torch.mm(w[rows].clamp(max=0).neg_(), a.T, out=z_minus[rows])
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
    """max_times by the compiled kernel, on as many threads as torch may use."""
    lanes = _lanes(w.element_size())
    points = lanes * _vectors(-(-len(a) // lanes))
    activations = _panels(a.T, 1, points).contiguous()
    reciprocals = torch.stack([_panels(r, lanes, points) for r in (r_plus, r_minus)], dim=2)
    kernel, answer = _kernel(), s.contiguous()
    arrays = [x.detach().numpy() for x in (w, activations, reciprocals, answer)]

    def work(first: int, last: int) -> None:
        best, weights = w.new_zeros(2, EDGES, lanes).numpy()
        lines = w.new_zeros(lanes, EDGES + lanes).numpy()  # lanes more, lest the lines share cache sets
        kernel(*arrays, best, weights, lines, first, last)

    _share(work, tiles=-(-len(w) // lanes), threads=torch.get_num_threads())
    if answer is not s:
        s.copy_(answer)


def _vectors(needed: int) -> int:
    """Vectors in a panel of points, so that the panels cost least: each as much as one vector more.

    >>> _vectors(16), _vectors(19), _vectors(1)
    (8, 4, 2)
    """
    return min(VECTORS, key=lambda vectors: -(-needed // vectors) * (vectors + 1))


def _panels(x: Float[Tensor, "lines points"], multiple: int, points: int) -> Float[Tensor, "panels lines p"]:
    """Cut the points into panels the registers can hold; the zeros that fill up raise no maximum."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % points, 0, -x.shape[0] % multiple))
    return padded.unflatten(1, (padded.shape[1] // points, points)).transpose(0, 1)


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
def _kernel() -> Callable[..., None]:
    """_row_tiles, compiled on first use (a second or two) and read from numba's cache from then on."""
    import numba
    from numba.extending import intrinsic, register_jitable

    global tile_max, transpose
    tile_max, transpose = intrinsic(prefer_literal=True)(_tile_max), intrinsic(_transpose)
    for inner in (_raise_best, _turn_weights, _raise_to):
        register_jitable(inner)
    try:
        return numba.njit(cache=True, nogil=True)(_row_tiles)
    except RuntimeError:  # no folder that a cache could be written to
        return numba.njit(nogil=True)(_row_tiles)


tile_max: Any = None  # the two intrinsics: globals, because numba does not cache a function with closures
transpose: Any = None


@functools.cache
def _lanes(itemsize: int) -> int:
    """Numbers in one vector register of this machine."""
    import llvmlite.binding

    features = llvmlite.binding.get_host_cpu_features()
    width = 64 if features.get("avx512f") else 32 if features.get("avx") else 16
    return width // itemsize


def _row_tiles(w, a, r, s, best, weights, lines, first, last):
    """Tiles first..last of the rows, one row per lane; the rest hold one panel of edges."""
    lanes, panel = best.shape[1], len(best)
    rows, edges = w.shape
    for left in range(0, edges, panel):
        right = min(edges, left + panel)
        for top in range(first * lanes, min(rows, last * lanes), lanes):
            bottom = min(rows, top + lanes)
            _turn_weights(w[top:bottom, left:right], lines, weights)
            best[:] = 0
            for k in range(len(a)):
                _raise_best(a[k, left:right], r[k, top : top + lanes], weights, best)
            _raise_to(s[top:bottom, left:right], w[top:bottom, left:right], best, lines)


def _raise_best(a, r, weights, best):
    """One panel of points and of edges against one tile of rows."""
    vectors = a.shape[1] // best.shape[1]
    for j in range(len(a)):
        if vectors == 8:
            tile_max(a[j], r, weights[j], best[j], 8)
        elif vectors == 4:
            tile_max(a[j], r, weights[j], best[j], 4)
        else:
            tile_max(a[j], r, weights[j], best[j], 2)


def _turn_weights(w, lines, weights):
    """w's tile, an edge's weights side by side: a stride apart they may all compete for one cache set."""
    for i in range(len(w)):
        for j in range(w.shape[1]):
            lines[i, j] = w[i, j]
    lanes = len(lines)
    for left in range(0, w.shape[1], lanes):
        transpose(lines[:, left : left + lanes], weights[left : left + lanes])


def _raise_to(s, w, best, lines):
    """s[i, j] = max(s[i, j], min(1, |w[i, j]| best[j, i])); where 0 meets infinity nothing is larger."""
    lanes, one = len(lines), w.dtype.type(1)
    for left in range(0, w.shape[1], lanes):
        transpose(best[left : left + lanes], lines[:, left : left + lanes])
    for i in range(len(w)):
        for j in range(w.shape[1]):
            old, new = s[i, j], abs(w[i, j]) * lines[i, j]
            new = one if new > one else new
            s[i, j] = new if new > old else old


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
        at = self.builder.add(at, self.builder.mul(stride, stride.type(k)))
        return self.builder.inttoptr(at, array.data.type)

    def load(self, pointer: Any, k: int = 0) -> Any:
        return self.builder.load(self.place(pointer, k), align=self.itemsize)

    def store(self, value: Any, pointer: Any, k: int = 0) -> None:
        self.builder.store(value, self.place(pointer, k), align=self.itemsize)

    def maximum(self, x: Any, y: Any) -> Any:
        """Numbers >= 0 are ordered as their bits are, and the integer maximum has no NaN to mind."""
        x, y = (self.builder.bitcast(v, self.bits) for v in (x, y))
        larger = self.builder.select(self.builder.icmp_signed(">", x, y), x, y)
        return self.builder.bitcast(larger, self.vector)

    def shuffle(self, x: Any, y: Any, order: list[int]) -> Any:
        index = self.ir.IntType(32)
        mask = self.ir.Constant(self.ir.VectorType(index, len(order)), [index(k) for k in order])
        return self.builder.shuffle_vector(x, y, mask)


def _tile_max(typing_context, a, r, w, best, vectors):
    """best[i] = max(best[i], max_x a[x] * r[i, 0 or 1, x]), 1 where w[i] is negative; x fills `vectors`."""
    from numba import types

    def codegen(context, builder, signature, arguments):
        v = _Vectors(context, builder, a)
        count = vectors.literal_value
        arrays = [
            context.make_array(t)(context, builder, x)
            for t, x in zip(signature.args[:4], arguments, strict=False)
        ]
        activations = [v.load(arrays[0].data, k) for k in range(count)]
        sign_bits = builder.bitcast(arrays[2].data, v.integer.as_pointer())

        def row(i):
            weight = builder.load(builder.gep(sign_bits, [v.ir.IntType(64)(i)]))
            negative = builder.ashr(weight, v.integer(v.integer.width - 1))  # all ones, or all zeros
            half = builder.and_(negative, v.integer(count * v.lanes))
            own = builder.gep(arrays[1].data, [half])
            start = i * 2 * count
            return functools.reduce(
                v.maximum, [builder.fmul(x, v.load(own, start + k)) for k, x in enumerate(activations)]
            )

        def tree(first, rows):  # neighbours' maxima meet until lane i holds row i
            if rows == 1:
                return row(first)
            x, y = tree(first, rows // 2), tree(first + rows // 2, rows // 2)
            even, odd = (v.shuffle(x, y, list(range(start, 2 * v.lanes, 2))) for start in (0, 1))
            return v.maximum(even, odd)

        v.store(v.maximum(v.load(arrays[3].data), tree(0, v.lanes)), arrays[3].data)
        return context.get_dummy_value()

    return types.void(a, r, w, best, vectors), codegen


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
