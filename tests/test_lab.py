"""Experiments: what a file may say, ids, results that stay, workers that die, and what is made of results."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distributed.client import FutureCancelledError

from coresieve import cli
from coresieve.errors import DomainError, FileError
from coresieve.lab import claims, data, experiment, figures, results, train, version, worker
from coresieve.lab.compare import MEASURES
from coresieve.lab.experiment import read
from coresieve.lab.plan import plan
from coresieve.lab.results import Store
from coresieve.lab.run import Progress, Run, cluster
from coresieve.methods import resolve
from coresieve.methods.magnitude import Magnitude

TOML = """
title = "A small one"
datasets = ["digits"]
architectures = ["2x30"]
networks = 2
epochs = 3
methods = ["corenet", "svd", {name = "corenet++", amplify = 2}]
sizes = [0.5, 0.2]
trials = 2
"""
CELLS = 2 * (2 * 2 + 2 + 2 * 2)  # networks x (corenet + svd, which draws nothing + corenet++)

DEADLY = """
import os, signal
from dataclasses import dataclass
from coresieve.methods.magnitude import Magnitude

@dataclass(frozen=True)
class Deadly(Magnitude):
    '''Kills its worker at one size, and raises at another.'''
    def compress(self, job):
        if job.budget.keep == 0.2:
            os.kill(os.getpid(), signal.SIGKILL)
        if job.budget.keep == 0.3:
            raise ZeroDivisionError("on purpose")
        super().compress(job)

METHOD = Deadly()
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """An experiment's file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(TOML)
    return path


@pytest.fixture(scope="module")
def client():
    with cluster(None, workers=2) as client:
        yield client


def run(client, path, progress=None):
    found = experiment.read(path)
    store = results.Store(found, path.parent / "results")
    Run(client, found, store, path.parent / "networks", progress or Progress()).run()
    return found, store


def measures(rows):
    """All but how long it took, by place."""
    return {results.place(row): {key: row[key] for key in MEASURES if key != "seconds"} for row in rows}


# --- Files and ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("trials", "trails"), "trails: Extra inputs"),
        (('"digits"', '"imagenet"'), "imagenet"),
        (('"2x30"', '"2by30"'), "2by30"),
        (("[0.5, 0.2]", "[0.5, 1.2]"), "sizes.1"),
        (("[0.5, 0.2]", "[0.5, 0.5]"), "listed twice"),
        (('"svd"', '"swd"'), "swd"),
        (("amplify = 2", "amplifly = 2"), "amplifly"),
        (("amplify = 2", "amplify = 0"), "amplify=0"),
        (('"svd"', '"nowhere.module:METHOD"'), "nowhere"),
        (("networks = 2", "networks = 0"), "networks"),
        (('"svd"', '{name = "corenet", rounds = 2, epochs = 1}'), "two methods called 'corenet'"),
        (('title = "A small one"', "title ="), "TOML"),
    ],
)
def test_a_file_that_says_something_else_is_refused(written, change, told):
    written.write_text(TOML.replace(*change))
    with pytest.raises(FileError, match=told):
        experiment.read(written)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileError, match="No such file"):
        experiment.read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[1].glob("experiments/**/*.toml")), ids=lambda p: p.name
)
def test_the_experiments_of_the_project_are_valid(path, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)  # where an experiment's own methods lie
    assert experiment.read(path).name == path.stem


def test_cells_are_the_product_and_their_ids_differ(written):
    found = experiment.read(written)
    cells = list(found.cells())
    assert len(cells) == CELLS
    assert len({cell.id for cell in cells}) == CELLS
    one = cells[0]
    networks = [{"network": replace(one.network, seed=9)}, {"network": replace(one.network, images="x")}]
    for change in [
        {"keep": 0.4},
        {"trial": 7},
        {"version": "x"},
        {"configuration": "x"},
        {"epochs": 1},
        *networks,
    ]:
        assert replace(one, **change).id != one.id
    assert replace(one, method="another name").id == one.id  # what it is called does not matter


def test_a_method_keeps_its_version_until_it_does_something_else(monkeypatch):
    before = version.version(resolve("magnitude"))
    assert version.version.__wrapped__(resolve("magnitude")) == before
    others = {version.version(resolve(name)) for name in ("corenet", "corenet+", "uniform", "l1", "svd")}
    assert len(others | {before}) == 6
    from coresieve.methods import magnitude

    plain = magnitude.keep_largest
    monkeypatch.setattr(magnitude, "keep_largest", lambda works, k: plain(works, k - 1))
    assert version.version.__wrapped__(resolve("magnitude")) != before


@dataclass(frozen=True)
class Broken(Magnitude):
    """A method with a mistake in it."""

    def compress(self, job):
        raise ZeroDivisionError("on purpose")


def test_a_method_that_breaks_has_a_version_so_that_its_cells_can_tell_why():
    assert version.version(Broken()) != version.version(resolve("magnitude"))


def test_no_worker_is_told_in_words(written, monkeypatch):
    """dask's own error, when all workers are gone for too long, would end the run with a traceback."""

    def scatter(*args, timeout, **kwargs):
        assert timeout >= 60  # a worker that died takes half a minute to come back where much else runs
        raise TimeoutError("No valid workers found")

    found = read(written)
    some = Run(SimpleNamespace(scatter=scatter), found, Store(found, Path("results")))
    with pytest.raises(FileError, match="no worker for"):
        some._sent(b"")


class Ended:
    """A task that is done: its answer is on a worker, and gone when that dies before it is fetched."""

    def __init__(self, answer):
        self.answer, self.status = answer, "finished"

    def result(self):
        if self.answer is None:
            self.status = "cancelled"
            raise FutureCancelledError("_measuring-1", "already forgotten")
        return self.answer


def test_an_answer_that_dies_with_its_worker_is_asked_for_again(written, monkeypatch):
    found = read(written)
    cells = list(found.cells())[:2]
    measured = dict.fromkeys(MEASURES, 0.5) | {"failed": None}
    answers = [None, [(cell.id, measured) for cell in cells]]
    client = SimpleNamespace(scatter=lambda raw, **_: raw, submit=lambda *a, **_: Ended(answers.pop(0)))
    monkeypatch.setattr("coresieve.lab.run._completed", list)
    some = Run(client, found, Store(found, Path("results")), todo={cell.id: cell for cell in cells})
    some._measure({cells[0].network.id: b""})
    assert not some.todo
    assert some.progress.failed == 0
    assert len(some.store.ids()) == 2


def test_the_plan_trains_only_networks_that_have_a_cell_to_do(written, monkeypatch):
    found = read(written)
    store = Store(found, Path("results"))
    assert plan(found, store, Path("nowhere")).training > 0
    everything = {cell.id for cell in found.cells()}
    monkeypatch.setattr(Store, "ids", lambda self: everything)
    assert plan(found, store, Path("nowhere")).core_hours == 0


def test_widths():
    assert train.widths("5x500", 784, 10) == (784, 500, 500, 500, 500, 500, 10)
    for wrong in ("", "0x5", "2x", "x5", "3x100-tower", "a-b", "5-0"):
        with pytest.raises(DomainError, match="architecture"):
            train.widths(wrong, 784, 10)


def test_training_is_kept_and_found_again(tmp_path):
    network = train.Network("digits", data.digest("digits"), "20", 0, epochs=2)
    epochs = []
    one = train.trained(network, tmp_path, lambda epoch, accuracy: epochs.append((epoch, accuracy)))
    before = torch.random.get_rng_state()
    two = train.trained(network, tmp_path, lambda *_: pytest.fail("trained again"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [epoch for epoch, _ in epochs] == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    network.path(tmp_path).write_bytes(b"broken")
    with pytest.raises(FileError, match="a network that was trained and kept"):
        train.trained(network, tmp_path)


# --- Running ------------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_a_run_fills_every_gap_once_and_the_next_only_gaps(client, written):
    _, store = run(client, written)
    rows = store.rows()
    assert len(rows) == CELLS
    assert all(row["failed"] is None and row["kept"] <= row["keep"] * 1.01 for row in rows)
    assert store.environment()["torch"] == torch.__version__
    files = {path: path.read_bytes() for path in store.folder.glob("*.json")}
    gone = sorted(files)[:3]
    for path in gone:
        path.unlink()
    again = Progress()
    run(client, written, again)
    assert (again.total, again.before, again.done) == (CELLS, CELLS - 3, CELLS)
    assert measures(store.rows()) == measures(rows)  # the same cell gives the same numbers
    assert all(path.read_bytes() == raw for path, raw in files.items() if path not in gone)  # untouched

    # packed, the results are the same, and nothing is to be done
    assert store.pack() == CELLS
    assert not store.folder.exists()
    assert measures(store.rows()) == measures(rows)
    assert store.ids() == {row["id"] for row in rows}
    last = Progress()
    run(client, written, last)
    assert last.before == CELLS
    loose = store.rows()[0] | {"id": "f" * 16, "trial": 99}
    store.folder.mkdir()
    store.path("f" * 16).write_text(json.dumps(loose))
    assert store.pack() == CELLS + 1


@pytest.mark.cluster
def test_workers_that_are_killed_lose_nothing(written, tmp_path):
    """SIGKILL, twice in mid-run; the numbers are those of a run without."""
    many = TOML.replace("trials = 2", "trials = 15")
    written.write_text(many)
    with cluster(None, workers=2) as client:
        killed = []

        def watch(state: Progress) -> None:
            if state.done in (10, 60) and len(killed) < 2 and state.done not in killed:
                killed.append(state.done)
                os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)

        state = Progress(watch=lambda s: threading.Thread(target=watch, args=(s,)).start())
        found, store = run(client, written, state)
    rows = store.rows()
    assert len(killed) == 2
    assert len(rows) == len(list(found.cells())) == 2 * (2 * 15 + 2 + 2 * 15)
    assert all(row["failed"] is None for row in rows)


@pytest.mark.cluster
def test_a_worker_that_is_killed_in_training_loses_nothing(written):
    written.write_text(TOML.replace("epochs = 3", "epochs = 150").replace('"svd", ', ""))
    killed = []
    with cluster(None, workers=1) as client:
        pids = client.run(os.getpid)

        def watch(state: Progress) -> None:
            if "epoch" in state.doing and not killed:
                killed.append(state.doing)
                os.kill(next(iter(pids.values())), signal.SIGKILL)

        state = Progress(watch=lambda s: threading.Thread(target=watch, args=(s,)).start())
        _, store = run(client, written, state)
    assert killed
    assert len(store.rows()) == CELLS - 4
    assert all(row["failed"] is None for row in store.rows())


@pytest.mark.cluster
def test_a_cell_that_always_kills_its_worker_ends_as_one_failed_row(written, tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    text = TOML.replace("networks = 2", "networks = 1").replace("[0.5, 0.2]", "[0.6, 0.5, 0.3, 0.2]")
    monkeypatch.setattr(version, "SIZES", (0.9,))
    monkeypatch.setattr("coresieve.lab.run.STRIKES", 2)
    written.write_text(text.replace('"svd"', '"deadly:METHOD"'))
    with cluster(None, workers=1) as client:
        state = Progress()
        _, store = run(client, written, state)
    failed = {
        (row["method"], row["keep"]): row["failed"] for row in store.rows() if row["failed"] is not None
    }
    assert failed.keys() == {("deadly:METHOD", 0.2), ("deadly:METHOD", 0.3)}
    assert failed["deadly:METHOD", 0.2] == "its worker died 2 times"
    assert failed["deadly:METHOD", 0.3] == "ZeroDivisionError: on purpose"
    assert state.failed == 2
    assert len(store.rows()) == 4 * (2 + 1 + 2)


@pytest.mark.cluster
def test_ctrl_c_stops_cleanly_and_the_next_run_goes_on(client, written):
    written.write_text(TOML.replace("trials = 2", "trials = 300"))
    command = [
        sys.executable,
        "-m",
        "coresieve",
        "lab",
        "run",
        "small.toml",
        "--results",
        "results",
        "--workers",
        "1",
        "--json",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    folder = written.parent / "results" / "small"
    end = time.monotonic() + 120
    while (not folder.is_dir() or len(list(folder.glob("*.json"))) < 20) and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    told = json.loads(out)
    assert told["interrupted"]
    assert "Traceback" not in err
    assert 20 <= len(list(folder.glob("*.json"))) < told["cells"]
    assert not list(folder.glob("*.tmp"))
    written.write_text(TOML)  # the first trials of the same experiment: only what is missing of them
    found, store = run(client, written)
    assert len(results.answers(found, store.rows())[0]) == CELLS


@pytest.mark.cluster
def test_a_scheduler_that_is_there(client, written, capsys):
    address = client.scheduler.address
    assert (
        cli.main(["lab", "run", "small.toml", "--scheduler", address, "--results", "results", "--json"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert (told["cells"], told["stored"], told["failed"]) == (CELLS, CELLS, 0)


def test_a_scheduler_that_is_not_there(written, capsys, monkeypatch):
    monkeypatch.setattr("coresieve.lab.run.PATIENCE", "1s")
    assert cli.main(["lab", "run", "small.toml", "--scheduler", "tcp://127.0.0.1:9"]) == 1
    assert "the address of a dask scheduler" in " ".join(capsys.readouterr().err.split())


@pytest.mark.cluster
def test_retraining_keeps_the_size_and_wins_accuracy_back(client, written):
    plain = '{name = "magnitude"}'
    tuned = '{name = "magnitude", label = "retrained", rounds = 2, epochs = 40}'
    text = TOML.replace('["corenet", "svd", {name = "corenet++", amplify = 2}]', f"[{plain}, {tuned}]")
    written.write_text(
        text.replace("[0.5, 0.2]", "[0.1]")
        .replace("trials = 2", "trials = 1")
        .replace("epochs = 3", "epochs = 30")
    )
    _, store = run(client, written)
    lost = {(row["method"], row["network"]): row["accuracy_drop"] for row in store.rows()}
    assert all(abs(row["kept"] - 0.1) < 0.002 for row in store.rows())
    for network in (0, 1):
        assert lost["retrained", network] < lost["magnitude", network] - 0.1


def stored(path, **more):
    """Results of every cell, without measuring one."""
    found = experiment.read(path)
    store = results.Store(found, path.parent / "results")
    for cell in found.cells():
        store.write(cell, dict.fromkeys(MEASURES, 0.1) | {"parameters": 1, "failed": None} | more)
    return found, store


def test_results_of_another_training_or_calibration_are_not_taken_for_these(written):
    found, store = stored(written)
    assert len(results.answers(found, store.rows())[0]) == CELLS
    for change in [{"epochs": 4}, {"calibration": 100}]:
        assert results.answers(found.model_copy(update=change), store.rows()) == ([], 0)
    longer = TOML.replace('"svd"', '{name = "svd", epochs = 1}')
    written.write_text(longer)
    methods = {row["method"] for row in results.answers(experiment.read(written), store.rows())[0]}
    assert methods == {"corenet", "corenet++ (amplify=2)"}


def test_packing_again_doubles_nothing_and_stays_clear_of_a_run_that_goes_on(written):
    _, store = stored(written)
    store.pack()
    stored(written)  # the same cells, loose again
    (store.folder / "another.1.tmp").write_text("")
    assert store.pack() == CELLS
    assert not list(store.folder.glob("*.json"))
    import duckdb

    assert duckdb.sql("select count(*) from 'results/small.parquet'").fetchall() == [(CELLS,)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "1"}'])
@pytest.mark.parametrize("command", ["pack", "figures", "report", "claims"])
def test_a_broken_result_is_named(written, capsys, text, command):
    _, store = stored(written)
    store.path("f" * 16).write_text(text)
    assert cli.main(["lab", command, "small.toml", "--results", "results"]) == 1
    assert f"{'f' * 16}.json" in "".join(capsys.readouterr().err.split())
    assert len(list(store.folder.glob("*.json"))) == CELLS + 1


def test_folders_that_cannot_be_written(written, capsys):
    stored(written)
    Path("file").write_text("")
    for tokens in (
        ["figures", "--out", "file/f"],
        ["report", "--out", "file/p.html"],
        ["claims", "--out", "file/c.md"],
    ):
        assert cli.main(["lab", tokens[0], "small.toml", "--results", "results", *tokens[1:]]) == 1
        assert "can be written" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(FileError, match="can be written"):
        results.Store(experiment.read(written), Path("file")).write_environment()


def test_a_result_that_cannot_be_written_is_not_taken_as_done(written):
    found, store = experiment.read(written), results.Store(experiment.read(written), Path("file"))
    Path("file").write_text("")
    cell = next(found.cells())
    run = Run(None, found, store, todo={cell.id: cell})
    for _ in range(2):  # told each time it comes
        with pytest.raises(FileError, match="can be written"):
            run._keep(cell.id, dict.fromkeys(MEASURES) | {"failed": None})
    assert run.todo
    assert run.progress.done == 0


def test_other_images_where_the_cells_are_computed_make_no_result(written):
    cell = next(experiment.read(written).cells())
    network = replace(cell.network, images="others")
    with pytest.raises(FileError, match="other images of digits"):
        worker.measure_all(
            [replace(cell, network=network)], experiment.Choice(name="corenet"), b"", lambda _: None
        )


def test_claims_tell_of_results_by_another_version(written, capsys, monkeypatch):
    stored(written)
    monkeypatch.setattr(version, "MEASURES", 2)
    version.version.cache_clear()
    try:
        assert cli.main(["lab", "claims", "small.toml", "--results", "results", "--out", "c.md"]) == 0
    finally:
        version.version.cache_clear()
    assert f"{CELLS} of {CELLS} were made by another version" in " ".join(capsys.readouterr().out.split())
    assert f"**{CELLS} of these results" in Path("c.md").read_text()


# --- What is drawn and judged -------------------------------------------------------------------------------


def made_up(dataset="mnist", architecture="2x300", network=0, method="corenet++", keep=0.1, trial=0, **more):
    place = {
        "dataset": dataset,
        "architecture": architecture,
        "network": network,
        "method": method,
        "keep": keep,
    }
    usual = dict.fromkeys(MEASURES, 0.1) | {"failed": None, "kept": keep, "version": "1", "trial": trial}
    ids = {"id": f"{place}{trial}", "network_id": f"{dataset}{architecture}{network}"}
    return place | usual | ids | more


OURS = ("corenet", "corenet+", "corenet++")


def sweep(better=2.0, drop=0.0):
    """CoreNet++ with an error `better` times smaller than the samplers'."""
    rows = []
    for dataset in ("mnist", "fashion-mnist", "cifar10"):
        for architecture in ("2x300", "5x500"):
            for keep in (0.5, 0.15, 0.1):
                for trial in range(2):
                    for method in (*OURS, *claims.SPARSIFIERS):
                        error = 1 / keep / (better if method == "corenet++" else 1.0)
                        lost = drop if method in OURS else 0.3
                        rows.append(made_up(dataset, architecture, 0, method, keep, trial, l1_error=error,
                                            accuracy_drop=lost, accuracy=0.98 - lost))  # fmt: skip
    return rows


def verdict(rows, start, retrained=()):
    return next(v for v in claims.verdicts(rows, list(retrained)) if v.claim.startswith(start))


def test_claims_are_judged_by_the_numbers():
    assert verdict(sweep(), "MNIST: compressed to about 15 %").verdict == claims.HOLDS
    assert verdict(sweep(drop=0.02), "MNIST: compressed to about 15 %").verdict == claims.NOT
    assert verdict([], "MNIST: compressed to about 15 %").verdict == claims.UNKNOWN
    assert (
        verdict(sweep(), "CoreNet++ beats every matrix-sparsification method in output").verdict
        == claims.HOLDS
    )
    assert (
        verdict(sweep(0.5), "CoreNet++ beats every matrix-sparsification method in output").verdict
        == claims.NOT
    )
    one_bad = sweep()
    bad = next(i for i, row in enumerate(one_bad) if row["method"] == "corenet++" and row["keep"] == 0.1)
    one_bad[bad] = one_bad[bad] | {"l1_error": 10.5}
    judged = verdict(one_bad, "CoreNet++ beats every matrix-sparsification method in output")
    assert judged.verdict == claims.PART
    assert "in 35 of 36 trials" in judged.measured
    assert (
        verdict(sweep(), "The advantage over the other samplers grows").verdict == claims.NOT
    )  # the same everywhere
    deeper = [row | {} for row in sweep()]
    for row in deeper:
        row["l1_error"] /= 3 if (row["architecture"], row["method"]) == ("5x500", "corenet++") else 1
    assert verdict(deeper, "The advantage over the other samplers grows").verdict == claims.HOLDS
    once = [row | {} for row in sweep()]  # in one of three pairs: may be chance
    for row in once:
        row["l1_error"] /= 3 if (row["dataset"], row["architecture"], row["method"]) == (
            "mnist", "5x500", "corenet++") else 1  # fmt: skip
    judged = verdict(once, "The advantage over the other samplers grows")
    assert judged.verdict == claims.NOT
    assert "in 1 of 3 pairs" in judged.measured
    behind = [row | {"l1_error": row["l1_error"] * (
        2 if row["dataset"] == "cifar10" and row["method"] == "corenet++" else 1)} for row in sweep(0.9)]  # fmt: skip
    assert verdict(behind, "The advantage is much larger").verdict == claims.NOT  # none is ahead
    assert verdict(sweep(), "MNIST: test accuracies").verdict == claims.HOLDS
    assert verdict(sweep(), "CIFAR-10: test accuracies").verdict == claims.NOT
    tuned = [made_up(method="magnitude, retrained", keep=0.058, accuracy_drop=0.0),
             made_up(method="corenet++, retrained", keep=0.058, accuracy_drop=0.011)]  # fmt: skip
    assert verdict([], "MNIST at 5.8 %: weight", tuned).verdict == claims.HOLDS
    assert verdict([], "MNIST at 5.8 %: CoreNet++", tuned).verdict == claims.HOLDS
    worse = [row | {"accuracy_drop": 0.2} for row in tuned]
    assert verdict([], "MNIST at 5.8 %: weight", worse).verdict == claims.NOT


def test_failed_cells_count_for_nothing_but_stay():
    rows = [*sweep(), made_up(trial=5, failed="no", l1_error=None, accuracy_drop=None, accuracy=None)]
    assert verdict(rows, "MNIST: compressed to about 15 %").verdict == claims.HOLDS


def test_figures_hold_every_panel_and_line(tmp_path):
    rows = [row for row in sweep() if (row["dataset"], row["architecture"]) != ("cifar10", "2x300")]
    written = figures.draw(rows, "made-up", tmp_path)
    assert sorted(path.name for path in written) == sorted(
        f"made-up-{family}.{ending}"
        for family in ("accuracy-drop", "l1-error", "error")
        for ending in ("svg", "png")
    )
    text = (tmp_path / "made-up-l1-error.svg").read_text()
    for told in ("MNIST, 2x300", "CIFAR-10, 5x500", "corenet++", "l1l2", "parameters kept"):
        assert told in text
    assert (tmp_path / "made-up-error.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(FileError, match="no results"):
        figures.draw([], "none", tmp_path)


def test_the_same_results_give_the_same_picture(tmp_path):
    rows = [row for row in sweep() if row["dataset"] == "mnist"]
    for name in ("one", "two"):
        figures.draw(rows, "made-up", tmp_path / name)
    one, two = (sorted((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_points_are_means_and_deviations():
    rows = [made_up(trial=t, l1_error=e) for t, e in enumerate((1.0, 3.0))]
    (point,) = figures.lines(rows, "l1_error")["mnist", "2x300"]["corenet++"]
    assert (point.mean, point.std, point.runs) == (2.0, 2**0.5, 2)


@pytest.mark.cluster
def test_the_commands_from_plan_to_page(client, written, capsys):
    def told(*tokens):
        assert cli.main([*tokens]) == 0
        return " ".join(capsys.readouterr().out.split())

    where = ("--results", "results", "--networks", "networks")
    assert f"cells {CELLS}, of which 0 are stored" in told("lab", "plan", "small.toml", *where)
    run(client, written)
    assert f"{CELLS}, of which {CELLS} are stored left about 0 core-hours" in told(
        "lab", "plan", "small.toml", *where
    )
    assert f"{CELLS} results" in told("lab", "pack", "small.toml", "--results", "results")
    assert "figures/small-error.svg" in told(
        "lab", "figures", "small.toml", "--results", "results", "--out", "figures"
    )
    assert f"{CELLS} results" in told(
        "lab", "report", "small.toml", "--results", "results", "--out", "page.html"
    )
    page = Path("page.html").read_text()
    for part in ("digits, 2x30", "corenet++ (amplify=2)", "coresieve lab run small.toml", "processor"):
        assert part in page
    assert "http" not in page.replace("http-equiv", "")
    told("lab", "claims", "small.toml", "--results", "results", "--out", "claims.md")
    assert "| digits" not in Path("claims.md").read_text()
    assert "| corenet |" in Path("claims.md").read_text()
    assert cli.main(["lab", "report", "small.toml", "--results", "nowhere"]) == 1
    assert "no results of small" in " ".join(capsys.readouterr().err.split())
