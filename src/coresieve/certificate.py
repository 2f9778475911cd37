"""A certificate: what fresh inputs have shown of a small network, with a stated confidence, in a few honest lines.

Each claim bounds one thing. Its confidence is its share of the whole: with the claims' alphas adding up to
1 - confidence, all of them hold together with that confidence (a union bound). A bound of None abstains.

>>> claim = Claim("flips", "at most 1 % of fresh inputs change their prediction", observed=0.0, bound=0.01,
...               points=299, alpha=0.05, counts={"changed": 0}, goal=0.02)
>>> claim.met, claim.says_nothing
(True, False)
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from coresieve.errors import MethodError, stored
from coresieve.report import jsonable, known

WIDTH = 79  # of the text: what a terminal of 80 columns shows

ASSUMPTIONS = (
    "the held-out inputs are independent draws from the inputs that the network will meet",
    "they were used neither to compress nor to choose the network",
)
LABELLED = ("their labels are right",)  # where a claim counts what is right
SEARCHED = "they were used neither to compress nor to choose which sizes are tested"  # where `smallest` tests on them


@dataclass(frozen=True)
class Claim:
    """One bounded quantity. `bound` is None where too few points, or an infinite value, allow none."""

    name: str
    sentence: str  # what holds, or why nothing is claimed
    observed: float | None  # on the held-out inputs
    bound: float | None
    points: int
    alpha: float  # with at most this probability the bound fails
    counts: dict[str, int] = field(default_factory=dict)
    given: dict[str, float] = field(default_factory=dict)  # the eps or delta that the claim speaks of
    goal: float | None = None  # what the bound was asked to be at most
    searched: bool = False  # whether `smallest` chose the network on these inputs, in a way that pays for it
    share: bool = True  # whether it bounds a share of inputs, told in per cent; else a relative error

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        return None if self.goal is None else self.bound is not None and self.bound <= self.goal

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the claim rests on, beside its confidence."""
        used = SEARCHED if self.searched else ASSUMPTIONS[1]
        return (ASSUMPTIONS[0], used, *LABELLED * (self.name == "accuracy_drop"))

    @property
    def says_nothing(self) -> bool:
        """A bound of 1 or more is vacuous, as is a band with eps of 1 or more: outputs that are all 0 do as well."""
        return self.bound is None or not self.bound < 1 or self.given.get("eps", 0) >= 1


@dataclass
class Certificate:
    """`certificate["flips"].bound`, `str(certificate)`, `certificate.to_dict()`."""

    claims: list[Claim]
    confidence: float
    points: int
    procedure: str
    digests: dict[
        str, str
    ]  # SHA-256 of the original's weights, the small network's, the held-out data, labels
    notes: list[str] = field(default_factory=list)
    a_priori: str = ""  # what the paper's theorem says of the same network
    asked: dict[str, Any] = field(default_factory=dict)  # what to ask again, to verify
    tested: list[dict[str, Any]] = field(default_factory=list)  # the sizes that were tried, in order
    version: str = ""

    def __getitem__(self, name: str) -> Claim:
        for claim in self.claims:
            if claim.name == name:
                return claim
        made = ", ".join(claim.name for claim in self.claims)
        raise MethodError(
            f"the claim {name!r}", f"one that was made: {made}", f"certify(..., claims=[{name!r}])"
        )

    def __contains__(self, name: object) -> bool:
        return any(claim.name == name for claim in self.claims)

    def __iter__(self) -> Iterator[Claim]:
        return iter(self.claims)

    def __len__(self) -> int:
        return len(self.claims)

    @property
    def met(self) -> bool | None:
        """Whether every goal is met; None where no goal was set."""
        results = [claim.met for claim in self.claims if claim.met is not None]
        return all(results) if results else None

    @property
    def assumptions(self) -> list[str]:
        """Those of all claims, each once."""
        return list(dict.fromkeys(what for claim in self.claims for what in claim.assumptions))

    def __str__(self) -> str:
        lines = [f"Certificate, {at_least(self.confidence)} confidence, {self.points:,} held-out inputs"]
        lines += [f"- {_told(claim)}" for claim in self.claims]
        lines += [self.procedure, f"Assumed: {'; '.join(self.assumptions)}."]
        lines += [f"Note: {note}." for note in self.notes]
        lines += [self.a_priori] * bool(self.a_priori)
        return "\n".join(
            textwrap.fill(line, WIDTH, subsequent_indent="  " if line[:2] == "- " else "") for line in lines
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; infinities become strings."""
        claims = [
            asdict(claim)
            | {"met": claim.met, "says_nothing": claim.says_nothing, "assumptions": list(claim.assumptions)}
            for claim in self.claims
        ]
        return jsonable(asdict(self) | {"claims": claims, "met": self.met, "assumptions": self.assumptions})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Certificate:
        """The inverse of `to_dict`; keys of a later version are ignored."""
        with stored("certificate"):
            plain: dict[str, Any] = {f.name: data[f.name] for f in fields(cls) if f.name in data}
            plain["digests"] = dict(plain["digests"])
            made = cls(**{**plain, "claims": [Claim(**known(Claim, claim)) for claim in data["claims"]]})
            str(made)  # numbers where numbers belong
            return made


def _told(claim: Claim) -> str:
    text = f"{claim.name}: {claim.sentence}"
    if claim.goal is not None:
        goal = f"{100 * claim.goal:.10g} %" if claim.share else f"{claim.goal:.10g}"
        text += f" Goal {goal}: {'met' if claim.met else 'NOT met'}."
    return text


def number(value: float, share: bool = True) -> str:
    """A share as per cent, an error as it is: bounds are rounded up, so that the text claims no more.

    >>> number(0.0038852), number(0.01), number(1.0), number(0.83251, share=False), number(0.5, share=False)
    ('0.389 %', '1 %', '100 %', '0.833', '0.5')
    """
    if not math.isfinite(value):
        return str(value)
    return f"{_up(100 * value):.6g} %" if share else f"{_up(value):.6g}"


def points_of_100(value: float) -> str:
    """A change of accuracy, rounded up.

    >>> points_of_100(0.012341), points_of_100(-0.012349)
    ('1.24 points, of 100', '-1.23 points, of 100')
    """
    return f"{_up(100 * value):.6g} points, of 100"


def at_least(value: float) -> str:
    """A confidence, or another share that holds at least: rounded down, by rounding up what is missing.

    >>> at_least(0.95), at_least(1 - 0.05 / 3), at_least(0.99999)
    ('95 %', '98.33 %', '99.999 %')
    """
    return f"{100 * (1 - _up(1 - value)):.15g} %"


def percent(value: float) -> str:
    """A share that was counted or asked for, to the nearest.

    >>> percent(0.95), percent(0.0062), percent(0.98333)
    ('95 %', '0.62 %', '98.33 %')
    """
    return f"{100 * value:.4g} %"


def _up(x: float) -> float:
    """x rounded up to three digits (to nothing above it, where it has no more)."""
    if abs(x) < 1e-300:  # 0, and what has no three digits
        return x
    step = 10.0 ** (math.floor(math.log10(abs(x))) - 2)
    return math.ceil(x / step - 1e-9) * step
