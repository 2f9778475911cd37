"""An experiment is one TOML file: which networks, methods and sizes, and how often each is drawn.

    title = "..."
    datasets = ["mnist"]
    architectures = ["2x300"]
    networks = 2                       # trained networks of each architecture, each by its seed
    methods = ["corenet", {name = "corenet++", amplify = 32}, "mine.py_module:METHOD"]
    sizes = [0.5, 0.1]
    trials = 10                        # draws of each size; one for a method that draws nothing

Its cells are the product of all these. A cell's id is a hash of all its inputs: the images, how the network was
trained, the method's configuration and its version, the size, the trial. So a result can be found again, and never
mistaken.

>>> one = Cell("mnist", "2x300", Network("mnist", "0" * 16, "2x300", 0), "svd", "SVD()", "1", 0.1, 0)
>>> len(one.id), one.id == dataclasses.replace(one, trial=1).id
(16, False)
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from coresieve.errors import CoresieveError, DomainError, FileError, MissingExtraError
from coresieve.lab import data
from coresieve.lab.train import EPOCHS, Network, widths
from coresieve.lab.version import version
from coresieve.methods import Method, resolve

try:
    from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
except ImportError as reason:
    raise MissingExtraError(
        "an experiment without pydantic", "what checks its file", "pip install coresieve[lab]"
    ) from reason


RETRAINING = 1  # of what follows a draw: another number when worker.py or finetune() trains on otherwise


def _distinct(values: list[Any]) -> list[Any]:
    if len({json.dumps(value, default=str, sort_keys=True) for value in values}) < len(values):
        raise ValueError("something is listed twice")
    return values


def _known_set(name: str) -> str:
    if name not in data.NAMES:
        raise ValueError(f"{name!r} is not one of {', '.join(data.NAMES)}")
    return name


def _known_architecture(name: str) -> str:
    widths(name, 1, 1)
    return name


Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Choice(BaseModel):
    """A method of an experiment: its name, settings that differ from that name's own, and what follows its draw.

    With `epochs` the small network is trained that long on labels, its zeros kept zero. With `rounds` too it shrinks to
    its size in as many steps, all of the same ratio, with that many epochs after each (Han et al. 2015).
    """

    model_config = ConfigDict(
        extra="allow", frozen=True
    )  # the rest are settings, which the method itself checks

    name: str
    label: str | None = None
    epochs: Annotated[int, Field(ge=0)] = 0
    rounds: Count = 1

    @property
    def told(self) -> str:
        """What figures and tables call it."""
        settings = [f"{key}={value}" for key, value in (self.model_extra or {}).items()]
        return self.label or self.name + (f" ({', '.join(settings)})" if settings else "")

    def method(self) -> Method:
        base = _imported(self.name) if ":" in self.name else resolve(self.name)
        try:
            return dataclasses.replace(base, **(self.model_extra or {}))
        except TypeError as reason:
            settings = [field.name for field in dataclasses.fields(base)]
            given = f"{self.name} with {', '.join(self.model_extra or {})}"
            raise DomainError(given, f"settings among {settings}", f'{{name = "{self.name}"}}') from reason


def _imported(name: str) -> Method:
    """A method of the user's own: `package.module:NAME`, importable where the cells are computed."""
    where, _, what = name.partition(":")
    try:
        found = getattr(importlib.import_module(where), what)
    except (ImportError, AttributeError) as reason:
        raise DomainError(f"the method {name!r} ({reason})", "package.module:NAME that can be imported",
                          "PYTHONPATH with the folder that holds it") from reason  # fmt: skip
    return resolve(found)


class Experiment(BaseModel):
    """The TOML file, checked; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    datasets: Annotated[
        list[Annotated[str, AfterValidator(_known_set)]], Field(min_length=1), AfterValidator(_distinct)
    ]
    architectures: Annotated[
        list[Annotated[str, AfterValidator(_known_architecture)]],
        Field(min_length=1),
        AfterValidator(_distinct),
    ]
    networks: Count = 4
    epochs: Annotated[int, Field(ge=0)] = EPOCHS
    methods: Annotated[list[str | Choice], Field(min_length=1), AfterValidator(_distinct)]
    sizes: Annotated[list[Share], Field(min_length=1), AfterValidator(_distinct)]
    trials: Count = 50
    calibration: Count | None = None  # images given to the methods; those set apart, 5,000, without it
    name: str = ""  # the file's, without .toml

    @property
    def choices(self) -> list[Choice]:
        return [Choice(name=method) if isinstance(method, str) else method for method in self.methods]

    def trained(self) -> list[Network]:
        """The networks, in the order in which they are listed."""
        images = {dataset: data.digest(dataset) for dataset in self.datasets}
        return [
            Network(dataset, images[dataset], architecture, seed, self.epochs)
            for dataset in self.datasets
            for architecture in self.architectures
            for seed in range(self.networks)
        ]

    def cells(self, networks: list[Network] | None = None) -> Iterator[Cell]:
        """All cells; those of one network and method follow each other."""
        for network in self.trained() if networks is None else networks:
            for choice in self.choices:
                method = choice.method()
                made = version(method)
                for keep in sorted(self.sizes):
                    for trial in range(self.trials if method.random or choice.epochs else 1):
                        yield Cell(
                            network.dataset, network.architecture, network, choice.told, repr(method), made,
                            keep, trial, self.calibration, choice.epochs, choice.rounds, choice.name,
                        )  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One measurement, and all that its result depends on."""

    dataset: str
    architecture: str
    network: Network
    method: str  # what it is called
    configuration: str
    version: str  # of the method: see version.py
    keep: float
    trial: int
    calibration: int | None = None
    epochs: int = 0
    rounds: int = 1
    name: str = ""  # of the method, to find it by

    @property
    def id(self) -> str:
        result = {key: getattr(self, key) for key in ("configuration", "version", "keep", "trial")}
        return identity(result | {"network_id": self.network.id}, self.calibration, self.epochs, self.rounds)

    @property
    def group(self) -> tuple[str, str]:
        """Cells that share a network and a calibration."""
        return self.network.id, self.method


def identity(result: Mapping[str, Any], calibration: int | None, epochs: int, rounds: int) -> str:
    """A hash of all that a result depends on; what is as usual is left out, so that a new setting changes no old id."""
    inputs = {key: result[key] for key in ("configuration", "version", "keep", "trial")}
    inputs["network"] = result["network_id"]
    more = {"calibration": (calibration, None), "epochs": (epochs, 0), "rounds": (rounds, 1)}
    more["retraining"] = (RETRAINING if epochs else 1, 1)
    inputs |= {key: value for key, (value, usual) in more.items() if value != usual}
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _distinct_names(choices: list[Choice]) -> None:
    told = [choice.told for choice in choices]
    if twice := next((name for name in told if told.count(name) > 1), None):
        raise DomainError(f"two methods called {twice!r}", "a name of its own for each", 'label = "..."')


def read(path: Path) -> Experiment:
    """The experiment in a TOML file."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as reason:
        hint = "experiments/paper/reduced.toml"
        raise FileError(f"{path} ({reason.strerror})", "an experiment, a TOML file", hint) from reason
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
        raise FileError(f"{path} ({reason})", "a TOML file", "docs/lab.md, which shows one") from reason
    try:
        experiment = Experiment.model_validate({"name": path.stem} | raw)
        for choice in experiment.choices:
            choice.method()
        _distinct_names(experiment.choices)
    except ValidationError as reason:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in reason.errors()[:5]
        )
        raise FileError(f"{path} ({wrong})", "an experiment", "docs/lab.md, which lists the keys") from reason
    except CoresieveError as reason:
        raise FileError(f"{path} ({reason.given})", reason.expected, reason.hint) from reason
    return experiment
