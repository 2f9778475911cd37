"""smallest(): the smallest network that fresh inputs certify, valid although many sizes are tried.

Fixed-sequence testing (Maurer, Hothorn, Lehmacher 1995; Learn then Test: Angelopoulos et al. 2021). The sizes to try,
from safe to bold, are chosen on calibration inputs alone. Each network in turn is tested on the held-out inputs at the
full alpha; the first failure ends the search and the last network that passed is the answer. Let i be the first
network in that order that truly breaks the goal: the answer can break it only if network i passed, and that has
probability at most alpha. Where to begin decides how many are tried and whether any passes, never the validity.

What is certified is the goal. The limit of Clopper and Pearson for the network that was picked is smaller, but it was
picked on the same inputs, so it is not claimed.

>>> sequence(0.1)[:5], sequence(0.8)[:3]
([0.4, 0.25, 0.18, 0.15, 0.13], [0.99, 0.96, 0.88])
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from coresieve import digests
from coresieve.bounds import allowance
from coresieve.certificate import Certificate, Claim, at_least, percent
from coresieve.certification import (
    CLAIMS,
    INTERRUPTED,
    OUTSIDE,
    REACHED,
    Asked,
    allowance_used,
    at_goal,
    endings,
    issue,
    searched,
    side_by_side,
    too_few,
)
from coresieve.compression import Compressed, Ready, calibrate, check_seed
from coresieve.errors import ClaimError, CoresieveError, NonFiniteError, NotCertifiedError, SampleError
from coresieve.judge import Judge, Measured
from coresieve.methods import Method, resolve
from coresieve.sample import Batch, Sample, batches, private_randomness, size, take
from coresieve.terminal import Progress, progress, share

LARGEST, LEAST = 0.99, 0.001  # the sizes that are tried at all
PILOT = 2000  # calibration inputs, at most, that only tell where to begin
STEPS = (4, 2.5, 1.8, 1.5, 1.3, 1.2, 1.1, 1.05, 1.0)  # times the size where the pilot inputs put the limit
RATIO = 0.95  # of one size to the one before, from there on


def smallest(
    model: nn.Module,
    calibration: Sample,
    heldout: Sample,
    *,
    max_flips: float | None = None,
    max_accuracy_drop: float | None = None,
    eps: float | None = None,
    delta: float | None = None,
    confidence: float = 0.95,
    method: str | Method = "sieve",
    labels: Any = None,
    seed: int = 0,
    points: int | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    bar: Progress | None = None,
) -> Compressed:
    """The smallest network certified to meet one goal, with its certificate; NotCertifiedError when there is none.

    max_flips: the share of fresh inputs whose prediction may change.
    max_accuracy_drop: the accuracy that may be lost, 0.01 for a point; needs `labels` of the held-out inputs.
    eps, delta: a share of at most delta (0.05) of fresh inputs may have an output outside (1 +- eps).
    The rest is as in `compress`. Ctrl-C ends the search with the best network certified so far.
    """
    asked = _goal(max_flips, max_accuracy_drop, eps, delta, confidence)
    method, seed = resolve(method), check_seed(seed)
    with progress() if bar is None else nullcontext(bar) as bar:
        bar.step("reading the held-out inputs")
        judge = Judge(model, heldout, labels)
        _possible(judge, asked)
        pilot, rest = _split(calibration, judge, seed)
        bar.step("calibrating")
        ready = calibrate(
            model, rest, method=method, seed=seed, points=points, include=include, exclude=exclude
        )
        pilots = Judge(model, pilot, warn=False)
        ready.observed.rows = ready.observed.rows.joined(pilots.rows)  # they help to choose the size
        start = _limit(ready, pilots, asked, _passing_share(judge, asked), seed, bar)
        best = _descend(ready, judge, asked, sequence(start), seed, bar)
        best.rows = ready.observed.rows.chosen_by(judge.rows)
        return best


def _goal(max_flips: Any, max_accuracy_drop: Any, eps: Any, delta: Any, confidence: Any) -> Asked:
    goals = {"flips": max_flips, "accuracy_drop": max_accuracy_drop}
    goals["coreset"] = None if eps is None else OUTSIDE if delta is None else delta
    goals = {name: goal for name, goal in goals.items() if goal is not None}
    if len(goals) != 1 or (delta is not None and eps is None):
        given = (
            "no goal"
            if not goals
            else f"goals for {' and '.join(goals)}"
            if len(goals) > 1
            else f"delta={delta!r} without eps"
        )
        raise ClaimError(
            given, "exactly one of max_flips=, max_accuracy_drop= and eps= (with delta=)", "max_flips=0.01"
        )
    return Asked.of(confidence, eps, goals.get("coreset", OUTSIDE), None, goals)


def _possible(judge: Judge, asked: Asked) -> None:
    """Whether the goal can be met at all: before any work."""
    name, alpha = asked.claims[0], 1 - asked.confidence
    claim = CLAIMS[name](judge.measure(judge.original), alpha, asked)  # raises where the claim does not apply
    goal = asked.goals[name]
    if claim.met or name == "accuracy_drop":
        return
    ((what, count),) = claim.counts.items()
    if (
        count and allowance(judge.points, goal, alpha) >= 0
    ):  # what does not change is bad only where it is NaN
        raise NonFiniteError(
            f"NaN in the original's own answers to {count:,} of {judge.points:,} held-out inputs",
            "finite numbers",
            "check the original's weights, and the held-out inputs for NaN",
        )
    raise NotCertifiedError(
        f"{judge.points:,} held-out inputs for {name} of at most {percent(goal)} at {at_least(asked.confidence)}",
        "enough of them to show it of a network that does not change at all",
        too_few(judge.points, goal, alpha, what).rstrip("."),
    )


def _split(calibration: Sample, judge: Judge, seed: int) -> tuple[list[Batch], list[Batch]]:
    """A quarter of the calibration inputs, at most PILOT, tells where to begin; the others calibrate."""
    with private_randomness(calibration, seed):
        given = [batch for batch in batches(calibration) if size(batch)]
    if not given:
        raise SampleError("no calibration inputs", "at least 2", "a few hundred inputs of the kind to come")
    rows = np.concatenate([digests.rows(batch) for batch in given])
    judge.refuse_rows(digests.KnownRows(rows))
    n = len(rows)
    piloting = np.zeros(n, bool)
    piloting[np.random.default_rng([seed, 5]).permutation(n)[: min(PILOT, n // 4)]] = True
    ends = np.cumsum([size(batch) for batch in given])[:-1]
    pilot, rest = [], []
    for batch, part in zip(given, np.split(piloting, ends), strict=True):
        for taken, side in ((part, pilot), (~part, rest)):
            if taken.any():
                side.append(take(batch, torch.from_numpy(np.flatnonzero(taken))))
    return (pilot or rest), rest


def _passing_share(judge: Judge, asked: Asked) -> float:
    """The share of held-out inputs that may be bad for a network to pass."""
    goal = asked.goals[asked.claims[0]]
    return max(0, allowance(judge.points, max(goal, 1e-9), 1 - asked.confidence)) / judge.points


def bad(measured: Measured, asked: Asked) -> float:
    """The share of inputs that count against the goal. Without labels a prediction that changes counts as one lost."""
    if asked.claims[0] == "coreset":
        return float((measured.deviation > asked.eps).mean())
    assert measured.flipped is not None
    return float(measured.flipped.mean())


def _limit(ready: Ready, pilot: Judge, asked: Asked, passing: float, seed: int, bar: Progress) -> float:
    """About the smallest size at which no more than this share of the pilot inputs is bad."""

    def passes(keep: float) -> bool:
        bar.step(f"looking where to begin: {share(keep)}")
        try:
            return bad(pilot.measure(ready.compress(keep=keep, seed=seed).model), asked) <= passing
        except CoresieveError:  # a size that the method cannot make
            return False

    low, high = LEAST, 1.0
    while high / low > 1.08:
        middle = max((low * high) ** 0.5, high / 3)
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high


def sequence(limit: float) -> list[float]:
    """The sizes to try, from safe to bold, when `limit` is where calibration inputs put the smallest."""
    sizes = [limit * step for step in STEPS]
    while sizes[-1] * RATIO >= LEAST:
        sizes.append(sizes[-1] * RATIO)
    return list(dict.fromkeys(float(f"{min(LARGEST, keep):.4g}") for keep in sizes))


def _descend(
    ready: Ready, judge: Judge, asked: Asked, sizes: list[float], seed: int, bar: Progress
) -> Compressed:
    """Test size after size; the last that passed, with its certificate."""
    best: tuple[Compressed, Claim, Measured] | None = None
    tested: list[dict[str, Any]] = []
    ended = REACHED
    try:
        for keep in sizes:
            used = f" (last: {tested[-1]['told']})" if tested else ""
            bar.step(f"testing {share(keep)}{used}")
            try:
                small = ready.compress(keep=keep, seed=seed)
                measured = judge.measure(small.model)
            except CoresieveError as error:  # a size that the method cannot make ends the search, too
                tested.append(
                    {"keep": keep, "kept": None, "bad": {}, "passed": False, "told": str(error).rstrip(".")}
                )
                break
            claim = CLAIMS[asked.claims[0]](measured, 1 - asked.confidence, asked)
            tested.append({"keep": keep, "kept": small.report.kept, "bad": claim.counts, "passed": bool(claim.met),
                           "told": allowance_used(claim)})  # fmt: skip
            if not claim.met:
                break
            best = small, claim, measured
    except KeyboardInterrupt:
        if best is None:
            raise
        ended = INTERRUPTED
    if best is None:
        raise _nothing(judge, asked, tested)
    if not tested[-1]["passed"]:
        ended = endings(tested)[0]
    small, claim, measured = best
    small.certificate = _certificate(judge, measured, asked, small, claim, tested, ended)
    return small


def _certificate(
    judge: Judge,
    measured: Measured,
    asked: Asked,
    small: Compressed,
    claim: Claim,
    tested: list[dict[str, Any]],
    ended: str,
) -> Certificate:
    certificate = issue(judge, measured, asked, small.model)
    certificate.claims = [at_goal(claim, asked)]
    certificate.tested = tested
    certificate.procedure = searched(tested, claim.alpha, ended)
    certificate.a_priori = side_by_side(small, certificate)
    return certificate


def _nothing(judge: Judge, asked: Asked, tested: list[dict[str, Any]]) -> NotCertifiedError:
    name, last = asked.claims[0], tested[-1]
    return NotCertifiedError(
        f"no network for {name} of at most {percent(asked.goals[name])} at {at_least(asked.confidence)} "
        f"with {judge.points:,} held-out inputs: the first size tried, {share(last['keep'])}, failed "
        f"({last['told']})",
        "a network that passes",
        "a looser goal, more held-out inputs, more calibration inputs, or another method",
    )
