"""finetune(): zeros stay zero, the rest learns, nothing else moves."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import coresieve as cs
from coresieve.errors import DomainError, ForwardError, NonFiniteError, SampleError


@pytest.fixture
def task():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 12, generator=generator)
    y = (x[:, :4].sum(1) > 0).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 2))
    small = cs.compress(model, x, keep=0.3, method="magnitude")
    return small, x, y


def accuracy(model, x, y):
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).double().mean())


def test_zeros_stay_zero_and_the_rest_learns(task):
    small, x, y = task
    before = {name: p.detach().clone() for name, p in small.model.named_parameters()}
    tuned = cs.finetune(
        small, DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True), epochs=20, learning_rate=1e-2
    )
    for name, p in tuned.model.named_parameters():
        assert torch.equal(p == 0, before[name] == 0)
        assert p.grad is None
    for name, p in small.model.named_parameters():
        assert torch.equal(p, before[name])  # the given network is as it was
    assert accuracy(tuned.model, x, y) > max(0.9, accuracy(small.model, x, y))
    assert "zeros kept zero" in str(tuned.report)


def test_layers_that_were_left_out_train_whole():
    x, y = torch.randn(60, 6), torch.randint(3, (60,))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.zeros_(model[2].bias)
    small = cs.compress(model, x, keep=0.3, method="magnitude", exclude=["2"])
    tuned = cs.finetune(small, [(x, y)], epochs=3)
    assert torch.equal(tuned.model[0].weight == 0, small.model[0].weight == 0)
    assert not bool((tuned.model[2].bias == 0).any())


def test_the_same_seed_gives_the_same_bits_and_global_randomness_is_left_alone(task):
    small, x, y = task
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    before = torch.random.get_rng_state()
    one, two = (cs.finetune(small, loader, epochs=2, seed=3) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    other = cs.finetune(small, loader, epochs=2, seed=4)
    assert not all(
        torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )


def test_inputs_that_trained_cannot_certify(task):
    small, x, _ = task
    fresh = torch.randn(300, 12, generator=torch.Generator().manual_seed(9))
    tuned = cs.finetune(small, [(fresh, torch.zeros(300, dtype=torch.long))])
    with pytest.raises(SampleError, match="300 of 300"):
        cs.certify(small.model, tuned, fresh)
    with pytest.raises(SampleError, match="which the calibration also holds"):
        cs.certify(small.model, tuned, x)  # those that calibrated still cannot, either


def test_it_saves_and_loads(task, tmp_path):
    small, x, y = task
    tuned = cs.finetune(small, [(x, y)], epochs=3)
    tuned.save(tmp_path / "t.safetensors")
    with torch.random.fork_rng(devices=[]):
        skeleton = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 2))
    back = cs.load(tmp_path / "t.safetensors", into=skeleton)
    assert all(
        torch.equal(a, b) for a, b in zip(tuned.model.parameters(), back.model.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"epochs": -1}, DomainError), ({"epochs": True}, DomainError), ({"learning_rate": 0.0}, DomainError),
        ({"learning_rate": float("nan")}, DomainError), ({"seed": -1}, DomainError), ({"loader": []}, SampleError),
        ({"loader": [torch.zeros(3, 12)]}, SampleError),
        ({"loader": [(torch.zeros(3, 9), torch.zeros(3).long())]}, ForwardError),
        ({"loader": [(torch.zeros(3, 12), torch.full((3,), 7))]}, ForwardError),
        ({"loader": [(torch.full((3, 12), torch.nan), torch.zeros(3).long())]}, NonFiniteError),
        ({"small": nn.Linear(12, 2)}, SampleError),
    ],
)  # fmt: skip
def test_bad_input(task, change, error):
    small, x, y = task
    given = {"small": small, "loader": [(x, y)], "epochs": 1} | change
    with pytest.raises(error):
        cs.finetune(given.pop("small"), given.pop("loader"), **given)
    assert not any(p.grad is not None for p in small.model.parameters())
