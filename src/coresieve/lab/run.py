"""Run an experiment on dask.distributed: an embedded local cluster, or a scheduler that is there.

The client, and nobody else, writes results. Workers get one task for each network and method, so that it is calibrated
once, and send each result as soon as they have it; what is stored is never computed again. When a worker dies, the cell
that it was at is set aside, and the others of its task go on. In the end those set aside run one at a time: a cell that
then kills three workers is a failed result, and so is a network that kills three in training. A file that a worker or
the client cannot read or write ends the run with its reason: it says nothing of any cell.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from coresieve.errors import FileError, MissingExtraError
from coresieve.lab.compare import MEASURES, Row
from coresieve.lab.experiment import Cell, Choice, Experiment
from coresieve.lab.results import Store
from coresieve.lab.train import Network, restored
from coresieve.lab.worker import measure_all, trained_bytes

TOPIC = "coresieve"
STRIKES = 3  # workers that die of a cell that runs alone before it counts as failed
NETWORKS = Path("out/networks")
PATIENCE = "10s"  # with a scheduler that does not answer
RETURN = 600  # seconds for a first worker to come, or to come back after its death, on a busy machine


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
    settings = {
        "distributed.scheduler.allowed-failures": 0,
        "distributed.logging.distributed": "critical",
        # dask's own value makes every large tensor a fresh mapping: a quarter of the time went into page faults
        "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 1 << 30,
        "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 1 << 30,
    }
    with config.set(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if scheduler is not None:
            try:
                client = Client(scheduler, timeout=PATIENCE)
            except (OSError, ValueError) as reason:
                raise FileError(f"--scheduler {scheduler} ({reason})", "the address of a dask scheduler",
                                "tcp://host:8786, or leave it out for a local cluster") from reason  # fmt: skip
            with _closed(client):
                yield client
            return
        with _deaf_to_ctrl_c():
            local: Any = LocalCluster(
                n_workers=workers or os.cpu_count() or 1,
                threads_per_worker=1,
                dashboard_address=None,  # pyright: ignore[reportArgumentType]
                silence_logs=logging.CRITICAL,
            )
        with _closed(local), _closed(Client(local)) as client:
            yield client


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Threads made here, and processes that they start, now or later, never see Ctrl-C, which a terminal sends to all.

    The command alone hears it, and closes the others; they would only print tracebacks over what it has to say.
    """
    if not hasattr(signal, "pthread_sigmask"):  # not on Windows
        yield
        return
    resource_tracker.ensure_running()  # a thread that starts it hears signals again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _closed(part: Any) -> Iterator[Any]:
    """Closed in the end; that a worker takes its time over it on a busy machine takes nothing from what was done."""
    try:
        yield part
    finally:
        with suppress(TimeoutError, OSError):
            part.close()


@dataclass
class Run:
    """One run: the gaps of an experiment, filled."""

    client: Any
    experiment: Experiment
    store: Store
    networks: Path = NETWORKS
    progress: Progress = field(default_factory=Progress)
    todo: dict[str, Cell] = field(default_factory=dict)  # cells without a result, by id
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
            cell = self.todo.get(cell_id)
            if cell is None:
                return
            self.store.write(
                cell, measured
            )  # what cannot be written stays to do: it comes again with the task's end
            del self.todo[cell_id]
            failed = self.progress.failed + (measured["failed"] is not None)
            self.progress.told(done=self.progress.done + 1, failed=failed,
                               doing=f"{cell.dataset} {cell.architecture} {cell.method}")  # fmt: skip

    # --- Training -------------------------------------------------------------------------------------------

    def _train(self, networks: list[Network]) -> dict[str, bytes]:
        """The weights of each network: from its file, or trained by a worker and then kept."""
        for network in networks:
            if network.path(self.networks).exists():
                restored(network, network.path(self.networks))  # a broken file is told now, not by every cell
        missing = [network for network in networks if not network.path(self.networks).exists()]
        deaths: Counter[str] = Counter()
        while missing:
            futures = {
                self.client.submit(_training, network, pure=False, priority=-i): network
                for i, network in enumerate(missing)
            }
            missing = []
            for future in _completed(futures):
                network, (answer, reason) = futures[future], _answer(future)
                deaths[network.id] += _killed(reason)
                if reason is None:
                    _write(network.path(self.networks), answer)
                elif isinstance(reason, FileError):
                    raise reason
                elif _killed(reason) and deaths[network.id] < STRIKES:
                    missing.append(network)
                else:
                    self._untrained(network, reason)
        return {n.id: n.path(self.networks).read_bytes() for n in networks if n.path(self.networks).exists()}

    def _untrained(self, network: Network, reason: Exception) -> None:
        for cell in [cell for cell in self.todo.values() if cell.network == network]:
            self._keep(cell.id, _failure(f"training {network.architecture} failed: {_told(reason)}"))

    # --- Measuring ------------------------------------------------------------------------------------------

    def _measure(self, weights: dict[str, bytes]) -> None:
        groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell in self.todo.values():
            groups[cell.group].append(cell)
        suspects: list[Cell] = []
        todo = list(groups.values())
        while todo:
            futures = self._submitted(todo, weights)
            todo = []
            for future in _completed(futures):
                answer, reason = _answer(future)
                left = [cell for cell in futures[future] if cell.id in self.todo]
                if isinstance(reason, FileError):
                    raise reason
                if reason is None:
                    for cell_id, measured in answer:
                        self._keep(cell_id, measured)
                elif future.status == "error" and left:
                    suspects.append(left[0])  # cells run in order: this one was begun and not ended
                    todo += [left[1:]] if left[1:] else []
                elif left:  # the weights that it was to have, or its answer, were on a worker that died
                    todo.append(left)
        for cell in suspects:
            self._alone(cell, weights)

    def _submitted(self, groups: list[list[Cell]], weights: dict[str, bytes]) -> dict[Any, list[Cell]]:
        """A task for each group, those first that come first; weights are sent once a network."""
        choices = {choice.told: choice for choice in self.experiment.choices}
        sent = {i: self._sent(weights[i]) for i in {cells[0].network.id for cells in groups}}
        return {
            self.client.submit(
                _measuring,
                cells,
                choices[cells[0].method],
                sent[cells[0].network.id],
                pure=False,
                priority=-i,
            ): cells
            for i, cells in enumerate(groups)
        }

    def _sent(self, weights: bytes) -> Any:
        """To a worker; dask waits for one to be there."""
        try:
            return self.client.scatter(weights, hash=False, timeout=RETURN)
        except TimeoutError as reason:
            hint = "starting workers, then run it again: what is stored stays"
            raise FileError(f"no worker for {RETURN} seconds", "one that answers", hint) from reason

    def _alone(self, cell: Cell, weights: dict[str, bytes]) -> None:
        """A cell whose worker died, with nothing else running, so that a death is its own."""
        reason: Exception | None = None
        for _ in range(STRIKES):
            (future,) = self._submitted([[cell]], weights)
            answer, reason = next(_answer(done) for done in _completed([future]))
            if reason is None:
                self._keep(*answer[0])
                return
            if isinstance(reason, FileError):
                raise reason
        assert reason is not None
        self._keep(cell.id, _failure(_told(reason)))


def _completed(futures: Iterable[Any]) -> Iterator[Any]:
    from distributed import as_completed

    yield from as_completed(list(futures))


def _answer(future: Any) -> tuple[Any, Exception | None]:
    """What a task that has ended answers, or why it does not: one that was done may have died with its worker since."""
    try:
        return future.result(), None
    except Exception as reason:
        return None, reason


def _killed(reason: Exception | None) -> bool:
    """Did its worker die?"""
    return type(reason).__name__ in ("KilledWorker", "FutureCancelledError", "CancelledError")


def _told(reason: Exception) -> str:
    return f"its worker died {STRIKES} times" if _killed(reason) else f"{type(reason).__name__}: {reason}"


def _failure(reason: str) -> Row:
    return dict.fromkeys(MEASURES) | {"failed": reason[:500]}


def _write(path: Path, raw: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(raw)
        temporary.replace(path)
    except OSError as reason:
        hint = "--networks with another folder"
        raise FileError(f"{path} ({reason.strerror})", "a folder that can be written", hint) from reason


# --- On the worker ------------------------------------------------------------------------------------------


def _training(network: Network) -> bytes:
    who = f"{network.dataset} {network.architecture} {network.seed}"
    return trained_bytes(network, lambda told: _tell(told | {"who": who}))


def _measuring(cells: list[Cell], choice: Choice, weights: bytes) -> list[tuple[str, Row]]:
    return measure_all(cells, choice, weights, _tell)


def _tell(told: Row) -> None:
    from distributed import get_worker

    get_worker().log_event(TOPIC, told)
