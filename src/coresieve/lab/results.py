"""Results: one immutable JSON file a cell, written atomically; whole experiments packed into one parquet file.

    <folder>/<experiment>/<id>.json      as cells are measured
    <folder>/<experiment>.parquet        `pack` moves them there: small enough to be committed

Both are read. A cell that another version of the code measured too is answered by the current one where there is one.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from coresieve.errors import FileError, MissingExtraError
from coresieve.lab.experiment import Cell, Experiment
from coresieve.lab.version import version

Row = dict[str, Any]

WHERE = Path("experiments/results")
COLUMNS = {
    "id": "VARCHAR", "dataset": "VARCHAR", "architecture": "VARCHAR", "network": "INTEGER", "network_id": "VARCHAR",
    "method": "VARCHAR", "configuration": "VARCHAR", "version": "VARCHAR", "keep": "DOUBLE", "trial": "INTEGER",
    "failed": "VARCHAR", "kept": "DOUBLE", "parameters": "BIGINT", "l1_error": "DOUBLE", "error": "DOUBLE",
    "flips": "DOUBLE", "accuracy": "DOUBLE", "accuracy_drop": "DOUBLE", "seconds": "DOUBLE",
}  # fmt: skip
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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(row(cell) | measured, allow_nan=False) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as reason:
            hint = "--results with another folder"
            raise FileError(f"{path} ({reason.strerror})", "a folder that can be written", hint) from reason

    def write_environment(self) -> None:
        """What made the results, beside them: software, processor, threads. Nothing of whom or when."""
        path = self.environment_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(environment(), indent=2) + "\n", encoding="utf-8")

    def environment(self) -> dict[str, str]:
        """Of the last run; empty when there was none."""
        return _read(self.environment_path) if self.environment_path.exists() else {}

    def rows(self) -> list[Row]:
        """All results, packed and loose."""
        found = {line["id"]: line for line in self._packed()}
        if self.folder.is_dir():
            for path in sorted(self.folder.glob("*.json")):
                line = _read(path)
                found.setdefault(line["id"], line)
        return list(found.values())

    def _packed(self) -> Iterator[Row]:
        if not self.packed.exists():
            return
        duckdb = _duckdb()
        try:
            found = duckdb.sql("select * from read_parquet($file)", params={"file": str(self.packed)})
            names = found.columns
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
        duckdb = _duckdb()
        temporary = self.packed.with_suffix(f".{os.getpid()}.tmp")
        old = (
            f"select * from read_parquet('{self.packed}') union all by name " if self.packed.exists() else ""
        )
        columns = ", ".join(f"'{name}': '{kind}'" for name, kind in COLUMNS.items())
        new = f"select * from read_json($files, format='newline_delimited', columns={{{columns}}})"
        try:
            duckdb.sql(f"select * from ({old}{new}) order by {ORDER}", params={"files": [str(path) for path in loose]}
                       ).write_parquet(str(temporary), compression="zstd")  # fmt: skip
            temporary.replace(self.packed)
        finally:
            temporary.unlink(missing_ok=True)
        for path in loose:
            path.unlink()
        self.folder.rmdir()
        return len(self.ids())


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


def place(line: Row) -> tuple:
    """Where a result stands in an experiment, whatever version of the code made it."""
    return tuple(line[key] for key in ("dataset", "architecture", "network", "method", "keep", "trial"))


def answers(experiment: Experiment, rows: Iterable[Row]) -> tuple[list[Row], int]:
    """The result at each place of the experiment that has one, in its order; how many another version made."""
    current = {choice.told: version(choice.method()) for choice in experiment.choices}
    found: dict[tuple, Row] = {}
    for line in rows:
        wanted = (
            line["dataset"] in experiment.datasets
            and line["architecture"] in experiment.architectures
            and line["network"] < experiment.networks
            and line["method"] in current
            and line["keep"] in experiment.sizes
            and line["trial"] < experiment.trials
        )
        if wanted and (place(line) not in found or line["version"] == current[line["method"]]):
            found[place(line)] = line
    older = sum(line["version"] != current[line["method"]] for line in found.values())
    axes = [experiment.datasets, experiment.architectures, list(range(experiment.networks)), list(current)]
    ranks = [{value: position for position, value in enumerate(axis)} for axis in axes]

    def order(where: tuple) -> tuple:
        return *(rank[value] for rank, value in zip(ranks, where, strict=False)), -where[4], where[5]

    return [found[where] for where in sorted(found, key=order)], older


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as reason:
        raise MissingExtraError("packed results without duckdb", "what reads them",
                                "pip install coresieve[lab]") from reason  # fmt: skip
    return duckdb
