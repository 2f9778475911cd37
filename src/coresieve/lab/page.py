"""One HTML page of curves and tables, whole in itself: no script, font or picture from elsewhere.

Geometry is worked out here, in plain floats; how it looks is `page.html.j2`. The page holds no date and no
time taken, so the same command gives the same page.

>>> log_ticks(0.03, 1.2)
[0.05, 0.1, 0.2, 0.5, 1.0]
>>> spaced([10.0, 11.0, 50.0], gap=8.0, low=0.0, high=100.0)
[6.5, 14.5, 50.0]
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coresieve.errors import FileError, MissingExtraError
from coresieve.terminal import share

Entry = dict[str, Any]  # one line of `compare.summary`

WIDTH, HEIGHT = 920, 440
LEFT, RIGHT, TOP, BOTTOM = 60, 806, 16, 392  # the plot's frame; the names stand right of it

# One hue for each family of methods, so that the eye sorts them before it reads; markers and dashes tell the
# members apart without colour. (name, on white, on black, dashes)
STYLES = (
    ("sieve", "#b91c1c", "#ff6b6b", ""),
    ("sparsegpt", "#0f766e", "#5eead4", "7 3"),
    ("wanda", "#5b8c00", "#a3d94a", "2 3"),
    ("corenet++", "#0b4a9e", "#9ccbff", ""),
    ("corenet+", "#2680d9", "#5aa5f5", "7 3"),
    ("corenet", "#6fb1ee", "#3478c4", "2 3"),
    ("uniform", "#6b7280", "#9aa4b2", ""),
    ("l1", "#9a3412", "#f08a5d", ""),
    ("l2", "#e07b00", "#ffb454", "7 3"),
    ("l1l2", "#b99300", "#e8d44d", "2 3"),
    ("svd", "#a21caf", "#e58bf0", ""),
    ("magnitude", "#047857", "#3fd19b", ""),
)
SPARE = (("#4338ca", "#a5a0ff"), ("#be185d", "#f9a8d4"), ("#1f2937", "#e5e7eb"))
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",  # circle
    "M-3.6 -3.6h7.2v7.2h-7.2z",  # square
    "M0 -4.8L4.6 3.4h-9.2z",  # triangle
    "M0 -5L5 0L0 5L-5 0z",  # diamond
    "M0 4.8L4.6 -3.4h-9.2z",  # triangle, point down
    "M-1.4 -4.6h2.8v3.2h3.2v2.8h-3.2v3.2h-2.8v-3.2h-3.2v-2.8h3.2z",  # plus
    "M0 -5L4.8 -1.5L3 4H-3L-4.8 -1.5z",  # pentagon
    "M-5 -4.6L5 4.6V-4.6L-5 4.6z",  # bow
    "M0 -6.4L2 -2L6.4 0L2 2L0 6.4L-2 2L-6.4 0L-2 -2z",  # star
    "M-4.6 -3.2L0 1.4L4.6 -3.2V0L0 4.6L-4.6 0z",  # chevron
    "M-4 -4L4 4M4 -4L-4 4M-4.6 -1h9.2v2h-9.2z",  # bar
    "M-2.2 -5h4.4v10h-4.4z",  # post
)


@dataclass(frozen=True)
class Figure:
    """One measure against size. `reference` is the original network's value, drawn as a dashed line."""

    measure: str
    title: str
    axis: str
    percent: bool = False
    log: bool = False
    higher_is_better: bool = False
    reference: float | None = None


@dataclass(frozen=True)
class Section:
    """Figures of the same entries, under a heading of their own where there are several sections."""

    figures: Sequence[Figure]
    entries: Sequence[Entry]
    title: str = ""


@dataclass(frozen=True)
class Grid:
    """A table of words, above the figures."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def render(
    sections: Sequence[Section],
    *,
    title: str,
    lead: str,
    facts: Sequence[tuple[str, str]],
    notes: Sequence[str],
    command: str,
    versions: Sequence[tuple[str, str]],
    grid: Grid | None = None,
) -> str:
    """The page as text."""
    styles = palette([entry["method"] for section in sections for entry in section.entries])
    parts = [(section, [drawn(f, section.entries, styles) for f in section.figures]) for section in sections]
    return template("page.html.j2").render(
        title=title,
        lead=lead,
        facts=facts,
        notes=notes,
        command=command,
        versions=versions,
        styles=styles,
        parts=parts,
        hover=[figure["hover"] for _, figures in parts for figure in figures],
        grid=grid,
        frame={"w": WIDTH, "h": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
    )


def template(name: str) -> Any:
    """One of the files beside this one; `look.css.j2` is what all pages look like."""
    require_jinja2()
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("coresieve.lab", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["share"] = share
    return environment.get_template(name)


def require_jinja2() -> None:
    try:
        import jinja2  # noqa: F401
    except ImportError as reason:
        raise MissingExtraError(
            "a page without jinja2", "the template engine", "pip install coresieve[lab]"
        ) from reason


def write(path: Path, text: str) -> None:
    """All of the page or none of it: a reader never meets half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as reason:
        hint = "another folder, or its permissions"
        raise FileError(f"{path} ({reason.strerror})", "a file that can be written", hint) from reason
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def palette(methods: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colours, dashes and marker of each method; a method without a style of its own takes a spare one."""
    known = {name: (light, dark, dash) for name, light, dark, dash in STYLES}
    answer: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys(methods):
        spare = SPARE[len(answer) % len(SPARE)]
        light, dark, dash = known.get(name, (*spare, "10 4"))
        marker = list(known).index(name) if name in known else len(answer)
        answer[name] = {
            "id": f"m{len(answer)}",
            "light": light,
            "dark": dark,
            "dash": dash,
            "marker": MARKERS[marker % len(MARKERS)],
        }
    return answer


def drawn(figure: Figure, entries: Sequence[Entry], styles: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Everything the template needs to draw one figure and the table under it."""
    seen = [entry for entry in entries if _plottable(entry, figure)]
    if not seen:
        return {
            "figure": figure,
            "lines": [],
            "x_ticks": [],
            "y_ticks": [],
            "reference": None,
            "hover": [],
        } | ({"table": table(figure, entries)})
    x, y = _axes(figure, seen)
    lines = [_line(figure, name, [e for e in seen if e["method"] == name], x, y) for name in styles]
    lines = [line for line in lines if line["points"]]
    reference = None if figure.reference is None else y(figure.reference)
    ends = [line["end"] for line in lines] + ([] if reference is None else [reference])
    places = [round(place, 1) for place in spaced(ends, gap=17, low=TOP, high=BOTTOM)]
    for line, place in zip(lines, places, strict=False):
        line["label_y"] = place
    keeps = sorted({entry["keep"] for entry in seen}, reverse=True)
    span = _y_span(figure, seen)
    ticks = log_ticks(*span) if figure.log else linear_ticks(*span)
    return {
        "figure": figure,
        "lines": lines,
        "x_ticks": [(round(x(keep), 1), share(keep)) for keep in keeps],
        "y_ticks": [(round(y(tick), 1), _tick(figure, tick)) for tick in ticks],
        "reference": None if reference is None else (round(reference, 1), places[-1]),
        "hover": [
            {"x": round(x(keep), 1), "keep": share(keep), "rows": _hover(figure, seen, keep)}
            for keep in keeps
        ],
        "table": table(figure, entries),
    }


def _plottable(entry: Entry, figure: Figure) -> bool:
    value = entry[figure.measure]
    return value is not None and math.isfinite(value) and (value > 0 or not figure.log)


def _line(
    figure: Figure,
    name: str,
    entries: Sequence[Entry],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> dict[str, Any]:
    entries = sorted(entries, key=lambda entry: -entry["keep"])
    middle = [(x(e["kept"] or e["keep"]), y(e[figure.measure])) for e in entries]
    spreads = [e[f"{figure.measure}_std"] or 0.0 for e in entries]
    over = [(px, y(e[figure.measure] + s)) for (px, _), e, s in zip(middle, entries, spreads, strict=True)]
    under = [(px, y(e[figure.measure] - s)) for (px, _), e, s in zip(middle, entries, spreads, strict=True)]
    return {
        "name": name,
        "points": [(round(px, 1), round(py, 1)) for px, py in middle],
        "path": _path(middle),
        "band": _path([*over, *reversed(under)]) + "Z" if any(spreads) else None,
        "end": middle[-1][1] if middle else 0.0,
    }


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in points) if points else ""


def _axes(
    figure: Figure, entries: Sequence[Entry]
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Size on a log axis that shrinks to the right, as the networks do; values clipped to the frame."""
    sizes = [entry["keep"] for entry in entries]
    big, little = math.log(max(sizes)), math.log(min(sizes))
    width = (big - little) or 1.0
    pad = 14
    low, high = _y_span(figure, entries)
    turn = math.log if figure.log else float

    def x(keep: float) -> float:
        return LEFT + pad + (RIGHT - LEFT - 2 * pad) * (big - math.log(keep)) / width

    def y(value: float) -> float:
        value = min(max(value, low), high)
        return BOTTOM - (BOTTOM - TOP) * (turn(value) - turn(low)) / (turn(high) - turn(low))

    return x, y


def _y_span(figure: Figure, entries: Sequence[Entry]) -> tuple[float, float]:
    values = [entry[figure.measure] for entry in entries]
    values += [] if figure.reference is None else [figure.reference]
    low, high = min(values), max(values)
    if figure.log:
        return low / 1.25, high * 1.25
    if figure.percent:  # whole tens, and never beyond what a share can be
        return math.floor(low * 10) / 10, min(1.0, math.floor(high * 10) / 10 + 0.1)
    room = 0.05 * (high - low) or 1.0
    return low - room, high + room


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times the powers of ten between low and high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        tick for power in powers for tick in (float(f"{d}e{power}") for d in (1, 2, 5)) if low <= tick <= high
    ]


def linear_ticks(low: float, high: float) -> list[float]:
    """
    >>> linear_ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * d for d in (1, 2, 5, 10) if power * d >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def spaced(wanted: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Places at least `gap` apart, in the same order, as near to those wanted as that allows."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[tuple[float, list[int]]] = []  # (centre, members): neighbours that touch move as one
    for i in order:
        centre, members = wanted[i], [i]
        while groups and groups[-1][0] + gap * len(groups[-1][1]) / 2 > centre - gap * len(members) / 2:
            _, before = groups.pop()
            members = before + members
            centre = sum(wanted[j] for j in members) / len(members)
            half = gap * (len(members) - 1) / 2
            centre = min(max(centre, low + half), high - half)
        groups.append((centre, members))
    answer = [0.0] * len(wanted)
    for centre, members in groups:
        for position, i in enumerate(members):
            answer[i] = centre + gap * (position - (len(members) - 1) / 2)
    return answer


def table(figure: Figure, entries: Sequence[Entry]) -> dict[str, Any]:
    """Methods down, sizes across; the best of each size is marked."""
    keeps = sorted({entry["keep"] for entry in entries}, reverse=True)
    methods = list(dict.fromkeys(entry["method"] for entry in entries))
    at = {(entry["method"], entry["keep"]): entry for entry in entries}
    best = {keep: _best(figure, [at[m, keep] for m in methods if (m, keep) in at]) for keep in keeps}
    rows = []
    for method in methods:
        found = [(keep, at.get((method, keep))) for keep in keeps]
        rows.append(
            (
                method,
                [_cell(figure, entry, entry is not None and entry is best[keep]) for keep, entry in found],
            )
        )
    return {"keeps": keeps, "rows": rows}


def _best(figure: Figure, entries: Sequence[Entry]) -> Entry | None:
    seen = [entry for entry in entries if entry[figure.measure] is not None]
    pick = max if figure.higher_is_better else min
    return pick(seen, key=lambda entry: entry[figure.measure]) if seen else None


def _cell(figure: Figure, entry: Entry | None, best: bool) -> dict[str, Any]:
    if entry is None or entry[figure.measure] is None:
        return {"mean": "–", "std": "", "best": False, "why": (entry or {}).get("failed") or ""}
    std = entry[f"{figure.measure}_std"]
    return {
        "mean": _number(figure, entry[figure.measure]),
        "std": "" if std is None else f"±{_number(figure, std)}",
        "best": best,
        "why": "",
    }


def _hover(figure: Figure, entries: Sequence[Entry], keep: float) -> list[list[str]]:
    """The lines of the box beside the pointer, best first."""
    here = [entry for entry in entries if entry["keep"] == keep]
    here.sort(key=lambda entry: entry[figure.measure], reverse=figure.higher_is_better)
    cells = [(entry["method"], _cell(figure, entry, False)) for entry in here]
    return [[method, cell["mean"], cell["std"]] for method, cell in cells]


def _number(figure: Figure, value: float) -> str:
    return f"{100 * value:.1f}" if figure.percent else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _tick(figure: Figure, value: float) -> str:
    return share(value) if figure.percent else f"{value:.4g}"
