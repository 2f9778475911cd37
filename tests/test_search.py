"""smallest(): what it returns, what it refuses, and that the order of sizes never sees the held-out inputs.

That its answer holds although many sizes are tried is shown by simulation in statistical/test_certificates.py.
"""

import itertools
import warnings

import pytest
import torch
from torch import nn

import coresieve as cs
from coresieve import digests, search
from coresieve.bounds import allowance
from coresieve.errors import (
    ClaimError,
    LayerError,
    MethodError,
    NonFiniteError,
    NotCertifiedError,
    SampleError,
)
from coresieve.judge import Judge
from networks import relu_net


def points(n: int, seed: int) -> torch.Tensor:
    return torch.rand(n, 10, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return relu_net(10, 40, 40, 3)


CALIBRATION, HELDOUT = points(600, 1), points(1500, 2)


def find(model, **more):
    goal = {"max_flips": 0.05} if not {"max_flips", "eps", "max_accuracy_drop"} & more.keys() else {}
    return cs.smallest(model, CALIBRATION, HELDOUT, method="magnitude", **goal, **more)


def test_the_answer_meets_the_goal_and_the_next_size_does_not(model):
    best = find(model)
    cert = best.certificate
    assert cert.met
    assert (cert["flips"].bound, cert["flips"].alpha) == (0.05, pytest.approx(0.05))
    assert best.report.kept < 0.95
    *passed, last = cert.tested
    assert all(size["passed"] for size in passed)
    assert not last["passed"]
    assert passed[-1]["kept"] == best.report.kept
    with torch.no_grad():
        flips = int((best.model(HELDOUT).argmax(1) != model(HELDOUT).argmax(1)).sum())
    assert cert["flips"].counts == {"changed": flips}
    assert flips <= allowance(1500, 0.05, 0.05) < last["bad"]["changed"]
    assert "Fixed-sequence testing" in str(cert)
    assert f"{len(cert.tested)} were" in cert.procedure
    assert "at most 5 % of fresh inputs" in cert["flips"].sentence  # the goal, and nothing sharper
    told = " ".join(str(cert).split())  # of the network they did choose nothing else is assumed
    assert "nor to choose which sizes are tested." in told
    assert "nor to choose the network" not in told


def test_few_compressions_are_needed(model, monkeypatch):
    made = []
    compress = cs.Ready.compress
    monkeypatch.setattr(cs.Ready, "compress", lambda self, **kw: made.append(kw) or compress(self, **kw))
    find(model)
    assert len(made) < 30


@pytest.mark.parametrize(
    "goal", [{"max_flips": 0.02}, {"eps": 0.5, "delta": 0.1}, {"max_accuracy_drop": 0.03}]
)
def test_every_goal(model, goal):
    labels = model(HELDOUT).argmax(1)
    best = find(model, labels=labels, **goal)
    assert best.certificate.met
    assert cs.verify(model, best, HELDOUT, labels=labels) == []
    claim = best.certificate.claims[0]
    assert claim.bound == next(v for k, v in goal.items() if k != "eps")


def test_the_sizes_are_chosen_without_the_heldout_inputs(model):
    """The same sizes in the same order for any held-out inputs, as far as both searches go."""
    first = [size["keep"] for size in find(model).certificate.tested]
    other = cs.smallest(model, CALIBRATION, points(1500, 3) ** 3, max_flips=0.05, method="magnitude")
    second = [size["keep"] for size in other.certificate.tested]
    assert all(a == b for a, b in zip(first, second, strict=False))
    assert first == sorted(first, reverse=True)


def test_from_safe_to_bold():
    for limit in (1.0, 0.5, 0.07, 0.001):
        sizes = search.sequence(limit)
        assert all(a > b for a, b in itertools.pairwise(sizes))
        assert sizes[0] == min(0.99, 4 * limit)
        assert min(sizes) < 1.06 * max(search.LEAST, 1e-9)


def test_too_few_heldout_inputs_are_told_before_any_work(model, monkeypatch):
    monkeypatch.setattr(search, "calibrate", lambda *a, **k: pytest.fail("calibrated"))
    with pytest.raises(
        NotCertifiedError, match=r"299 inputs with none changed would be needed for 1 % at 95 %; you gave 120"
    ):
        cs.smallest(model, CALIBRATION, HELDOUT[:120], max_flips=0.01)


def test_nothing_uncertified_is_returned(model, monkeypatch):
    monkeypatch.setattr(search, "_limit", lambda *a: 0.01)  # calibration inputs mislead it
    with pytest.raises(NotCertifiedError, match=r"the first size tried, 4 %, failed .* allowed.*looser goal"):
        find(model)


def test_ctrl_c_returns_the_best_so_far(model, monkeypatch):
    measure, calls = Judge.measure, []

    def interrupted(self, small):
        if self.points == len(HELDOUT):
            calls.append(1)
            if len(calls) == 4:  # the original itself, two sizes, and the third
                raise KeyboardInterrupt
        return measure(self, small)

    monkeypatch.setattr(Judge, "measure", interrupted)
    best = find(model)
    assert len(best.certificate.tested) == 2
    assert "it was interrupted" in best.certificate.procedure
    assert cs.verify(model, best, HELDOUT) == []
    calls[:] = [1, 1]  # before anything was certified
    with pytest.raises(KeyboardInterrupt):
        find(model)


def test_the_pilot_inputs_may_not_certify_either(model):
    best = find(model)
    assert best.rows.overlap(digests.rows(CALIBRATION)) == len(CALIBRATION)


@pytest.mark.filterwarnings("error::coresieve.errors.CoresieveWarning")
def test_repeated_calibration_inputs_do_not_draw_the_warning_about_judges(model):
    cs.smallest(model, CALIBRATION.repeat(2, 1), HELDOUT, max_flips=0.05, method="magnitude")


def test_what_verify_says_of_another_story(model):
    best = find(model)
    best.certificate.procedure = best.certificate.procedure.replace("at 5 %", "at 0.01 %")
    assert "Fixed-sequence" in " ".join(cs.verify(model, best, HELDOUT))


def test_overlap_is_refused(model):
    with pytest.raises(SampleError, match=r"^5 of 305 held-out inputs"):
        cs.smallest(model, CALIBRATION, torch.cat([HELDOUT[:300], CALIBRATION[-5:]]), max_flips=0.05)


def test_the_pilot_and_the_calibration_are_apart(model, monkeypatch):
    seen = {}
    calibrate = search.calibrate
    monkeypatch.setattr(
        search, "calibrate", lambda m, x, **k: seen.update(rest=torch.cat(list(x))) or calibrate(m, x, **k)
    )
    limit = search._limit
    monkeypatch.setattr(
        search,
        "_limit",
        lambda r, pilot, *a: seen.update(pilot=torch.cat(pilot.batches)) or limit(r, pilot, *a),
    )
    find(model)
    assert len(seen["pilot"]) == 150
    both = torch.cat([seen["rest"], seen["pilot"]])
    assert torch.equal(both.sort(0).values, CALIBRATION.sort(0).values)


def test_generators_and_loaders(model):
    best = cs.smallest(
        model, iter(CALIBRATION.split(100)), iter(HELDOUT.split(100)), max_flips=0.05, method="magnitude"
    )
    assert best.certificate.tested == find(model).certificate.tested


def test_the_same_seed_gives_the_same_answer(model):
    one, two = (
        cs.smallest(model, CALIBRATION, HELDOUT, max_flips=0.3, method="corenet", seed=3) for _ in range(2)
    )
    assert one.certificate == two.certificate
    assert one.certificate.digests["compressed"] == two.certificate.digests["compressed"]


def test_a_size_that_cannot_be_made_ends_the_search_and_loses_nothing(model, monkeypatch):
    sizes = [size["keep"] for size in find(model).certificate.tested]
    compress = cs.Ready.compress

    def breaks(self, *, keep, seed):
        if keep == sizes[2]:
            raise NonFiniteError("weights too large", "less", "more")
        return compress(self, keep=keep, seed=seed)

    monkeypatch.setattr(cs.Ready, "compress", breaks)
    best = find(model)
    assert [size["passed"] for size in best.certificate.tested] == [True, True, False]
    assert "could not be made" in best.certificate.procedure
    assert cs.verify(model, best, HELDOUT) == []
    monkeypatch.setattr(search, "sequence", lambda start: sizes[2:])
    with pytest.raises(NotCertifiedError, match="weights too large"):
        find(model)


def test_a_model_that_answers_nan_is_told_so():
    broken = relu_net(10, 5, 3)
    broken[0].weight.data[0] = torch.nan
    with pytest.raises(NonFiniteError, match="NaN in the original's own answers to 1,500 of 1,500"):
        find(broken)
    with pytest.raises(
        NotCertifiedError, match=r"59 inputs with none changed .* you gave 7"
    ):  # before all else
        cs.smallest(broken, CALIBRATION, HELDOUT[:7], max_flips=0.05)


def test_calibration_inputs_may_repeat(model):
    """They are not the judges: what is said of repeated held-out inputs is not said of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twice = torch.cat([CALIBRATION, CALIBRATION])
        assert cs.smallest(model, twice, HELDOUT, max_flips=0.05, method="magnitude").certificate.met


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.LazyLinear(3)), lambda: nn.Linear(10, 3, device="meta")]
)
def test_a_model_without_its_weights_is_refused_and_left_alone(make):
    model = make()
    before = repr(model)
    with pytest.raises(LayerError, match=r"weight"):
        find(model)
    assert repr(model) == before


def test_an_unknown_method_is_refused_before_anything_is_read(model):
    with pytest.raises(MethodError, match="corenet"):
        cs.smallest(model, None, None, max_flips=0.1, method="corenett")


@pytest.mark.parametrize(
    ("goal", "match"),
    [
        ({"max_flips": None}, "no goal"),
        ({"max_flips": 0.1, "max_accuracy_drop": 0.1}, "goals for flips and accuracy_drop"),
        ({"max_flips": 0.1, "eps": 0.1}, "exactly one"),
        ({"max_flips": 0.1, "delta": 0.1}, "delta=0.1 without eps"),
        ({"max_flips": 2}, "a goal of 2"),
        ({"max_accuracy_drop": 0.1}, "labels=y"),
        ({"eps": -0.1}, "eps=-0.1"),
        ({"max_flips": 0.1, "confidence": 1}, "confidence=1"),
    ],
)
def test_goals_that_make_no_sense(model, goal, match):
    with pytest.raises(ClaimError, match=match):
        find(model, **goal)
