"""The paper's quantitative claims beside what was measured: docs/reproduction.md, written from stored results only.

The paper says "without significant loss" and gives no number. Here a loss is significant above one point of accuracy,
on average over draws and networks; the tables show the numbers, so that other lines can be drawn.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coresieve.lab.figures import title
from coresieve.lab.results import Row

SIGNIFICANT = 0.01  # accuracy lost
MUCH = 1.2  # "much more significant": the advantage so many times another one
OURS = "corenet"  # the paper's algorithms begin with this
SPARSIFIERS = (
    "uniform",
    "l1",
    "l2",
    "l1l2",
)  # "matrix sparsification", the paper's baselines that draw entries
HOLDS, PART, NOT, UNKNOWN = "holds", "holds in part", "does not hold", "not measured"


@dataclass(frozen=True)
class Verdict:
    claim: str
    where: str
    measured: str
    verdict: str


def verdicts(sweep: Sequence[Row], retrained: Sequence[Row]) -> list[Verdict]:
    """Every claim, judged."""
    rows = [row for row in sweep if row["failed"] is None]
    after = [row for row in retrained if row["failed"] is None]
    found = [
        *(_size(rows, dataset, keep, where) for dataset, keep, where in SIZES),
        _better(rows, "l1_error", "output error"),
        _better(rows, "accuracy_drop", "accuracy"),
        _deeper(rows),
        _data_sets(rows),
        *(_accuracy(rows, dataset, said) for dataset, said in ACCURACIES.items()),
    ]
    for dataset, (keep, thresholded, ours) in RETRAINED.items():
        found.append(_retrained(after, dataset, keep, "magnitude", thresholded))
        found.append(_retrained(after, dataset, keep, "corenet++", ours))
    return found


# --- Sizes without significant loss -------------------------------------------------------------------------

SIZES = (
    ("mnist", 0.15, "Results"), ("fashion-mnist", 0.15, "Results"), ("cifar10", 0.5, "Results, appendix"),
    ("mnist", 0.1, "appendix"), ("fashion-mnist", 0.1, "appendix"),
)  # fmt: skip


def _size(rows: Iterable[Row], dataset: str, keep: float, where: str) -> Verdict:
    """For the best of the paper's algorithms, however many candidates it draws, architecture by architecture."""
    lost = _means(rows, "accuracy_drop", dataset=dataset, keep=keep)
    by_architecture: dict[str, dict[str, float]] = defaultdict(dict)
    for (_, architecture, method, _), mean in lost.items():
        if method.startswith(OURS):
            by_architecture[architecture][method] = mean
    told, fine = [], []
    for architecture, means in by_architecture.items():
        best = min(means, key=lambda method: means[method])
        told.append(f"{architecture} {_points(means[best])} ({best})")
        fine.append(means[best] <= SIGNIFICANT)
    claim = f"{title(dataset)}: compressed to about {100 * keep:g} % without significant loss of accuracy"
    return Verdict(claim, where, f"points lost: {', '.join(told)}" if told else "", _of(fine))


# --- Against the other samplers -----------------------------------------------------------------------------


def _better(rows: Iterable[Row], measure: str, what: str) -> Verdict:
    """Draw by draw: CoreNet++ against the best of the sparsifiers with the same trial on the same network and size."""
    at: dict[tuple, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row[measure] is not None:
            key = row["dataset"], row["architecture"], row["network"], row["keep"], row["trial"]
            at[key][row["method"]] = row[measure]
    pairs = [
        (m["corenet++"], min(m[x] for x in SPARSIFIERS))
        for m in at.values()
        if {"corenet++", *SPARSIFIERS} <= m.keys()
    ]
    means = _means(rows, measure)
    spots = {(d, a, k) for d, a, _, k in means}
    won = [
        means[d, a, "corenet++", k] < min(means[d, a, method, k] for method in SPARSIFIERS)
        for d, a, k in spots
        if all((d, a, method, k) in means for method in ("corenet++", *SPARSIFIERS))
    ]
    claim = f"CoreNet++ beats every matrix-sparsification method in {what}, in all experiments and trials"
    if not pairs:
        return Verdict(claim, "Discussion", "", UNKNOWN)
    better = sum(ours < other for ours, other in pairs)
    told = (
        f"better than the best of {len(SPARSIFIERS)} in {better:,} of {len(pairs):,} trials "
        f"({100 * better / len(pairs):.1f} %), and on average in {sum(won)} of {len(won)} panels and sizes"
    )
    verdict = HOLDS if better == len(pairs) else PART if sum(won) > len(won) / 2 else NOT
    return Verdict(claim, "Discussion", told, verdict)


def advantage(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """How many times smaller the l1 error of CoreNet++ is than the best sparsifier's: geometric mean over sizes."""
    means = _means(rows, "l1_error")
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for dataset, architecture, method, keep in means:
        others = [means.get((dataset, architecture, x, keep)) for x in SPARSIFIERS]
        if method == "corenet++" and None not in others and means[dataset, architecture, method, keep] > 0:
            best = min(x for x in others if x is not None)
            ratios[dataset, architecture].append(best / means[dataset, architecture, method, keep])
    return {key: math.exp(statistics.fmean(map(math.log, values))) for key, values in ratios.items()}


def _deeper(rows: Iterable[Row]) -> Verdict:
    """Of two architectures on one data set, has the deeper one the larger advantage?"""
    found = advantage(rows)
    told, grows = [], []
    for dataset in dict.fromkeys(key[0] for key in found):
        here = sorted((a for d, a in found if d == dataset), key=_depth)
        told.append(f"{title(dataset)} " + ", ".join(f"{a} {found[dataset, a]:.2f}" for a in here))
        pairs = itertools.combinations(here, 2)
        grows += [found[dataset, a] < found[dataset, b] for a, b in pairs if _depth(a)[0] < _depth(b)[0]]
    claim = "The advantage over the other samplers grows with the number of layers"
    if not grows:
        return Verdict(claim, "Discussion, appendix", "", UNKNOWN)
    measured = (
        f"larger in the deeper of two in {sum(grows)} of {len(grows)} pairs; error of the best of them over "
    )
    measured += f"CoreNet++'s: {'; '.join(told)}"
    verdict = HOLDS if all(grows) else PART if sum(grows) > len(grows) / 2 else NOT  # one pair may be chance
    return Verdict(claim, "Discussion, appendix", measured, verdict)


def _depth(architecture: str) -> tuple[int, str]:
    layers = architecture.partition("x")[0]
    return (int(layers) if "x" in architecture else architecture.count("-") + 1), architecture


def _data_sets(rows: Iterable[Row]) -> Verdict:
    found = advantage(rows)
    means = {
        d: math.exp(statistics.fmean(math.log(v) for (e, _), v in found.items() if e == d)) for d, _ in found
    }
    claim = "The advantage is much larger on MNIST and Fashion-MNIST than on CIFAR-10"
    if not {"mnist", "fashion-mnist", "cifar10"} <= means.keys():
        return Verdict(claim, "appendix", "", UNKNOWN)
    told = ", ".join(f"{title(d)} {value:.2f}" for d, value in means.items())
    larger = [means[d] > max(1, MUCH * means["cifar10"]) for d in ("mnist", "fashion-mnist")]
    return Verdict(
        claim, "appendix", f"error of the best other sampler over CoreNet++'s: {told}", _of(larger)
    )


# --- Accuracies ---------------------------------------------------------------------------------------------

ACCURACIES = {"mnist": 0.98, "cifar10": 0.45, "fashion-mnist": 0.96}
ROUGHLY = 0.02  # points of accuracy, of 1


def _accuracy(rows: Iterable[Row], dataset: str, said: float) -> Verdict:
    originals: dict[tuple[str, int], float] = {}
    for row in rows:
        if row["dataset"] == dataset and row["accuracy"] is not None:
            originals[row["architecture"], row["network"]] = row["accuracy"] + row["accuracy_drop"]
    claim = f"{title(dataset)}: test accuracies of roughly {100 * said:g} %"
    if not originals:
        return Verdict(claim, "appendix", "", UNKNOWN)
    low, high = min(originals.values()), max(originals.values())
    told = f"{100 * low:.1f} to {100 * high:.1f} % over {len(originals)} networks"
    if low > said + ROUGHLY:
        told += " (better)"
    near = [abs(value - said) <= ROUGHLY for value in originals.values()]
    return Verdict(claim, "appendix", told, _of(near))


# --- With retraining ----------------------------------------------------------------------------------------

LOST_NOTHING = 0.002  # what 0 % in the paper may be
NEAR_POINTS, NEAR_SHARE = 0.005, 0.3  # of another number of the paper's
RETRAINED = {"mnist": (0.058, 0.0, 0.01), "cifar10": (0.03, 0.0, 0.095), "fashion-mnist": (0.041, 0.0, 0.047)}


def _retrained(rows: Iterable[Row], dataset: str, keep: float, method: str, said: float) -> Verdict:
    here = [
        r for r in rows if r["dataset"] == dataset and r["keep"] == keep and r["method"].startswith(method)
    ]
    who = "weight thresholding" if method == "magnitude" else "CoreNet++"
    claim = f"{title(dataset)} at {100 * keep:g} %: {who} with retraining loses {100 * said:g} points"
    if not here:
        return Verdict(claim, "appendix, retraining", "", UNKNOWN)
    by: dict[str, list[float]] = defaultdict(list)
    for row in here:
        by[row["architecture"]].append(row["accuracy_drop"])
    means = {architecture: statistics.fmean(values) for architecture, values in by.items()}
    told = ", ".join(f"{architecture} {_points(mean)}" for architecture, mean in means.items())
    if said == 0:
        return Verdict(
            claim,
            "appendix, retraining",
            f"points lost: {told}",
            _of([m <= LOST_NOTHING for m in means.values()]),
        )
    near = [abs(mean - said) <= max(NEAR_POINTS, NEAR_SHARE * said) for mean in means.values()]
    told += " (less than the paper's)" * all(mean < said for mean in means.values())
    return Verdict(claim, "appendix, retraining", f"points lost: {told}", _of(near))


# --- Words --------------------------------------------------------------------------------------------------


def _means(rows: Iterable[Row], measure: str, **where: object) -> dict[tuple[str, str, str, float], float]:
    groups: dict[tuple[str, str, str, float], list[float]] = defaultdict(list)
    for row in rows:
        if row[measure] is not None and all(row[key] == value for key, value in where.items()):
            groups[row["dataset"], row["architecture"], row["method"], row["keep"]].append(row[measure])
    return {key: statistics.fmean(values) for key, values in groups.items()}


def _of(parts: Sequence[bool]) -> str:
    """
    >>> _of([True, True]), _of([True, False]), _of([False]), _of([])
    ('holds', 'holds in part', 'does not hold', 'not measured')
    """
    return UNKNOWN if not parts else HOLDS if all(parts) else PART if any(parts) else NOT


def _points(drop: float) -> str:
    return f"{100 * drop:.2f}".replace("-0.00", "0.00")


RULES = (
    f"Sizes: the best of the paper's algorithms loses at most {100 * SIGNIFICANT:g} point on average over draws and "
    "networks; the best is chosen by the same test images. Holds: on every architecture.",
    f"Against the samplers ({', '.join(SPARSIFIERS)}): holds when CoreNet++ beats the best of them in every trial (a "
    "tie does not), in part when its mean beats theirs in more than half of the panels and sizes.",
    "Depth: of every two architectures of one data set, the advantage in l1 error (geometric mean over sizes) should "
    "be larger in the deeper one; holds for all pairs, in part for more than half. Widths differ too.",
    f"Data sets: CoreNet++ is ahead, by a ratio at least {MUCH:g} times CIFAR-10's; in part on one of the two.",
    f"Accuracies: within {100 * ROUGHLY:g} points of the paper's, for every network.",
    f"Retraining: 0 means at most {100 * LOST_NOTHING:g} points; other numbers are met within {100 * NEAR_POINTS:g} "
    f"points or {100 * NEAR_SHARE:g} % of themselves, whichever is more, from below too.",
    "Where nothing else is said, a claim holds in part when it holds for some of the architectures or networks.",
)  # fmt: skip


def table(found: Sequence[Verdict]) -> list[str]:
    lines = ["| the paper says | where | measured | verdict |", "|---|---|---|---|"]
    return [*lines, *(f"| {v.claim} | {v.where} | {v.measured or '–'} | **{v.verdict}** |" for v in found)]


def losses(rows: Sequence[Row]) -> list[str]:
    """Accuracy lost at each size: a table for each data set, architectures averaged, the least of each size in bold."""
    lines: list[str] = []
    usable = [row for row in rows if row["failed"] is None and row["accuracy_drop"] is not None]
    for dataset in dict.fromkeys(row["dataset"] for row in usable):
        here = [row for row in usable if row["dataset"] == dataset]
        methods, sizes = (
            dict.fromkeys(r["method"] for r in here),
            sorted({r["keep"] for r in here}, reverse=True),
        )
        lost: dict[tuple[str, float], list[float]] = defaultdict(list)
        for row in here:
            lost[row["method"], row["keep"]].append(row["accuracy_drop"])
        means = {key: statistics.fmean(values) for key, values in lost.items()}
        least = {size: min(means[m, size] for m in methods if (m, size) in means) for size in sizes}
        lines += ["", f"{title(dataset)}:", "", "| kept | " + " | ".join(f"{100 * s:g} %" for s in sizes) + " |",
                  "|---" * (1 + len(sizes)) + "|"]  # fmt: skip
        for method in methods:
            cells = []
            for size in sizes:
                mean = means.get((method, size))
                told = "–" if mean is None else _points(mean)
                cells.append(f"**{told}**" if mean == least[size] else told)
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines
