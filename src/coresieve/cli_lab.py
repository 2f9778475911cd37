"""The commands of the lab: data sets, and experiments from plan to page.

coresieve data list
coresieve lab plan    experiments/paper/reduced.toml
coresieve lab run     experiments/paper/reduced.toml
coresieve lab figures experiments/paper/reduced.toml
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from coresieve.cli_arguments import Json
from coresieve.terminal import escape, print_json, progress, say, size_of, table

data_app = App(
    name="data", sort_key=9, help="The image sets of the experiments: MNIST, Fashion-MNIST, CIFAR-10, digits."
)
lab_app = App(name="lab", sort_key=8, help="The paper's experiments: plan, run, draw and judge them.")

File = Annotated[Path, Parameter(help="The experiment, a TOML file.")]
Results = Annotated[Path, Parameter(help="Folder of the results.")]
Networks = Annotated[Path, Parameter(help="Folder of the trained networks.")]
RESULTS, NETWORKS = Path("experiments/results"), Path("out/networks")


@data_app.command(name="list")
def list_(*, json: Json = False) -> None:
    """Tell which sets are here, and where."""
    with progress() as bar:
        bar.step("looking")
        from coresieve.lab import data

        found, folder = data.listed(), str(data.folder())
    if json:
        print_json({"folder": folder, "sets": found})
        return
    answer = table(["set", "images", "format"])
    answer.add_column("where", justify="left", overflow="fold")
    for line in found:
        missing = "[yellow]missing[/]" if line["format"] is None else line["format"]
        answer.add_row(line["name"], f"{line['images']:,}", missing, escape(line["folder"] or ""))
    say(answer)
    say(f"Looked below {escape(folder)} (CORESIEVE_DATA names another folder).")


@data_app.command
def fetch(name: str, /, *, into: Path | None = None, json: Json = False) -> None:
    """Download a set from its usual public home, resumed where it stopped and checked.

    Parameters
    ----------
    name
        mnist, fashion-mnist or cifar10.
    into
        Folder of the data sets [default: CORESIEVE_DATA, or the user's cache].
    """
    with progress() as bar:
        bar.step("connecting")
        from coresieve.lab import fetch as downloads

        last: list[str] = []

        def tick(file: str, have: int, of: int | None) -> None:
            if last != [file]:
                bar.step(f"{file}", total=of)
                last[:] = [file]
            bar.reach(have)

        place = downloads.fetch(name, into, tick)
    if json:
        print_json({"name": name, "folder": str(place)})
        return
    say(f"{name} is in {escape(str(place))}")


@lab_app.command
def plan(
    file: File, /, *, results: Results = RESULTS, networks: Networks = NETWORKS, json: Json = False
) -> None:
    """Tell what there is to do, and about how many core-hours it takes on this machine."""
    with progress() as bar:
        bar.step("reading the experiment")
        from dataclasses import asdict

        from coresieve.lab.experiment import read
        from coresieve.lab.plan import plan as planned
        from coresieve.lab.results import Store

        experiment = read(file)
        bar.step("counting")
        found = planned(experiment, Store(experiment, results), networks)
    if json:
        print_json({"experiment": experiment.name} | asdict(found) | {"core_hours": found.core_hours})
        return
    say(f"[bold]{escape(experiment.title)}[/]")
    say(f"networks  {found.networks:,}, of which {found.trained:,} are trained")
    say(f"cells     {found.cells:,}, of which {found.stored:,} are stored")
    parts = (("training", found.training), ("judging", found.judging), ("drawing", found.drawing),
             ("retraining", found.retraining))  # fmt: skip
    told = ", ".join(f"{name} {hours:.2g}" for name, hours in parts if hours)
    say(f"left      about {found.core_hours:.2g} core-hours" + (f" ({told})" if told else ""))


@lab_app.command
def run(
    file: File,
    /,
    *,
    scheduler: str | None = None,
    workers: Annotated[int, Parameter(validator=Number(gte=1))] | None = None,
    results: Results = RESULTS,
    networks: Networks = NETWORKS,
    json: Json = False,
) -> int:
    """Fill the gaps of an experiment: train what is not trained, measure what is not measured.

    Ctrl-C stops it; run it again and it goes on. Results are written one by one and never changed.

    Parameters
    ----------
    scheduler
        Address of a dask scheduler, tcp://host:8786 [default: a cluster on this machine].
    workers
        Processes of the local cluster [default: one a core].
    """
    from coresieve.lab.watch import watched

    with watched() as watch:
        from coresieve.lab.experiment import read
        from coresieve.lab.results import Store
        from coresieve.lab.run import Progress, Run, cluster

        experiment = read(file)
        state = Progress(watch=watch)
        store = Store(experiment, results)
        interrupted = False
        try:
            with cluster(scheduler, workers) as client:
                Run(client, experiment, store, networks, state).run()
        except KeyboardInterrupt:
            interrupted = True
    if json:
        told = {
            "cells": state.total,
            "stored": state.done,
            "failed": state.failed,
            "interrupted": interrupted,
        }
        print_json({"experiment": experiment.name} | told)
    else:
        say(f"{state.done:,} of {state.total:,} cells are stored, {state.before:,} of them by earlier runs; "
            f"{state.failed:,} failed now. They are in {escape(str(store.folder))}")  # fmt: skip
        if interrupted:
            say("Interrupted: run it again and it goes on from here.")
    return 130 if interrupted else 0


@lab_app.command
def pack(file: File, /, *, results: Results = RESULTS) -> None:
    """Put an experiment's results into one small file, to be committed."""
    with progress() as bar:
        bar.step("packing")
        from coresieve.lab.experiment import read
        from coresieve.lab.results import Store

        store = Store(read(file), results)
        count = store.pack()
    if not count:
        say(f"No results in {escape(str(store.folder))}")
        return
    say(f"{count:,} results in {escape(str(store.packed))} ({size_of(store.packed.stat().st_size)})")


@lab_app.command
def figures(
    file: File, /, *, results: Results = RESULTS, out: Path = Path("docs/figures"), json: Json = False
) -> None:
    """Draw the paper's figures from stored results: SVG and PNG."""
    with progress() as bar:
        bar.step("drawing")
        from coresieve.lab import figures as drawing
        from coresieve.lab.experiment import read
        from coresieve.lab.results import Store, answers

        experiment = read(file)
        rows, older = answers(experiment, Store(experiment, results).rows())
        written = drawing.draw(rows, experiment.name, out)
    if json:
        print_json({"results": len(rows), "older": older, "files": [str(path) for path in written]})
        return
    for path in written:
        say(escape(str(path)))
    _tell_older(older, len(rows))


@lab_app.command
def report(
    file: File, /, *, results: Results = RESULTS, out: Path = Path("out/report.html"), json: Json = False
) -> None:
    """Write one page with every figure and table of an experiment, from stored results."""
    with progress() as bar:
        bar.step("writing")
        from coresieve.lab.experiment import read
        from coresieve.lab.report import write
        from coresieve.lab.results import Store, answers

        experiment = read(file)
        store = Store(experiment, results)
        rows, older = answers(experiment, store.rows())
        write(experiment, rows, older, store.environment(), file, out)
    if json:
        print_json({"results": len(rows), "older": older, "page": str(out)})
        return
    say(f"{escape(str(out))}: {len(rows):,} results")
    _tell_older(older, len(rows))


@lab_app.command
def claims(
    file: File, /, *, also: list[Path] | None = None, retrained: list[Path] | None = None, results: Results = RESULTS,
    out: Path = Path("docs/reproduction.md"), json: Json = False,
) -> None:  # fmt: skip
    """Hold the paper's claims against stored results, and write the verdicts down.

    Parameters
    ----------
    also
        Further experiments whose sizes count; may be repeated [default: amplified*.toml beside FILE].
    retrained
        Experiments with retraining; may be repeated [default: retrained-*.toml beside FILE].
    """
    with progress() as bar:
        bar.step("judging")
        from dataclasses import asdict

        from coresieve.lab import report as lab
        from coresieve.lab.claims import verdicts

        also = also or sorted(file.parent.glob("amplified*.toml"))
        retrained = retrained or sorted(file.parent.glob("retrained-*.toml"))
        sweep, more, after, older, command = lab.gathered(file, also, retrained, results)
        judged = verdicts([*sweep, *more], after)
        lab.write_claims(judged, sweep, older, command, file.stem, out)
    if json:
        print_json([asdict(verdict) for verdict in judged])
        return
    answer = table(["claim"])
    answer.columns[0].no_wrap = False
    answer.add_column("verdict", justify="left", no_wrap=True)
    for verdict in judged:
        answer.add_row(escape(verdict.claim), verdict.verdict)
    say(answer)
    say(f"Written to {escape(str(out))}")
    _tell_older(older, len(sweep) + len(more) + len(after))


def _tell_older(older: int, count: int) -> None:
    if older:
        say(
            f"[yellow]{older:,} of {count:,} were made by another version of a method; lab run makes them anew.[/]"
        )
