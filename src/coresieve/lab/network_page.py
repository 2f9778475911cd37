"""One HTML page of one small network: its bytes, how it runs, what each layer lost, what is certified of it.

`coresieve inspect FILE --page out.html` writes it, and `coresieve bench ORIGINAL FILE --page out.html` with times.
Lengths of bars are worked out here, in per cent of the longest; how they look is `network.html.j2`. Nothing is
computed of the network but the bounds of its tensors (`compact/bounds.py`).

>>> bar("after", 50, 200, "50 B").parts
(Piece(kind='after', start=0.0, width=25.0),)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coresieve import __version__
from coresieve.certificate import Certificate, Claim, at_least, number, percent
from coresieve.compact.bounds import WIDTHS
from coresieve.errors import FileError
from coresieve.lab import page
from coresieve.lab.sizes import Layer, by_layer, weighed
from coresieve.report import Report, gathered
from coresieve.sparse import Acceleration, _cell
from coresieve.terminal import size_of

KINDS = {  # of bytes, in the order in which they are stacked
    "positions": "positions: which entries are there",
    "values": "values, coded",
    "plain": "values, as they are",
    "header": "header: report, certificate, names",
}
WAYS = {"original": "original", "compressed": "as it is", "accelerated": "accelerated"}
TIMED = (
    'The networks took turns, with the same threads. Times are medians; "times faster" is the median of the turns\' '
    "ratios. A bar of time is as long as that ratio says, and the line at its end spans the quartiles. Only ratios "
    "carry over to another machine."
)
UNTIMED = (
    "Before: the original's weights at their full size, of the type in the file; its own file is not at hand."
)


@dataclass(frozen=True)
class Piece:
    """A part of a bar, in per cent of the longest."""

    kind: str
    start: float
    width: float


@dataclass(frozen=True)
class Bar:
    """A line of a chart. `spread`: from where to where the end may be, in per cent as well."""

    label: str
    parts: tuple[Piece, ...]
    told: str
    note: str = ""
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class Timing:
    """What bench found. `sizes`: {what: (bytes of the original, of the small network)}."""

    rows: Sequence[dict[str, Any]]
    sizes: dict[str, Sequence[int]]
    threads: int
    verdict: str
    acceleration: Acceleration | None = None


def check(path: Path) -> None:
    """Before any work: that a page can be made, under a name that no network has."""
    page.require_jinja2()
    if path.suffix.lower() not in (".html", ".htm"):
        raise FileError(
            f"--page {path}", "a name that ends in .html", f"--page {path.with_suffix('.html').name}"
        )
    if path.is_dir():
        raise FileError(f"--page {path} is a folder", "a file", f"--page {path / 'small.html'}")


def write(
    out: Path,
    file: Path,
    command: str,
    *,
    report: Report | None,
    certificate: Certificate | None,
    timing: Timing | None = None,
) -> None:
    page.write(out, render(file, command, report=report, certificate=certificate, timing=timing))


def render(
    file: Path,
    command: str,
    *,
    report: Report | None,
    certificate: Certificate | None,
    timing: Timing | None = None,
) -> str:
    """The page as text."""
    rounding = "" if report is None else report.rounding
    layers = by_layer(weighed(file, rounding), [] if report is None else report.layers)
    size = file.stat().st_size
    told = report is not None and bool(report.layers)
    before = timing.sizes["file"][0] if timing else sum(layer.before or 0 for layer in layers)
    bound = sum(layer.bound for layer in layers)
    return page.template("network.html.j2").render(
        title=file.name,
        lead=report._title() if report is not None and told else "A network without a report.",
        verdict=timing.verdict if timing else "",
        facts=_facts(before, size, bound, certificate, timing),
        totals=_totals(before, size, bound, measured=timing is not None),
        kinds={kind: text for kind, text in KINDS.items() if kind == "header" or _sum(layers, kind)},
        went=_went(layers, size),
        bytes_table=_bytes_table(layers, size),
        timing=timing,
        latency=[] if timing is None else [_latency(row) for row in timing.rows],
        latency_table=None if timing is None else _latency_table(timing.rows),
        ways=None if timing is None or timing.acceleration is None else _ways(timing.acceleration),
        memory=[] if timing is None else _memory(timing.sizes["memory"]),
        report=report if told else None,
        report_table=_report_table(report) if report is not None and told else None,
        report_lines=[] if report is None or not told else _report_lines(report),
        certificate=certificate,
        claims=[] if certificate is None else [_claim(claim) for claim in certificate],
        a_priori=_a_priori(report if told else None, certificate),
        confidence="" if certificate is None else at_least(certificate.confidence),
        tested=None if certificate is None else _tested(certificate),
        notes=_notes(timing, rounding),
        command=command,
        version=__version__,
    )


# --- Bars ---------------------------------------------------------------------------------------------------


def bar(kind: str, value: float, longest: float, told: str, label: str = "", note: str = "") -> Bar:
    return Bar(label or kind, (Piece(kind, 0.0, _share(value, longest)),), told, note)


def _share(value: float, longest: float) -> float:
    return round(100 * min(1.0, max(0.0, value / longest)), 2) if longest > 0 else 0.0


def _totals(before: int, size: int, bound: float, *, measured: bool) -> list[Bar]:
    longest = max(before, size, bound)
    first = "file of the original" if measured else "the original's weights, dense"
    return [
        bar("before", before, longest, size_of(before), "before", first),
        bar("after", size, longest, size_of(size), "after", _of(size, before)),
        bar("bound", bound, longest, size_of(round(bound)), "bound", _of(bound, before)),
    ]


def _of(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} % of before" if whole else ""


def _sum(layers: Sequence[Layer], kind: str) -> int:
    return sum(_sizes(layer)[kind] for layer in layers)


def _sizes(layer: Layer) -> dict[str, int]:
    return {"positions": layer.positions, "values": layer.coded, "plain": layer.plain, "header": 0}


def _went(layers: Sequence[Layer], size: int) -> list[Bar]:
    header = max(0, size - sum(layer.bytes for layer in layers))
    longest = max([header, *(layer.bytes for layer in layers)])
    bars = []
    for layer in layers:
        parts, start = [], 0.0
        for kind, value in _sizes(layer).items():
            if width := _share(value, longest):
                parts.append(Piece(kind, round(start, 2), width))
                start += width
        bars.append(
            Bar(
                layer.name,
                tuple(parts),
                size_of(layer.bytes),
                _of(layer.bytes, size).replace("before", "the file"),
            )
        )
    return [
        *bars,
        bar("header", header, longest, size_of(header), note=_of(header, size).replace("before", "the file")),
    ]


def _latency(row: dict[str, Any]) -> tuple[str, list[Bar]]:
    """Of one batch size: times relative to the original's, 1 / the median ratio, with its quartiles."""
    times, faster = row["milliseconds"], {"original": (1.0, 1.0, 1.0)}
    faster |= {way: row[f"{way}_faster"] for way in WAYS if way != "original"}
    longest = max(1 / ratio for ratios in faster.values() for ratio in ratios if ratio > 0)
    bars = []
    for way, label in WAYS.items():
        low, middle, high = (1 / ratio if ratio > 0 else longest for ratio in reversed(faster[way]))
        part = Piece(way, 0.0, _share(middle, longest))
        told = f"{times[way]:.3g} ms"
        if way == "original":
            bars.append(Bar(label, (part,), told))
            continue
        note = "{1:.2f} × ({0:.2f}–{2:.2f})".format(*faster[way])
        bars.append(Bar(label, (part,), told, note, (_share(low, longest), _share(high, longest))))
    return f"batch of {row['batch']:,}", bars


def _memory(sizes: Sequence[int]) -> list[Bar]:
    before, after = sizes
    longest = max(before, after)
    return [
        bar("before", before, longest, size_of(before), "original"),
        bar(
            "after",
            after,
            longest,
            size_of(after),
            "accelerated",
            _of(after, before).replace("before", "its"),
        ),
    ]


# --- Tables and words ---------------------------------------------------------------------------------------


def _facts(
    before: int, size: int, bound: float, certificate: Certificate | None, timing: Timing | None
) -> list[tuple[str, str]]:
    facts = [
        ("bytes before", size_of(before)),
        ("bytes after", size_of(size)),
        ("bound", size_of(round(bound))),
    ]
    facts += [("times smaller", f"{before / size:.1f}")] * (before > 0 and size > 0)
    if timing is not None and timing.rows:
        best = max(timing.rows, key=lambda row: row["accelerated_faster"][1])
        facts.append((f"times faster, batch of {best['batch']}", f"{best['accelerated_faster'][1]:.1f}"))
    if certificate is not None:
        facts += [
            (f"{c.name}, at most", number(c.bound, c.share)) for c in certificate if c.bound is not None
        ][:2]
    return facts


def _bytes_table(layers: Sequence[Layer], size: int) -> page.Grid:
    """What matters most stands first: a phone shows four columns."""
    head = (
        "layer",
        "bytes",
        "bound, bits",
        "bytes / bound",
        "positions",
        "values",
        "not 0",
        "dense now",
        "before",
    )
    numbers = [
        (x.name, x.bytes, x.bound, x.positions, x.coded + x.plain, x.kept, x.dense, x.before or 0)
        for x in layers
    ]
    totals = ("all layers", *(sum(column) for column in list(zip(*numbers, strict=True))[1:]))
    rows = [
        [
            name,
            f"{stored:,}",
            f"{8 * bound:,.0f}",
            f"{stored / bound:.2f}" if bound else "",
            *(f"{n:,}" for n in rest),
        ]
        for name, stored, bound, *rest in ([*numbers, totals] if numbers else [])
    ]
    header = size - sum(layer.bytes for layer in layers)
    blank = [""] * (len(head) - 2)
    rows += [["header", f"{header:,}", *blank], ["the file", f"{size:,}", *blank]]
    return page.Grid("Bytes by layer", head, rows)


def _latency_table(rows: Sequence[dict[str, Any]]) -> page.Grid:
    head = ("batch", "original ms", "as it is ms", "accelerated ms", "times faster", "quartiles", "inputs/s before",
            "inputs/s after", "largest difference")  # fmt: skip
    lines = []
    for row in rows:
        low, middle, high = row["accelerated_faster"]
        cells = [f"{row['batch']:,}", *(f"{row['milliseconds'][way]:.3g}" for way in WAYS)]
        cells += [f"{middle:.2f}", f"{low:.2f}–{high:.2f}"]
        cells += [f"{row['per_second'][way]:,.0f}" for way in ("original", "accelerated")]
        lines.append([*cells, f"{row['largest_difference']:.1g}"])
    return page.Grid("Latency", head, lines)


def _ways(acceleration: Acceleration) -> page.Grid:
    head = ["layer", "size", "not 0", *(f"batch {n}" for n in acceleration.batches)]
    rows = [
        [
            x.name or "(model)",
            "{} x {}".format(*x.shape),
            f"{100 * x.density:.3g} %",
            *(_cell(x, n) for n in acceleration.batches),
        ]
        for x in acceleration.layers
    ]
    return page.Grid("How each layer runs", head, rows)


def _report_table(report: Report) -> page.Grid:
    columns = [column for part in report._columns() for column in part]
    rows = [[show(layer) for _, show in columns] for layer in report.layers]
    total = {
        "layer": "total",
        "before": f"{report.parameters_before:,}",
        "after": f"{report.parameters_after:,}",
        "kept": f"{100 * report.kept:.3g} %",
        "error": "" if report.error is None else f"{report.error:.3g}",
    }
    rows.append([total.get(name, "") for name, _ in columns])
    return page.Grid("Layer by layer", [name for name, _ in columns], rows)


def _report_lines(report: Report) -> list[str]:
    return [line for line in (report._measured(), report.guarantee, *gathered(report.notes)) if line]


def _claim(claim: Claim) -> dict[str, Any]:
    goal = (
        "" if claim.goal is None else (f"{100 * claim.goal:.10g} %" if claim.share else f"{claim.goal:.10g}")
    )
    small = [f"{claim.points:,} inputs", f"holds with {at_least(1 - claim.alpha)}"]
    if claim.observed is not None:
        shown = percent(claim.observed) if claim.share else f"{claim.observed:.4g}"
        small.insert(0, f"observed {shown}")
    small += [f"{what}: {many:,}" for what, many in claim.counts.items()]
    return {
        "name": claim.name,
        "bound": "nothing is claimed"
        if claim.bound is None
        else f"at most {number(claim.bound, claim.share)}",
        "vacuous": claim.says_nothing,
        "sentence": claim.sentence,
        "goal": goal,
        "met": claim.met,
        "small": small,
    }


def _a_priori(report: Report | None, certificate: Certificate | None) -> str:
    """What was known before any input was tried."""
    if certificate is not None and certificate.a_priori:
        return certificate.a_priori
    return "" if report is None else f"A priori error bound: {report.a_priori_told()}"


def _tested(certificate: Certificate) -> page.Grid | None:
    """The sizes that `smallest` tried, whatever is told of each."""
    if not certificate.tested:
        return None
    names = list(dict.fromkeys(name for line in certificate.tested for name in line))
    rows = [[_plain(line.get(name)) for name in names] for line in certificate.tested]
    return page.Grid("Sizes that were tested, in order", names, rows)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _notes(timing: Timing | None, rounding: str) -> list[str]:
    width = {"": "all bits of each value that is not 0"}
    width |= dict.fromkeys(WIDTHS, "16 bits for each value that is not 0")
    width = width.get(rounding, "the entropy of the rounded values")
    notes = [
        f"The bound is log2 of the number of ways to choose which entries are not 0, and {width}. The header is not "
        "in it, nor in bytes / bound. Values of 32 bits can be stored in less, since their exponents are "
        "alike: then the file is under it.",
        "Errors are relative, in the l1 norm, of the layer's outputs; the total is of the network's.",
    ]
    notes.insert(1, UNTIMED if timing is None else TIMED)
    return notes
