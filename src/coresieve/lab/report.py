"""One page, and one chapter of docs, from the stored results of an experiment; nothing is computed but means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coresieve.errors import FileError
from coresieve.lab import claims, page
from coresieve.lab.compare import summary
from coresieve.lab.experiment import Experiment, read
from coresieve.lab.figures import title
from coresieve.lab.results import Row, Store, answers

_SHADED = "mean over networks and draws, shaded by one standard deviation"
FIGURES = (
    page.Figure("accuracy_drop", "Accuracy lost", f"Points of accuracy, of 100; {_SHADED}", percent=True),
    page.Figure("error", "Output error", f"‖f̂(x) − f(x)‖₁ / ‖f(x)‖₁, log scale; {_SHADED}", log=True),
    page.Figure("flips", "Predictions that change", f"Share of test images, in %; {_SHADED}", percent=True),
)


def write(
    experiment: Experiment, rows: Sequence[Row], older: int, made: dict[str, str], file: Path, out: Path
) -> None:
    """The page of an experiment; `made` is the environment that made its results."""
    if not rows:
        raise FileError(
            f"no results of {experiment.name}", "some cells that were measured", f"coresieve lab run {file}"
        )
    sections = []
    for dataset, architecture in dict.fromkeys((row["dataset"], row["architecture"]) for row in rows):
        here = [row for row in rows if (row["dataset"], row["architecture"]) == (dataset, architecture)]
        sections.append(page.Section(FIGURES, summary(here), f"{title(dataset)}, {architecture}"))
    failed = sum(row["failed"] is not None for row in rows)
    facts = [
        ("results", f"{len(rows):,}"), ("failed", f"{failed:,}"),
        ("networks", f"{len({row['network_id'] for row in rows})}"), ("draws of a size", f"up to {experiment.trials}"),
    ]  # fmt: skip
    text = page.render(
        sections,
        title=experiment.title,
        lead=f"{len(experiment.choices)} methods at {len(experiment.sizes)} sizes, judged on test images that neither "
        "trained nor calibrated.",
        facts=facts,
        notes=_notes(older, len(rows)),
        command=f"coresieve lab run {file}\ncoresieve lab report {file}",
        versions=list(made.items()),
        grid=_verdicts(rows) if {"corenet++", "uniform"} <= {row["method"] for row in rows} else None,
    )
    page.write(out, text)


def _verdicts(rows: Sequence[Row]) -> page.Grid:
    judged = [v for v in claims.verdicts(rows, []) if v.verdict != claims.UNKNOWN]
    return page.Grid(
        "The paper's claims",
        ("the paper says", "measured", "verdict"),
        [(v.claim, v.measured, v.verdict) for v in judged],
    )


def _notes(older: int, count: int) -> list[str]:
    notes = [
        "Size is the share of non-zero parameters kept, biases counted (svd: entries of its two factors). Points "
        "stand at the size reached.",
        "Methods saw the trained weights and 5,000 images that trained nothing, without labels.",
        "A marked cell is the best of its column. A mean without a spread has one network and one draw.",
    ]
    return notes + [f"{older:,} of {count:,} results were made by an earlier version of a method."] * (
        older > 0
    )


def gathered(
    file: Path, also: Sequence[Path], retrained: Sequence[Path], results: Path
) -> tuple[list[Row], list[Row], list[Row], int, str]:
    """The rows of a sweep, of further ones and of those with retraining; how many another version made; the commands
    that remake them."""
    older = 0

    def rows(paths: Sequence[Path]) -> list[Row]:
        nonlocal older
        every: list[Row] = []
        for found in map(read, paths):
            here, stale = answers(found, Store(found, results).rows())
            every += here
            older += stale
        return every

    commands = [f"coresieve lab run {path}" for path in (file, *also, *retrained)]
    commands += [f"coresieve lab figures {file}", f"coresieve lab claims {file}"]
    return rows([file]), rows(also), rows(retrained), older, "\n".join(commands)


def write_claims(
    judged: Sequence[claims.Verdict], sweep: Sequence[Row], older: int, command: str, name: str, out: Path
) -> None:
    """docs/reproduction.md."""
    measured = [row for row in sweep if row["failed"] is None]
    networks = len({row["network_id"] for row in measured})
    lines = [
        "# What of the paper holds",
        "",
        "Written by `coresieve lab claims` from the results in `experiments/results`; do not edit it by hand.",
        "",
        f"{len(measured):,} small networks of {networks} trained ones were measured on all test images; 5,000 of the "
        "training images, which trained nothing, calibrated. The paper gives no number for \"without significant "
        f"loss\": here it is {100 * claims.SIGNIFICANT:g} point of accuracy on average. Nothing was retrained unless "
        "the line says so.",
        *["", f"**{older:,} of these results were made by an earlier version of a method.**"] * (older > 0),
        "",
        *claims.table(judged),
        "",
        "## How each is judged",
        "",
        *(f"- {rule}" for rule in claims.RULES),
        "",
        "## Accuracy lost, in points",
        "",
        "Means over architectures, networks and draws; the figures show each architecture.",
        *claims.losses(sweep),
        "",
        "## Figures",
        "",
        *(f"![{alt}](figures/{name}-{measure}.svg)\n" for measure, alt in (
            ("accuracy-drop", "accuracy lost against size"), ("l1-error", "l1 error against size"),
            ("error", "relative error against size"))),
        "## Make it again",
        "",
        "```",
        "export CORESIEVE_DATA=<folder with mnist/, fashion-mnist/ and cifar10/>",
        *command.splitlines(),
        "```",
        "",
    ]  # fmt: skip
    page.write(out, "\n".join(lines))
