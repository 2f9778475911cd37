"""What a person reads: all of it, in a terminal of any usual width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from coresieve.report import LayerReport, Report

HEADS = (
    "layer",
    "before",
    "after",
    "kept",
    "error",
    "exact rows",
    "draws",
    "dead",
    "mean S",
    "max S",
    "Delta",
)
LONG = "encoder.layers.11.self_attention.out_proj"


def report(name: str = "fc", size: int = 235_500) -> Report:
    layer = LayerReport(
        name, 300, 785, before=size, after=size // 7, rows_exact=287, draws=size // 3, sensitivity_mean=20.51,
        sensitivity_max=24.65, delta_hat=1341.4, dead_neurons=13, error=0.642,
    )  # fmt: skip
    return Report(
        "corenet++", "keep=0.1", 0, "1", layers=[layer, layer], points=368, points_measured=64, error=0.7
    )


def shown(what: Report, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [79, 80, 100, 200])
@pytest.mark.parametrize(
    ("name", "size"), [("fc", 1400), ("fc", 235_500), ("encoder.fc1", 2**30), (LONG, 2**20)]
)
def test_no_number_is_cut_or_left_out(name, size, width):
    lines = shown(report(name, size), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert all(head in text for head in HEADS)
    numbers = [
        f"{size:,}",
        f"{size // 7:,}",
        f"{2 * size:,}",
        "14.3 %",
        "287/300",
        "20.5",
        "24.6",
        "1,341",
        "0.642",
    ]
    assert all(number in text for number in numbers)
    assert name in text or len(name) > 20  # a long name may be broken


def test_one_table_where_there_is_room_and_two_where_not():
    heads = [line for line in shown(report(size=2**24), 200) if line.startswith(" layer")]
    assert len(heads) == 1
    heads = [line for line in shown(report(LONG), 80) if line.startswith(" layer")]
    assert len(heads) == 2
    assert len([line for line in shown(report(LONG), 80) if "total" in line]) == 1


def test_printed_it_fits_a_terminal_of_80_columns_and_drags_no_spaces():
    lines = str(report(LONG, 2**30)).splitlines()
    assert max(map(len, lines)) < 80
    assert all(line == line.rstrip() for line in lines)
