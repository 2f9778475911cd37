"""The demo's network: handwritten digits, an ordinary ReLU network, and three parts that never mix.

1797 images of 8x8 pixels ship with scikit-learn. One part trains the network, one (inputs only) tells the
methods which weights matter, one judges the small networks; no image is in two of them.

>>> parts = digits()
>>> [len(part) for part in (parts.train, parts.calibration, parts.test)]
[1000, 297, 500]
"""

from __future__ import annotations

import itertools
import platform
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coresieve.compression import calibrate
from coresieve.errors import FileError
from coresieve.lab import data, page
from coresieve.lab.compare import Row, accuracy, cells, compare, summary
from coresieve.methods import METHODS
from coresieve.terminal import Progress, share, size_of

WIDTHS = (64, 300, 300, 10)
EPOCHS = 40
SIZES = (0.5, 0.3, 0.2, 0.15, 0.1, 0.05)
SEEDS = 5
QUICK_SIZES, QUICK_SEEDS = (0.3, 0.1), 2
SAVED_METHOD, SAVED_SIZE = "sieve", 0.1  # the network that is written to a file
OUT = Path("out/demo")


def digits() -> data.Parts:
    """Pixels scaled from 0..16 to 0..1; each part holds every digit in the same share."""
    raw = data.digits()
    train, calibration, test = (
        torch.from_numpy(raw[part] / 16).flatten(1) for part in ("train", "calibration", "test")
    )
    labels = torch.from_numpy(raw["train_labels"]), torch.from_numpy(raw["test_labels"])
    return data.Parts(train, labels[0], calibration, test, labels[1])


def network() -> nn.Module:
    """An untrained network of the demo's shape: also the skeleton that `cs.load` fills."""
    pairs = itertools.pairwise(WIDTHS)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def train(
    parts: data.Parts, *, epochs: int = EPOCHS, seed: int = 0, tick: Callable[[], None] = lambda: None
) -> nn.Module:
    """Adam on the cross-entropy. torch's global random state is put back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in range(epochs):
            for batch in torch.randperm(len(parts.train)).split(50):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(parts.train[batch]), parts.train_labels[batch]).backward()
                optimizer.step()
            tick()
    return model.eval().requires_grad_(True)


@dataclass(frozen=True)
class Demo:
    """What the demo measured and where it put things."""

    rows: list[Row]
    sizes: tuple[float, ...]
    seeds: int
    accuracy: float  # of the original
    parameters: int
    tested: int
    command: str
    page: Path
    file: Path
    file_note: str

    @property
    def summary(self) -> list[Row]:
        return summary(self.rows)

    def to_dict(self) -> dict[str, Any]:
        original = {"accuracy": self.accuracy, "parameters": self.parameters, "tested": self.tested}
        made = {
            "command": self.command,
            "versions": dict(versions()),
            "page": str(self.page),
            "file": str(self.file),
        }
        return made | {"original": original, "rows": self.rows, "summary": self.summary}


def run(
    out: Path = OUT, *, seeds: int | None = None, quick: bool = False, bar: Progress | None = None
) -> Demo:
    """Train, compress by every method at every size, write the page and one small network into `out`."""
    with _one_thread():
        return _run(out, seeds, quick, bar or Progress())


@contextmanager
def _one_thread() -> Iterator[None]:
    """The network is small: threads would wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(out: Path, seeds: int | None, quick: bool, bar: Progress) -> Demo:
    sizes = QUICK_SIZES if quick else SIZES
    count = seeds or (QUICK_SEEDS if quick else SEEDS)
    page.require_jinja2()  # before the work, not after it
    _make_folder(out)
    parts = digits()
    bar.step("training on digits", total=EPOCHS)
    model = train(parts, tick=bar.advance)
    bar.step("compressing", total=len(cells(tuple(METHODS), sizes, range(count))))
    rows = []
    for row in compare(
        model, parts.calibration, [parts.test], keeps=sizes, seeds=range(count), labels=parts.test_labels
    ):
        rows.append(row)
        bar.advance(f"{row['method']} at {share(row['keep'])}")
    bar.step("writing the page and the file")
    small = calibrate(model, parts.calibration, method=SAVED_METHOD).compress(keep=SAVED_SIZE)
    file = out / "small.safetensors"
    small.save(file, compact=True)
    weights = sum(p.nbytes for p in model.parameters())
    demo = Demo(
        rows=rows,
        sizes=sizes,
        seeds=count,
        accuracy=accuracy(model, [parts.test], parts.test_labels),
        parameters=sum(p.numel() for p in model.parameters()),
        tested=len(parts.test),
        command=_command(out, seeds, quick),
        page=out / "index.html",
        file=file,
        file_note=f"{SAVED_METHOD} at {share(SAVED_SIZE)}: {size_of(file.stat().st_size)} of {size_of(weights)}",
    )
    page.write(demo.page, _page(demo))
    return demo


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise FileError(
            f"--out {out} ({reason.strerror})", "a folder that can be made", f"--out {OUT}"
        ) from reason


def _command(out: Path, seeds: int | None, quick: bool) -> str:
    """
    >>> _command(OUT, 3, quick=True), _command(Path("my page"), None, quick=False)
    ('coresieve demo --quick --seeds 3', "coresieve demo --out 'my page'")
    """
    words = ["coresieve", "demo"] + ["--quick"] * quick + ([] if seeds is None else ["--seeds", str(seeds)])
    return shlex.join(words + ([] if out == OUT else ["--out", str(out)]))


def versions() -> list[tuple[str, str]]:
    names = ("coresieve", "torch", "numpy", "numba", "scikit-learn")
    return [*((name, version(name)) for name in names), ("Python", platform.python_version())]


def _page(demo: Demo) -> str:
    repeated = (
        f"mean of {demo.seeds} seeds, shaded by one standard deviation" if demo.seeds > 1 else "one seed"
    )
    figures = [
        page.Figure(
            "accuracy",
            "Accuracy against size",
            f"Share of {demo.tested} test digits read right, in %; {repeated}",
            percent=True,
            higher_is_better=True,
            reference=demo.accuracy,
        ),
        page.Figure(
            "error",
            "Output error against size",
            f"‖f̂(x) − f(x)‖₁ / ‖f(x)‖₁ on the same digits, log scale; {repeated}",
            log=True,
        ),
    ]
    facts = [
        ("network", "-".join(map(str, WIDTHS))),
        ("parameters", f"{demo.parameters:,}"),
        ("its accuracy", f"{100 * demo.accuracy:.1f} %"),
        ("test digits", f"{demo.tested}"),
    ]
    return page.render(
        [page.Section(figures, demo.summary)],
        title="One network, made smaller nine ways",
        lead=_lead(demo),
        facts=facts,
        notes=_notes(demo),
        command=demo.command,
        versions=versions(),
    )


def _lead(demo: Demo) -> str:
    here = [entry for entry in demo.summary if entry["keep"] == SAVED_SIZE and entry["accuracy"] is not None]
    start = f"A ReLU network that reads handwritten digits: {len(METHODS)} methods, {len(demo.sizes)} sizes."
    if not here:
        return start
    best = max(here, key=lambda entry: entry["accuracy"])
    found, original = (f"{100 * accuracy:.1f} %" for accuracy in (best["accuracy"], demo.accuracy))
    told = (
        f"{start} With {share(SAVED_SIZE)} of its parameters the best of them here, {best['method']}, "
        f"reads {found} right; the original reads {original}."
    )
    return told.replace(" %", "\N{NO-BREAK SPACE}%")


def _notes(demo: Demo) -> list[str]:
    off = max(
        (abs(row["kept"] / row["keep"] - 1) for row in demo.rows if row["kept"] is not None), default=0.0
    )
    return [
        "Nothing was retrained. The methods saw the trained weights and 297 calibration images, no labels. "
        "The test images trained nothing and calibrated nothing.",
        "Size is the share of non-zero parameters kept, biases counted (svd: entries of its two factors). "
        f"Points stand at the size reached, which is within {100 * off:.2g} % of the size asked for.",
        "sieve solves for the edges that matter and for their weights, layer after layer, and then moves all weights "
        "toward the original's answers; sparsegpt and wanda are pruning methods of others.",
        "corenet samples each neuron's incoming edges by how much they matter on the calibration images; "
        "corenet+ also removes neurons that never fire; corenet++ also draws several times and keeps the "
        "best draw.",
        "uniform, l1, l2 and l1l2 sample edges without looking at any image: all alike, by |w|, by w², by "
        "both. svd keeps the largest singular values; magnitude keeps the largest weights. What draws "
        "nothing runs once.",
        "A marked cell is the best of its column. A mean without a spread ran once.",
    ]
