"""How small can a network be and still be certified? The table in docs/certificates.md.

    python experiments/certified.py            run what is missing, then write the table   (CORESIEVE_DATA: the sets)
    python experiments/certified.py --table    only write the table, from the stored results

MNIST and Fashion-MNIST, a 784-300-100-10 and a 784-1000-1000-10 network, every method: `cs.smallest` with at most
0.5, 1 and 2 % flips at 95 %. 5,000 images that trained nothing choose sizes and compress; 5,000 test images certify;
the other 5,000 only look afterwards whether what was certified is true. One line of results/certified.jsonl a cell;
running again fills the gaps, and makes anew what another version of its method made: the last line of a cell counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import coresieve as cs
from coresieve.errors import CoresieveError, NotCertifiedError
from coresieve.lab import data
from coresieve.lab.compare import outputs
from coresieve.lab.train import Network, trained
from coresieve.lab.version import version
from coresieve.methods import METHODS, resolve

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "certified.jsonl", HERE.parent / "docs" / "certificates.md"
NETWORKS = Path("out/networks")
SETS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
ARCHITECTURES = {"300-100": "784-300-100-10", "1000-1000": "784-1000-1000-10"}
GOALS = (0.005, 0.01, 0.02)
HELDOUT = 5000
BEGIN, END = "<!-- made by experiments/certified.py -->", "<!-- end -->"


def stored() -> dict[tuple, dict]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["dataset"], row["architecture"], row["method"], row["goal"]): row for row in rows}


def run(datasets: list[str]) -> None:
    done = stored()
    for dataset in datasets:
        parts = data.load(dataset, train=False)
        for architecture in ARCHITECTURES:
            cells = [(m, g) for m in METHODS for g in GOALS]
            todo = [(m, g) for m, g in cells if not current(done.get((dataset, architecture, m, g)), m)]
            if todo:
                model = trained(Network(dataset, data.digest(dataset), architecture, 0), NETWORKS)
            for method, goal in todo:
                row = {"dataset": dataset, "architecture": architecture, "method": method, "goal": goal}
                row |= cell(model, parts, method, goal) | {"version": version(resolve(method))}
                print(row, file=sys.stderr, flush=True)
                RESULTS.parent.mkdir(exist_ok=True)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def current(row: dict | None, method: str) -> bool:
    """Whether it was made by the method as it is now."""
    return row is not None and row.get("version") == version(resolve(method))


def cell(model: torch.nn.Module, parts: data.Parts, method: str, goal: float) -> dict:
    start = time.perf_counter()
    shuffled = torch.randperm(len(parts.test), generator=torch.Generator().manual_seed(0))
    judges, others = (
        parts.test[shuffled[:HELDOUT]],
        parts.test[shuffled[HELDOUT:]],
    )  # writers come in turn: mix them
    try:
        best = cs.smallest(model, parts.calibration, judges, max_flips=goal, method=method)
    except NotCertifiedError as reason:
        return {"kept": None, "why": str(reason), "seconds": round(time.perf_counter() - start, 1)}
    except CoresieveError as reason:
        return {"kept": None, "why": f"failed: {reason}", "seconds": round(time.perf_counter() - start, 1)}
    was, now = (outputs(net, [others]).argmax(1) for net in (model, best.model))
    assert best.certificate is not None
    flipped = best.certificate["flips"].counts["changed"]
    return {
        "kept": best.report.kept,
        "heldout_flips": flipped / HELDOUT,
        "other_flips": float((was != now).double().mean()),
        "tested": len(best.certificate.tested),
        "seconds": round(time.perf_counter() - start, 1),
    }


def table(rows: dict[tuple, dict]) -> str:
    """A line a method; for each network the size certified at each goal."""
    columns = [(d, a) for d in SETS for a in ARCHITECTURES]
    told = " / ".join(f"{100 * goal:g}" for goal in GOALS)
    lines = [
        "| method | " + " | ".join(f"{SETS[d]}, {ARCHITECTURES[a]}" for d, a in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for method in METHODS:
        cells = [" / ".join(size(rows.get((d, a, method, goal))) for goal in GOALS) for d, a in columns]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    certified = [row for row in rows.values() if row["kept"] is not None]
    older = sum(not current(row, row["method"]) for row in rows.values())
    warned = (
        f"\n\n**{older} of these {len(rows)} results were made by an earlier version of a method.**"
        * bool(older)
    )
    broken = sum(row["other_flips"] > row["goal"] for row in certified)
    return (
        f"Share of the parameters kept, in %, by the smallest network certified to flip at most {told} % of fresh "
        f"inputs, at 95 %, with {HELDOUT:,} held-out images; - where none was.\n\n"
        + "\n".join(lines)
        + "\n\n"
        f"On the other 5,000 test images, which neither chose nor certified, {broken} of these {len(certified)} "
        "networks flip more than their goal." + warned
    )


def size(row: dict | None) -> str:
    return "?" if row is None else "-" if row["kept"] is None else f"{100 * row['kept']:.3g}"


def write() -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(stored())}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="compute nothing")
    parser.add_argument("--dataset", choices=list(SETS), help="only the cells of this one")
    options = parser.parse_args()
    if not options.table:
        torch.set_num_threads(1)
        run([options.dataset] if options.dataset else list(SETS))
    write()
