"""accelerate(): a copy of a network whose compressed layers run the fastest way there is here, found by timing.

Whether a sparse layer is faster than a dense one depends on its density, on how many inputs come at once and on the
machine; so nothing is assumed. For each layer and batch size the ways take turns on random inputs, dense among
them, with the threads that torch has at that moment. A way replaces dense only where it was faster by a margin.

>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 10))
>>> _ = nn.init.sparse_(model[0].weight, sparsity=0.95)
>>> fast = accelerate(model, batch=64)
>>> x = torch.rand(64, 300)
>>> torch.allclose(fast(x), model(x), atol=1e-5), fast.acceleration.layers[1].note
(True, 'dense: no weight is 0')
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from coresieve.errors import BudgetError, LayerError
from coresieve.kernels import sparse_product
from coresieve.kernels.sparse_product import Rows
from coresieve.layers import check_loaded, linear

if TYPE_CHECKING:
    from coresieve.compression import Compressed

DENSE = "dense"
MARGIN = 0.95  # of dense's time: a way must be at least this much faster
SECONDS = 0.3  # of timing for a layer and batch size
TURNS = (5, 60)  # at least and at most, for each way
TURN = 1e-3  # seconds: a quicker way runs several times in a turn, and once before, to find its weights in the caches
HOPELESS = 1.5  # times as long as the fastest in the first turns: takes no further part
FULL = 0.9  # density from which on no way could be faster than dense


# ---- the ways to run a layer --------------------------------------------------------------------------------

Way = Callable[[Tensor], Tensor]  # of x: (batch, inputs), float32, contiguous, on the CPU


class Dense:
    """What nn.Linear does."""

    def __init__(self, rows: Rows, bias: np.ndarray | None):
        self.weight, self.bias = torch.from_numpy(rows.dense()), _tensor(bias)
        self.nbytes = self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class TorchSparse:
    """torch's own product of a matrix in compressed rows, with 32-bit indices: those go to MKL."""

    def __init__(self, rows: Rows, bias: np.ndarray | None):
        starts, columns, values = _plain(rows)
        shape = (len(rows.counts), rows.inputs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Ss]parse.*")  # that its interface may change
            crow, col, own = map(torch.from_numpy, (starts, columns, values))
            self.weight = torch.sparse_csr_tensor(crow, col, own, shape)
        self.bias = _tensor(bias)
        self.nbytes = starts.nbytes + columns.nbytes + values.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y = (self.weight @ x.T).T.contiguous()
        return y if self.bias is None else y.add_(self.bias)


class Scipy:
    """scipy's product of a matrix in compressed rows."""

    def __init__(self, rows: Rows, bias: np.ndarray | None):
        from scipy.sparse import csr_array

        starts, columns, values = _plain(rows)
        self.weight = csr_array((values, columns, starts), shape=(len(rows.counts), rows.inputs))
        self.bias, self.nbytes = _tensor(bias), starts.nbytes + columns.nbytes + values.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.from_numpy(np.ascontiguousarray((self.weight @ x.numpy().T).T))
        return y if self.bias is None else y.add_(self.bias)


def _tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


def _plain(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, columns and values as other libraries want them; a few weights of 0 among them do no harm."""
    return rows.starts.astype(np.int32), rows.columns.astype(np.int32), rows.values


def ways(rows: Rows) -> dict[str, Callable[[Rows, np.ndarray | None], Any]]:
    """What can run such a layer on this machine, by name."""
    answer: dict[str, Callable[[Rows, np.ndarray | None], Any]] = {
        DENSE: Dense,
        "torch sparse": TorchSparse,
        "scipy": Scipy,
    }
    if not (
        sparse_product.available() and rows.columns.dtype == np.uint16 and len(rows.counts) and rows.inputs
    ):
        return answer
    for width in sparse_product.widths(rows):
        answer[f"panels {width}"] = lambda r, b, width=width: sparse_product.Panels(r, b, width)
    for shape in sparse_product.slab_shapes():
        name = f"slabs {shape[0]}x{shape[1]}"
        answer[name] = lambda r, b, shape=shape: sparse_product.Slabs(r, b, shape)
    return answer


def _candidates(rows: Rows, batch: int) -> list[str]:
    """Those worth a try: no panel wider than twice the batch, slabs only for few inputs."""
    answer = []
    for name in ways(rows):
        wide = name.startswith("panels") and int(name.split()[-1]) >= 2 * batch
        narrow = name.startswith("panels") and 16 * int(name.split()[-1]) < batch
        many = name.startswith("slabs") and batch > 16
        if not (wide or narrow or many or name == DENSE):
            answer.append(name)
    return answer


# ---- the timing -------------------------------------------------------------------------------------------


def race(runners: dict[str, Way], x: Tensor, seconds: float = SECONDS) -> dict[str, list[float]]:
    """Seconds of one call in each turn, the ways taking turns; what is hopeless leaves after the first turns.

    With one thread they are its own processor time, which does not count the turns of other jobs.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    loops, times = {}, {name: [] for name in runners}
    for name, run in runners.items():
        run(x)
        loops[name] = max(1, min(200, int(TURN / max(_timed(run, x, 1, clock), 1e-7))))
    start, still = time.perf_counter(), list(runners)
    for turn in range(TURNS[1]):
        if turn >= TURNS[0] and time.perf_counter() - start > seconds:
            break
        for name in still:
            times[name].append(_timed(runners[name], x, loops[name], clock))
        if turn == 2:
            best = min(map(statistics.median, times.values()))
            still = [n for n in still if n == DENSE or statistics.median(times[n]) < HOPELESS * best]
    return times


def _timed(run: Way, x: Tensor, loops: int, clock: Callable[[], float]) -> float:
    if loops > 1:
        run(x)
    start = clock()
    for _ in range(loops):
        run(x)
    return (clock() - start) / loops


def ratios(times: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """How many times faster than dense: the quartiles over turns, each of which timed both."""
    pairs = [dense / own for dense, own in zip(times[DENSE], times[name], strict=False)]
    low, middle, high = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
    return low, middle, high


def choose(times: dict[str, list[float]]) -> str:
    """The fastest; dense unless it is faster by the margin, and in three of four turns."""
    full = {name: t for name, t in times.items() if len(t) == len(times[DENSE])}
    best = min(full, key=lambda name: statistics.median(full[name]))
    low, middle, _ = ratios(times, best)
    return best if low > 1 and middle * MARGIN > 1 else DENSE


# ---- the module -------------------------------------------------------------------------------------------


class SparseLinear(nn.Module):
    """A linear layer for inference that runs by the way chosen for the batch size at hand.

    - Batch sizes that were not named run like the nearest one that was.
    - It has no parameters, and hence none to train. `state_dict()` holds the dense `weight` and `bias` of the layer
      it stands for, and `load_state_dict()` takes those. `weight` and `bias` read the same, made anew at each look.
    - Where a gradient to the input is wanted, and for inputs that are no plain float32 tensor on the CPU, under
      autocast or while torch.jit traces, the dense product runs, with a weight made for that call.
    - Moved to another dtype or device it is dense there, and sparse again once it is float32 on the CPU.
    """

    def __init__(self, rows: Rows, bias: np.ndarray | None, names: dict[int, str]):
        super().__init__()
        self.in_features, self.out_features = rows.inputs, len(rows.counts)
        self.names = dict(sorted(names.items()))
        self._rows: Rows | None = rows
        self._bias = bias
        self._moved: tuple[Tensor, Tensor | None] | None = None
        self._pack()

    def _pack(self) -> None:
        """Lay out the weights for each way that was chosen."""
        self._handle, self._run, self._packed = next(_HANDLES), {}, {}
        _LIVE[self._handle] = self
        if self._rows is not None:
            known = ways(self._rows)  # a copy may have come to another machine
            named = {batch: name if name in known else DENSE for batch, name in self.names.items()}
            self._packed = {name: known[name](self._rows, self._bias) for name in set(named.values())}
            self._run = {batch: self._packed[name] for batch, name in named.items()}

    def forward(self, input: Tensor) -> Tensor:  # by the name that nn.Linear has for it
        x = input
        if torch.compiler.is_compiling():
            return torch.ops.coresieve.sparse_linear(x, self._handle, self.out_features)
        if self._needs_dense(x):
            return F.linear(x, self.weight, self.bias)
        if x.ndim == 2 and x.is_contiguous():
            try:
                return self._run[x.shape[0]](x)
            except (KeyError, RuntimeError):  # a batch of another size, a tensor without memory: slowly, then
                pass
        return self._product(x)

    def _needs_dense(self, x: Tensor) -> bool:
        return (
            type(x) is not Tensor
            or self._moved is not None
            or x.dtype is not torch.float32
            or not x.is_cpu
            or x.layout is not torch.strided
            or x.ndim == 0
            or x.shape[-1] != self.in_features
            or (x.requires_grad and torch.is_grad_enabled())
            or forward_ad._current_level >= 0
            or x.is_neg()
            or torch.is_autocast_enabled("cpu")
            or torch._C._get_tracing_state() is not None
        )

    def _product(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).contiguous()
        batch = flat.shape[0]
        try:
            run = self._run[batch]
        except KeyError:
            run = self._run[batch] = self._run[min(self.names, key=lambda n: abs(np.log(n / max(1, batch))))]
        try:
            y = run(flat)
        except RuntimeError:  # a tensor without memory of its own, as inside torch.func
            return F.linear(x, self.weight, self.bias)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        return torch.from_numpy(cast("Rows", self._rows).dense()) if self._moved is None else self._moved[0]

    @property
    def bias(self) -> Tensor | None:
        return (_tensor(self._bias) if self._moved is None else self._moved[1]) if self._has_bias else None

    @property
    def _has_bias(self) -> bool:
        return (self._bias if self._moved is None else self._moved[1]) is not None

    @property
    def nbytes(self) -> int:
        """What the weights take in memory, all layouts together."""
        if self._rows is None:
            return self.weight.nbytes
        arrays = {id(a): a.nbytes for p in self._packed.values() for a in getattr(p, "arrays", ())}
        arrays |= {id(a): a.nbytes for a in self._rows[:4]}
        others = sum(p.nbytes for p in self._packed.values() if not hasattr(p, "arrays"))
        return sum(arrays.values()) + others

    def extra_repr(self) -> str:
        told = ", ".join(f"{batch}: {name}" for batch, name in self.names.items())
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias}, {told}"
        )

    # Weights that come and go: state_dict, copies, other dtypes and devices.

    def _fill(self, weight: Tensor, bias: Tensor | None) -> None:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            self._rows, self._moved = sparse_product.csr(weight.numpy()), None
            self._bias = None if bias is None else bias.numpy().copy()
        else:
            self._rows, self._bias, self._moved = None, None, (weight, bias)
        self._pack()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseLinear:
        weight, bias = self.weight, self.bias
        moved = fn(weight)
        if moved is not weight:
            self._fill(moved, None if bias is None else fn(bias))
        return super()._apply(fn, recurse)  # pyright: ignore[reportReturnType]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight
        if (bias := self.bias) is not None:
            destination[f"{prefix}bias"] = bias.clone()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        own = {"weight": self.weight, **({} if self.bias is None else {"bias": self.bias})}
        known = {f"{prefix}{name}" for name in own}
        unexpected_keys.extend(
            key for key in state_dict if strict and key.startswith(prefix) and key not in known
        )
        wrong = len(error_msgs)
        for name, old in own.items():
            new = state_dict.get(f"{prefix}{name}")
            if new is None:
                missing_keys.extend([f"{prefix}{name}"] if strict else [])
            elif new.shape != old.shape:
                told = f"{tuple(new.shape)} in the state dict, {tuple(old.shape)} in the layer"
                error_msgs.append(f"size mismatch for {prefix}{name}: {told}.")
            else:
                own[name] = new.detach().to(old)
        if len(error_msgs) == wrong:
            self._fill(own["weight"], own.get("bias"))

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_run", "_packed", "_handle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self._rows, tuple):
            self._rows = Rows(*self._rows)
        self._pack()


# torch.compile meets one operator, whatever the way: it needs no graph break, and its gradient is the dense one.

_HANDLES = itertools.count()
_LIVE: weakref.WeakValueDictionary[int, SparseLinear] = weakref.WeakValueDictionary()


@torch.library.custom_op("coresieve::sparse_linear", mutates_args=())
def _sparse_linear(x: Tensor, layer: int, outputs: int) -> Tensor:
    module = _LIVE[layer]
    with torch.no_grad():
        return F.linear(x, module.weight, module.bias) if module._needs_dense(x) else module._product(x)


@_sparse_linear.register_fake
def _(x: Tensor, layer: int, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


def _keep_layer(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.layer = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient @ _LIVE[ctx.layer].weight, None, None


_sparse_linear.register_autograd(_backward, setup_context=_keep_layer)


# ---- accelerate -------------------------------------------------------------------------------------------


@dataclass
class LayerTimes:
    """What one layer got. `chosen`: batch -> way; `ratio`: batch -> (quartile, median, quartile) against dense;
    `microseconds`: batch -> way -> median."""

    name: str
    shape: tuple[int, int]
    density: float
    bytes_before: int
    bytes_after: int
    chosen: dict[int, str] = field(default_factory=dict)
    ratio: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    microseconds: dict[int, dict[str, float]] = field(default_factory=dict)
    note: str = ""


@dataclass
class Acceleration:
    """What accelerate() did, layer by layer; `str()` is a table."""

    batches: list[int]
    threads: int
    layers: list[LayerTimes] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        from coresieve.report import new_console
        from coresieve.terminal import escape, table

        shown = table(["layer", "size", "density", *(f"batch {n}" for n in self.batches), "bytes"])
        for x in self.layers:
            cells = [_cell(x, n) for n in self.batches]
            sizes = f"{x.bytes_after / max(1, x.bytes_before):.2f} x"
            shown.add_row(escape(x.name or "(model)"), "{} x {}".format(*x.shape), f"{100 * x.density:.3g} %",
                          *cells, sizes)  # fmt: skip
        console = new_console(width=max(80, 60 + 36 * len(self.batches)))
        with console.capture() as capture:
            console.print(shown)
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        head = f"Times faster than dense torch, median of interleaved turns (quartiles), {threads}"
        told = [f"{x.name}: {x.note}" for x in self.layers if x.note] + self.notes
        return "\n".join([head, capture.get().rstrip(), *(f"- {note}" for note in told)])


def _cell(x: LayerTimes, batch: int) -> str:
    name = x.chosen.get(batch, DENSE)
    if name == DENSE:
        return DENSE
    low, middle, high = x.ratio[batch]
    return f"{middle:.1f} ({low:.1f}-{high:.1f}) {name}"


def accelerate(
    model: nn.Module | Compressed, batch: int | Sequence[int] = (1, 64), *, seconds: float = SECONDS
) -> nn.Module:
    """A copy of the model for inference, each nn.Linear with zeros in it run the fastest way for these batch sizes.

    The ways are timed there and then, dense among them, with the threads that torch has now; a layer that nothing runs
    faster stays as it is. `batch` counts the rows that a layer sees, which in (batch, positions, features) is
    batch times positions. `seconds` is what timing may take for each layer and size. The answer's `acceleration` is a
    report of what each layer got. What is replaced is a `SparseLinear`, whose docstring says how it trains, saves and
    copies.
    """
    from coresieve.calibration import uncompiled
    from coresieve.compression import _copy

    batches = _batches(batch)
    inner = getattr(model, "model", model) if not isinstance(model, nn.Module) else model
    if not isinstance(inner, nn.Module):
        raise LayerError(f"a model of type {type(model).__name__}", "a torch.nn.Module or what compress() answers",
                         "pass the network itself")  # fmt: skip
    inner = uncompiled(inner)
    check_loaded(inner)
    fast = _copy(inner)
    report = Acceleration(batches, torch.get_num_threads())
    aside = _read_past_forward(fast)
    made: dict[int, nn.Module] = {}
    for name, module in list(fast.named_modules()):
        if isinstance(module, nn.Linear):
            reason = aside.get(id(module)) or _why_dense(module)
            if reason is None:
                made[id(module)] = _replacement(name, module, report, seconds)
            else:
                report.notes.append(f"{name or 'the model'} stays dense: {reason}")
    fast = _put(fast, made)
    fast.acceleration = report  # pyright: ignore[reportArgumentType]
    return fast


def _batches(given: int | Sequence[int]) -> list[int]:
    try:
        some = [given] if isinstance(given, SupportsIndex) else list(given)
    except TypeError:
        some = []
    if not some or any(isinstance(n, bool) or not isinstance(n, SupportsIndex) or int(n) < 1 for n in some):
        raise BudgetError(f"batch={given!r}", "whole numbers of at least 1", "batch=(1, 64)")
    return sorted({int(n) for n in some})


def _read_past_forward(model: nn.Module) -> dict[int, str]:
    """Layers whose weights torch's fused transformer layers read without calling them."""
    told = "torch's transformer layers read its weight past its forward"
    owners = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
    return {
        id(child): told
        for module in model.modules()
        if isinstance(module, owners)
        for child in module.children()
    }


def _why_dense(module: nn.Linear) -> str | None:
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}"
    if (reason := linear.why_not(module)) is not None:
        return reason
    if module.weight.dtype != torch.float32 or module.weight.device.type != "cpu":
        return f"its weight is {module.weight.dtype} on {module.weight.device}; only float32 on the CPU is made faster"
    if module._backward_hooks or module._backward_pre_hooks:
        return "it has backward hooks"
    return None


def _replacement(name: str, module: nn.Linear, report: Acceleration, seconds: float) -> nn.Module:
    rows = sparse_product.csr(module.weight.detach().numpy())
    size = module.weight.nbytes
    line = LayerTimes(name, (module.out_features, module.in_features), float(rows.density), size, size)
    report.layers.append(line)
    if rows.density > FULL:
        line.note = "dense: no weight is 0" if rows.density == 1 else "dense: hardly a weight is 0"
        return module
    bias = None if module.bias is None else module.bias.detach().numpy().copy()
    for batch in report.batches:
        _time(line, rows, module, bias, batch, seconds)
    if set(line.chosen.values()) == {DENSE}:
        line.note = "dense: nothing was faster"
        return module
    fast = SparseLinear(rows, bias, line.chosen)
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
                 "_forward_hooks_always_called"):  # fmt: skip
        getattr(fast, kind).update(getattr(module, kind))
    line.bytes_after = fast.nbytes
    return fast.train(module.training)


def _time(
    line: LayerTimes, rows: Rows, module: nn.Linear, bias: np.ndarray | None, batch: int, seconds: float
) -> None:
    runners: dict[str, Way] = {DENSE: _bare(module)}
    for name in _candidates(rows, batch):
        with contextlib.suppress(RuntimeError):  # a build of torch without sparse products
            runners[name] = SparseLinear(rows, bias, {batch: name})
    x = torch.randn(batch, rows.inputs, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        times = race(runners, x, seconds)
    line.chosen[batch] = chosen = choose(times)
    line.ratio[batch] = ratios(times, chosen)
    line.microseconds[batch] = {name: 1e6 * statistics.median(t) for name, t in times.items()}


def _bare(module: nn.Linear) -> nn.Linear:
    """The same layer without its hooks, which should see no random inputs."""
    plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    plain.weight, plain.bias = module.weight, module.bias
    return plain


def _put(model: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """The model with modules replaced wherever they are held."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    return made.get(id(model), model)


def memory(model: nn.Module) -> int:
    """Bytes that the weights take, each tensor once, in every layout that is kept."""
    tensors = {id(t): t.nbytes for t in itertools.chain(model.parameters(), model.buffers())}
    return sum(tensors.values()) + sum(m.nbytes for m in model.modules() if isinstance(m, SparseLinear))
