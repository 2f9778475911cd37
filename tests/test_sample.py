"""A sample in any shape: its batches, its size, and the choice among its points."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

import coresieve as cs
from coresieve.errors import SampleError
from coresieve.sample import batches, choose, count, private_randomness, size, take

X = torch.arange(600.0).reshape(300, 2)


class Stream(IterableDataset):
    def __init__(self, x: Tensor):
        self.x = x

    def __iter__(self):
        return iter(self.x)


# --- Batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample",
    [
        X,
        X.numpy(),
        X.numpy()[::-1][::-1],
        list(X.split(70)),
        tuple(X.split(70)),
        [(x, "a label") for x in X.split(70)],
        [[x.numpy(), None] for x in X.split(70)],
        DataLoader(TensorDataset(X), batch_size=33),
        DataLoader(TensorDataset(X, X), batch_size=33),
        DataLoader(Stream(X), batch_size=33),
    ],
)
def test_batches_hold_every_point_in_order(sample):
    assert torch.equal(torch.cat(list(batches(sample))), X)
    assert torch.equal(torch.cat(list(batches(sample))), X)  # and again: it can be read twice


def test_a_generator_is_read_lazily():
    read = []

    def stream():
        for i in range(1000):
            read.append(i)
            yield X[:10]

    assert sum(size(batch) for _, batch in choose(stream(), [25], 0)) == 25
    assert len(read) == 3


def test_dict_batches_keep_what_is_not_a_tensor():
    (batch,) = batches([{"x": np.ones((4, 2)), "scale": 0.5, "flag": None}])
    assert isinstance(batch["x"], Tensor)
    assert (batch["scale"], batch["flag"], size(batch)) == (0.5, None, 4)
    some = take(batch, torch.tensor([1, 3]))
    assert (some["x"].shape, some["scale"]) == ((2, 2), 0.5)


@pytest.mark.parametrize("sample", ["path.npy", b"bytes", 3, {"x": X}, None, [["a", "b"]], [3], [None]])
def test_what_is_no_sample_is_refused(sample):
    with pytest.raises(SampleError, match=r"expected .* Try: "):
        list(batches(sample))


@pytest.mark.parametrize("sample", [[{"scale": 1}], [torch.tensor(3.0)]])
def test_a_batch_without_points_is_refused(sample):
    with pytest.raises(SampleError, match="dimension of points"):
        list(choose(sample, [2], 0))


# --- How many -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "points"),
    [
        (X, 300),
        (X.numpy(), 300),
        (torch.tensor(1.0), 0),
        (X[:0], 0),
        ([], 0),
        (list(X.split(70)), 300),
        ([{"x": X[:3]}, {"x": X[:4]}], 7),
        (DataLoader(TensorDataset(X), batch_size=33), 300),
        (DataLoader(TensorDataset(X), batch_size=33, drop_last=True), 297),
        (DataLoader(TensorDataset(X), batch_size=33, sampler=RandomSampler(X, num_samples=40)), 40),
        (DataLoader(TensorDataset(X), batch_size=None), None),
        (DataLoader(Stream(X), batch_size=33), None),
        (DataLoader(TensorDataset(X), batch_sampler=BatchSampler(range(10), 3, False)), 10),
        ((x for x in X.split(7)), None),
    ],
)
def test_count(sample, points):
    assert count(sample) == points


# --- The choice ---------------------------------------------------------------------------------------------


def chosen(sample, wanted, seed=0) -> list[list[tuple]]:
    """The points of each subset."""
    subsets: list[list[tuple]] = [[] for _ in wanted]
    for which, batch in choose(sample, wanted, seed):
        subsets[which] += [tuple(x) for x in batch.tolist()]
    return subsets


@given(
    n=st.integers(0, 60),
    S=st.integers(1, 60),
    T=st.integers(0, 60),
    size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_subsets_are_disjoint_and_of_the_sizes_asked_for(n, S, T, size, seed):
    x = X[:n]
    for sample in (x, list(x.split(size))):
        first, later = chosen(sample, [S, T], seed)
        both = {*first, *later}
        assert len(both) == len(first) + len(later)
        assert both <= {tuple(p) for p in x.tolist()}
        assert len(later) == min(T, n // 3)
        assert len(first) == min(S, n - len(later))


@given(n=st.integers(0, 60), S=st.integers(1, 60), T=st.integers(0, 60), size=st.integers(1, 9))
def test_of_a_stream_the_first_points_are_taken(n, S, T, size):
    """It cannot say its size, so both subsets fill up as it goes; each is as large as if it could."""
    points = [tuple(p) for p in X[:n].tolist()]
    first, later = chosen((part for part in X[:n].split(size)), [S, T])
    assert len(later) == min(T, n // 3)
    assert len(first) == min(S, n - len(later))
    assert first == sorted(first)
    assert later == sorted(later)
    both = sorted(first + later)
    if len(both) == S + T:
        assert set(both) <= set(points[: S + 3 * T])
    else:
        assert both == points or len(first) == S  # nothing is left out that had a place


def test_the_choice_follows_the_seed_and_nothing_else():
    before = torch.random.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    same, again, other = chosen(X, [50], 1), chosen(list(X.split(7)), [50], 1), chosen(X, [50], 2)
    assert same == again != other
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == str(np.random.get_state())  # noqa: NPY002


def test_every_point_is_as_likely_as_any_other():
    """2000 choices of 10 out of 40, chi-square; false alarm 1e-6 with a fresh seed."""
    hits = np.zeros(40)
    for seed in range(2000):
        for which, batch in choose(X[:40], [10, 10], seed):
            hits[(batch[:, 0] / 2).long().numpy()] += which == 1
    # without replacement the counts are less spread: (1 - 10/40) * 40/39 of a multinomial's variance
    statistic = ((hits - 500) ** 2 / 500).sum() / (0.75 * 40 / 39)
    assert 1e-6 < stats.chi2.sf(statistic, 39) < 1 - 1e-6


def test_points_beyond_those_that_were_counted_are_not_chosen():
    """A collate function may make three points of one."""
    loader = DataLoader(
        TensorDataset(X), batch_size=7, collate_fn=lambda b: torch.stack([x for (x,) in b]).repeat(3, 1)
    )
    seen = []
    subsets = list(
        choose(loader, [1000], 0, lambda batch, used: seen.append((len(batch), len(used), used.sum())))
    )
    assert sum(len(batch) for _, batch in subsets) == len(X)
    assert sum(n for n, _, _ in seen) == 3 * len(X)
    assert all(n == m for n, m, _ in seen)


# --- Randomness is lent, not taken --------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_reading_a_shuffled_loader_leaves_its_randomness_as_it_was(own):
    generator = torch.Generator().manual_seed(3) if own else None
    loader = DataLoader(TensorDataset(X), batch_size=50, shuffle=True, generator=generator)
    before = (loader.generator or torch.default_generator).get_state(), torch.random.get_rng_state()
    with private_randomness(loader, 1):
        one = torch.cat(list(batches(loader)))
    with private_randomness(loader, 1):
        two = torch.cat(list(batches(loader)))
    assert torch.equal(one, two)
    assert not torch.equal(one, X)
    assert torch.equal((loader.generator or torch.default_generator).get_state(), before[0])
    assert torch.equal(torch.random.get_rng_state(), before[1])


def test_the_generators_of_numpy_and_python_are_lent_too():
    before = str(np.random.get_state()), random.getstate()  # noqa: NPY002
    drawn = []
    for seed in (1, 1, 2**70):
        with private_randomness(X, seed):
            drawn.append((np.random.rand(), random.random()))  # noqa: NPY002
    assert drawn[0] == drawn[1] != drawn[2]
    assert before == (str(np.random.get_state()), random.getstate())  # noqa: NPY002


def test_compressing_from_a_shuffled_loader_repeats_itself():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
    loader = DataLoader(TensorDataset(X / 600), batch_size=50, shuffle=True)
    state = torch.random.get_rng_state()
    one, two = (cs.compress(model, loader, keep=0.5, method="corenet++", seed=4).model for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    assert torch.equal(state, torch.random.get_rng_state())
