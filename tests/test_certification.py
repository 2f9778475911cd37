"""certify() and verify(): the numbers, what is refused, and that a certificate travels and cannot be forged."""

import copy
import json
import math
import re
import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import coresieve as cs
from coresieve import digests
from coresieve.bounds import lower, rank, upper
from coresieve.errors import (
    AlteredError,
    ClaimError,
    CoresieveWarning,
    FileError,
    ForwardError,
    LayerError,
    SampleError,
)
from coresieve.judge import compare
from coresieve.storage import save_model
from networks import relu_net

ALL = ["flips", "coreset", "coreset_eps", "output_error", "accuracy_drop"]


@pytest.fixture(scope="module")
def case():
    """(original, small, calibration inputs, held-out inputs)"""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = relu_net(12, 40, 30, 4)
        x = torch.randn(1400, 12)
    small = cs.compress(model, x[:400], keep=0.5, seed=1)
    return model, small, x[:400], x[400:]


class Fixed(nn.Module):
    """Answers what it was told to, in order; the input only tells how many rows are wanted."""

    def __init__(self, answers: Tensor):
        super().__init__()
        self.register_buffer("answers", answers)

    def forward(self, x: Tensor) -> Tensor:
        return self.answers[x[:, 0].long()]


def fixed(before: Tensor, after: Tensor, **question) -> cs.Certificate:
    x = torch.arange(len(before), dtype=torch.float32)[:, None]
    return cs.certify(Fixed(before), Fixed(after), x, **question)


# --- The numbers --------------------------------------------------------------------------------------------


def test_every_claim_by_hand(case):
    model, small, _, x = case
    with torch.no_grad():
        f, g = model(x).double(), small.model(x).double()
    y = f.argmax(1)
    y[::3] = (y[::3] + 1) % 4
    n, alpha = len(x), 0.05 / 5
    cert = cs.certify(model, small, x, eps=0.2, delta=0.1, labels=y)
    assert [claim.name for claim in cert] == ALL

    flips = int((f.argmax(1) != g.argmax(1)).sum())
    assert (cert["flips"].counts, cert["flips"].observed) == ({"changed": flips}, flips / n)
    assert cert["flips"].bound == upper(flips, n, alpha)

    deviation = ((g - f).abs() / f.abs()).amax(1)
    outside = int((deviation > 0.2).sum())
    assert cert["coreset"].bound == upper(outside, n, alpha)
    k = rank(n, 0.1, alpha)
    assert cert["coreset_eps"].bound == pytest.approx(float(deviation.sort().values[k - 1]))
    error = (g - f).abs().sum(1) / f.abs().sum(1)
    assert cert["output_error"].bound == pytest.approx(float(error.sort().values[k - 1]))

    b = int(((f.argmax(1) == y) & (g.argmax(1) != y)).sum())
    c = int(((f.argmax(1) != y) & (g.argmax(1) == y)).sum())
    drop = cert["accuracy_drop"]
    assert (drop.observed, drop.counts) == ((b - c) / n, {"became wrong": b, "became right": c})
    assert drop.bound == upper(b, n, alpha / 2) - lower(c, n, alpha / 2)
    assert 0 < flips < n
    assert b > 0
    assert c > 0


def test_each_claim_tells_what_it_rests_on(case):
    model, small, _, x = case
    cert = cs.certify(model, small, x, labels=torch.zeros(len(x), dtype=torch.long))
    labelled, plain = cert["accuracy_drop"].assumptions, cert["flips"].assumptions
    assert labelled == (*plain, "their labels are right")
    told = cert.to_dict()
    assert [tuple(claim["assumptions"]) for claim in told["claims"]] == [claim.assumptions for claim in cert]
    assert told["assumptions"] == list(labelled)
    assert all(what in " ".join(str(cert).split()) for what in labelled)
    assert "labels" not in str(cs.certify(model, small, x))


def test_confidence_is_joint(case):
    model, small, _, x = case
    all_of_them = cs.certify(model, small, x, eps=0.2)
    assert sum(claim.alpha for claim in all_of_them) == pytest.approx(0.05)
    alone = cs.certify(model, small, x, claims=["flips"])
    assert alone["flips"].alpha == pytest.approx(0.05)
    assert alone["flips"].bound < all_of_them["flips"].bound
    assert "split equally, 1.25 % for each" in all_of_them.procedure
    assert "split" not in alone.procedure
    assert (
        cs.certify(model, small, x, claims=["flips"], confidence=0.99)["flips"].bound > alone["flips"].bound
    )


def test_a_goal_alone_makes_one_claim(case):
    model, small, _, x = case
    cert = cs.certify(model, small, x, max_flips=0.9)
    assert [claim.name for claim in cert] == ["flips"]
    assert cert.met is cert["flips"].met is True
    assert "Goal 90 %: met." in str(cert)
    both = cs.certify(model, small, x, max_flips=0.9, max_output_error=1e-6)
    assert (both["flips"].met, both["output_error"].met, both.met) == (True, False, False)
    assert cs.certify(model, small, x).met is None


def test_too_few_points_are_said_in_words():
    f = torch.eye(4)[torch.arange(120) % 4]
    cert = fixed(f, f, max_flips=0.01)
    assert cert.met is False
    assert "299 inputs with none changed would be needed for 1 % at 95 %; you gave 120." in str(cert).replace(
        "\n  ", " "
    )
    cert = fixed(f[:20], f[:20], claims=["output_error", "coreset_eps"])
    assert cert["output_error"].bound is None
    assert cert["output_error"].says_nothing
    assert "72 inputs would be needed at 97.5 %; you gave 20" in str(cert).replace("\n  ", " ")


def test_an_equal_network_is_certified_as_such(case):
    model, _, _, x = case
    cert = cs.certify(model, copy.deepcopy(model), x, eps=0.0, labels=torch.zeros(len(x)))
    assert [claim.observed for claim in cert] == [0, 0, 0, 0, 0]
    assert cert["coreset_eps"].bound == cert["output_error"].bound == 0


def test_nan_and_infinity_are_violations():
    f = torch.tensor(
        [[1.0, 2.0], [1.0, 2.0], [1.0, math.inf], [0.0, 1.0], [0.0, 1.0], [math.nan, 1.0], [0.0, 0.0]]
    )
    g = torch.tensor(
        [[math.nan, 2.0], [1.0, math.inf], [1.0, math.inf], [0.0, 1.5], [0.1, 1.0], [1.0, 1.0], [0.0, 0.0]]
    )
    seen = compare(f, g, torch.tensor([1, 1, 1, 1, 1, 1, 0]))
    assert seen.deviation.tolist() == [math.inf, math.inf, 0, 0.5, math.inf, math.inf, 0]
    assert seen.error.tolist() == pytest.approx([math.inf, math.inf, 0, 0.5, 0.1, math.inf, 0])
    assert seen.flipped.tolist() == [True, False, False, False, False, True, False]
    assert seen.lost.tolist() == [True, False, False, False, False, True, False]
    assert not seen.gained.any()


def test_a_network_that_answers_nan_now_and_then():
    f = torch.rand(400, 3, generator=torch.Generator().manual_seed(0)) + 1
    g = f.clone()
    g[:50] = torch.nan
    cert = fixed(f, g, eps=0.1, labels=f.argmax(1))
    assert cert["flips"].counts == {"changed": 50}
    assert cert["coreset"].counts == {"outside": 50}
    assert cert["accuracy_drop"].counts == {"became wrong": 50, "became right": 0}
    assert cert["output_error"].bound is None
    assert "50 of 400 here are off without bound" in str(cert).replace("\n  ", " ")


def test_an_input_of_many_positions_is_one_draw():
    f = torch.zeros(100, 7, 3)
    f[..., 0] = 1
    g = f.clone()
    g[:10, 3, 1] = 2
    assert fixed(f, g)["flips"].counts == {"changed": 10}


def test_collapse_is_called_vacuous(case):
    model, small, _, x = case
    zero = copy.deepcopy(model)
    for p in zero.parameters():
        p.data.zero_()
    cert = cs.certify(model, zero, x, eps=0.5)
    assert cert["coreset_eps"].bound == cert["output_error"].bound == 1
    assert cert["output_error"].says_nothing
    assert "do as well" in str(cert)
    cert = cs.certify(model, small, x)
    assert "Side by side. A priori: none (" in str(cert).replace("\n", " ")
    assert "Certified, coreset_eps" in cert.a_priori


def test_a_band_that_lets_everything_be_0_is_called_vacuous(case):
    model, _, _, x = case
    zero = copy.deepcopy(model)
    for p in zero.parameters():
        p.data.zero_()
    wide, narrow = (cs.certify(model, zero, x, eps=eps, claims=["coreset"])["coreset"] for eps in (1.0, 0.99))
    assert wide.bound < 0.01
    assert wide.says_nothing
    assert "do as well" in wide.sentence
    assert "do as well" not in narrow.sentence


# --- The words say no more than the numbers ------------------------------------------------------------------


def said(pattern: str, text: str) -> float:
    match = re.search(pattern, " ".join(text.split()))
    assert match is not None
    return float(match[1])


def test_every_printed_bound_is_at_least_the_bound():
    f = torch.eye(4)[torch.arange(1000) % 4]
    for changed in range(0, 400, 29):
        g = f.clone()
        g[:changed] = 1.001 * f[:changed].roll(1, 1) + 1e-3
        cert = fixed(f, g, labels=f.argmax(1), eps=0.2, claims=["flips", "coreset", "accuracy_drop"])
        for name, pattern in (("flips", r"at most (\S+) %"), ("coreset", r"at most (\S+) %"),
                              ("accuracy_drop", r"at most (\S+) points")):  # fmt: skip
            bound = 100 * cert[name].bound
            assert bound * (1 - 1e-9) <= said(pattern, cert[name].sentence) <= 1.01 * bound


def test_an_accuracy_that_rises_is_not_told_too_high():
    f = torch.eye(2)[torch.zeros(1000, dtype=torch.long)]
    for gained in range(100, 900, 61):
        g = f.clone()
        g[:gained] = f[:gained].flip(1)
        claim = fixed(f, g, labels=torch.ones(1000), claims=["accuracy_drop"])["accuracy_drop"]
        assert claim.bound < 0
        assert 100 * claim.bound - 1e-9 <= said(r"at most (\S+) points", claim.sentence) < 0


@pytest.mark.parametrize("missing", [0.5, 0.05, 0.0123456, 1e-5, 1e-9])
def test_a_confidence_is_never_rounded_up(missing):
    f = torch.eye(4)[torch.arange(100) % 4]
    cert = fixed(f, f, confidence=1 - missing, delta=missing, claims=["coreset_eps"])
    assert (
        1 - 1.01 * missing <= said(r"Certificate, (\S+) % confidence", str(cert)) / 100 <= 1 - missing + 1e-15
    )
    assert said(r"for (?:at least )?(\S+) % of fresh", str(cert)) / 100 <= 1 - missing + 1e-15
    assert missing * (1 - 1e-6) <= said(r"with probability (\S+) %", str(cert)) / 100 <= 1.01 * missing


def test_a_goal_is_told_as_it_was_given(case):
    model, _, _, x = case
    cert = cs.certify(model, copy.deepcopy(model), x, max_flips=0.0123456)
    assert "Goal 1.23456 %: met." in str(cert)


# --- What it can be given -----------------------------------------------------------------------------------


def test_every_kind_of_sample_gives_the_same(case):
    model, small, _, x = case

    def told(heldout):
        cert = cs.certify(model, small, heldout, eps=0.2)
        return [(claim.name, claim.counts, round(claim.bound, 12)) for claim in cert], cert.digests

    loader = DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=32)
    kinds = [
        x.numpy(),
        x.double(),
        loader,
        list(x.split(100)),
        iter(x.split(100)),
        [{"input": b} for b in x.split(64)],
    ]
    for kind in kinds:
        assert told(kind) == told(x)


def test_nothing_is_changed(case):
    model, small, _, x = case
    before, state = (digests.weights(model), digests.weights(small.model)), torch.get_rng_state()
    model.train()
    cs.certify(model, small, x)
    assert model.training
    model.eval()
    assert (digests.weights(model), digests.weights(small.model)) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_regression_network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = relu_net(6, 20, 1), torch.rand(900, 6)
    small = cs.compress(model, x[:300], keep=0.8)
    cert = cs.certify(model, small, x[300:], eps=0.3)
    assert [claim.name for claim in cert] == ["coreset", "coreset_eps", "output_error"]
    with pytest.raises(ClaimError, match="several classes"):
        cs.certify(model, small, x[300:], max_flips=0.1)


def test_overlap_is_refused_and_counted(case):
    model, small, calibration, x = case
    for mixed in (
        torch.cat([x[:50], calibration[:7]]),
        torch.cat([calibration[:7], x[:50]]).double().numpy(),
    ):
        with pytest.raises(SampleError, match=r"^7 of 57 held-out inputs"):
            cs.certify(model, small, mixed)
    assert len(cs.certify(model, small.model, calibration)) == 3  # a bare module cannot know


def test_inputs_that_chose_the_network_may_not_certify_it_again(case):
    """smallest() tested sizes on them: a sharper limit for the size it picked would be picked on the same inputs."""
    model, _, calibration, x = case
    best = cs.smallest(model, calibration, x[:600], max_flips=0.2, method="magnitude")
    with pytest.raises(SampleError, match="chose this network"):
        cs.certify(model, best, x[:600])
    assert cs.verify(model, best, x[:600]) == []
    assert cs.certify(model, best, x[600:])["flips"].points == 400


def test_nor_may_some_of_them_in_any_order(case, tmp_path):
    """Turned round, a part, beside others, after another certificate, from the file, after more training."""
    model, _, calibration, x = case
    best = cs.smallest(model, calibration, x[:600], max_flips=0.2, method="magnitude")
    best.save(tmp_path / "best.safetensors")
    loaded = cs.load(tmp_path / "best.safetensors", into=copy.deepcopy(model))
    tuned = cs.finetune(best, [(x[900:], model(x[900:]).argmax(1))])
    assert cs.certify(model, best, x[600:900])["flips"].points == 300
    for small in (best, loaded, tuned):
        for n, some in ((600, x[:600].flip(0)), (50, x[550:600]), (10, x[590:700])):
            with pytest.raises(SampleError, match=f"^{n} of {len(some)} held-out inputs, on which smallest"):
                cs.certify(model, small, some)


def test_labels_beside_a_shuffling_loader_are_refused(case):
    model, small, _, x = case
    y, data = model(x).argmax(1), TensorDataset(x)
    in_order = cs.certify(model, small, DataLoader(data, batch_size=64), labels=y)
    assert in_order["accuracy_drop"].counts == cs.certify(model, small, x, labels=y)["accuracy_drop"].counts
    batches = BatchSampler(RandomSampler(data), 64, drop_last=False)
    for loader in (DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, batch_sampler=batches)):
        with pytest.raises(ClaimError, match="in the order of their labels"):
            cs.certify(model, small, loader, labels=y)
        assert cs.certify(model, small, loader)["flips"].points == len(x)  # without labels any order will do


def test_overlap_with_a_sample_larger_than_what_is_used(case):
    model, _, _, _ = case
    x = torch.rand(5000, 12, generator=torch.Generator().manual_seed(1))
    small = cs.compress(model, x[:4000], keep=0.5, method="corenet")
    assert small.report.points < 2000
    with pytest.raises(SampleError, match=r"^10 of 1,010 held-out inputs"):
        cs.certify(model, small, x[3990:])


def test_what_is_remembered_of_the_rows_is_bounded(monkeypatch):
    monkeypatch.setattr(digests, "ROWS_REMEMBERED", 100)
    witness, x = digests.Witness(), torch.rand(1000, 3)
    for batch in x.split(64):
        witness.see(batch, np.arange(len(batch)) % 2 == 0)
    known = witness.known()
    assert (len(known.used), len(known.others)) == (100, 100)


def test_whole_numbers_beyond_float32_are_told_apart():
    x = torch.tensor([[2**24], [2**24 + 1], [2**24]])
    rows = digests.rows(x)
    assert (rows[0] == rows[2], rows[0] == rows[1]) == (True, False)
    assert digests.rows(torch.tensor([[0.0, -0.0]])) == digests.rows(torch.tensor([[0, 0]]))
    many = torch.cat([torch.arange(300), 2**24 + torch.arange(300)])[:, None]  # in blocks as one by one
    assert digests.rows(many).tolist() == [int(digests.rows(row[None])[0]) for row in many]


def test_repeated_rows_draw_a_warning(case):
    model, small, _, x = case
    with pytest.warns(CoresieveWarning, match="3 of 103 held-out inputs repeat others"):
        cert = cs.certify(model, small, torch.cat([x[:100], x[:3]]))
    assert "unless the inputs to come repeat as often" in str(cert).replace("\n", " ")


LINEAR = nn.Linear(2, 3)
X = torch.rand(40, 2)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: cs.certify(LINEAR, LINEAR, torch.zeros(0, 2)), SampleError, "no held-out inputs"),
        (lambda: cs.certify(LINEAR, LINEAR, []), SampleError, "no held-out inputs"),
        (lambda: cs.certify(LINEAR, nn.Linear(2, 4), X), ForwardError, r"\(40, 4\) where .* \(40, 3\)"),
        (lambda: cs.certify(LINEAR, nn.Linear(5, 3), X), ForwardError, "compressed network"),
        (lambda: cs.certify(LINEAR, nn.Flatten(0), X), ForwardError, "an answer for each input"),
        (lambda: cs.certify("x", LINEAR, X), ClaimError, "torch.nn.Module"),
        (lambda: cs.certify(LINEAR, "x", X), ClaimError, "what compress"),
        (lambda: cs.certify(LINEAR, LINEAR, X, labels=[0] * 39), ClaimError, "39.* for 40 held-out"),
        (lambda: cs.certify(LINEAR, LINEAR, X, labels=[3] * 40), ClaimError, "classes from 0 to 2"),
        (lambda: cs.certify(LINEAR, LINEAR, X, labels=[-1] * 40), ClaimError, "classes from 0 to 2"),
        (lambda: cs.certify(LINEAR, LINEAR, X, labels=[0.5] * 40), ClaimError, "classes from 0 to 2"),
        (lambda: cs.certify(LINEAR, LINEAR, X, labels=["a"] * 40), ClaimError, "whole numbers"),
        (lambda: cs.certify(LINEAR, LINEAR, X, labels=[math.nan] * 40), ClaimError, "labels with nan"),
        (lambda: cs.certify(LINEAR, LINEAR, X, labels=torch.full((40,), 1j)), ClaimError, "labels with 1j"),
        (lambda: cs.certify(LINEAR, LINEAR, X, labels=torch.zeros(40).to_sparse()), ClaimError, "sparse"),
        (lambda: cs.certify(LINEAR, LINEAR, X, labels=np.zeros(40, object)), ClaimError, "object"),
        (lambda: cs.certify(LINEAR, LINEAR, X, claims=["flip"]), ClaimError, "one of flips"),
        (lambda: cs.certify(LINEAR, LINEAR, X, claims=[["flips"]]), ClaimError, "one of flips"),
        (lambda: cs.certify(LINEAR, LINEAR, X, claims=[]), ClaimError, r"claims=\[\]: expected some of flips"),
        (lambda: cs.certify(LINEAR, LINEAR, X, claims=5), ClaimError, "claims=5"),
        (lambda: cs.certify(LINEAR, LINEAR, X, claims=["flips", "flips"]), ClaimError, "each claim once"),
        (lambda: cs.certify(LINEAR, LINEAR, X, claims=["coreset"]), ClaimError, "without eps"),
        (lambda: cs.certify(LINEAR, LINEAR, X, claims=["accuracy_drop"]), ClaimError, "labels=y"),
        (lambda: cs.certify(LINEAR, LINEAR, X, max_accuracy_drop=0.1), ClaimError, "labels=y"),
        (lambda: cs.certify(LINEAR, LINEAR, X, max_flips=0.1, claims=["output_error"]), ClaimError, "a goal for flips"),
        (lambda: cs.certify(LINEAR, LINEAR, X, max_flips=1.5), ClaimError, "a goal of 1.5"),
        (lambda: cs.certify(LINEAR, LINEAR, X, max_flips=-0.1), ClaimError, "a goal of -0.1"),
        (lambda: cs.certify(LINEAR, LINEAR, X, confidence=95), ClaimError, "confidence=95"),
        (lambda: cs.certify(LINEAR, LINEAR, X, confidence=None), ClaimError, "confidence=None"),
        (lambda: cs.certify(LINEAR, LINEAR, X, confidence=1e-300), ClaimError, "confidence=1e-300"),
        (lambda: cs.certify(LINEAR, LINEAR, X, confidence=np.complex64(0.9)), ClaimError, "confidence=np.complex64"),
        (lambda: cs.certify(LINEAR, LINEAR, X, eps=10**400), ClaimError, "eps=1000"),
        (lambda: cs.certify(LINEAR, LINEAR, X, delta=1e-300), ClaimError, "delta=1e-300"),
        (lambda: cs.certify(nn.Linear(2, 3, device="meta"), LINEAR, X), LayerError, "meta"),
        (lambda: cs.certify(LINEAR, nn.LazyLinear(3), X), LayerError, "not initialised"),
        (lambda: cs.verify(LINEAR, LINEAR, X), ClaimError, "Linear, a network without a certificate"),
        (lambda: cs.verify(LINEAR, "small.safetensors", X), ClaimError, "str, a network without"),
        (lambda: cs.certify(LINEAR, LINEAR, X, eps=-1), ClaimError, "eps=-1"),
        (lambda: cs.certify(LINEAR, LINEAR, X, eps=math.nan), ClaimError, "eps=nan"),
        (lambda: cs.certify(LINEAR, LINEAR, X, delta=0), ClaimError, "delta=0"),
        (lambda: cs.certify(LINEAR, LINEAR, X)["coreset"], cs.errors.MethodError, "one that was made"),
        (lambda: cs.certify(nn.Linear(2, 1), nn.Linear(2, 1), X, labels=[0] * 40), ClaimError, "several classes"),
    ],
)  # fmt: skip
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


LABELS = {
    "big-endian": lambda y: y.astype(">i8"),
    "backwards": lambda y: y[::-1].copy()[::-1],
    "read-only": lambda y: np.broadcast_to(y, y.shape),
    "uint8": lambda y: y.astype(np.uint8),
    "uint16": lambda y: y.astype(np.uint16),
    "uint64": lambda y: y.astype(np.uint64),
    "float16": lambda y: y.astype(np.float16),
    "a column": lambda y: y[:, None],
    "a list": lambda y: y.tolist(),
}


@pytest.mark.parametrize("dress", LABELS.values(), ids=LABELS)
@pytest.mark.filterwarnings("error::UserWarning")
def test_labels_in_any_clothes(case, dress):
    model, small, _, x = case
    y = np.arange(len(x)) % 4
    plain, dressed = (cs.certify(model, small, x, labels=labels) for labels in (torch.tensor(y), dress(y)))
    assert dressed.digests == plain.digests
    assert dressed["accuracy_drop"] == plain["accuracy_drop"]


@pytest.mark.parametrize(
    "number", [Fraction(1, 2), Decimal("0.5"), torch.tensor(0.5), np.float32(0.5)], ids=repr
)
def test_numbers_of_any_kind(case, tmp_path, number):
    model, small, _, x = case
    small = copy.deepcopy(small)
    question = {"confidence": number, "delta": number, "eps": number, "max_flips": number, "claims": ALL[:3]}
    cert = cs.certify(model, small, x, **question)
    assert cert == cs.certify(model, small, x, **dict.fromkeys(question, 0.5) | {"claims": ALL[:3]})
    small.save(tmp_path / "small.safetensors")


@pytest.mark.parametrize("goal", [1e-9, 1e-12, 1e-18, 1e-300, 5e-324])
def test_a_goal_that_nobody_can_count_to_is_told_at_once(goal):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cert = cs.certify(
            nn.Linear(2, 3), nn.Linear(2, 3), X, max_flips=goal, delta=1e-15, max_output_error=goal
        )
    assert cert.met is False
    assert "would be needed" in str(cert)


def test_a_compiled_model_has_the_digest_of_the_model():
    compiled, plain = torch.compile(LINEAR), cs.certify(LINEAR, LINEAR, X).digests
    assert cs.certify(compiled, compiled, X).digests == plain


# --- It travels ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(case, tmp_path):
    model, small, _, x = case
    small = copy.deepcopy(small)
    y = model(x).argmax(1)
    cert = cs.certify(model, small, x, eps=0.2, labels=y, max_flips=0.5, claims=ALL)
    path = tmp_path / "small.safetensors"
    small.save(path)
    return path, cert, y


def test_it_is_saved_with_the_network_and_confirmed_by_another(case, saved):
    model, _, calibration, x = case
    path, cert, y = saved
    back = cs.load(path, into=copy.deepcopy(model))
    assert back.certificate == cert
    assert str(back.certificate) == str(cert)
    assert str(cert) in str(back)
    assert json.loads(json.dumps(cert.to_dict()))["claims"][0]["name"] == "flips"
    assert cs.verify(model, back, x, labels=y) == []
    with pytest.raises(SampleError, match="calibration"):  # the file remembers which rows calibrated it
        cs.certify(model, back, calibration)


def test_infinities_survive_json():
    f = torch.tensor([[1.0, 2.0]] * 100)
    g = f.clone()
    g[:20] = torch.nan
    cert = fixed(f, g)
    assert cert["output_error"].observed == math.inf
    assert cs.Certificate.from_dict(json.loads(json.dumps(cert.to_dict(), allow_nan=False))) == cert


def test_altered_weights_are_refused(case, saved, tmp_path):
    model, small, _, _ = case
    path, cert, _ = saved
    other = copy.deepcopy(small)
    other.certificate = cert
    other.model[0].weight.data[0, 0] += 1e-3
    with pytest.raises(AlteredError, match="other weights"):
        other.save(tmp_path / "other.safetensors")
    forged = tmp_path / "forged.safetensors"  # sealed anew, by somebody who knows how
    save_model(forged, other.model, {"report": small.report.to_dict(), "certificate": cert.to_dict()})
    skeleton = copy.deepcopy(model)
    with pytest.raises(AlteredError, match="other weights"):
        cs.load(forged, into=skeleton)
    assert digests.weights(skeleton) == digests.weights(model)  # as it was
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 1
    forged.write_bytes(damaged)
    with pytest.raises(FileError):
        cs.load(forged, into=copy.deepcopy(model))


ODD = {
    "no report": {"report": {}},
    "a report that is a list": {"report": [1]},
    "no report at all": {"report": None},
    "layers of another kind": {"report": {"layers": [{"x": 1}]}},
    "rows that are no base64": {"calibration_rows": "@@"},
    "half a row": {"calibration_rows": "AAAA"},
    "half a row that chose": {"calibration_rows": "", "choosing_rows": "AAAA"},
    "rows that are a number": {"calibration_rows": 5},
    "no claims": {"certificate": {}},
    "a certificate that is a list": {"certificate": [1]},
    "claims that are none": {"certificate": {"claims": None, "digests": {}}},
    "claims without bounds": {"certificate": {"claims": [{"name": "flips"}], "digests": {}}},
    "digests that are none": {"certificate": {"claims": [], "digests": None}},
}


@pytest.mark.parametrize("header", ODD.values(), ids=ODD)
def test_a_header_of_another_making_is_refused_and_changes_nothing(case, tmp_path, header):
    model, small, _, _ = case
    path, skeleton = tmp_path / "small.safetensors", copy.deepcopy(model)
    save_model(path, small.model, {"report": small.report.to_dict(), **header})
    with pytest.raises(FileError, match=r"a stored .* that is malformed .*expected .*Try: "):
        cs.load(path, into=skeleton)
    assert digests.weights(skeleton) == digests.weights(model)


@pytest.mark.parametrize(
    "into", [None, nn.Linear, {}, "small"], ids=["None", "a class", "a dict", "a string"]
)
def test_what_is_no_module_is_not_filled(saved, into):
    with pytest.raises(LayerError, match=r"into=.*torch\.nn\.Module"):
        cs.load(saved[0], into=into)


def test_a_compiled_skeleton_is_filled(case, saved):
    model, *_ = case
    back = cs.load(saved[0], into=torch.compile(copy.deepcopy(model)))
    assert type(back.model) is type(model)


def changed(cert: cs.Certificate, which: int = 0, **claim) -> cs.Certificate:
    data = cert.to_dict()
    data["claims"][which] |= claim
    return cs.Certificate.from_dict(data)


def test_verify_finds_what_is_not_true(case, saved):
    model, _, _, x = case
    path, cert, y = saved
    small = cs.load(path, into=copy.deepcopy(model))

    def wrong(certificate=cert, original=model, heldout=x, labels=y):
        small.certificate = certificate
        return " ".join(cs.verify(original, small, heldout, labels=labels))

    assert wrong() == ""
    assert "held-out inputs are not those" in wrong(heldout=x[:-1], labels=y[:-1])
    assert "labels are not those" in wrong(labels=(y + 1) % 4)
    assert "labels are not those" in wrong(labels=None)
    assert "original's weights are not" in wrong(original=relu_net(12, 40, 30, 4))
    assert "a bound of" in wrong(changed(cert, bound=cert["flips"].bound / 2))
    assert "not {'changed': 0}" in wrong(changed(cert, counts={"changed": 0}))
    assert "it says 'at most 0 %" in wrong(changed(cert, sentence="at most 0 % of fresh inputs change"))
    nearly = {"bound": cert["flips"].bound * (1 + 1e-7)}  # as close as another processor may come
    assert wrong(changed(cert, **nearly)) == ""
    assert "it says 'at most 0 %" in wrong(
        changed(cert, sentence="at most 0 % of fresh inputs change", **nearly)
    )
    assert "an observed value of" in wrong(changed(cert, observed=0.0))
    assert "a goal of 0.5, not 0.9" in wrong(changed(cert, goal=0.9))
    level = ALL.index("output_error")
    bound = cert["output_error"].bound
    told = {"bound": bound * (1 + 1e-7), "sentence": "||f_hat - f||_1 / ||f||_1 is at most 0.001"}
    assert "it says '||f_hat - f||_1 / ||f||_1 is at most 0.001" in wrong(changed(cert, level, **told))
    assert wrong(changed(cert, level, bound=told["bound"])) == ""
    for key, value in (
        ("procedure", "Ten million inputs."),
        ("notes", ["all is well"]),
        ("a_priori", "eps = 0"),
    ):
        assert f"it says {value!r}" in wrong(cs.Certificate.from_dict(cert.to_dict() | {key: value}))
    small.certificate = None
    with pytest.raises(ClaimError, match="without a certificate"):
        cs.verify(model, small, x)
