"""A layer seen as rows: its weight matrix with every bias embedded as one more edge, and its inputs.

A `Layer` is one weight and all modules that use it: a weight tied between two modules is compressed once. Each
distinct bias of those modules is an edge of its own, with input 1 where its module runs and 0 elsewhere.
One file in this folder a kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from coresieve.errors import LayerError, NonFiniteError
from coresieve.layers import linear

ROWS_AT_ONCE = 256  # rows are read, drawn and written in blocks of this many, to bound memory


@dataclass(eq=False)
class Layer:
    """One weight matrix and the modules that share it. `chosen` is False for a layer that must stay exact."""

    name: str
    modules: dict[str, nn.Linear]
    chosen: bool = True
    biases: list[nn.Parameter] = field(default_factory=list)

    def __post_init__(self):
        self.refresh()

    def refresh(self) -> None:
        """Find the biases anew, after a module was given other parameters."""
        self.biases = []
        for module in self.modules.values():
            if module.bias is not None and self.bias_column(module) is None:
                self.biases.append(module.bias)

    @property
    def module(self) -> nn.Linear:
        return self.modules[self.name]

    @property
    def weight(self) -> Tensor:
        return linear.weight(self.module)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, edges), biases counted as edges."""
        rows, edges = self.weight.shape
        return rows, edges + len(self.biases)

    def bias_column(self, module: nn.Linear) -> int | None:
        """Which of the bias edges is this module's."""
        return next((k for k, b in enumerate(self.biases) if b is module.bias), None)

    def blocks(self) -> Iterator[slice]:
        rows = self.weight.shape[0]
        return (slice(i, min(i + ROWS_AT_ONCE, rows)) for i in range(0, rows, ROWS_AT_ONCE))

    def read(self, rows: slice | Tensor) -> Tensor:
        """[W | b] for some rows, in float32 or wider: a copy."""
        with torch.no_grad():
            columns = [self.weight[rows], *(b[rows].unsqueeze(1) for b in self.biases)]
            return torch.cat(columns, dim=1).to(working_dtype(self.weight))

    def write(self, rows: slice | Tensor, values: Tensor) -> None:
        """Put [W | b] back for some rows, in the layer's own dtype."""
        self.check_fits(values)
        edges = self.weight.shape[1]
        with torch.no_grad():
            self.weight[rows] = values[:, :edges].to(self.weight.dtype)
            for k, b in enumerate(self.biases):
                b[rows] = values[:, edges + k].to(b.dtype)

    def check_fits(self, values: Tensor) -> None:
        """What is reweighed grows, perhaps beyond what the layer's own dtype holds."""
        own = self.weight.dtype
        if not bool(torch.isfinite(values.to(own)).all()):
            raise NonFiniteError(f"weights too large for {own} in {self.describe()}",
                                 "a narrower range", "a larger budget, or the model in a wider type")  # fmt: skip

    def nonzero(self) -> int:
        """How many parameters are not zero, biases counted."""
        return sum(int(torch.count_nonzero(t)) for t in (self.weight, *self.biases))

    def describe(self) -> str:
        rows, edges = self.weight.shape
        return f"layer {self.name or 'that is the whole model'} ({rows} x {edges})"

    def check_finite(self) -> None:
        for what, tensor in (("weights", self.weight), *(("biases", b) for b in self.biases)):
            ends = torch.stack(torch.aminmax(tensor.detach())) if tensor.numel() else tensor
            if not bool(torch.isfinite(ends).all()):
                bad = int(tensor.numel() - torch.isfinite(tensor).sum())
                raise NonFiniteError(
                    f"{bad} NaN or infinite {what} in {self.describe()}",
                    "finite numbers",
                    "check the training run or the file that the weights came from",
                )


def working_dtype(tensor: Tensor) -> torch.dtype:
    """float64 stays; everything narrower is computed in float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@dataclass
class Found:
    """What a model holds: its layers, and a line for each part that stays exact."""

    layers: list[Layer]
    notes: list[str]


def find(model: nn.Module, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> Found:
    """The model's layers in the order of their names; a parameter that something else uses too stays exact."""
    check_loaded(model)
    linears: dict[str, nn.Linear] = {}
    others: dict[int, str] = {}
    notes: list[str] = [*getattr(model, "notes", ())]  # what a graph holds that is no module
    for name, module in model.named_modules():
        own = list(module._parameters.values())
        reason = linear.why_not(module)
        if reason is None:
            assert isinstance(module, nn.Linear)
            linears[name] = module
        elif any(p is not None for p in own) or linear.parametrize.is_parametrized(module):
            notes.append(f"{_who(name, module)} stays exact: {reason}")
            others |= {id(p): name for p in own if p is not None}
    layers = list(_grouped(linears, others, notes))
    if not layers:
        raise LayerError(
            f"{type(model).__name__} without a layer to compress" + _bullets(notes),
            "at least one nn.Linear with a weight of its own",
            "coresieve compresses fully-connected layers; check that the model holds some",
        )
    _choose(layers, _patterns(include, "include"), _patterns(exclude, "exclude"))
    for layer in layers:
        if not layer.chosen:
            notes.append(f"{layer.name} stays exact: excluded")
    return Found(layers, notes)


def _who(name: str, module: nn.Module) -> str:
    """A module that stays exact; where layers inside it may be compressed only what it holds itself does."""
    name = name or "the model"
    own = [key for key, parameter in module._parameters.items() if parameter is not None]
    inside = any(linear.why_not(part) is None for part in module.modules())
    return f"what {name} holds itself ({', '.join(own)})" if own and inside else name


def check_loaded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        lazy = isinstance(parameter, nn.UninitializedParameter)
        if lazy or parameter.is_meta:
            raise LayerError(f"{name}, which is {'not initialised' if lazy else 'on the meta device'}",
                             "a model that holds all its weights",
                             "run it once on a batch" if lazy else "load its weights")  # fmt: skip


def _grouped(linears: dict[str, nn.Linear], others: dict[int, str], notes: list[str]) -> Iterator[Layer]:
    by_weight: dict[int, dict[str, nn.Linear]] = {}
    for name, module in linears.items():
        by_weight.setdefault(id(module.weight), {})[name] = module
    for modules in by_weight.values():
        name = next(iter(modules))
        owner = next(
            (others[id(p)] for m in modules.values() for p in m.parameters() if id(p) in others), None
        )
        if owner is not None:
            notes.append(f"{name} stays exact: it shares a parameter with {owner}")
        elif _shares_bias(modules, linears):
            notes.append(f"{name} stays exact: it shares its bias with a layer of another weight")
        else:
            yield Layer(name, modules)


def _shares_bias(modules: dict[str, nn.Linear], linears: dict[str, nn.Linear]) -> bool:
    mine = {id(m.bias) for m in modules.values() if m.bias is not None}
    return any(id(m.bias) in mine for name, m in linears.items() if name not in modules)


def _patterns(given: Sequence[str] | str, what: str) -> list[str]:
    try:
        patterns = [given] if isinstance(given, str) else list(given)
        right = all(isinstance(pattern, str) for pattern in patterns)
    except TypeError:
        patterns, right = [], False
    if not right:
        raise LayerError(f"{what}={given!r}", "names of layers or patterns", f'{what}=["encoder.*"]')
    if what == "include" and not patterns:
        raise LayerError("include=[]", "at least one pattern", 'include=["*"] takes every layer')
    return patterns


def _choose(layers: list[Layer], include: list[str], exclude: list[str]) -> None:
    names = [name for layer in layers for name in layer.modules]
    for pattern in (*include, *exclude):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LayerError(
                f"the pattern {pattern!r}, which matches no layer",
                "a layer's name or a pattern such as 'encoder.*'",
                f"one of {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}",
            )

    def matches(layer: Layer, patterns: list[str]) -> bool:
        return any(fnmatchcase(name, pattern) for name in layer.modules for pattern in patterns)

    for layer in layers:
        layer.chosen = matches(layer, include) and not matches(layer, exclude)
    if not any(layer.chosen for layer in layers):
        raise LayerError(f"include={include}, exclude={exclude}, which leave no layer", "at least one layer",
                         "exclude fewer layers")  # fmt: skip


def _bullets(notes: list[str]) -> str:
    return "".join(f"\n  - {note}" for note in notes[:8]) + ("\n" if notes else "")
