"""Results: one immutable JSON file a cell, written atomically; whole experiments packed into one parquet file.

    <folder>/<experiment>/<id>.json      as cells are measured
    <folder>/<experiment>.parquet        `pack` moves them there: small enough to be committed

Both are read. A cell that another version of the code measured too is answered by the current one where there is one.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from coresieve.errors import FileError, MissingExtraError
from coresieve.lab.experiment import Cell, Choice, Experiment, identity
from coresieve.lab.train import Network
from coresieve.lab.version import version

Row = dict[str, Any]

WHERE = Path("experiments/results")
COLUMNS = {
    "id": "VARCHAR", "dataset": "VARCHAR", "architecture": "VARCHAR", "network": "INTEGER", "network_id": "VARCHAR",
    "method": "VARCHAR", "configuration": "VARCHAR", "version": "VARCHAR", "keep": "DOUBLE", "trial": "INTEGER",
    "failed": "VARCHAR", "kept": "DOUBLE", "parameters": "BIGINT", "l1_error": "DOUBLE", "error": "DOUBLE",
    "flips": "DOUBLE", "accuracy": "DOUBLE", "accuracy_drop": "DOUBLE", "seconds": "DOUBLE",
    "images": "VARCHAR",
}  # fmt: skip
_NEEDED = COLUMNS.keys() - {"images"}  # results made before it was written lack it
ORDER = "dataset, architecture, network, method, keep, trial, id"  # alike values side by side pack well


class Store:
    """The results of one experiment."""

    def __init__(self, experiment: Experiment, folder: Path = WHERE):
        self.folder = folder / experiment.name
        self.packed = folder / f"{experiment.name}.parquet"
        self.environment_path = folder / f"{experiment.name}.environment.json"

    def path(self, cell_id: str) -> Path:
        return self.folder / f"{cell_id}.json"

    def ids(self) -> set[str]:
        """Which cells have a result."""
        loose = {path.stem for path in self.folder.glob("*.json")} if self.folder.is_dir() else set()
        return loose | {row["id"] for row in self._packed()}

    def write(self, cell: Cell, measured: Row) -> None:
        """A result is written once: the first one stays."""
        path = self.path(cell.id)
        if path.exists():
            return
        _write(path, json.dumps(row(cell) | measured, allow_nan=False) + "\n")

    def write_environment(self) -> None:
        """What made the results, beside them: software, processor, threads. Nothing of whom or when."""
        _write(self.environment_path, json.dumps(environment(), indent=2) + "\n")

    def environment(self) -> dict[str, str]:
        """Of the last run; empty when there was none."""
        return _read(self.environment_path) if self.environment_path.exists() else {}

    def rows(self) -> list[Row]:
        """All results, packed and loose."""
        found = {line["id"]: line for line in self._packed()}
        if self.folder.is_dir():
            for path in sorted(self.folder.glob("*.json")):
                line = _result(path)
                found.setdefault(line["id"], line)
        return list(found.values())

    def _packed(self) -> Iterator[Row]:
        if not self.packed.exists():
            return
        duckdb = _duckdb()
        try:
            found = duckdb.sql("select * from read_parquet($file)", params={"file": str(self.packed)})
            names = found.columns
            if missing := _NEEDED - set(names):
                given = f"{self.packed} without {', '.join(sorted(missing))}"
                raise FileError(given, "packed results", "the file as it was committed")
            for values in found.fetchall():
                yield dict(zip(names, values, strict=True))
        except duckdb.Error as reason:
            given = f"{self.packed} ({str(reason).splitlines()[0]})"
            raise FileError(given, "packed results", "the file as it was committed") from reason

    def pack(self) -> int:
        """Move loose results into the parquet file; how many it then holds."""
        loose = sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []
        if not loose:
            return len(self.ids())
        stored = {line["id"] for line in self._packed()}
        new = [
            path for path in loose if _result(path)["id"] not in stored
        ]  # each is checked before one is moved
        if new:
            self._add(new)
        for path in loose:
            path.unlink()
        with contextlib.suppress(OSError):  # a run that goes on has put others there
            self.folder.rmdir()
        return len(self.ids())

    def _add(self, loose: list[Path]) -> None:
        """These results into the parquet file, which is replaced in one step."""
        duckdb = _duckdb()
        temporary = self.packed.with_suffix(f".{os.getpid()}.tmp")
        params: dict[str, Any] = {"files": [str(path) for path in loose]}
        columns = ", ".join(f"'{name}': '{kind}'" for name, kind in COLUMNS.items())
        every = f"select * from read_json($files, format='newline_delimited', columns={{{columns}}})"
        if self.packed.exists():
            params["packed"] = str(self.packed)
            every = f"select * from read_parquet($packed) union all by name {every}"
        try:
            found = duckdb.sql(f"select * from ({every}) order by {ORDER}", params=params)
            found.write_parquet(str(temporary), compression="zstd")
            temporary.replace(self.packed)
        except (OSError, duckdb.Error) as reason:
            given = f"{self.packed} ({str(reason).splitlines()[0]})"
            raise FileError(
                given, "a folder that can be written", "--results with another folder"
            ) from reason
        finally:
            temporary.unlink(missing_ok=True)


def environment() -> dict[str, str]:
    """The software and the processor that measure now."""
    names = ("coresieve", "torch", "numpy", "numba", "distributed")
    return {name: installed(name) for name in names} | {
        "Python": platform.python_version(),
        "processor": _processor(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()}, {os.cpu_count()} cores"


def row(cell: Cell) -> Row:
    """What a result says of its cell."""
    return {
        "id": cell.id,
        "dataset": cell.dataset,
        "architecture": cell.architecture,
        "network": cell.network.seed,
        "network_id": cell.network.id,
        "images": cell.network.images,
        "method": cell.method,
        "configuration": cell.configuration,
        "version": cell.version,
        "keep": cell.keep,
        "trial": cell.trial,
    }


def _read(path: Path) -> Row:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise FileError(f"{path} ({reason})", "a result", "rm it, and lab run makes it again") from reason


def _result(path: Path) -> Row:
    found = _read(path)
    missing = _NEEDED - found.keys() if isinstance(found, dict) else _NEEDED
    if missing:
        without = f"without {', '.join(sorted(missing))}"
        raise FileError(f"{path} ({without})", "a result", "rm it, and lab run makes it again")
    return found


def _write(path: Path, text: str) -> None:
    """All of it or nothing."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as reason:
        hint = "--results with another folder"
        raise FileError(f"{path} ({reason.strerror})", "a folder that can be written", hint) from reason
    except KeyboardInterrupt:
        temporary.unlink(missing_ok=True)
        raise


def place(line: Row) -> tuple:
    """Where a result stands in an experiment, whatever version of the code made it."""
    return tuple(line[key] for key in ("dataset", "architecture", "network", "method", "keep", "trial"))


def answers(experiment: Experiment, rows: Iterable[Row]) -> tuple[list[Row], int]:
    """The result at each place of the experiment that has one, in its order; how many another version made.

    What was trained, calibrated or trained on otherwise than the file now says is not of this experiment.
    """
    choices = {choice.told: choice for choice in experiment.choices}
    current = {name: version(choice.method()) for name, choice in choices.items()}
    found: dict[tuple, Row] = {}
    for line in rows:
        wanted = (
            line["dataset"] in experiment.datasets
            and line["architecture"] in experiment.architectures
            and line["network"] < experiment.networks
            and line["method"] in current
            and line["keep"] in experiment.sizes
            and line["trial"] < experiment.trials
            and _made_so(line, experiment, choices[line["method"]])
        )
        if wanted and (place(line) not in found or line["version"] == current[line["method"]]):
            found[place(line)] = line
    older = sum(line["version"] != current[line["method"]] for line in found.values())
    axes = [experiment.datasets, experiment.architectures, list(range(experiment.networks)), list(current)]
    ranks = [{value: position for position, value in enumerate(axis)} for axis in axes]

    def order(where: tuple) -> tuple:
        return *(rank[value] for rank, value in zip(ranks, where, strict=False)), -where[4], where[5]

    return [found[where] for where in sorted(found, key=order)], older


def _made_so(line: Row, experiment: Experiment, choice: Choice) -> bool:
    """With this network, calibration and retraining? The result's id tells, without the data sets."""
    images = line.get("images")
    network = images and Network(
        line["dataset"], images, line["architecture"], line["network"], experiment.epochs
    )
    trained_so = not network or network.id == line["network_id"]
    return trained_so and line["id"] == identity(line, experiment.calibration, choice.epochs, choice.rounds)


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as reason:
        raise MissingExtraError("packed results without duckdb", "what reads them",
                                "pip install coresieve[lab]") from reason  # fmt: skip
    return duckdb
