"""certify(): what held-out inputs, which played no part in the compression, promise of a small network.

    flips          share of fresh inputs whose prediction (arg max) changes                 Clopper-Pearson
    coreset        share of fresh inputs with any output entry outside (1 +- eps) of the original's: the event
                   of the paper's Definition 1                                              Clopper-Pearson
    coreset_eps    its inverse: the smallest eps that a share of at most delta leaves       order statistic
    output_error   ||f_hat - f||_1 / ||f||_1 that a share of at most delta exceeds          order statistic
    accuracy_drop  accuracy lost: share right before and wrong now, minus share wrong before and right now,
                   an upper limit of the one minus a lower limit of the other, half of alpha each

All are exact: valid for any network and any n (`bounds.py`). An input, however many positions it has, is one draw:
it flips when any of its predictions does. NaN counts as a violation, never as a missing value.

>>> import torch
>>> from torch import nn
>>> f, x = nn.Linear(3, 2), torch.rand(300, 3)
>>> cert = certify(f, f, x, max_flips=0.01)
>>> cert["flips"].observed, round(cert["flips"].bound, 4), cert.met
(0.0, 0.0099, True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from coresieve import __version__
from coresieve.bounds import allowance, lower, points_for, rank, upper
from coresieve.budget import real
from coresieve.certificate import Certificate, Claim, at_least, number, percent, points_of_100
from coresieve.compression import Compressed
from coresieve.errors import ClaimError
from coresieve.judge import Judge, Measured
from coresieve.sample import Sample

NOTHING = " That says nothing: outputs that are all 0 do as well."
OUTSIDE = 0.05  # the share that may lie outside, for the claims that ask for a level, when none is given


def certify(
    original: nn.Module,
    compressed: Compressed | nn.Module,
    heldout: Sample,
    *,
    confidence: float = 0.95,
    eps: float | None = None,
    delta: float = OUTSIDE,
    labels: Any = None,
    claims: Sequence[str] | None = None,
    max_flips: float | None = None,
    max_outside: float | None = None,
    max_output_error: float | None = None,
    max_accuracy_drop: float | None = None,
) -> Certificate:
    """What fresh inputs prove of `compressed`, jointly with this confidence.

    heldout: inputs that were used neither to compress nor to choose. Overlap with the calibration is refused.
    eps: the band of the claim "coreset". delta: the share that the claims at a level leave outside.
    labels: the right classes, for "accuracy_drop".
    claims: which to make; without it all that apply, or with goals those that have one (fewer claims are sharper).
    max_...: goals; `certificate.met` says whether the bounds reach them.

    Where `compressed` is what `compress` returned, the certificate is attached to it and saved with it.
    """
    goals = {"flips": max_flips, "coreset": max_outside, "output_error": max_output_error,
             "accuracy_drop": max_accuracy_drop}  # fmt: skip
    asked = Asked.of(confidence, eps, delta, claims, {k: v for k, v in goals.items() if v is not None})
    judge = Judge(original, heldout, labels)
    judge.refuse(compressed)
    judge.refuse_chooser(compressed)
    model = compressed.model if isinstance(compressed, Compressed) else compressed
    certificate = issue(judge, judge.measure(model), asked, model)
    if isinstance(compressed, Compressed):
        certificate.a_priori = side_by_side(compressed, certificate)
        compressed.certificate = certificate
    return certificate


CONFIRMED = "Confirmed: the same weights and inputs give the same numbers."


def verify(original: nn.Module, compressed: Compressed, heldout: Sample, *, labels: Any = None) -> list[str]:
    """Recompute the certificate that `compressed` carries; what differs, in words. An empty list confirms it.

    What no one can recompute from these is taken on trust: that the inputs are independent and were not used before,
    for a network found by `smallest` the sizes that were tried, and the report with the paper's eps in it.
    """
    stored = compressed.certificate if isinstance(compressed, Compressed) else None
    if stored is None:
        given = f"{type(compressed).__name__}, " * (not isinstance(compressed, Compressed))
        raise ClaimError(f"{given}a network without a certificate", "one that certify() or smallest() gave one",
                         "cs.load(path, into=...) of a file that holds one; coresieve certify ... --write")  # fmt: skip
    judge = Judge(original, heldout, labels)
    judge.refuse(compressed)
    made = judge.digests(compressed.model)
    named = {"original": "the original's weights", "compressed": "the small network's weights",
             "heldout": "the held-out inputs", "labels": "the labels"}  # fmt: skip
    wrong = [f"{named.get(key, key)} are not those of the certificate"
             for key in stored.digests if made.get(key) != stored.digests[key]]  # fmt: skip
    wrong = wrong or _recount(stored, judge.measure(compressed.model))
    told: dict[str, Any] = {"notes": judge.notes}
    if stored.a_priori:
        told["a_priori"] = side_by_side(compressed, stored)
    for name, again in told.items():
        if getattr(stored, name) != again:
            wrong.append(f"it says {getattr(stored, name)!r}, and should say {again!r}")
    return wrong


def _recount(stored: Certificate, measured: Measured) -> list[str]:
    """What differs when the stored claims, and how they are said to have come about, are made anew."""
    question = stored.asked
    asked = Asked.of(stored.confidence, question.get("eps"), question.get("delta"),
                     [claim.name for claim in stored], question.get("goals") or {})  # fmt: skip
    wrong = [] if stored.points == measured.points else [f"{measured.points:,} points, not {stored.points:,}"]
    for claim in stored:
        again = CLAIMS[claim.name](measured, (1 - stored.confidence) / len(stored), asked)
        again = at_goal(again, asked) if stored.tested and again.met else again
        if (again.counts, again.points, again.given) != (claim.counts, claim.points, claim.given):
            wrong.append(f"{claim.name}: {again.counts} of {again.points:,}, not {claim.counts}")
        if (again.goal, again.share, again.searched) != (claim.goal, claim.share, claim.searched):
            wrong.append(f"{claim.name}: a goal of {again.goal}, not {claim.goal}")
        for what, x, y in (("a bound", again.bound, claim.bound), ("an alpha", again.alpha, claim.alpha),
                           ("an observed value", again.observed, claim.observed)):  # fmt: skip
            if not _close(x, y):
                wrong.append(f"{claim.name}: {what} of {x}, not {y}")
        if (sentence := _of_numbers_as_stored(again, claim)) != claim.sentence:
            wrong.append(f"{claim.name}: it says {claim.sentence!r}, and the numbers say {sentence!r}")
    if stored.procedure not in (ways := _procedures(stored)):
        wrong.append(f"it says {stored.procedure!r}, and should say {ways[0]!r}")
    return wrong


def _close(x: float | None, y: float | None) -> bool:
    """Equal to rounding: another processor may add in another order."""
    return x == y or (x is not None and y is not None and abs(x - y) <= 1e-5 * max(abs(x), abs(y), 1e-9))


def _of_numbers_as_stored(again: Claim, claim: Claim) -> str:
    """What the claim has to say. A level is told by the stored numbers, which are close to those found again."""
    if again.name not in LEVELS or again.bound is None or claim.bound is None or claim.observed is None:
        return again.sentence
    return _level_told(claim.name, claim.bound, claim.observed, again.given["delta"])


def _procedures(stored: Certificate) -> list[str]:
    alpha = (1 - stored.confidence) / len(stored)
    if not stored.tested:
        return [_procedure(len(stored), alpha)]
    return [searched(stored.tested, alpha, ended) for ended in endings(stored.tested)]


# --- What is asked ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The question, checked. `claims` is empty for "all that apply"."""

    confidence: float
    eps: float | None
    delta: float
    claims: tuple[str, ...]
    goals: dict[str, float]

    @classmethod
    def of(cls, confidence: Any, eps: Any, delta: Any, claims: Any, goals: dict[str, Any]) -> Asked:
        confidence = _inside("confidence", confidence, "0.95 is right 19 times of 20")
        delta = _inside("delta", delta, "0.05 leaves one input of 20 outside")
        band, wanted = real(eps), {name: real(goal) for name, goal in goals.items()}
        if band is not None and not 0 <= band < np.inf:
            raise ClaimError(f"eps={eps!r}", "a relative error, 0 or more", "eps=0.1")
        for name, goal in wanted.items():
            low, high = GOALS[name]
            if goal is None or not low <= goal < high:
                expected = f"a number from {low:g} up to, but not including, {high:g}"
                raise ClaimError(
                    f"a goal of {goals[name]!r} for {name}", expected, "0.01 for one in a hundred"
                )
        names = tuple(goals) if claims is None else _names(claims)
        if (lost := goals.keys() - set(names)) or len(set(names)) < len(names):
            given = (
                f"a goal for {min(lost)}, which is not among claims={list(names)}"
                if lost
                else f"claims={list(names)}"
            )
            raise ClaimError(
                given, "each claim once, those with goals among them", "leave claims= out, or name it too"
            )
        return cls(
            confidence, band, delta, names, {name: goal for name, goal in wanted.items() if goal is not None}
        )

    def to_dict(self) -> dict[str, Any]:
        return {"eps": self.eps, "delta": self.delta, "claims": list(self.claims), "goals": self.goals}


def _names(claims: Any) -> tuple[str, ...]:
    names = (claims,) if isinstance(claims, str) else tuple(claims) if isinstance(claims, Iterable) else ()
    if not names:
        raise ClaimError(
            f"claims={claims!r}", f"some of {', '.join(CLAIMS)}", "leave it out for all that apply"
        )
    for name in names:
        if not isinstance(name, str) or name not in CLAIMS:
            raise ClaimError(f"the claim {name!r}", f"one of {', '.join(CLAIMS)}", 'claims=["flips"]')
    return names


def _inside(name: str, given: Any, hint: str) -> float:
    value = real(given)
    if value is None or not 0 < value < 1 or 1 - value == 1:
        raise ClaimError(f"{name}={given!r}", "a number strictly between 0 and 1", f"{name}={hint}")
    return value


# --- The claims ---------------------------------------------------------------------------------------------


def flips(measured: Measured, alpha: float, asked: Asked) -> Claim:
    if measured.flipped is None:
        raise ClaimError(
            "flips of a network without several outputs for each input",
            "a score for each of several classes",
            'claims=["coreset_eps", "output_error"], which speak of any outputs',
        )
    k = int(measured.flipped.sum())
    return _share("flips", k, "changed", "change their prediction", measured, alpha, asked)


def coreset(measured: Measured, alpha: float, asked: Asked) -> Claim:
    if asked.eps is None:
        raise ClaimError('the claim "coreset" without eps', "the band (1 +- eps) that outputs are to stay in",
                         'eps=0.1, or the claim "coreset_eps", which finds it')  # fmt: skip
    k = int((measured.deviation > asked.eps).sum())
    what = f"have an output outside (1 ± {asked.eps:.10g}) of the original's"
    claim = _share("coreset", k, "outside", what, measured, alpha, asked, eps=asked.eps)
    return replace(claim, sentence=claim.sentence + NOTHING * (asked.eps >= 1))


def _share(
    name: str, k: int, counted: str, what: str, measured: Measured, alpha: float, asked: Asked, **given: float
) -> Claim:
    n = measured.points
    bound, goal = upper(k, n, alpha), asked.goals.get(name)
    sentence = f"at most {number(bound)} of fresh inputs {what} (here {k:,} of {n:,}, {percent(k / n)})."
    if goal is not None and bound > goal and allowance(n, goal, alpha) < 0:
        sentence += " " + too_few(n, goal, alpha, counted)
    return Claim(name, sentence, k / n, bound, n, alpha, {counted: k}, given, goal)


def too_few(n: int, goal: float, alpha: float, counted: str) -> str:
    if goal <= 0:
        return "No number of inputs shows that it never happens."
    need, sure = needed(goal, alpha), at_least(1 - alpha)
    return f"{need} inputs with none {counted} would be needed for {percent(goal)} at {sure}; you gave {n:,}."


def needed(share: float, alpha: float) -> str:
    """
    >>> needed(0.01, 0.05), needed(1e-300, 0.05)
    ('299', 'more than 10^15')
    """
    points = points_for(share, alpha)
    return f"{points:,}" if points < 10**15 else "more than 10^15"


def coreset_eps(measured: Measured, alpha: float, asked: Asked) -> Claim:
    return _level("coreset_eps", measured.deviation, alpha, asked)


def output_error(measured: Measured, alpha: float, asked: Asked) -> Claim:
    return _level("output_error", measured.error, alpha, asked)


LEVELS = {
    "coreset_eps": "all outputs stay within (1 ± {}) of the original's for at least {} of fresh inputs",
    "output_error": "||f_hat - f||_1 / ||f||_1 is at most {} for at least {} of fresh inputs",
}


def _level(name: str, values: np.ndarray, alpha: float, asked: Asked) -> Claim:
    n, delta, bound = len(values), asked.delta, None
    observed = float(np.quantile(values, 1 - delta, method="inverted_cdf"))
    k, inside = rank(n, delta, alpha), at_least(1 - delta)
    value = np.inf if k is None else float(np.partition(values, k - 1)[k - 1])
    if k is None:
        need = f"{needed(delta, alpha)} inputs would be needed at {at_least(1 - alpha)}; you gave {n:,}"
        sentence = f"nothing is claimed for {inside} of fresh inputs: {need}."
    elif np.isinf(value):
        off = f"{int(np.isinf(values).sum()):,} of {n:,} here are off without bound"
        sentence = f"nothing is claimed for {inside} of fresh inputs: {off}."
    else:
        bound = value
        sentence = _level_told(name, bound, observed, delta)
    given, goal = {"delta": delta}, asked.goals.get(name)
    return Claim(name, sentence, observed, bound, n, alpha, {}, given, goal, share=False)


def _level_told(name: str, bound: float, observed: float, delta: float) -> str:
    what = LEVELS[name].format(number(bound, False), at_least(1 - delta))
    return f"{what} (here {number(observed, False)})." + NOTHING * (bound >= 1)


def accuracy_drop(measured: Measured, alpha: float, asked: Asked) -> Claim:
    if measured.lost is None or measured.gained is None:
        raise ClaimError(
            'the claim "accuracy_drop" without labels', "the right classes of the held-out inputs", "labels=y"
        )
    n, b, c = measured.points, int(measured.lost.sum()), int(measured.gained.sum())
    bound, observed = upper(b, n, alpha / 2) - lower(c, n, alpha / 2), (b - c) / n
    sentence = (
        f"accuracy falls by at most {points_of_100(bound)} (here by {100 * observed:.3g}: "
        f"{b:,} of {n:,} became wrong, {c:,} became right)."
    )
    goal = asked.goals.get("accuracy_drop")
    if goal is not None and bound > goal and upper(0, n, alpha / 2) > goal and goal > 0:
        sentence += (
            f" {needed(goal, alpha / 2)} inputs with none become wrong would be enough; you gave {n:,}."
        )
    counts = {"became wrong": b, "became right": c}
    return Claim("accuracy_drop", sentence, observed, bound, n, alpha, counts, {}, goal)


CLAIMS: dict[str, Callable[[Measured, float, Asked], Claim]] = {
    "flips": flips,
    "coreset": coreset,
    "coreset_eps": coreset_eps,
    "output_error": output_error,
    "accuracy_drop": accuracy_drop,
}
GOALS = {"flips": (0, 1), "coreset": (0, 1), "output_error": (0, np.inf), "accuracy_drop": (-1, 1)}


def issue(judge: Judge, measured: Measured, asked: Asked, model: nn.Module) -> Certificate:
    """All claims asked for, their alphas adding up to 1 - confidence."""
    names = asked.claims or _applicable(measured, asked)
    alpha = (1 - asked.confidence) / len(names)
    return Certificate(
        claims=[CLAIMS[name](measured, alpha, asked) for name in names],
        confidence=asked.confidence,
        points=measured.points,
        procedure=_procedure(len(names), alpha),
        digests=judge.digests(model),
        notes=list(judge.notes),
        asked=asked.to_dict(),
        version=__version__,
    )


def _applicable(measured: Measured, asked: Asked) -> list[str]:
    names = ["flips"] * (measured.flipped is not None) + ["coreset"] * (asked.eps is not None)
    return [*names, "coreset_eps", "output_error", *["accuracy_drop"] * (measured.lost is not None)]


def _procedure(claims: int, alpha: float) -> str:
    exact = "The bounds are exact (binomial), for one network, fixed before these inputs were looked at."
    if claims == 1:
        return f"{exact} The claim may fail with probability {number(alpha)}."
    return (
        f"{exact} All {claims} claims hold together: the {number(claims * alpha)} that may fail "
        f"are split equally, {number(alpha)} for each."
    )


REACHED = "the smallest size was reached"
INTERRUPTED = "it was interrupted"


def searched(tested: list[dict[str, Any]], alpha: float, ended: str) -> str:
    """How `smallest` went about it."""
    return (
        f"Fixed-sequence testing: sizes from safe to bold, chosen on calibration inputs alone, were tested from "
        f"{percent(tested[0]['keep'])} down, each at {number(alpha)}; {len(tested)} were, and {ended}. The network "
        f"returned breaks the goal with probability at most {number(alpha)}, however many were tried."
    )


def endings(tested: list[dict[str, Any]]) -> list[str]:
    """What may have ended it: a size that failed, or else another reason."""
    last = tested[-1]
    if not last["passed"]:
        return [f"{percent(last['keep'])} {'could not be made' if last['kept'] is None else 'failed'}"]
    return [REACHED, INTERRUPTED]


def at_goal(claim: Claim, asked: Asked) -> Claim:
    """The claim of a network that was found by testing many sizes: its goal, and nothing sharper."""
    assert claim.goal is not None
    proved = {
        "flips": f"at most {number(claim.goal)} of fresh inputs change their prediction",
        "coreset": f"at most {number(claim.goal)} of fresh inputs have an output outside (1 ± {asked.eps or 0:.10g}) "
        "of the original's",
        "accuracy_drop": f"accuracy falls by at most {points_of_100(claim.goal)}",
    }[claim.name]
    sentence = f"{proved} (of {claim.points:,} here: {allowance_used(claim)})."
    sentence += NOTHING * (claim.name == "coreset" and (asked.eps or 0) >= 1)
    return replace(claim, sentence=sentence, bound=claim.goal, searched=True)


def allowance_used(claim: Claim) -> str:
    """How much of what was allowed a network used."""
    assert claim.goal is not None
    counts = ", ".join(f"{k:,} {what}" for what, k in claim.counts.items())
    if len(claim.counts) > 1:
        return counts
    return f"{counts} of {allowance(claim.points, claim.goal, claim.alpha):,} allowed"


def side_by_side(small: Compressed, certificate: Certificate) -> str:
    """The paper's bound and the certificate's, and which of them says nothing."""
    named = {claim.name: claim for claim in certificate}
    held = named.get("coreset_eps") or named.get("coreset") or certificate.claims[0]
    bound = "none" if held.bound is None else number(held.bound, held.share)
    eps = "eps = " * (held.name == "coreset_eps" and held.bound is not None)
    verdict = "says nothing: vacuous" if held.says_nothing else "not vacuous"
    return f"Side by side. A priori: {small.report.a_priori_told()} Certified, {held.name}: {eps}{bound} ({verdict})."
