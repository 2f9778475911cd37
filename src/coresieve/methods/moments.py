"""What a layer's least-squares problem is made of: second moments of its inputs, and what they should lead to.

With a_hat what the compressed layers before hand over, a what the original's do, and z = W a the original's answer,

    min over W_hat of  sum_x sum_i c_i ((W_hat a_hat(x))_i - z_i(x))^2
                     = sum_i c_i (w_hat_i H w_hat_i - 2 g_i w_hat_i) + constant,   H = E a_hat a_hat^T,  G = E z a_hat^T

where c_i says what an error of row i costs at the output: c_i = E |d f / d z_i|^2 in the metric of `distance.py`, by
one backward pass (f in a random direction has a gradient of that mean square). Nothing but H and G is kept of a layer's
inputs; the bias is one more input, which is 1.

>>> m = Moments.empty(rows=1, edges=2)
>>> m.add(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([[3.0], [5.0]]))
>>> m.H.tolist(), m.G.tolist(), m.lines
([[2.0, 2.0], [2.0, 4.0]], [[8.0, 10.0]], 2)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coresieve.calibration import Batch, first_tensor, forward, hooks, stop_forward, stopping
from coresieve.layers import Layer, working_dtype
from coresieve.methods.distance import direction
from coresieve.methods.method import Job, Work

ASIDE = 8  # one of so many inputs is held aside, to choose by


@dataclass
class Moments:
    """Sums over lines of inputs, in float64: H (edges, edges), G (rows, edges)."""

    H: Tensor
    G: Tensor
    lines: int = 0

    @classmethod
    def empty(cls, rows: int, edges: int, device: torch.device | str | None = None) -> Moments:
        H, G = (torch.zeros(n, edges, dtype=torch.float64, device=device) for n in (edges, rows))
        return cls(H, G)

    def add(self, a: Tensor, z: Tensor) -> None:
        self.H += a.T @ a
        self.G += z.T @ a
        self.lines += len(a)

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.H + other.H, self.G + other.G, self.lines + other.lines)


@dataclass
class Teacher:
    """The network whose layers' answers are to be met."""

    model: nn.Module
    layers: dict[str, Layer]

    @classmethod
    def original(cls, job: Job) -> Teacher:
        return cls(job.original, {work.layer.name: work.seen.layer for work in job.works})

    @classmethod
    def copy_of(cls, job: Job) -> Teacher:
        """The small network as it is now."""
        model = copy.deepcopy(job.model)
        found = {w.layer.name: {n: model.get_submodule(n) for n in w.layer.modules} for w in job.works}
        return cls(model, {name: Layer(name, modules) for name, modules in found.items()})  # pyright: ignore[reportArgumentType]


def moments(job: Job, work: Work, teacher: Teacher) -> tuple[Moments, Moments]:
    """Of a layer as the copy feeds it now: those to fit, and those of the inputs held aside."""
    rows, edges = work.layer.shape
    fit, aside = (Moments.empty(rows, edges, work.layer.weight.device) for _ in range(2))
    once = work.seen.calls == job.observed.forwards
    for batch in job.observed.sample:
        theirs = runs(teacher.model, teacher.layers[work.layer.name], batch, once)
        ours = runs(job.model, work.layer, batch, once)
        for (_, z), (a, _) in zip(theirs, ours, strict=False):
            if len(a) == len(z):
                cut = len(a) - len(a) // ASIDE
                fit.add(a[:cut], z[:cut])
                aside.add(a[cut:], z[cut:])
    return fit, aside


def runs(model: nn.Module, layer: Layer, batch: Batch, once: bool) -> list[tuple[Tensor, Tensor]]:
    """(inputs with a one for each bias that is added, outputs) of each run of a layer; `once`: it runs only once."""
    caught: list[tuple[Tensor, Tensor]] = []

    def see(layer: Layer, module: nn.Linear, a: Tensor, z: Tensor) -> None:
        wide = working_dtype(a)
        caught.append((with_ones(layer, module, a).to(wide), z.to(wide, copy=True)))
        if once:
            stop_forward()

    with hooks([layer], see), stopping():
        forward(model, batch)
    return caught


def with_ones(layer: Layer, module: nn.Linear, a: Tensor) -> Tensor:
    """Inputs with a column for each of the layer's biases: 1 for the bias of the module that runs, 0 for others."""
    ones = a.new_zeros(len(a), len(layer.biases))
    column = layer.bias_column(module)
    if column is not None:
        ones[:, column] = 1
    return torch.cat([a, ones], dim=1)


def costs(job: Job, teacher: Teacher, T: float | None = None) -> dict[str, Tensor]:
    """c of every layer: what an error of each of its rows costs at the teacher's output, in one unit for all:
    the distance of votes at temperature T, or of plain numbers without one.

    Where no gradient comes from the output, a layer's rows cost alike, and as much as the layer says in all.
    """
    layers = list(teacher.layers.values())
    c = {layer.name: torch.zeros(layer.shape[0], dtype=torch.float64) for layer in layers}
    power = dict.fromkeys(c, 0.0)
    chance = torch.Generator().manual_seed(0)
    for batch in job.observed.sample:
        for name, z, gradient in _backward(teacher.model, layers, batch, T, chance):
            power[name] += float(z.double().square().sum())
            if gradient is not None:
                c[name] += gradient.double().square().sum(dim=0).cpu()
    if not all(bool(x.sum() > 0) and bool(x.isfinite().all()) for x in c.values()):
        job.tell("not every layer gets a gradient from the output: each layer's own error counts instead")
        c = {name: torch.full_like(x, 1 / (power[name] or 1.0)) for name, x in c.items()}
    most = max(float(x.max()) for x in c.values())
    found = {}
    for work in job.works:
        weight = work.layer.weight
        found[work.layer.name] = (
            (c[work.layer.name] / most).clamp(min=1e-12).to(weight.device, working_dtype(weight))
        )
    return found


def _backward(
    model: nn.Module, layers: list[Layer], batch: Batch, T: float | None, chance: torch.Generator
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(layer, its outputs, the gradient by them of the output in a random direction) for each run of each layer."""
    seen: list[tuple[str, Tensor, list[Tensor]]] = []

    def hook(layer: Layer):
        def after(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            source = output if output.requires_grad else output.detach().requires_grad_(True)
            gradients: list[Tensor] = []
            source.register_hook(gradients.append)
            seen.append((layer.name, output.detach().reshape(-1, output.shape[-1]).clone(), gradients))
            return source.clone()  # what follows may work in place

        return after

    handles = [
        module.register_forward_hook(hook(layer)) for layer in layers for module in layer.modules.values()
    ]
    frozen = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(False)
        with torch.enable_grad():
            output = first_tensor(forward(model, batch))
            if output is not None and output.requires_grad:
                (output * direction(output.detach(), T, chance)).sum().backward()
    finally:
        for p in frozen:
            p.requires_grad_(True)
        for handle in handles:
            handle.remove()
    for name, z, gradients in seen:
        yield name, z, gradients[0].reshape(z.shape) if gradients else None
