"""What a person reads of a compression: a line a layer, a total, and the sentences that numbers cannot say."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from coresieve.errors import stored

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

WIDTH = 79  # of the text: what a terminal of 80 columns shows


@dataclass
class LayerReport:
    """One layer. None where a number has no meaning for the method (or was not measured)."""

    name: str
    rows: int
    edges: int  # biases counted
    before: int  # parameters that are not zero
    after: int = 0
    rows_exact: int | None = None  # rows left as they were
    draws: int | None = None  # samples drawn, over all rows
    sensitivity_mean: float | None = None  # of S, the sum of a row's sensitivities
    sensitivity_max: float | None = None
    delta_hat: float | None = None
    eps: float | None = None  # the layer's share of the error, in theory mode
    dead_neurons: int | None = None  # removed from the layer
    rank: int | None = None
    rounding: float | None = None  # ||w_rounded - w||_1 / ||w||_1 over the weights that were rounded
    error: float | None = None  # ||z_hat - z||_1 / ||z||_1 on calibration points

    @property
    def kept(self) -> float:
        return self.after / self.before if self.before else 1.0


Columns = list[tuple[str, Callable[[LayerReport], str]]]


@dataclass
class Report:
    """The whole compression; `str(report)` is a table, `to_dict()` is for programs."""

    method: str
    budget: str
    seed: int
    version: str
    rounding: str = ""  # "8 bits", "float16"; "": every bit of the weights stays
    layers: list[LayerReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    guarantee: str = ""  # what is promised, or why nothing is
    a_priori: float | None = None  # eps of the paper's theorem for the draws made; None: it does not apply
    a_priori_missing: str = ""  # why not
    points: int = 0  # |S|
    points_judging: int = 0  # |T|
    points_needed: int | None = None  # what the theory asks |S| to be
    points_measured: int = 0  # calibration points on which the errors were measured
    error: float | None = None  # ||f_hat - f||_1 / ||f||_1 on those
    seconds: float = 0.0

    @property
    def parameters_before(self) -> int:
        return sum(layer.before for layer in self.layers)

    @property
    def parameters_after(self) -> int:
        return sum(layer.after for layer in self.layers)

    @property
    def kept(self) -> float:
        """The share of non-zero parameters that stayed, over all layers that could be compressed."""
        return self.parameters_after / self.parameters_before if self.parameters_before else 1.0

    def a_priori_told(self) -> str:
        """The error that the paper's theorem bounds at the size reached, known before any input is tried."""
        if self.a_priori is None:
            return f"none ({self.a_priori_missing or 'the theorem does not speak of this method'})."
        if self.a_priori == 0 and self.parameters_after == self.parameters_before:
            return "eps = 0 (every row is exact)."
        if self.a_priori == 0:
            return "eps = 0, by the paper's theorem: what left was silent on all of the sample."
        if self.a_priori < 1:
            return f"eps = {self.a_priori:.3g}, by the paper's theorem at this size."
        return (
            f"none (at this size the paper's theorem gives eps = {self.a_priori:.2g}, "
            "and 1 or more says nothing: vacuous)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; infinities become the string "inf", so that JSON holds them."""
        totals = {
            "parameters_before": self.parameters_before,
            "parameters_after": self.parameters_after,
            "kept": self.kept,
        }
        layers = [asdict(layer) | {"kept": layer.kept} for layer in self.layers]
        return jsonable(asdict(self) | totals | {"layers": layers})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The inverse of `to_dict`; keys of a later version are ignored."""
        with stored("report"):
            layers = [LayerReport(**known(LayerReport, layer)) for layer in data.get("layers", [])]
            return replace(cls(**{**known(cls, data), "layers": []}), layers=layers)

    def __str__(self) -> str:
        console = new_console(file=io.StringIO(), width=WIDTH, color_system=None)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.padding import Padding
        from rich.text import Text

        yield Text(self._title(), style="bold")
        yield from self._tables(console, options)
        for line in (
            self._measured(),
            self.guarantee,
            self._a_priori(),
            *(f"- {note}" for note in gathered(self.notes)),
        ):
            if line:
                yield Padding(Text(line), (0, 0, 0, 1))

    def _tables(self, console: Console, options: ConsoleOptions) -> list[Table]:
        """All columns side by side where the terminal is wide enough; else how it was done in a table below."""
        from rich.measure import Measurement

        sizes, how = self._columns()
        unbounded = options.update(max_width=10_000)

        def fits(table: Table) -> bool:
            return Measurement.get(console, unbounded, table).maximum <= options.max_width

        ways = ([sizes + how], [sizes, sizes[:1] + how]) if how else ([sizes],)
        drawn = [[self._table(part, gap) for part in parts] for parts in ways for gap in (1, 0)]
        return next((tables for tables in drawn if all(map(fits, tables))), drawn[-1])

    def _table(self, columns: Columns, gap: int) -> Table:
        """A line a layer, and a total. The line breaks within a layer's name where nothing else helps."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap))
        for name, _ in columns:
            number = name != "layer"
            table.add_column(
                name, justify="right" if number else "left", overflow="fold", no_wrap=number, min_width=5
            )
        for layer in self.layers:
            table.add_row(*(Text(show(layer)) for _, show in columns))
        total = {
            "before": f"{self.parameters_before:,}",
            "after": f"{self.parameters_after:,}",
            "kept": _percent(self.kept),
            "error": _short(self.error),
        }
        if total.keys() & dict(columns).keys():
            table.add_section()
            table.add_row("total", *(total.get(name, "") for name, _ in columns[1:]), style="bold")
        return table

    def _title(self) -> str:
        how = f"{self.method}, {self.budget}, seed {self.seed}{self.rounding and ', ' + self.rounding}"
        return f"{how}: {_percent(self.kept)} of the parameters kept"

    def _measured(self) -> str:
        used = f"Of the sample {self.points:,} points were used"
        used += f" and {self.points_judging:,} more to judge candidates" if self.points_judging else ""
        asked = "" if self.points_needed is None else f" (the theory asks for {self.points_needed:,})"
        return f"{used}{asked}. Errors are relative, in the l1 norm, on {self.points_measured:,} of them."

    def _a_priori(self) -> str:
        """Only where a theorem could have spoken, and `guarantee` does not tell it already."""
        told = self.a_priori is not None and self.budget.startswith("keep")
        return f"A priori error bound: {self.a_priori_told()}" if told else ""

    def _columns(self) -> tuple[Columns, Columns]:
        """Those that every method has, and those that some layer has a number for."""
        always: Columns = [
            ("layer", lambda x: x.name),
            ("before", lambda x: f"{x.before:,}"),
            ("after", lambda x: f"{x.after:,}"),
            ("kept", lambda x: _percent(x.kept)),
            ("error", lambda x: _short(x.error)),
        ]
        numbers: Columns = [
            ("exact rows", lambda x: "" if x.rows_exact is None else f"{x.rows_exact:,}/{x.rows:,}"),
            ("draws", lambda x: _count(x.draws)),
            ("dead", lambda x: _count(x.dead_neurons)),
            ("rank", lambda x: _count(x.rank)),
            ("rounding", lambda x: _short(x.rounding)),
            ("mean S", lambda x: _short(x.sensitivity_mean)),
            ("max S", lambda x: _short(x.sensitivity_max)),
            ("Delta", lambda x: _short(x.delta_hat)),
        ]
        return always, [(name, show) for name, show in numbers if any(map(show, self.layers))]


def new_console(**how: Any) -> Console:
    """A console of rich, which draws a random number when it is imported: not from the user's generator."""
    state = random.getstate()
    from rich.console import Console

    random.setstate(state)
    return Console(**how)


def gathered(notes: list[str]) -> list[str]:
    """The same lines, those that say the same of several layers joined into one.

    >>> gathered(["a stays exact: LayerNorm", "b stays exact: LayerNorm", "the theory allows no saving"])
    ['a and b stay exact: LayerNorm', 'the theory allows no saving']
    """
    names: dict[str, list[str]] = {}
    for note in notes:
        name, exact, reason = note.partition(" stays exact: ")
        names.setdefault(reason if exact else note, []).extend([name] if exact else [])
    return [f"{_listed(who)}{reason}" if who else reason for reason, who in names.items()]


def _listed(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} stays exact: "
    shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
    return f"{', '.join(shown[:-1])} and {shown[-1]} stay exact: "


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _short(x: float | None) -> str:
    if x is None:
        return ""
    return "inf" if math.isinf(x) else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def _count(n: int | None) -> str:
    return "" if n is None else f"{n:.1e}" if n >= 10**8 else f"{n:,}"


def known(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {key: _number(value) for key, value in data.items() if key in names}


def _number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
