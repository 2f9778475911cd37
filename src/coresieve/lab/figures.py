"""The paper's figures, from stored results only: a panel for each data set and architecture, a line for each method.

    accuracy_drop   accuracy lost, in points                    the paper's Figure 1 and its appendix
    l1_error        mean over test images of ||f_hat - f||_1    the paper's Figure 2 and its appendix
    error           the same over ||f||_1, so that networks can be compared

Lines are means over networks and trials, shaded by one standard deviation; sizes are those reached.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coresieve.errors import FileError, MissingExtraError
from coresieve.lab.data import SOURCES
from coresieve.lab.page import palette
from coresieve.lab.results import Row

COLUMNS = 3  # panels side by side, where an experiment has one data set
DASHES = {"": "-", "7 3": (0, (5, 2)), "2 3": (0, (1.5, 2)), "10 4": (0, (7, 3))}
MARKS = ("o", "s", "^", "D", "v", "P", "p", "X", "*")


@dataclass(frozen=True)
class Family:
    """One measure as the paper draws it."""

    measure: str
    title: str
    axis: str
    log: bool
    scale: float = 1.0


FAMILIES = (
    Family("accuracy_drop", "Accuracy lost", "accuracy lost (points)", log=False, scale=100.0),
    Family("l1_error", "Output error", "mean ‖f̂(x) − f(x)‖₁", log=True),
    Family("error", "Output error, relative", "‖f̂ − f‖₁ / ‖f‖₁", log=True),
)


def title(dataset: str) -> str:
    return SOURCES[dataset].title if dataset in SOURCES else dataset


@dataclass(frozen=True)
class Point:
    """One method at one size."""

    keep: float
    kept: float  # reached, on average
    mean: float
    std: float
    runs: int


def lines(rows: Iterable[Row], measure: str) -> dict[tuple[str, str], dict[str, list[Point]]]:
    """{(data set, architecture): {method: points, the smallest size first}}"""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row["failed"] is None and row[measure] is not None:
            groups[row["dataset"], row["architecture"], row["method"], row["keep"]].append(row)
    found: dict[tuple[str, str], dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for (dataset, architecture, method, keep), group in sorted(groups.items(), key=lambda item: item[0][3]):
        values = [row[measure] for row in group]
        std = statistics.stdev(values) if len(values) > 1 else 0.0
        kept = statistics.fmean(row["kept"] for row in group)
        point = Point(keep, kept, statistics.fmean(values), std, len(values))
        found[dataset, architecture][method].append(point)
    return found


def draw(rows: Sequence[Row], name: str, into: Path) -> list[Path]:
    """Every family as SVG and PNG; with several data sets in rows of panels, a column for each architecture."""
    plt = _pyplot()
    if not rows:
        raise FileError(f"no results of {name}", "some cells that were measured", "coresieve lab run")
    try:
        into.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        given = f"{into} ({reason.strerror})"
        raise FileError(given, "a folder that can be written", "--out with another one") from reason
    written = []
    for family in FAMILIES:
        panels = lines(rows, family.measure)
        if not panels:
            continue
        figure = _figure(plt, family, panels, list(dict.fromkeys(row["method"] for row in rows)))
        for ending in ("svg", "png"):
            path = into / f"{name}-{family.measure.replace('_', '-')}.{ending}"
            metadata = {"Date": None} if ending == "svg" else {"Software": None}
            figure.savefig(path, metadata=metadata, dpi=130)
            written.append(path)
        plt.close(figure)
    return written


def _figure(plt: Any, family: Family, panels: dict[tuple[str, str], Any], methods: list[str]) -> Any:
    datasets, architectures = (list(dict.fromkeys(key[i] for key in panels)) for i in (0, 1))
    if len(datasets) > 1:
        across, down = len(architectures), len(datasets)
        order = [(dataset, architecture) for dataset in datasets for architecture in architectures]
    else:
        across = min(COLUMNS, len(architectures))
        down = math.ceil(len(architectures) / across)
        order = [(datasets[0], architecture) for architecture in architectures]
    figure, axes = plt.subplots(
        down, across, figsize=(3.6 * across, 2.7 * down + 0.7), squeeze=False, layout="constrained"
    )
    order_of = sorted(methods, key=_known)
    styles = palette(order_of)
    for axis, key in zip(axes.flat, order, strict=False):
        if key in panels:
            _panel(axis, family, panels[key], order_of, styles)
        axis.set_title(f"{title(key[0])}, {key[1]}", fontsize=9.5)
    for axis in axes.flat[len(order) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("parameters kept", fontsize=9)
    for row in axes:
        row[0].set_ylabel(family.axis, fontsize=9)
    handles = {h.get_label(): h for axis in axes.flat for h in axis.get_lines() if h.get_label()[0] != "_"}
    shown = [handles[method] for method in order_of if method in handles]
    figure.legend(shown, [h.get_label() for h in shown], loc="outside lower center", ncols=min(5, len(shown)),
                  frameon=False, fontsize=9)  # fmt: skip
    return figure


def _known(method: str) -> tuple[int, str]:
    from coresieve.lab.page import STYLES

    names = [name for name, *_ in STYLES]
    return (names.index(method) if method in names else len(names)), method


def _panel(
    axis: Any, family: Family, found: dict[str, list[Point]], methods: list[str], styles: dict[str, Any]
) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for index, method in enumerate(methods):
        points = found.get(method, [])
        if not points:
            continue
        x = [point.kept for point in points]
        y = [family.scale * point.mean for point in points]
        spread = [family.scale * point.std for point in points]
        style = styles[method]
        axis.plot(x, y, label=method, color=style["light"], linestyle=DASHES[style["dash"]], linewidth=1.4,
                  marker=MARKS[index % len(MARKS)], markersize=3.4, markeredgewidth=0)  # fmt: skip
        low = [max(a - s, a / 50) if family.log else a - s for a, s in zip(y, spread, strict=True)]
        axis.fill_between(
            x, low, [a + s for a, s in zip(y, spread, strict=True)], color=style["light"], alpha=0.13, lw=0
        )
    axis.set_xscale("log")
    sizes = sorted({point.keep for points in found.values() for point in points})
    ticks = [
        size for size in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if sizes[0] * 0.9 <= size <= sizes[-1] * 1.1
    ] or sizes
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    if family.log:
        axis.set_yscale("log")
    axis.grid(True, which="major", color="#e3e7ec", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as reason:
        raise MissingExtraError(
            "figures without matplotlib", "what draws them", "pip install coresieve[lab]"
        ) from reason
    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "coresieve", "svg.fonttype": "none", "font.family": "DejaVu Sans"})
    import matplotlib.pyplot as plt

    return plt
