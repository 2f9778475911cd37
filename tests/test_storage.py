"""A file gives back the very bits that were saved, or says what is wrong with it and changes nothing."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from coresieve import storage
from coresieve.errors import DomainError, FileError
from coresieve.layers.low_rank import LowRank
from coresieve.storage import is_ours, load_model, read_header, save_model

HEADER = {"method": "sieve", "seed": 3, "budget": {"keep": 0.1}, "report": [{"layer": "é", "eps": 0.5}, None]}
DTYPES = list(storage._DTYPES.values())


class Net(nn.Module):
    """Every kind of layer whose size may change, and one that may not."""

    def __init__(self, edges: int = 6, hidden: int = 5, out: int = 3, bias: bool = True):
        super().__init__()
        self.fc1 = nn.Linear(edges, hidden, bias=bias)
        self.norm = nn.BatchNorm1d(hidden)
        self.fc2 = nn.Linear(hidden, hidden, bias=bias)
        self.fc3 = nn.Linear(hidden, out)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return self.scale * self.fc3(self.fc2(self.norm(self.fc1(x)).relu()).relu())


class Bag(nn.Module):
    """Any tensors, as buffers."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self, size: int = 4):
        super().__init__()
        self.a = nn.Linear(size, size)
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "small.safetensors"


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def bits(model: nn.Module) -> dict[str, tuple]:
    return {name: (t.dtype, tuple(t.shape), raw(t)) for name, t in model.state_dict().items()}


def pruned() -> Net:
    """A Net whose second layer has lost two neurons and whose third is of rank 1."""
    torch.manual_seed(0)
    net = Net()
    net.fc1, net.norm, net.fc2 = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
    net.fc3 = LowRank(3, 3, 1)  # pyright: ignore
    return net.eval()


def frozen(model: nn.Module):
    """All that must not change when a load is refused."""
    objects = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    return objects, bits(model), repr(model), [id(m) for m in model.modules()]


# --- Round trips --------------------------------------------------------------------------------------------


def test_the_weights_and_the_header_come_back(path):
    net, skeleton = Net(), Net()
    save_model(path, net, HEADER)
    assert load_model(path, skeleton) == HEADER
    assert bits(skeleton) == bits(net)
    assert list(read_header(path)) == [*HEADER, "file"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    specs=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4).map(tuple)), max_size=5
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_dtype_and_shape_comes_back_bit_for_bit(path, specs, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(dtype, shape):
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        width = torch.empty((), dtype=dtype).element_size()  # any bits: NaN with a payload, -0.0, subnormals
        flat = torch.randint(0, 256, (torch.Size(shape).numel() * width,), generator=generator)
        return flat.to(torch.uint8).view(dtype).reshape(shape)

    model = Bag({f"t{i}": draw(dtype, shape) for i, (dtype, shape) in enumerate(specs)})
    skeleton = Bag({f"t{i}": torch.zeros(shape) for i, (_, shape) in enumerate(specs)})
    save_model(path, model, {})
    load_model(path, skeleton)
    assert bits(skeleton) == bits(model)
    described = read_header(path)["file"]["tensors"]
    assert {n: (t["dtype"], tuple(t["shape"]), t["bytes"]) for n, t in described.items()} == {
        n: (str(dtype)[6:], shape, len(data)) for n, (dtype, shape, data) in bits(model).items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_the_files(path, dtype):
    net, skeleton = pruned().to(dtype), Net()
    save_model(path, net, {})
    load_model(path, skeleton)
    assert bits(skeleton) == bits(net)
    assert skeleton.fc1.weight.dtype == dtype
    x = torch.randn(2, 6, dtype=dtype)
    assert torch.equal(skeleton.eval()(x), net(x))


def test_an_integer_parameter(path):
    model, skeleton = nn.Linear(2, 2), nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), requires_grad=False)
    save_model(path, model, {})
    load_model(path, skeleton)
    assert bits(skeleton) == bits(model)
    assert isinstance(skeleton.weight, nn.Parameter)


@pytest.mark.parametrize(
    "view",
    [
        lambda base: {"a": base[:, :3], "b": base[:, 1:]},  # overlapping
        lambda base: {"a": base, "b": base.t()},  # the same memory, read another way
        lambda base: {"a": base.t(), "b": base[1].expand(4, 5)},  # not contiguous; stride 0
        lambda base: {"a": base.flip(0).conj(), "b": base.to(torch.complex64).conj()},
        lambda base: {"a": torch.view_as_complex(base[:4].reshape(5, 2, 2)).conj().imag},
    ],
)
def test_views_are_stored_as_what_they_show(path, view):
    model = Bag(view(torch.randn(5, 5)))
    save_model(path, model, {})
    skeleton = Bag({name: torch.zeros(t.shape) for name, t in model.state_dict().items()})
    load_model(path, skeleton)
    for name, tensor in model.state_dict().items():
        assert torch.equal(skeleton.state_dict()[name], tensor)
    assert not read_header(path)["file"]["aliases"]


def test_an_empty_model_and_a_large_header(path):
    save_model(path, nn.Sequential(nn.ReLU()), {"text": "x" * 100_000, "nan": [float("inf")]})
    assert load_model(path, nn.Sequential(nn.ReLU()))["nan"] == [float("inf")]


def test_buffers_that_are_not_persistent_stay_out(path):
    model, skeleton = nn.Linear(1, 1), nn.Linear(1, 1)
    for module, value in ((model, 1.0), (skeleton, 2.0)):
        module.register_buffer("cache", torch.tensor(value), persistent=False)
    save_model(path, model, {})
    load_model(path, skeleton)
    assert skeleton.cache == 2.0


def test_the_header_keeps_its_order_and_its_odd_strings(path):
    header = {"z": 1, "a": {"y": '"}\\', "b": "\u2028\ud800"}, '"coresieve.seal":"' + "0" * 64: "0" * 64}
    save_model(path, nn.Linear(1, 1), header)
    assert json.dumps(load_model(path, nn.Linear(1, 1))) == json.dumps(header)


def test_requires_grad_and_training_are_the_skeletons(path):
    save_model(path, pruned(), {})
    skeleton = Net().eval()
    skeleton.fc1.requires_grad_(False)
    skeleton.fc3.requires_grad_(False)
    load_model(path, skeleton)
    assert not any(p.requires_grad for m in (skeleton.fc1, skeleton.fc3) for p in m.parameters())
    assert all(p.requires_grad for p in skeleton.fc2.parameters())
    assert not any(module.training for module in skeleton.modules())


def test_no_random_state_moves(path):
    small, skeleton, before = pruned(), Net(), torch.get_rng_state()
    save_model(path, small, {})
    load_model(path, skeleton)
    assert torch.equal(torch.get_rng_state(), before)


# --- Changed layers -----------------------------------------------------------------------------------------


def test_pruned_and_low_rank_layers_go_into_the_original(path):
    small, skeleton = pruned(), Net().eval()
    save_model(path, small, {})
    load_model(path, skeleton)
    assert bits(skeleton) == bits(small)
    assert repr(skeleton) == repr(small)  # in_features, num_features, ... too
    x = torch.randn(4, 6)
    assert torch.equal(skeleton(x), small(x))
    skeleton(x).sum().backward()  # an ordinary module still


def test_the_structure_is_in_the_header(path):
    save_model(path, pruned(), {})
    assert read_header(path)["file"]["structure"] == {
        "fc1": {"kind": "linear", "in": 6, "out": 4, "bias": True},
        "norm": {"kind": "batch_norm", "features": 4},
        "fc2": {"kind": "linear", "in": 4, "out": 3, "bias": True},
        "fc3": {"kind": "low_rank", "in": 3, "out": 3, "rank": 1, "bias": True},
    }


def test_a_skeleton_of_the_small_shapes(path):
    small = pruned()
    skeleton = copy.deepcopy(small)
    for tensor in skeleton.state_dict().values():
        tensor.zero_()
    layers = list(skeleton.modules())
    save_model(path, small, {})
    load_model(path, skeleton)
    assert bits(skeleton) == bits(small)
    assert list(skeleton.modules()) == layers  # nothing had to be replaced


def test_a_low_rank_skeleton_of_another_rank(path):
    small = nn.Sequential(LowRank(5, 4, 1))
    save_model(path, small, {})
    skeleton = nn.Sequential(LowRank(5, 4, 3))
    load_model(path, skeleton)
    assert bits(skeleton) == bits(small)


def test_nested_layers_and_rank_zero(path):
    small = nn.Sequential(nn.ModuleDict({"x": nn.Sequential(LowRank(5, 4, 0, bias=False))}), nn.ReLU())
    skeleton = nn.Sequential(nn.ModuleDict({"x": nn.Sequential(nn.Linear(5, 4, bias=False))}), nn.ReLU())
    save_model(path, small, {})
    load_model(path, skeleton)
    assert repr(skeleton) == repr(small)


def test_a_bias_that_went_or_came(path):
    for bias in (True, False):
        small, skeleton = Net(bias=bias), Net(bias=not bias)
        save_model(path, small, {})
        load_model(path, skeleton)
        assert bits(skeleton) == bits(small)
        assert repr(skeleton) == repr(small)


def test_a_skeleton_without_values(path):
    with torch.device("meta"):
        skeleton = Net().eval()
    small = pruned()
    save_model(path, small, {})
    load_model(path, skeleton)
    assert bits(skeleton) == bits(small)


def test_attention_and_recurrent_layers(path):
    def make():
        return nn.ModuleList(
            [
                nn.MultiheadAttention(4, 2),
                nn.LSTM(3, 2),
                nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
            ]
        )

    model, skeleton = make(), make()
    save_model(path, model, {})
    load_model(path, skeleton)
    assert bits(skeleton) == bits(model)
    x = torch.randn(5, 3)
    assert torch.equal(skeleton[1](x)[0], model[1](x)[0])
    assert torch.equal(skeleton[2](x), model[2](x))


# --- Ties ---------------------------------------------------------------------------------------------------


def tied(tie: bool = True) -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
    if tie:
        model["head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize("skeleton_tied", [True, False])
def test_tied_parameters_are_stored_once_and_tied_again(path, skeleton_tied):
    model, skeleton = tied(), tied(skeleton_tied)
    save_model(path, model, {})
    about = read_header(path)["file"]
    assert about["aliases"] == {"head.weight": "embed.weight"}
    assert sorted(about["tensors"]) == ["embed.weight", "head.bias"]
    load_model(path, skeleton)
    assert bits(skeleton) == bits(model)
    assert skeleton["head"].weight is skeleton["embed"].weight


def test_a_tie_that_compression_broke_is_broken_in_the_skeleton(path):
    model, skeleton = tied(False), tied(True)
    save_model(path, model, {})
    load_model(path, skeleton)
    assert bits(skeleton) == bits(model)
    assert skeleton["head"].weight.data_ptr() != skeleton["embed"].weight.data_ptr()


def test_empty_tensors_are_not_tied_by_their_address(path):
    model = Bag({"a": torch.empty(0), "b": torch.empty(0, 3), "c": torch.empty(0)})
    save_model(path, model, {})
    assert not read_header(path)["file"]["aliases"]


@pytest.mark.parametrize(
    "layer", [lambda: nn.Linear(4, 4), lambda: LowRank(4, 4, 2), lambda: nn.Linear(3, 3)]
)
@pytest.mark.parametrize("shared", [True, False])
def test_one_layer_under_two_names(path, layer, shared):
    small, skeleton = Twice(), Twice()
    small.a = small.b = layer()
    if not shared:
        skeleton.b = nn.Linear(4, 4)
    save_model(path, small, {})
    load_model(path, skeleton)
    assert bits(skeleton) == bits(small)
    assert (skeleton.a is skeleton.b) == shared
    assert all(p is q for p, q in zip(skeleton.a.parameters(), skeleton.b.parameters(), strict=True))


def test_low_rank_layers_that_share_factors_and_not_biases(path):
    def make(layer):
        model = nn.ModuleList([layer(), layer()])
        for (name, first), second in zip(model[0].named_parameters(), model[1].parameters(), strict=True):
            if not name.endswith("bias"):
                parent, _, leaf = name.rpartition(".")
                setattr(model[1].get_submodule(parent), leaf, first)
                assert first is not second
        return model

    small, skeleton = make(lambda: LowRank(4, 4, 2)), make(lambda: nn.Linear(4, 4))
    save_model(path, small, {})
    assert len(read_header(path)["file"]["tensors"]) == 4
    load_model(path, skeleton)
    assert bits(skeleton) == bits(small)
    assert skeleton[0].up.weight is skeleton[1].up.weight
    assert skeleton[0].down.bias is not skeleton[1].down.bias


def test_a_block_under_two_names(path):
    def make(layer):
        block = nn.Sequential(layer)
        return nn.ModuleDict({"enc": block, "dec": block})

    small, skeleton = make(LowRank(4, 4, 2)), make(nn.Linear(4, 4))
    save_model(path, small, {})
    load_model(path, skeleton)
    assert bits(skeleton) == bits(small)
    assert skeleton["enc"][0] is skeleton["dec"][0]


@pytest.mark.parametrize("layer", [lambda: nn.Linear(4, 4), lambda: LowRank(4, 4, 2)])
def test_one_layer_cannot_hold_two(path, layer):
    small, skeleton = Twice(), Twice()
    small.b = layer()
    save_model(path, small, {})
    before = frozen(skeleton)
    with pytest.raises(FileError, match="one shared layer in the skeleton"):
        load_model(path, skeleton)
    assert frozen(skeleton) == before


# --- Skeletons that do not fit ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skeleton", "words"),
    [
        (lambda: Net(hidden=2), ["fc1.weight: (4, 6) in the file, (2, 6) in the skeleton"]),
        (
            lambda: Net(out=2),
            ["fc3.down.weight: (1, 3) in the file, none", "fc3.weight: none in the file, (2, 5)"],
        ),
        (lambda: nn.Sequential(nn.Linear(6, 5)), ["0.weight: none in the file, (5, 6)", "and 10 more"]),
        (lambda: Bag({"fc1": torch.zeros(2)}), ["fc1: none in the file, (2,) in the skeleton"]),
        (
            lambda: nn.Sequential(nn.LazyLinear(3)),
            ["0.weight: none in the file, not initialized in the skeleton"],
        ),
        (lambda: nn.ReLU(), ["fc1.bias: (4,) in the file, none in the skeleton"]),
    ],
)
def test_a_skeleton_that_does_not_fit_is_named_and_left_alone(path, skeleton, words):
    save_model(path, pruned(), {})
    into = skeleton()
    before = None if "Lazy" in repr(into) else frozen(into)
    with pytest.raises(FileError) as caught:
        load_model(path, into)
    assert "Try: a skeleton made by the same code" in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert before is None or frozen(into) == before


def test_one_wrong_tensor_among_fitting_changes_leaves_all_alone(path):
    """The changes would be carried out first, were the rest not looked at before."""
    small, skeleton = pruned(), Net()
    skeleton.scale = nn.Parameter(torch.zeros(2))
    save_model(path, small, {})
    before = frozen(skeleton)
    with pytest.raises(FileError, match=r"\(scale: \(\) in the file, \(2,\) in the skeleton\)"):
        load_model(path, skeleton)
    assert frozen(skeleton) == before


def test_a_shape_that_no_structure_records_must_agree(path):
    save_model(path, nn.Conv1d(2, 3, 1), {})
    with pytest.raises(FileError, match=r"weight: \(3, 2, 1\) in the file, \(4, 2, 1\) in the skeleton"):
        load_model(path, nn.Conv1d(2, 4, 1))


@pytest.mark.parametrize("make", [lambda n: nn.Linear(n, 2), lambda n: nn.Linear(2, n), nn.BatchNorm1d])
def test_layers_shrink_and_never_grow(path, make):
    save_model(path, make(4), {})
    load_model(path, make(5))
    with pytest.raises(FileError, match="does not fit the skeleton"):
        load_model(path, make(3))


def test_a_model_that_is_one_layer(path):
    save_model(path, LowRank(3, 2, 1), {})
    with pytest.raises(FileError, match=r"into=LowRank\(3, 2, 1\)"):
        load_model(path, nn.Linear(3, 2))
    load_model(path, LowRank(3, 2, 1))


# --- Models and headers that cannot be saved ----------------------------------------------------------------


beta = pytest.mark.filterwarnings("ignore:Sparse CSR")


class Extra(nn.Module):
    def get_extra_state(self):
        return {"not": "a tensor"}

    def set_extra_state(self, state):
        raise AssertionError


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Extra(), "'_extra_state' is a dict"),
        (lambda: nn.LazyLinear(2), "not initialized"),
        (lambda: nn.Linear(2, 2, device="meta"), "has no values"),
        (lambda: Bag({"w": torch.eye(2).to_sparse()}), "sparse"),
        pytest.param(lambda: Bag({"w": torch.eye(2).to_sparse_csr()}), "sparse", marks=beta),
        (lambda: Bag({"w": torch.zeros(2, dtype=torch.complex128)}), "complex128"),
        (lambda: Bag({"__metadata__": torch.zeros(2)}), "__metadata__"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused(path, model, words):
    with pytest.raises(FileError, match=words):
        save_model(path, model(), {})
    assert not os.listdir(path.parent)


@pytest.mark.parametrize("header", [{"a": torch.zeros(1)}, {"a": {1, 2}}, {"file": 1}, {(1, 2): 3}, [1]])
def test_headers_that_json_cannot_hold_are_refused(path, header):
    with pytest.raises(FileError, match="header"):
        save_model(path, nn.Linear(1, 1), header)
    assert not os.listdir(path.parent)


def test_a_header_that_refers_to_itself(path):
    header: dict = {}
    header["self"] = header
    with pytest.raises(FileError, match="header"):
        save_model(path, nn.Linear(1, 1), header)


# --- Damage -------------------------------------------------------------------------------------------------


def small_file(path: Path) -> bytes:
    save_model(path, tied(), {"seed": 1})
    return path.read_bytes()


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0xFF])
def test_every_flipped_byte_is_found(path, flip):
    data = small_file(path)
    skeleton = tied()
    before = frozen(skeleton)
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= flip
        path.write_bytes(broken)
        with pytest.raises(FileError):
            load_model(path, skeleton)
    assert frozen(skeleton) == before


def test_padding_is_covered_too(path):
    data = small_file(path)
    place = 8 + int.from_bytes(data[:8], "little") - 1
    for seed in range(8):  # until a header of this length has padding
        if data[place : place + 1] == b" ":
            break
        save_model(path, tied(), {"seed": 10**seed})
        data = path.read_bytes()
        place = 8 + int.from_bytes(data[:8], "little") - 1
    assert data[place : place + 1] == b" "
    path.write_bytes(data[:place] + b"\n" + data[place + 1 :])
    safetensors.torch.load_file(path)  # harmless to others; not what was saved
    with pytest.raises(FileError, match="damaged header"):
        load_model(path, tied())


def test_every_truncation_is_found(path):
    data = small_file(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        for read in (lambda: load_model(path, tied()), lambda: read_header(path)):
            with pytest.raises(FileError, match=r"cut short|empty|not a safetensors"):
                read()
    path.write_bytes(data + b"\0")
    with pytest.raises(FileError, match="bytes after its end"):
        load_model(path, tied())


def test_read_header_answers_for_the_header_only(path):
    data = small_file(path)
    header = 8 + int.from_bytes(data[:8], "little")
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= 1
        path.write_bytes(broken)
        if position < header:
            with pytest.raises(FileError):
                read_header(path)
        else:
            assert read_header(path)["seed"] == 1
    with pytest.raises(FileError, match="damaged weights"):
        load_model(path, tied())


def resealed(data: bytes, change) -> bytes:
    """`data` with another header and a true seal: the work of somebody, not of an accident."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header = change(header) or header
    header["__metadata__"]["coresieve.seal"] = storage._BLANK
    text = json.dumps(header, separators=(",", ":")).encode()
    start = len(text).to_bytes(8, "little") + text
    head = storage._HEAD.match(text)
    assert head
    place = slice(8 + head.start(2), 8 + head.end(2))
    seal = storage._seal(start, place).encode()
    return start[: place.start] + seal + start[place.stop :] + data[8 + length :]


def inner(**changes):
    def change(header):
        notes = json.loads(header["__metadata__"]["coresieve"])
        header["__metadata__"]["coresieve"] = json.dumps({**notes, **changes})

    return change


def entry(**changes):
    return lambda header: header["embed.weight"].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        inner(header=[]),
        inner(aliases={"head.weight": "nowhere"}),
        inner(aliases={"embed.weight": "head.bias"}),
        inner(aliases=3),
        inner(structure={"head": {"kind": "unheard of"}}),
        inner(structure={"head": {"kind": "linear", "in": -1, "out": 1, "bias": True}}),
        inner(structure={"head": {"kind": "linear", "in": True, "out": 1, "bias": True}}),
        inner(structure={"head": {"kind": "linear", "in": 1, "out": 1, "bias": 1}}),
        inner(structure=[1]),
        inner(
            structure={"head": {"kind": "linear", "in": 1, "out": 1, "bias": True}}
        ),  # not the tensors' sizes
        inner(payload="0" * 64),
        entry(shape=[2**40, 2**40]),
        entry(shape=[-3, -2]),
        entry(shape=[3.0, 2]),
        entry(shape="32"),
        entry(dtype="F63"),
        entry(data_offsets=[0, 20]),
        entry(data_offsets=[8, 32]),
        lambda header: header.pop("head.bias") and None,
        lambda header: header["__metadata__"].update(other=header["__metadata__"].pop("coresieve")),
        lambda header: header["__metadata__"].update(coresieve="[" * 100_000),
    ],
)
def test_a_sealed_header_is_not_believed_blindly(path, change):
    path.write_bytes(resealed(small_file(path), change))
    skeleton = tied()
    before = frozen(skeleton)
    with pytest.raises(FileError):
        load_model(path, skeleton)
    assert frozen(skeleton) == before


def test_resealing_alone_is_accepted(path):
    """Else the test above would pass for no reason."""
    path.write_bytes(resealed(small_file(path), lambda header: None))
    load_model(path, tied())


# --- Files that are not ours --------------------------------------------------------------------------------


def foreign(path, **notes):
    safetensors.torch.save_file({"weight": torch.zeros(2)}, path, notes or None)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.symlink_to(path), "symbolic links"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_text("A text that is no network.\n" * 9), "is not a safetensors file"),
        (
            lambda path: path.write_bytes((9).to_bytes(8, "little") + b"not json."),
            "is not a safetensors file",
        ),
        (lambda path: path.write_bytes((4).to_bytes(8, "little") + b"[[[["), "is not a safetensors file"),
        (lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"), "is not a safetensors file"),
        (lambda path: torch.save(nn.Linear(1, 1).state_dict(), path), "is not a safetensors file"),
        (foreign, "is a safetensors file that coresieve did not write"),
        (lambda path: foreign(path, format="pt"), "is a safetensors file that coresieve did not write"),
        (lambda path: foreign(path, coresieve="{}"), "written anew by another program"),
        (lambda path: path.write_bytes(small_file(path)[:60]), "is cut short"),
    ],
)
def test_each_kind_of_wrong_file_has_its_own_words(path, make, words):
    make(path)
    for read in (lambda: load_model(path, nn.Linear(1, 1)), lambda: read_header(path)):
        with pytest.raises(FileError, match=words) as caught:
            read()
        assert "small.safetensors" in str(caught.value)


def test_a_newer_format(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(storage, "FORMAT", 3)
        save_model(path, nn.Linear(1, 1), {})
    with pytest.raises(FileError, match=r"has format 3: expected format 2 or older\. Try: a newer version"):
        load_model(path, nn.Linear(1, 1))


def test_other_readers_can_open_the_file(path):
    net = pruned()
    net.register_buffer("steps", torch.arange(3))
    net.register_buffer("mask", torch.tensor(True))
    save_model(path, net, HEADER)
    loaded = safetensors.torch.load_file(path)
    assert {n: (t.dtype, tuple(t.shape), raw(t)) for n, t in loaded.items()} == bits(net)
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["coresieve"])["header"] == HEADER


def test_nothing_is_ever_unpickled(path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle")

    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    save_model(path, pruned(), {})
    load_model(path, Net())


# --- Writing ------------------------------------------------------------------------------------------------


def test_the_same_model_gives_the_same_bytes(path):
    torch.manual_seed(1)
    net = pruned()
    save_model(path, net, HEADER)
    first = path.read_bytes()
    save_model(path, copy.deepcopy(net), HEADER)
    assert path.read_bytes() == first
    skeleton = Net()
    header = load_model(path, skeleton)
    save_model(path, skeleton, header)  # over the file it came from
    assert path.read_bytes() == first


def test_the_same_bytes_in_another_process(tmp_path):
    code = """
        import sys, torch
        from coresieve.storage import save_model
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        torch.nn.init.ones_(model[0].weight), torch.nn.init.ones_(model[0].bias)
        save_model(sys.argv[1], model, {"a": 1, "b": 2, "c": 3})
    """
    for name, seed in (("one", "1"), ("two", "2")):
        command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / name)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


class Stop(BaseException):
    """Not an Exception, like Ctrl-C."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Stop(), RuntimeError("broken")])
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(path, monkeypatch, error, where):
    old = small_file(path)

    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, where, fail)
        expected = FileError if isinstance(error, OSError) else type(error)
        with pytest.raises(expected, match="No space left" if expected is FileError else None):
            save_model(path, nn.Linear(3, 3), {})
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_a_tensor_that_fails_in_the_middle(path, monkeypatch):
    old, real, seen = small_file(path), storage._bytes, []

    def fail(tensor):
        seen.append(tensor)
        if len(seen) == 2:
            raise RuntimeError("lost the device")
        return real(tensor)

    monkeypatch.setattr(storage, "_bytes", fail)
    with pytest.raises(RuntimeError, match="lost the device"):
        save_model(path, nn.Linear(3, 3), {})
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_a_kill_in_the_middle_leaves_the_old_file(path):
    old = small_file(path)
    code = """
        import sys, time, torch
        from coresieve import storage
        real, seen = storage._bytes, []
        def slow(tensor):
            seen.append(tensor)
            if len(seen) == 2:
                print("half", flush=True)
                time.sleep(60)
            return real(tensor)
        storage._bytes = slow
        storage.save_model(sys.argv[1], torch.nn.Linear(300, 300), {})
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        left = [name for name in os.listdir(path.parent) if name != path.name]
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert len(left) == 1  # it was really writing
    assert path.read_bytes() == old
    load_model(path, tied())
    save_model(path, nn.Linear(1, 1), {})  # what the kill left behind is in nobody's way
    load_model(path, nn.Linear(1, 1))


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_mode_is_what_the_umask_asks_for(path, mask):
    former = os.umask(mask)
    try:
        save_model(path, nn.Linear(1, 1), {})
    finally:
        os.umask(former)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_file_keeps_the_mode_it_has(path):
    small_file(path)
    path.chmod(0o600)
    small_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_replaced(path, tmp_path, exists):
    target = tmp_path / "elsewhere" / "real.safetensors"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    path.symlink_to(target)
    save_model(path, nn.Linear(1, 1), {"new": True})
    assert path.is_symlink()
    assert read_header(target)["new"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda tmp: tmp / "missing" / "small", "No such file or directory.*expected a folder that exists"),
        (lambda tmp: tmp, "is a folder"),
        (lambda tmp: Path("/dev/null"), "not a regular file"),
        (lambda tmp: (tmp / "file").write_text("") or tmp / "file" / "small", "Not a directory"),
        (lambda tmp: tmp / ("n" * 300), "name too long"),
    ],
)
def test_places_that_cannot_be_written(tmp_path, make, words):
    with pytest.raises(FileError, match=words):
        save_model(make(tmp_path), nn.Linear(1, 1), {})


@pytest.mark.parametrize("name", [None, 7, 3.5, "a\0b", "\ud800", b"a\0b", nn.Linear], ids=repr)
def test_what_is_no_path_is_refused(name):
    for act in (
        lambda: save_model(name, nn.Linear(1, 1), {}),
        lambda: load_model(name, nn.Linear(1, 1)),
        lambda: read_header(name),
        lambda: is_ours(name),
    ):
        with pytest.raises(FileError, match=r"a path of type .*a file's name"):
            act()


def test_a_path_in_bytes_is_a_path(path):
    save_model(os.fsencode(path), nn.Linear(1, 1), {})
    assert is_ours(os.fsencode(path))
    load_model(os.fsencode(path), nn.Linear(1, 1))


def test_a_current_folder_that_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for act in (
        lambda: save_model("small", nn.Linear(1, 1), {}),
        lambda: load_model("small", nn.Linear(1, 1)),
    ):
        with pytest.raises(FileError, match="No such file or directory"):
            act()


def test_what_the_caller_refuses_changes_nothing(path):
    save_model(path, tied(), HEADER)
    skeleton, seen = tied(), {}
    before = frozen(skeleton)

    def check(header, state):
        seen.update(header | state)
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        load_model(path, skeleton, check)
    assert frozen(skeleton) == before
    assert seen.keys() == HEADER.keys() | tied().state_dict().keys()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk(path, monkeypatch):
    """A real ENOSPC, at the write or at the flush, not one that we raise ourselves."""
    old, real = small_file(path), open
    monkeypatch.setattr(
        storage, "open", lambda name, mode: real(name, mode) and real("/dev/full", "wb"), raising=False
    )
    for size in (1, 3000):  # below and above what a buffer holds
        with pytest.raises(FileError, match="No space left on device"):
            save_model(path, nn.Linear(size, 3), {})
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_without_permission(path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    small_file(path)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "open", refuse, raising=False)
        for act in (lambda: save_model(path, nn.Linear(1, 1), {}), lambda: read_header(path)):
            with pytest.raises(FileError, match="Permission denied"):
                act()
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "access", lambda *args: False)  # a read-only file
        with pytest.raises(FileError, match="Permission denied"):
            save_model(path, nn.Linear(1, 1), {})
    load_model(path, tied())


def test_a_name_of_the_greatest_length_and_a_relative_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("s" * 255, "small"):
        save_model(name, nn.Linear(1, 1), {})
        load_model(name, nn.Linear(1, 1))


def test_one_tensor_at_a_time_is_copied(path, monkeypatch):
    """Eight transposed tensors need copies to be written; never two at once."""
    real, copies, most = storage._bytes, [], 0

    def watched(tensor):
        nonlocal most
        view = real(tensor)
        copies.append(weakref.ref(view.obj))  # the array that holds the copy
        gc.collect()
        most = max(most, sum(copy() is not None for copy in copies))
        return view

    monkeypatch.setattr(storage, "_bytes", watched)
    save_model(path, Bag({f"t{i}": torch.randn(4, 3).t() for i in range(8)}), {})
    assert (len(copies), most) == (8, 1)


# --- LowRank ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3)])
def test_full_rank_factors_give_the_linear_layer(bias, shape):
    torch.manual_seed(0)
    linear = nn.Linear(5, 4, bias=bias, dtype=torch.float64)
    matrix = torch.cat([linear.weight, linear.bias[:, None]], 1) if bias else linear.weight
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    layer = LowRank.from_factors(u * s, vh, bias=bias)
    assert (layer.in_features, layer.out_features, layer.rank) == (5, 4, 4)
    assert sum(p.numel() for p in layer.parameters()) == (u * s).numel() + vh.numel()
    x = torch.randn(*shape, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), linear(x))


def test_from_factors_copies_and_draws_nothing():
    left, right = torch.ones(3, 2), torch.ones(2, 5)
    before = torch.get_rng_state()
    layer = LowRank.from_factors(left, right, bias=True)
    assert torch.equal(torch.get_rng_state(), before)
    left.zero_(), right.zero_()
    assert all((p == 1).all() and p.is_contiguous() for p in layer.parameters())
    assert [name for name, _ in layer.named_parameters()] == ["down.weight", "down.bias", "up.weight"]


def test_factors_that_do_not_meet():
    with pytest.raises(DomainError, match=r"shapes \(3, 2\) and \(3, 5\)"):
        LowRank.from_factors(torch.ones(3, 2), torch.ones(3, 5), bias=True)
    with pytest.raises(DomainError, match="one dtype"):
        LowRank.from_factors(torch.ones(3, 2), torch.ones(2, 5).double(), bias=True)
    with pytest.raises(DomainError, match="in \\+ 1"):
        LowRank.from_factors(torch.ones(3, 2), torch.ones(2), bias=True)


@pytest.mark.filterwarnings("error")
def test_rank_zero_is_the_constant_zero():
    assert LowRank(3, 2, 0)(torch.ones(4, 3)).tolist() == [[0.0, 0.0]] * 4
