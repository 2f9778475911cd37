"""A table of awkward networks: each builder answers a model and a sample of inputs for it.

`build("residual")` makes one from a seed of its own, without touching global randomness.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

POINTS = 300


def build(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[name]()


def relu_net(*widths: int, bias: bool = True) -> nn.Sequential:
    """Linear, ReLU, Linear, ReLU, ..., Linear: what the paper speaks of."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def plain():
    return relu_net(12, 30, 20, 4), torch.rand(POINTS, 12)


# --- Few of something ---------------------------------------------------------------------------------------


def one_input():
    return relu_net(1, 16, 2), torch.rand(POINTS, 1)


def one_neuron():
    return relu_net(6, 1, 3), torch.rand(POINTS, 6)


def one_output():
    return relu_net(12, 20, 1), torch.rand(POINTS, 12)


def single_layer():
    return relu_net(12, 5), torch.rand(POINTS, 12)


def bare_linear():
    """The model is the layer: it has no parent and its name is empty."""
    return nn.Linear(12, 5), torch.rand(POINTS, 12)


def one_weight():
    return nn.Sequential(nn.Linear(1, 1, bias=False)), torch.rand(POINTS, 1)


# --- Rows and neurons of a special kind ---------------------------------------------------------------------


def negative_row():
    model, x = plain()
    for parameter in model[2].parameters():
        parameter.data[3].abs_().neg_()
    return model, x


def zero_row():
    model, x = plain()
    for parameter in model[2].parameters():
        parameter.data[3] = 0
    return model, x


def zero_layer():
    model, x = plain()
    for parameter in model[2].parameters():
        parameter.data.zero_()
    return model, x


def dead_neurons():
    model, x = plain()
    model[0].bias.data[:5] = -100
    model[2].bias.data[7] = -100
    return model, x


def all_dead():
    model, x = plain()
    model[2].bias.data[:] = -100
    return model, x


def dead_inputs():
    """Half of the inputs are 0 on every point, as the rim of an image is."""
    model, x = plain()
    x[:, ::2] = 0
    return model, x


def zero_inputs():
    return plain()[0], torch.zeros(POINTS, 12)


def no_bias():
    return relu_net(12, 30, 4, bias=False), torch.rand(POINTS, 12)


def equal_weights():
    model, x = plain()
    for parameter in model.parameters():
        parameter.data.fill_(0.125)
    return model, x


# --- One parameter in two places ----------------------------------------------------------------------------


class Tied(nn.Module):
    """Two modules share a weight; their biases are one, or two, or there is none on one side."""

    def __init__(self, biases: str):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12, bias=biases != "one side")
        self.head = nn.Linear(12, 3)
        self.second.weight = self.first.weight
        if biases == "shared":
            self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).relu())


def tied_same_bias():
    return Tied("shared"), torch.rand(POINTS, 12)


def tied_two_biases():
    return Tied("two"), torch.rand(POINTS, 12)


def tied_one_bias():
    return Tied("one side"), torch.rand(POINTS, 12)


class TwoWeightsOneBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).relu())


def one_bias_two_weights():
    return TwoWeightsOneBias(), torch.rand(POINTS, 12)


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.body(x).relu()).relu())


def used_twice():
    return Repeated(), torch.rand(POINTS, 12)


def two_names():
    """One module object registered under two names."""
    layer = nn.Linear(12, 12)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(12, 3)), torch.rand(POINTS, 12)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens)).relu())


def tied_embedding():
    return LanguageModel(), torch.randint(0, 20, (POINTS, 6))


# --- Forwards that are not a chain --------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(x + self.b(F.relu(self.a(x)))))


def residual():
    return Residual(), torch.rand(POINTS, 12)


class Skip(nn.Module):
    """Neurons of `first` are dead, but they also go elsewhere: the layer must not shrink."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.first.bias.data[:6] = -100

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.head((self.second(h) + h).relu())


def skip_from_dead():
    return Skip(), torch.rand(POINTS, 12)


class Nested(nn.Module):
    """Modules in lists and dicts, functional activations, a keyword call, a structured answer."""

    def __init__(self):
        super().__init__()
        self.stems = nn.ModuleDict({"left": nn.Linear(12, 10), "right": nn.Linear(12, 10)})
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.cat([F.relu(stem(input=x)) for stem in self.stems.values()], dim=-1)
        for block in self.blocks:
            h = block(h)
        return {"loss": None, "logits": self.head(h), "hidden": (h,)}


def nested():
    return Nested(), torch.rand(POINTS, 12)


class TwoArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(8, 16), nn.Linear(5, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return self.head((self.left(x) + scale * self.right(y)).relu())


def dict_batches():
    batch = lambda n: {"x": torch.rand(n, 8), "y": torch.rand(n, 5), "scale": 0.5}  # noqa: E731
    return TwoArguments(), [batch(n) for n in (100, 100, 50)]


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.never, self.head = nn.Linear(12, 16), nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def never_runs():
    return Unused(), torch.rand(POINTS, 12)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def attention():
    return Attention(), torch.randn(60, 5, 6)


def transformer():
    """In eval mode torch has a fused path, which reads the layers' weights without calling them."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    return nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 3)), torch.randn(60, 5, 6)


# --- Inputs, activations and number types -------------------------------------------------------------------


def three_dimensions():
    return relu_net(12, 20, 4), torch.rand(60, 5, 12)


def bfloat16():
    model, x = plain()
    return model.bfloat16(), x.bfloat16()


def float16():
    model, x = plain()
    return model.half(), x.half()


def float64():
    model, x = plain()
    return model.double(), x.double()


def negative_inputs():
    model = nn.Sequential(
        nn.Linear(12, 20),
        nn.Tanh(),
        nn.Linear(20, 20),
        nn.GELU(),
        nn.Linear(20, 20),
        nn.LayerNorm(20),
        nn.Linear(20, 4),
    )
    return model, torch.randn(POINTS, 12)


def batch_norm():
    norm = nn.BatchNorm1d(20)
    norm.running_mean.normal_()  # pyright: ignore
    norm.running_var.uniform_(0.5, 2)  # pyright: ignore
    return nn.Sequential(nn.Linear(12, 20), norm, nn.ReLU(), nn.Linear(20, 4)), torch.rand(POINTS, 12)


def relu_in_place():
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(inplace=True), nn.Linear(20, 4), nn.ReLU(inplace=True))
    return model, torch.rand(POINTS, 12)


def weight_norm():
    normed = parametrizations.weight_norm(nn.Linear(20, 20))
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), normed, nn.ReLU(), nn.Linear(20, 4)), torch.rand(
        POINTS, 12
    )


def dropout_in_training():
    model = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, 4))
    model[4].eval()
    return model.train(), torch.rand(POINTS, 12)


class MixedTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 20), nn.Linear(20, 4).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu().bfloat16()).float()


def mixed_types():
    return MixedTypes(), torch.rand(POINTS, 12)


def transposed():
    """A weight that is stored column by column."""
    model, x = plain()
    model[0].weight = nn.Parameter(torch.randn(12, 30).t())
    return model, x


def frozen():
    model, x = dead_neurons()
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model, x


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    builder.__name__: builder
    for builder in (
        plain, one_input, one_neuron, one_output, single_layer, bare_linear, one_weight,
        negative_row, zero_row, zero_layer, dead_neurons, all_dead, dead_inputs, zero_inputs, no_bias, equal_weights,
        tied_same_bias, tied_two_biases, tied_one_bias, one_bias_two_weights, used_twice, two_names, tied_embedding,
        residual, skip_from_dead, nested, dict_batches, never_runs, attention, transformer,
        three_dimensions, bfloat16, float16, float64, negative_inputs, batch_norm, relu_in_place, weight_norm,
        mixed_types, transposed, dropout_in_training, frozen,
    )
}  # fmt: skip
