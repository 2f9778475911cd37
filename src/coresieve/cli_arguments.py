"""What a command line may say: shares as 0.1 or 10%, lists by comma, models, files, and which budget.

>>> fraction("10%"), fraction("0.1"), fractions("50%, 0.2,10%")
(0.1, 0.1, (0.5, 0.2, 0.1))
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import ArgumentCollection, Group, Parameter, Token

from coresieve.errors import FileError


def fraction(text: str) -> float:
    """A share of the parameters: 0.1 or 10%."""
    number = text.strip()
    try:
        return round(float(number[:-1]) / 100, 12) if number.endswith("%") else float(number)
    except ValueError:
        raise ValueError(f"{text!r} is not a share of the parameters; write 0.1 or 10%.") from None


def whole(text: str) -> int:
    """A whole number: 1.5 is not taken for 2.

    >>> whole("3")
    3
    """
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number.") from None


def fractions(text: str) -> tuple[float, ...]:
    return tuple(fraction(part) for part in text.split(",") if part.strip())


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "b": 1}


def byte_count(text: str) -> int:
    """
    >>> byte_count("200kB"), byte_count("1.5 MB"), byte_count("64KiB"), byte_count("1000")
    (200000, 1500000, 65536, 1000)
    """
    number = text.strip().lower()
    unit = next((unit for unit in UNITS if number.endswith(unit)), "")
    try:
        return int(float(number.removesuffix(unit).replace("_", "")) * UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number of bytes; write 200kB, 1.5MB or 64KiB.") from None


def converted(turn: Callable[[str], Any]) -> Callable[[Any, Sequence[Token]], Any]:
    return lambda _, tokens: turn(tokens[0].value)


def one_budget(given: ArgumentCollection) -> None:
    if len([argument for argument in given if argument.tokens]) != 1:
        raise ValueError(
            "Give exactly one budget: --keep 0.1, --max-bytes 200kB, or --eps 0.5 (and --delta 0.05)."
        )


budgets = Group("Budget (one of them)", validator=one_budget)
Keep = Annotated[
    float | None,
    Parameter(
        converter=converted(fraction), group=budgets, help="Share of the parameters to keep: 0.1 or 10%."
    ),
]
MaxBytes = Annotated[
    int | None,
    Parameter(
        converter=converted(byte_count),
        group=budgets,
        help="Most bytes of the file, which is compact: 200kB, 1.5MB.",
    ),
]
Eps = Annotated[float | None, Parameter(group=budgets, help="Relative error that the theory is to bound.")]
Keeps = Annotated[
    tuple[float, ...],
    Parameter(
        metavar="SIZES",
        converter=converted(fractions),
        n_tokens=1,
        negative=(),
        help="Sizes: 0.5,0.2,0.1 or 50%,20%,10%.",
    ),
]
Methods = Annotated[
    tuple[str, ...] | None,
    Parameter(
        metavar="NAMES",
        converter=converted(names),
        n_tokens=1,
        negative=(),
        help="Methods, by comma [default: all].",
    ),
]
Model = Annotated[
    str,
    Parameter(help="model.onnx, or package.module:factory: called without arguments, the factory makes it."),
]
Weights = Annotated[
    Path | None,
    Parameter(help="The trained weights of a factory's model, a state dict in safetensors."),
]
Data = Annotated[
    Path,
    Parameter(name=("--data", "--calibration"), help="Inputs, one per row: .npy, .npz or .safetensors."),
]
Out = Annotated[Path | None, Parameter(name=("--out", "-o"))]
Page = Annotated[
    Path | None, Parameter(help="Also write all of it as one HTML page, whole in itself (coresieve[lab]).")
]
Key = Annotated[str | None, Parameter(help="Name of the array, in a file that holds several [default: x].")]
Json = Annotated[
    bool,
    Parameter(name="--json", negative=(), show_default=False, help="Print JSON and nothing else on stdout."),
]
Names = Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False)]
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
Goal = Annotated[
    float | None,
    Parameter(converter=converted(fraction), help="Most that may change or be lost, certified: 0.01 or 1%."),
]
Whole = Annotated[int, Parameter(converter=converted(whole))]
Share = Annotated[float, Parameter(converter=converted(fraction))]
Heldout = Annotated[Path, Parameter(help="Inputs that played no part in the compression, one per row.")]
Labels = Annotated[Path | None, Parameter(help="The right classes of the held-out inputs.")]


def is_onnx(name: str | Path) -> bool:
    """
    >>> is_onnx("model.onnx"), is_onnx("nets:build")
    (True, False)
    """
    return str(name).lower().endswith(".onnx")


def trained(model: str, weights: Path | None) -> Path:
    """The file that holds the model's weights."""
    if is_onnx(model) and weights is not None:
        raise FileError(f"--weights {weights} beside {model}", "an ONNX model alone: it holds its weights",
                        "the command without --weights")  # fmt: skip
    if not is_onnx(model) and weights is None:
        raise FileError(f"MODEL {model!r} without --weights", "the file of its trained weights, or a model.onnx",
                        "--weights weights.safetensors")  # fmt: skip
    return Path(model) if weights is None else weights


def named_out(out: Path | None, model: str) -> Path:
    """Where to write; without a word on it, in the kind of file that the model came in."""
    return out or Path("small.onnx" if is_onnx(model) else "small.safetensors")


def check_coded(out: Path, *, compact: bool, max_bytes: int | None) -> None:
    """Compact files are safetensors files."""
    asked = " and ".join(["--compact"] * compact + ["--max-bytes"] * (max_bytes is not None))
    if asked and is_onnx(out):
        raise FileError(f"{asked} with --out {out}", "a safetensors file, which can be coded",
                        f"--out {out.with_suffix('.safetensors')}, or {out.name} without {asked}")  # fmt: skip


def check_out(out: Path, force: bool, inputs: Sequence[Path]) -> None:
    """Before any work: whether the answer can be written where it is wanted."""
    try:
        _check_out(out, force, inputs)
    except OSError as error:
        raise FileError(
            f"--out {out} ({error.strerror})", "a file that can be written", "another name"
        ) from error


def _check_out(out: Path, force: bool, inputs: Sequence[Path]) -> None:
    if any(out.resolve() == path.resolve() for path in inputs):
        raise FileError(
            f"--out {out} is one of the inputs", "a new file", f"--out {out.stem}-small.safetensors"
        )
    if out.is_dir():
        raise FileError(
            f"--out {out} is a folder", "a file", f"--out {shlex.quote(str(out / 'small.safetensors'))}"
        )
    if not out.parent.is_dir():
        hint = f"mkdir -p {shlex.quote(str(out.parent))} before"
        raise FileError(f"--out {out}", "a file in a folder that exists", hint)
    if out.exists() and not out.is_file():
        raise FileError(f"--out {out} is not a regular file", "a new file", "--out small.safetensors")
    if out.exists() and not force:
        raise FileError(
            f"--out {out} is there already", "a new file", "another name, or --force to replace it"
        )
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise FileError(f"--out {out} (Permission denied)", "a file that can be written", "another folder")
