"""The tables of docs/sieve.md, from stored results: python experiments/sieve/table.py (CORESIEVE_DATA: the sets)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from coresieve.lab.experiment import Experiment, read
from coresieve.lab.results import Store
from coresieve.terminal import share

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "sieve.md"
SETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
AIMS = {"mnist": 0.1, "fashion-mnist": 0.3, "cifar10": 1.0}  # points of accuracy that may be lost
BEGIN, END = "<!-- made by experiments/sieve/table.py: {} -->", "<!-- end -->"
OURS = "sieve without polish"

Row = dict[str, Any]
Lines = list[str]


def rows_of(name: str) -> tuple[Experiment, list[Row]]:
    """An experiment and its results that the current versions of its methods made."""
    experiment = read(HERE / f"{name}.toml")
    wanted = {cell.id for cell in experiment.cells()}
    return experiment, [r for r in Store(experiment).rows() if r["id"] in wanted and r["failed"] is None]


def grid(rows: Iterable[Row], value: str) -> dict[tuple[str, float], float]:
    """Means over architectures of the means over draws."""
    found = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["method"], row["keep"]][row["architecture"], row["network"]].append(row[value])
    return {cell: statistics.fmean(map(statistics.fmean, found[cell].values())) for cell in found}


def table(
    head: str, columns: list[str], lines: dict[str, list[float | None]], show: Callable[[float], str]
) -> Lines:
    """The best of each column, the smallest, stands out."""
    best = [
        min((x for x in column if x is not None), default=None)
        for column in zip(*lines.values(), strict=True)
    ]
    out = [f"| {head} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, values in lines.items():
        told = [
            "" if x is None else f"**{show(x)}**" if x == b else show(x)
            for x, b in zip(values, best, strict=True)
        ]
        out.append(f"| {name} | {' | '.join(told)} |")
    return [*out, ""]


def of_a_set(name: str) -> Lines:
    experiment, rows = rows_of(f"sieve-{name}")
    if not rows:
        return [f"## {SETS[name]}", "", "Not measured yet.", ""]
    methods, keeps = [c.told for c in experiment.choices], sorted(experiment.sizes, reverse=True)
    done = sorted({r["architecture"] for r in rows})
    out = [
        f"## {SETS[name]}",
        "",
        f"Means over {', '.join(done)}, one network of each, 3 draws where a method draws.",
    ]
    missing = sum(1 for _ in experiment.cells()) - len(rows)
    out += [f"**{missing} cells are not measured yet.**"] * (missing > 0) + [""]
    measures: list[tuple[str, str, Callable[[float], str]]] = [
        ("accuracy lost, points", "accuracy_drop", lambda x: f"{100 * x:.2f}"),
        ("predictions changed, %", "flips", lambda x: f"{100 * x:.2f}"),
        ("relative output error", "error", lambda x: f"{x:.3f}"),
        ("seconds, one core", "seconds", lambda x: f"{x:.1f}"),
    ]
    for head, value, show in measures:
        found = grid(rows, value)
        lines = {m: [found.get((m, k)) for k in keeps] for m in methods}
        out += table(head, [share(k) for k in keeps], lines, show)
    return out + against_the_next(grid(rows, "error"), methods, keeps)


def against_the_next(errors: dict[tuple[str, float], float], methods: list[str], keeps: list[float]) -> Lines:
    ratios = []
    for keep in keeps:
        others = [errors[m, keep] for m in methods if m not in ("sieve", OURS) and (m, keep) in errors]
        if (OURS, keep) in errors and others:
            ratios.append((errors[OURS, keep] / min(others), keep))
    if not ratios:
        return []
    most, where = max(ratios)
    return [f"Output error without polish, over that of the next best method: {min(ratios)[0]:.2f} to {most:.2f} "
            f"(the most at {share(where)}).", ""]  # fmt: skip


def without_labels() -> Lines:
    out = ["| | kept | aim | accuracy lost, points | mean |", "|---|---|---|---|---|"]
    for name, title in SETS.items():
        experiment, rows = rows_of(f"unlabelled-{name}")
        keep = share(experiment.sizes[0])
        lost = {
            a: [100 * r["accuracy_drop"] for r in rows if r["architecture"] == a]
            for a in experiment.architectures
        }
        told = ", ".join(f"{a} {statistics.fmean(x):.2f}" for a, x in lost.items() if x) or "not measured yet"
        whole = all(lost.values())
        mean = f"**{statistics.fmean(map(statistics.fmean, lost.values())):.2f}**" if whole else ""
        out.append(f"| {title} | {keep} | {AIMS[name]:g} | {told} | {mean} |")
    return [*out, ""]


def ablations() -> Lines:
    experiment, rows = rows_of("ablations")
    if not rows:
        return ["Not measured yet.", ""]
    out: Lines = []
    columns = [(d, k) for d in experiment.datasets for k in sorted(experiment.sizes, reverse=True)]
    for head, value, scale in (
        ("relative output error", "error", 1),
        ("predictions changed, %", "flips", 100),
    ):
        at = {(r["method"], r["dataset"], r["keep"]): r[value] * scale for r in rows}
        out += [f"| {head} | {' | '.join(f'{SETS[d]} {share(k)}' for d, k in columns)} |",
                "|---" * (len(columns) + 1) + "|"]  # fmt: skip
        for choice in experiment.choices:
            told = [at.get((choice.told, d, k)) for d, k in columns]
            shown = " | ".join("" if x is None else f"{x:.3f}" if scale == 1 else f"{x:.2f}" for x in told)
            out.append(f"| {choice.told} | {shown} |")
        out.append("")
    return out


def main() -> None:
    parts = {"unlabelled": without_labels(), "ablations": ablations()}
    parts["sets"] = [line for name in SETS for line in of_a_set(name)]
    page = PAGE.read_text()
    for part, lines in parts.items():
        begin = BEGIN.format(part)
        before, rest = page.split(begin)
        page = before + begin + "\n\n" + "\n".join(lines) + "\n" + END + rest.split(END, 1)[1]
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
