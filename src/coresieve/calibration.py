"""Run a sample through the model once, by forward hooks, and keep what a method needs of it.

Nothing is traced: hooks on the layers see their inputs stream by into statistics, and a few points stay, to measure
errors on and (for CoreNet++) to judge candidates by.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coresieve.digests import KnownRows, Witness
from coresieve.errors import ForwardError, NonFiniteError, SampleError
from coresieve.layers import Layer, linear, working_dtype
from coresieve.sample import (
    Batch,
    Sample,
    choose,
    merged,
    own_randomness,
    private_randomness,
    size,
    take,
)
from coresieve.statistics import Statistics

POINTS_MEASURED = 64  # calibration points kept to measure errors on


@dataclass
class Seen:
    """One layer of the original model and what its inputs have shown."""

    layer: Layer
    statistics: Statistics
    calls: int = 0
    feeds: dict[str, bool] = field(
        default_factory=dict
    )  # next layer -> whether it always saw exactly ReLU of this one


@dataclass
class Answers:
    """What a network says to one batch: each layer on its first call, and the network itself."""

    layers: dict[str, Tensor]
    outputs: list[Tensor]

    @property
    def output(self) -> Tensor | None:
        """The first tensor of the network's answer, which errors are measured on."""
        return next(iter(self.outputs), None)


@dataclass
class Kept:
    """A few inputs that stay, with the original's answers to them."""

    inputs: list[Batch] = field(default_factory=list)
    answers: list[Answers] = field(default_factory=list)  # one an input
    points: int = 0

    def add(self, batch: Batch) -> None:
        self.inputs.append(batch)
        self.points += size(batch)

    def record(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        """Run the points that stayed, for the answers to compare with."""
        for batch in self.inputs:
            answers = run_once(model, layers, batch)
            for layer in layers:
                check_finite(answers.layers.get(layer.name), f"the outputs of {layer.describe()}")
            check_finite(answers.output, "the model's output")
            self.answers.append(answers)


@dataclass
class Observed:
    """What one pass over the sample has shown."""

    seen: list[Seen]  # the layers that ran, in the order in which they first did
    points: int  # |S|
    forwards: int  # how many times the model ran
    is_chain: bool  # ReLU between the layers and nothing else, as the paper's theorem assumes
    sample: list[Batch]  # S itself, for a method that reads it again; else empty
    measuring: Kept  # some of S
    judging: Kept  # T, disjoint from S
    rows: KnownRows  # digests of the sample's rows, so that none of them certifies what they made


def observe(
    model: nn.Module,
    layers: Sequence[Layer],
    sample: Sample,
    wanted: Sequence[int],
    seed: int,
    sensitivities: bool,
    keep_sample: bool = False,
) -> Observed:
    """One pass: `wanted` is (|S|, |T|). The model runs in eval mode and is put back as it was."""
    run, witness = _Pass(model, layers, sensitivities), Witness()
    sample_kept: list[Batch] = []
    with eval_mode(model), torch.no_grad(), private_randomness(sample, seed):
        for which, batch in choose(sample, wanted, seed, witness.see):
            run.take_in(batch, judging=which == 1)
            if keep_sample and which == 0:
                sample_kept.append(batch)
        for kept in (run.measuring, run.judging):
            kept.inputs = merged(kept.inputs, run.largest)
            kept.record(model, layers)
    if run.points < 2:
        raise SampleError(f"a sample of {run.points} point{'s' * (run.points != 1)}", "at least 2 points",
                          f"a few hundred inputs of the kind to come; the theory asks for {wanted[0]}")  # fmt: skip
    return Observed(
        *(list(run.seen.values()), run.points, run.forwards, run.is_chain()),
        *(sample_kept, run.measuring, run.judging, witness.known()),
    )


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode; afterwards flags and buffers are as they were, whatever the forward did to them."""
    modes = [(module, module.training) for module in model.modules()]
    places = [(m, dict(m._buffers)) for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    contents = [(tensor, tensor.clone()) for tensor in _moving(model) if not tensor.is_meta]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
        for module, buffers in places:  # a forward may have put other tensors in their place, or new ones
            module._non_persistent_buffers_set.difference_update(module._buffers.keys() - buffers.keys())
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, before in contents:
                _put_back(tensor, before)


def _moving(model: nn.Module) -> list[Tensor]:
    """What a forward changes by itself: buffers, and the weights of embeddings that keep their rows short."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    return [*model.buffers(), *(m.weight for m in embeddings if m.max_norm is not None)]


def _put_back(tensor: Tensor, before: Tensor) -> None:
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    if not plain or tensor.shape != before.shape:
        tensor.data = before
    elif not torch.equal(tensor, before):
        tensor.copy_(before)


def uncompiled(model: nn.Module) -> nn.Module:
    """torch.compile's wrapper calls the same modules past their hooks, and gives their weights other names."""
    return getattr(model, "_orig_mod", model)


class _Ours(BaseException):
    """Carries an exception of our hooks past the model, so that it is not taken for the model's own."""


class _Enough(BaseException):
    """Ends a forward early; not an Exception, so that a model's own `except` lets it through."""


def stop_forward() -> None:
    """From a hook: what was looked for is found. The forward ends inside `stopping()`."""
    raise _Enough


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    with contextlib.suppress(_Enough):
        yield


def forward(model: nn.Module, batch: Batch, note: str = "") -> Any:
    """The model on a copy of one batch, moved to its device and floating type, with a randomness of its own.

    The model's exception comes with our context.
    """
    batch = moved(model, batch)
    torch.clear_autocast_cache()  # it would answer with weights that were rewritten since
    with own_randomness(0):  # a model that draws noise draws the same for original and copy
        try:
            return model(**batch) if isinstance(batch, dict) else model(batch)
        except _Ours as ours:
            raise (ours.__cause__ or ours) from None
        except ForwardError:
            raise  # of a graph: it says what is wrong
        except Exception as error:
            raise ForwardError(
                f"{type(error).__name__} from {type(model).__name__}.forward{_where(model, error)} "
                f"on {_describe(batch)}{note}: {error}",
                "a batch that the model takes",
                "run the model on one batch of the sample yourself, or pass dict batches for several arguments",
            ) from error


def _where(model: nn.Module, error: Exception) -> str:
    """The innermost module that the exception came through, by name and shape."""
    names = {id(module): name for name, module in model.named_modules() if name}
    inner, trace = "", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            shape = (
                f"{module.out_features} x {module.in_features}"
                if isinstance(module, nn.Linear)
                else type(module).__name__
            )
            inner = f", in layer {names[id(module)]} ({shape})"
        trace = trace.tb_next
    return inner


def moved(model: nn.Module, batch: Batch) -> Batch:
    """A copy of the batch on the model's device, floating tensors in its type."""
    floats = [p for p in model.parameters() if p.is_floating_point()]
    dtypes = {p.dtype for p in floats}

    def move(x: Any) -> Any:
        if not torch.is_tensor(x):
            return x
        if not floats:
            return x.clone()
        safe = x.is_floating_point() and x.dtype not in dtypes
        return x.to(floats[0].device, floats[0].dtype if safe else x.dtype, copy=True)

    return {key: move(value) for key, value in batch.items()} if isinstance(batch, dict) else move(batch)


def _describe(batch: Batch) -> str:
    if isinstance(batch, Tensor):
        return f"a batch of shape {tuple(batch.shape)} and type {batch.dtype}"
    return "a batch of " + ", ".join(f"{k} {tuple(v.shape)}" for k, v in batch.items() if torch.is_tensor(v))


def tensors(output: Any) -> list[Tensor]:
    """The dense floating-point tensors of whatever a forward returned."""
    return [x for x in tree_leaves(output) if torch.is_tensor(x) and _dense(x)]


def first_tensor(output: Any) -> Tensor | None:
    return next(iter(tensors(output)), None)


def _dense(x: Tensor) -> bool:
    return x.is_floating_point() and x.layout == torch.strided and not x.is_nested


@contextlib.contextmanager
def hooks(layers: Sequence[Layer], see: Callable[[Layer, nn.Linear, Tensor, Tensor], None]) -> Iterator[None]:
    """Call `see(layer, module, inputs, outputs)` after each run of each layer."""

    def hook(layer: Layer):
        def after(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            assert isinstance(module, nn.Linear)
            try:
                x = args[0] if args else kwargs["input"]
                see(layer, module, linear.inputs(module, x.detach()), linear.outputs(module, output.detach()))
            except Exception as error:
                raise _Ours from error

        return after

    handles = [
        module.register_forward_hook(hook(layer), with_kwargs=True)
        for layer in layers
        for module in layer.modules.values()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def inputs_of(model: nn.Module, layer: Layer, batch: Batch) -> Tensor | None:
    """What a layer sees on its first call, with a column for each bias; None when it does not run."""
    caught: list[Tensor] = []

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        assert isinstance(module, nn.Linear)
        a = linear.inputs(module, (args[0] if args else kwargs["input"]).detach())
        ones = a.new_zeros(len(a), len(layer.biases))
        column = layer.bias_column(module)
        if column is not None:
            ones[:, column] = 1
        caught.append(torch.cat([a, ones], dim=1).to(working_dtype(a)))
        stop_forward()

    handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in layer.modules.values()]
    try:
        with stopping():
            forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return caught[0] if caught else None


def run_once(model: nn.Module, layers: Sequence[Layer], batch: Batch) -> Answers:
    """The network's answers to a batch."""
    return answers_of(model, {layer.name: list(layer.modules) for layer in layers}, batch)


def answers_of(model: nn.Module, names: dict[str, list[str]], batch: Batch) -> Answers:
    """The answers of modules by name, whatever kind they are by now: a compressed layer may be two thin ones."""
    seen: dict[str, Tensor] = {}

    def hook(key: str):
        def after(module: nn.Module, args: tuple, output: Tensor) -> None:
            if key not in seen:
                # a copy: the activation that follows may work in place
                seen[key] = output.detach().reshape(-1, output.shape[-1]).clone()

        return after

    modules = [(key, model.get_submodule(name)) for key, group in names.items() for name in group]
    handles = [module.register_forward_hook(hook(key)) for key, module in modules]
    try:
        outputs = tensors(forward(model, batch))
    finally:
        for handle in handles:
            handle.remove()
    return Answers(seen, [output.detach().clone() for output in outputs])


def check_finite(x: Tensor | None, what: str) -> None:
    """NaN and infinity are refused where they first appear."""
    if x is not None and x.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(x))).all()):
        raise NonFiniteError(f"NaN or infinity in {what}", "finite numbers",
                             "check the sample for NaN, and the weights and layers before for overflow")  # fmt: skip


class _Pass:
    """The one pass over the sample."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], sensitivities: bool):
        self.model, self.layers, self.sensitivities = model, layers, sensitivities
        self.weights = sum(layer.weight.nbytes for layer in layers)
        self.seen: dict[str, Seen] = {}
        self.measuring, self.judging = Kept(), Kept()
        self.points = self.forwards = self.largest = 0
        self.ends_in_last_layer = True
        self.batch: Batch | None = None
        self.previous: tuple[str, Tensor] | None = None

    def take_in(self, batch: Batch, judging: bool) -> None:
        n = size(batch)
        self.largest = max(self.largest, n)
        if judging:
            return self.judging.add(batch)
        self.batch, self.previous = batch, None
        with hooks(self.layers, self._see):
            output = first_tensor(forward(self.model, batch))
        check_finite(output, "the model's output")
        self.ends_in_last_layer &= self._ends_in_last_layer(output)
        self.points += n
        self.forwards += 1
        room = min(n, POINTS_MEASURED - self.measuring.points)
        if room > 0:
            self.measuring.add(take(batch, torch.arange(room, device="cpu")))
        return None

    def _ends_in_last_layer(self, output: Tensor | None) -> bool:
        if output is None or self.previous is None:
            return False
        last = self.previous[1]
        return output.numel() == last.numel() and torch.equal(output.reshape(last.shape), last)

    def _see(self, layer: Layer, module: nn.Linear, a: Tensor, z: Tensor) -> None:
        seen = self.seen.get(layer.name) or self._first_sight(layer)
        seen.calls += 1
        if not len(a):
            return
        check_finite(a, f"the inputs of {layer.describe()}")
        check_finite(z, f"the outputs of {layer.describe()}")
        if (
            self.previous is None
            and isinstance(self.batch, Tensor)
            and self.batch.ndim == 1
            and len(a) < len(self.batch)
        ):
            raise SampleError("one point without a dimension of points", "a point per row", "x.unsqueeze(0)")
        self._link(layer.name, a)
        if self.sensitivities:
            column = layer.bias_column(module) or 0
            bias = None if module.bias is None else module.bias.detach()
            seen.statistics.update(layer.weight.detach(), a, bias, column)
        self.previous = (layer.name, z.clone())  # an activation may work in place

    def _first_sight(self, layer: Layer) -> Seen:
        edges = layer.weight.shape[1]
        statistics = Statistics.empty(
            layer.shape[0], edges, len(layer.biases), layer.weight.dtype, layer.weight.device,
            sensitivities=self.sensitivities and layer.chosen, weights=self.weights,
        )  # fmt: skip
        self.seen[layer.name] = Seen(layer, statistics)
        return self.seen[layer.name]

    def _link(self, name: str, a: Tensor) -> None:
        """Was this layer fed exactly the ReLU of the layer that ran just before?"""
        if self.previous is not None:
            before, z = self.previous
            self.previous = None  # its memory is free from here on
            feeds = self.seen[before].feeds
            feeds[name] = feeds.get(name, True) and z.shape == a.shape and torch.equal(z.clamp_(min=0), a)

    def is_chain(self) -> bool:
        chain = list(self.seen.values())
        once = all(seen.calls == self.forwards for seen in chain)
        linked = all(a.feeds == {b.layer.name: True} for a, b in itertools.pairwise(chain))
        return once and linked and self.ends_in_last_layer and not chain[-1].feeds
