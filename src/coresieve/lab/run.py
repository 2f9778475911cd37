"""Run an experiment on dask.distributed: an embedded local cluster, or a scheduler that is there.

The client, and nobody else, writes results. Workers get one task for each network and method, so that it is calibrated
once, and send each result as soon as they have it; those that are stored are never computed again. When a worker dies,
the task's cells that have no result yet run one by one: a cell that kills three workers is a failed result.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coresieve.errors import FileError, MissingExtraError
from coresieve.lab.compare import MEASURES, Row
from coresieve.lab.experiment import Cell, Choice, Experiment
from coresieve.lab.results import Store
from coresieve.lab.train import Network
from coresieve.lab.worker import measure_all, trained_bytes

TOPIC = "coresieve"
STRIKES = 3  # workers that may die of one cell before it counts as failed
NETWORKS = Path("out/networks")


@dataclass
class Progress:
    """What a watcher is told: how many cells there are, are stored, failed; what goes on."""

    total: int = 0
    done: int = 0
    failed: int = 0
    before: int = 0  # stored by earlier runs, among `done`
    doing: str = ""
    watch: Callable[[Progress], None] = lambda _: None

    def told(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self, name, value)
        self.watch(self)


@contextmanager
def cluster(scheduler: str | None, workers: int | None = None) -> Iterator[Any]:
    """A client of the scheduler at this address, or of a local cluster of one process a core."""
    try:
        from dask import config
        from distributed import Client, LocalCluster
    except ImportError as reason:
        raise MissingExtraError("lab run without dask.distributed", "what runs the cells",
                                "pip install coresieve[lab]") from reason  # fmt: skip
    quiet = {"distributed.scheduler.allowed-failures": 0, "distributed.logging.distributed": "critical"}
    with config.set(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if scheduler is not None:
            try:
                client = Client(scheduler, timeout="10s")
            except (OSError, ValueError) as reason:
                raise FileError(f"--scheduler {scheduler} ({reason})", "the address of a dask scheduler",
                                "tcp://host:8786, or leave it out for a local cluster") from reason  # fmt: skip
            with client:
                yield client
            return
        local: Any = LocalCluster(
            n_workers=workers or os.cpu_count() or 1,
            threads_per_worker=1,
            dashboard_address=None,  # pyright: ignore[reportArgumentType]
            silence_logs=logging.CRITICAL,
        )
        with local, Client(local) as client:
            yield client


@dataclass
class Run:
    """One run: the gaps of an experiment, filled."""

    client: Any
    experiment: Experiment
    store: Store
    networks: Path = NETWORKS
    progress: Progress = field(default_factory=Progress)
    todo: dict[str, Cell] = field(default_factory=dict)  # cells without a result, by id
    strikes: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)  # results come in on dask's thread too

    def run(self) -> Progress:
        """Fill all gaps; what is stored stays, however this ends."""
        self.progress.told(doing="reading the data sets")
        networks = self.experiment.trained()
        cells = list(self.experiment.cells(networks))
        stored = self.store.ids()
        self.todo = {cell.id: cell for cell in cells if cell.id not in stored}
        self.progress.told(
            total=len(cells), done=len(cells) - len(self.todo), before=len(cells) - len(self.todo)
        )
        if self.todo:
            self.store.write_environment()
        self.client.subscribe_topic(TOPIC, self._event)
        try:
            weights = self._train([n for n in networks if any(c.network == n for c in self.todo.values())])
            self._measure(weights)
        finally:
            self.client.unsubscribe_topic(TOPIC)
        return self.progress

    def _event(self, event: tuple[Any, Any]) -> None:
        """A worker tells: a result, or how its training goes."""
        told = event[1]
        if isinstance(told, dict) and "measured" in told:
            self._keep(told["id"], told["measured"])
        elif isinstance(told, dict) and "epoch" in told:
            self.progress.told(
                doing=f"training {told['who']}: epoch {told['epoch']}, {100 * told['accuracy']:.1f} % right"
            )

    def _keep(self, cell_id: str, measured: Row) -> None:
        with self.lock:
            cell = self.todo.pop(cell_id, None)
            if cell is None:
                return
            self.store.write(cell, measured)
            failed = self.progress.failed + (measured["failed"] is not None)
            self.progress.told(done=self.progress.done + 1, failed=failed,
                               doing=f"{cell.dataset} {cell.architecture} {cell.method}")  # fmt: skip

    # --- Training -------------------------------------------------------------------------------------------

    def _train(self, networks: list[Network]) -> dict[str, bytes]:
        """The weights of each network: from its file, or trained by a worker and then kept."""
        missing = [network for network in networks if not network.path(self.networks).exists()]
        futures = {
            self.client.submit(_training, network, pure=False, priority=-i): network
            for i, network in enumerate(missing)
        }
        for future in _completed(futures):
            network = futures[future]
            if future.status == "finished":
                _write(network.path(self.networks), future.result())
                continue
            for cell in [cell for cell in self.todo.values() if cell.network == network]:
                self._keep(cell.id, _failure(f"training {network.architecture} failed: {future.exception()}"))
        return {n.id: n.path(self.networks).read_bytes() for n in networks if n.path(self.networks).exists()}

    # --- Measuring ------------------------------------------------------------------------------------------

    def _measure(self, weights: dict[str, bytes]) -> None:
        choices = {choice.told: choice for choice in self.experiment.choices}
        sent = {key: self.client.scatter(value, hash=False) for key, value in weights.items()}
        groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell in self.todo.values():
            groups[cell.group].append(cell)
        alone: list[Cell] = []

        def submit(cells: list[Cell], priority: int) -> Any:
            choice, network = choices[cells[0].method], sent[cells[0].network.id]
            return self.client.submit(_measuring, cells, choice, network, pure=False, priority=priority)

        futures = {submit(cells, -i): cells for i, cells in enumerate(groups.values())}
        while futures:
            for future in _completed(dict(futures)):
                cells = futures.pop(future)
                if future.status == "finished":
                    for cell_id, measured in future.result():
                        self._keep(cell_id, measured)
                    continue
                alone += self._after_failure(cells, future.exception())
            futures = {submit([cell], 0): [cell] for cell in alone}
            alone = []

    def _after_failure(self, cells: list[Cell], reason: BaseException) -> list[Cell]:
        """Which cells to try again, each by itself, after a task ended without its results."""
        left = [cell for cell in cells if cell.id in self.todo]
        if len(left) > 1:
            return left
        for cell in left:
            self.strikes[cell.id] += 1
            if self.strikes[cell.id] >= STRIKES:
                told = (
                    f"its worker died {STRIKES} times"
                    if _killed(reason)
                    else f"{type(reason).__name__}: {reason}"
                )
                self._keep(cell.id, _failure(told))
        return [cell for cell in left if cell.id in self.todo]


def _completed(futures: Iterable[Any]) -> Iterator[Any]:
    from distributed import as_completed

    yield from as_completed(list(futures))


def _killed(reason: BaseException) -> bool:
    return type(reason).__name__ == "KilledWorker"


def _failure(reason: str) -> Row:
    return dict.fromkeys(MEASURES) | {"failed": reason[:500]}


def _write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(raw)
    temporary.replace(path)


# --- On the worker ------------------------------------------------------------------------------------------


def _training(network: Network) -> bytes:
    who = f"{network.dataset} {network.architecture} {network.seed}"
    return trained_bytes(network, lambda told: _tell(told | {"who": who}))


def _measuring(cells: list[Cell], choice: Choice, weights: bytes) -> list[tuple[str, Row]]:
    return measure_all(cells, choice, weights, _tell)


def _tell(told: Row) -> None:
    from distributed import get_worker

    get_worker().log_event(TOPIC, told)
