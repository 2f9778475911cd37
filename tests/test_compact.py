"""A compact file gives back the very bits, near the bound, and says so when it is damaged or not ours."""

from __future__ import annotations

import json
import resource
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coresieve as cs
from coresieve import compact, storage
from coresieve.compact import pack, positions, rans, unpack
from coresieve.compact.side import Reader, Writer
from coresieve.errors import AlteredError, BudgetError, DomainError, FileError, NonFiniteError
from coresieve.fitting import fit
from coresieve.methods import METHODS
from coresieve.rounding import DIGITS, Rounding, rounded
from coresieve.storage import file_size, load_model, read_header, save_model
from test_storage import DTYPES, Bag, Net, bits, pruned, raw


@pytest.fixture
def path(tmp_path):
    return tmp_path / "small.safetensors"


def sparse(rows: int, columns: int, density: float, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows, columns, generator=g) < density
    return torch.where(kept, torch.randn(rows, columns, generator=g), 0.0).to(dtype)


def entropy(values: torch.Tensor) -> float:
    """Of all values together, in bits."""
    _, counts = values.unique(return_counts=True)
    return float(-(counts * (counts / counts.sum()).log2()).sum())


# --- Bit for bit --------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    density=st.sampled_from([0, 0.02, 0.3, 0.97, 1]),
    few=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bits_of_any_type_come_back(dtype, shape, density, few, seed):
    g, width, n = np.random.default_rng(seed), dtype.itemsize, int(np.prod(shape))
    some = g.integers(0, 2 if dtype == torch.bool else 256, (5 if few else max(n, 1), width), np.uint8)
    data = some[g.integers(0, len(some), n)] * (
        g.random((n, 1)) < density
    )  # NaN with payloads, -0.0, subnormals
    flat = torch.from_numpy(data.astype(np.uint8).reshape(-1))
    tensor = flat.view(dtype).reshape(shape) if n else torch.empty(shape, dtype=dtype)
    again = unpack(pack(tensor).code, dtype, shape)
    assert (again.dtype, again.shape, raw(again)) == (tensor.dtype, tensor.shape, raw(tensor))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_odd_numbers_among_ordinary_ones(dtype):
    tensor, tiny = sparse(50, 60, 0.3, dtype=dtype), torch.finfo(dtype).smallest_normal
    odd = [
        -0.0,
        float("nan"),
        -float("nan"),
        float("inf"),
        -float("inf"),
        tiny / 2,
        -tiny / 4,
        torch.finfo(dtype).max,
    ]
    tensor[3, : len(odd)] = torch.tensor(odd, dtype=dtype)
    assert raw(unpack(pack(tensor).code, dtype, tensor.shape)) == raw(tensor)


def test_views_and_gradients():
    base = torch.randn(20, 30, requires_grad=True)
    for tensor in (base.t(), base[::2, 1:7], base[0].expand(4, 30), base[:, :2].to(torch.complex64).conj()):
        assert raw(unpack(pack(tensor).code, tensor.dtype, tensor.shape)) == raw(tensor.resolve_conj())


@pytest.mark.parametrize("density", [1e-5, 1e-3, 0.02, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("shape", [(1, 3000), (3000, 1), (300, 200)])
def test_positions_come_back_at_every_density(shape, density):
    kept = np.random.default_rng(0).random(shape) < density
    out = Writer()
    made = positions.encode(out, kept)
    found = positions.decode(Reader(out.whole()), *shape)
    assert (found.index == made.index).all()
    assert sorted(found.index) == np.flatnonzero(kept).tolist()


def test_the_same_tensor_gives_the_same_bytes():
    assert pack(sparse(50, 60, 0.3)) == pack(sparse(50, 60, 0.3))


# --- Near the bound -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.01, 0.05, 0.1, 0.3, 0.5, 0.8])
def test_positions_cost_near_the_bound(density):
    kept = np.random.default_rng(0).random((1000, 784)) < density
    out = Writer()
    positions.encode(out, kept)
    assert len(out.whole()) < 1.005 * positions.bound(kept.size, int(kept.sum())) / 8 + 40


def test_columns_of_unequal_density_cost_less_than_the_bound():
    g = np.random.default_rng(0)
    kept = g.random((1000, 784)) < 0.2 * g.random(784) ** 2
    out = Writer()
    positions.encode(out, kept)
    assert len(out.whole()) < 0.9 * positions.bound(kept.size, int(kept.sum())) / 8


def test_rows_of_unequal_density_cost_less_than_the_bound():
    g = np.random.default_rng(0)
    kept = g.random((1000, 784)) < np.where(
        g.random((1000, 1)) < 0.2, 1, 0.05
    )  # exact rows among sampled ones
    out = Writer()
    positions.encode(out, kept)
    assert len(out.whole()) < 0.5 * positions.bound(kept.size, int(kept.sum())) / 8


def test_the_exponents_are_coded():
    weight = sparse(1000, 784, 0.1)
    k = int(weight.count_nonzero())
    assert len(pack(weight).code) < 0.88 * (4 * k + positions.bound(weight.numel(), k) / 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_values_in_float32_cost_as_little_as_in_their_own_type(dtype):
    weight = sparse(300, 400, 0.1).to(dtype)
    assert abs(len(pack(weight.float()).code) - len(pack(weight).code)) < 60


def test_few_distinct_values_are_a_palette():
    weight = sparse(300, 400, 0.1)
    weight = weight.sign() * 0.1234567 * (1 + weight.abs().floor())
    k = int(weight.count_nonzero())
    ideal = (entropy(weight[weight != 0]) + positions.bound(weight.numel(), k)) / 8
    assert len(pack(weight).code) < 1.02 * ideal + 60


def test_tiny_tensors_are_stored_as_they_are(path):
    model = Bag({"count": torch.tensor(7), "pair": torch.randn(2), "zeros": torch.zeros(1000)})
    save_model(path, model, {}, compact=True)
    told = read_header(path)["file"]["tensors"]
    assert [name for name in told if "kept" in told[name]] == ["zeros"]
    assert told["zeros"]["bytes"] < 40


# --- The coder ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**6), min_size=256, max_size=256))
def test_frequencies_add_up_and_leave_no_symbol_out(counts):
    f = rans.frequencies(np.array(counts))
    assert f.sum() == (rans.TOTAL if any(counts) else 0)
    assert ((f > 0) == (np.array(counts) > 0)).all()


def test_a_sure_symbol_costs_nothing():
    symbols, tables = np.zeros(10**5, np.uint8), rans.frequencies(np.eye(256, dtype=np.int64)[0])[None]
    code = rans.encode(symbols, [10**5], tables)
    assert len(code) == rans.START
    assert not rans.decode(code, [10**5], tables).any()


def test_every_damaged_code_is_refused_or_decodes_within_bounds():
    """The file's digest finds damage; what somebody else sealed must at least not crash."""
    code, g = bytearray(pack(sparse(30, 40, 0.2)).code), np.random.default_rng(0)
    refused = 0
    for place in range(len(code)):
        damaged = bytearray(code)
        damaged[place] ^= int(g.integers(1, 256))
        try:
            assert unpack(damaged, torch.float32, (30, 40)).shape == (30, 40)
        except ValueError:
            refused += 1
    for cut in range(0, len(code), 7):
        with pytest.raises(ValueError):
            unpack(code[:cut], torch.float32, (30, 40))
    with pytest.raises(ValueError):
        unpack(code, torch.float32, (20, 30))
    assert refused > len(code) / 4


# --- The file -----------------------------------------------------------------------------------------------


def holes(model, density: float = 0.3):
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.data = sparse(*parameter.shape, density, seed=len(name), dtype=parameter.dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_shrunk_and_low_rank_layers_come_back(path, dtype):
    small, skeleton = holes(pruned()).to(dtype), Net().eval()
    save_model(path, small, {"a": 1}, compact=True)
    assert load_model(path, skeleton) == {"a": 1}
    assert bits(skeleton) == bits(small)
    x = torch.randn(4, 6, dtype=dtype)
    assert torch.equal(skeleton(x), small(x))
    assert path.stat().st_size == file_size(small, {"a": 1}, compact=True)


def test_the_size_is_told_before_writing(path):
    model = holes(Net(100, 80))
    for packed in (False, True):
        save_model(path, model, {"x": [1.5]}, compact=packed)
        assert path.stat().st_size == file_size(model, {"x": [1.5]}, compact=packed)


def test_what_a_compact_file_holds(path):
    model = holes(torch.nn.Linear(300, 200))
    save_model(path, model, {}, compact=True)
    about = read_header(path)["file"]
    weight = about["tensors"]["weight"]
    assert about["format"] == 2
    assert (weight["dtype"], weight["shape"]) == ("float32", [200, 300])
    assert weight["kept"] == int(model.weight.count_nonzero())
    assert 0.95 < 8 * weight["positions"] / positions.bound(200 * 300, weight["kept"]) < 1.05
    assert weight["bytes"] < path.stat().st_size


def test_a_plain_file_is_one_for_older_versions_too(path):
    save_model(path, Net(), {})
    assert read_header(path)["file"]["format"] == 1


def test_another_reader_opens_it(path):
    import safetensors.torch

    model = holes(torch.nn.Linear(300, 200))
    save_model(path, model, {}, compact=True)
    code = safetensors.torch.load_file(path)["weight"]
    assert raw(unpack(code.numpy().data, torch.float32, (200, 300))) == raw(model.weight)


def test_every_damaged_byte_is_found(path):
    model = holes(torch.nn.Linear(40, 30))
    save_model(path, model, {"a": 1}, compact=True)
    whole, skeleton = path.read_bytes(), torch.nn.Linear(40, 30)
    before = bits(skeleton)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with pytest.raises(FileError):
            load_model(path, skeleton)
    assert bits(skeleton) == before


def test_a_sealed_file_with_a_wrong_code_is_refused(path, monkeypatch):
    """Not an accident, which the digest finds: somebody else's seal."""
    wrong = compact.Packed(b"\x01\x00\x00\x00nonsense", 7, 3)
    monkeypatch.setattr(compact, "pack", lambda tensor: wrong)
    save_model(path, torch.nn.Linear(40, 30), {}, compact=True)
    skeleton = torch.nn.Linear(40, 30)
    before = bits(skeleton)
    with pytest.raises(FileError, match=r"a code of '(weight|bias)' that cannot be read"):
        load_model(path, skeleton)
    assert bits(skeleton) == before


def test_a_header_that_claims_what_is_not_so(path, monkeypatch):
    real = storage._packed

    def claimed(tensors):
        packed, told = real(tensors)
        told["weight"][1] = [30, 41]
        return packed, told

    monkeypatch.setattr(storage, "_packed", claimed)
    save_model(path, Bag({"weight": sparse(30, 40, 0.3)}), {}, compact=True)
    with pytest.raises(FileError, match="does not fit the skeleton"):
        load_model(path, Bag({"weight": torch.zeros(30, 40)}))
    with pytest.raises(FileError, match="cannot be read"):
        load_model(path, Bag({"weight": torch.zeros(30, 41)}))


def test_a_newer_compact_file(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(storage, "COMPACT", 3)
        save_model(path, torch.nn.Linear(40, 30), {}, compact=True)
    with pytest.raises(FileError, match=r"has format 3: expected format 2 or older\. Try: a newer version"):
        load_model(path, torch.nn.Linear(40, 30))


def test_another_tools_file(path):
    import safetensors.torch

    safetensors.torch.save_file({"weight": torch.zeros(3)}, path, {"format": "pt"})
    with pytest.raises(FileError, match="a safetensors file that coresieve did not write"):
        load_model(path, torch.nn.Linear(3, 1))


def test_a_full_disk_leaves_the_old_file(path):
    """/dev/full takes nothing; the limit on a file's size stands for a disk that fills up on the way."""
    small, large = torch.nn.Linear(3, 1), torch.nn.Linear(300, 300)
    save_model(path, small, {}, compact=True)
    old, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(FileError, match="small"):
            save_model(path, large, {}, compact=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == old
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_tied_tensors_are_packed_once(path):
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(30, 20), "head": torch.nn.Linear(20, 30)})
    model["head"].weight = model["embed"].weight
    save_model(path, model, {}, compact=True)
    assert read_header(path)["file"]["aliases"] == {"head.weight": "embed.weight"}
    skeleton = torch.nn.ModuleDict({"embed": torch.nn.Embedding(30, 20), "head": torch.nn.Linear(20, 30)})
    load_model(path, skeleton)
    assert skeleton["head"].weight is skeleton["embed"].weight
    assert bits(skeleton) == bits(model)


def test_the_inner_json_is_json(path):
    save_model(path, holes(Net(50, 40)), {}, compact=True)
    text = path.read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    assert set(json.loads(header["__metadata__"]["coresieve"])["packed"]) <= set(header)


# --- Rounding -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ready():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(60, 80), torch.nn.ReLU(), torch.nn.Linear(80, 10))
    return cs.calibrate(model, torch.rand(100, 60), method="corenet", points=40)


def skeleton():
    return torch.nn.Sequential(torch.nn.Linear(60, 80), torch.nn.ReLU(), torch.nn.Linear(80, 10))


@pytest.mark.parametrize("n", [8, 6, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounded_rows_are_few_steps_and_half_a_step_off_at_most(n, dtype):
    w, most = sparse(50, 200, 0.3, dtype=dtype), 2 ** (n - 1) - 1
    r = rounded(w, Rounding(bits=n))
    top = w.abs().amax(1).double() / most
    slack = 1 + 2.0 ** -(min(9, DIGITS[dtype] - n + 1) - 1)  # a step is rounded up
    assert r.dtype == dtype
    assert ((r.double() - w.double()).abs().amax(1) <= 0.5001 * slack * top).all()
    assert all(len(row.abs().unique()) <= most + 1 for row in r)
    assert not (r[r == 0].signbit()).any()
    if dtype in (torch.float64, torch.float32):
        assert torch.equal(rounded(r, Rounding(bits=n)), r)


@pytest.mark.parametrize("n", [8, 6, 4])
@pytest.mark.parametrize("density", [0.02, 0.1, 0.5, 1.0])
def test_rounded_weights_cost_near_their_entropy(n, density):
    w = sparse(400, 500, density)
    scale = w.abs().amax(1, keepdim=True).clamp(min=1e-9) / (2 ** (n - 1) - 1)
    w = rounded(w, Rounding(bits=n))
    k = int(w.count_nonzero())
    ideal = (entropy((w / scale).round()[w != 0]) + positions.bound(w.numel(), k)) / 8
    assert len(pack(w).code) < 1.02 * ideal + 400 * 1.5 + 250  # a step for each row, and a table


def test_saving_with_bits_rounds_a_copy_and_says_so(ready, path):
    small = ready.compress(keep=0.3)
    before = bits(small.model)
    small.save(path, bits=8)
    assert bits(small.model) == before
    again = cs.load(path, into=skeleton())
    assert bits(again.model) == bits(small.rounded(bits=8).model) != before
    assert again.report.rounding == "8 bits"
    assert all(0 < line.rounding < 0.05 for line in again.report.layers)
    assert again.report.parameters_after == sum(int(p.count_nonzero()) for p in again.model.parameters())
    assert again.compact


def test_errors_are_measured_after_rounding(ready):
    exact, coarse = ready.compress(keep=0.999), ready.compress(keep=0.999, bits=4)
    assert coarse.report.error > exact.report.error
    assert "4 bits" in str(coarse.report)


@pytest.mark.parametrize("dtype", ["float16", torch.bfloat16])
def test_a_narrower_type(ready, path, dtype):
    small = ready.compress(keep=0.3)
    small.save(path, dtype=dtype)
    weight = cs.load(path, into=skeleton()).model[0].weight
    narrow = torch.float16 if dtype == "float16" else dtype
    assert weight.dtype == torch.float32
    assert torch.equal(weight, small.model[0].weight.to(narrow).float())


@pytest.mark.parametrize(
    "wrong", [{"bits": 7}, {"bits": True}, {"dtype": "int8"}, {"bits": 8, "dtype": "float16"}]
)
def test_roundings_that_there_are_not(ready, wrong):
    with pytest.raises(DomainError, match="Try: "):
        ready.compress(keep=0.3, **wrong)


def test_numbers_too_large_for_float16():
    w = torch.nn.Linear(3, 2)
    w.weight.data.fill_(1e6)
    small = cs.compress(torch.nn.Sequential(w), torch.rand(20, 3), keep=1, method="magnitude")
    with pytest.raises(NonFiniteError, match="bfloat16"):
        small.rounded(dtype="float16")


def test_a_certificate_is_of_the_rounded_weights(ready, path):
    small = ready.compress(keep=0.5)
    heldout = torch.rand(50, 60, generator=torch.Generator().manual_seed(9))
    cs.certify(ready.model, small, heldout, eps=0.5)
    with pytest.raises(AlteredError, match="once rounded"):
        small.save(path, bits=8)
    small.save(path, compact=True)
    assert cs.load(path, into=skeleton()).certificate is not None
    coarse = small.rounded(bits=8)
    assert coarse.certificate is None
    cs.certify(ready.model, coarse, heldout, eps=0.5)
    coarse.save(path, bits=8)  # rounding once more changes nothing
    assert cs.verify(ready.model, cs.load(path, into=skeleton()), heldout) == []


# --- max_bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("how", [{}, {"bits": 6}])
def test_the_file_is_at_most_as_large_as_was_asked(method, how, path):
    torch.manual_seed(0)
    model = skeleton()
    small = cs.compress(model, torch.rand(100, 60), max_bytes=5_000, method=method, points=30, **how)
    small.save(path)
    assert small.bytes() == path.stat().st_size <= 5_000
    assert path.stat().st_size > (4_600 if method != "svd" else 4_000)
    assert bits(cs.load(path, into=skeleton()).model) == bits(small.model)
    assert "max_bytes=5000" in small.report.budget


def test_room_for_everything_keeps_everything(ready):
    assert ready.compress(max_bytes=10**6).report.kept == 1


def test_a_budget_that_nothing_fits_names_the_least(ready, path):
    with pytest.raises(BudgetError, match=r"expected at least \d+") as caught:
        ready.compress(max_bytes=500)
    least = int(str(caught.value).split("at least ")[1].split(",")[0])
    ready.compress(max_bytes=least).save(path)
    assert path.stat().st_size <= least


@pytest.mark.parametrize(
    "wrong", [{"max_bytes": 0}, {"max_bytes": 1.5}, {"max_bytes": True}, {"max_bytes": 1, "keep": 1}]
)
def test_budgets_that_are_none(ready, wrong):
    with pytest.raises(BudgetError, match="max_bytes"):
        ready.compress(**wrong)


def test_a_file_that_outgrew_its_budget_is_not_written(ready, path):
    small = ready.compress(max_bytes=6_000)
    small.save(path)
    old = path.read_bytes()
    with pytest.raises(FileError, match="at most 6,000"):
        small.save(path, compact=False)
    assert path.read_bytes() == old


def test_few_compressions_suffice():
    tried = []
    fit(tried.append, lambda _: 3_000 + round(10**6 * tried[-1] ** 0.95), 200_000, entries=10**6, bits=26)
    assert len(tried) <= 5


@given(st.floats(0.3, 3), st.integers(0, 5000), st.integers(4_000, 10**6), st.integers(0, 99))
def test_whatever_the_sizes_the_answer_fits(power, fixed, most, luck):
    """Sizes that jump about, and those that hardly grow."""

    def size(keep: float) -> int:
        return fixed // 2 + int(10**6 * keep**power * (1 + luck * ((keep * 7919) % 1) / 1000))

    if size(1e-6) <= most:
        assert size(fit(lambda keep: keep, size, most, entries=10**6, bits=8)) <= most
