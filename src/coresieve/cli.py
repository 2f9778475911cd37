"""The commands demo, compress, compare and inspect: a thin shell around the library; the answer goes to stdout.

Those about certificates are in `cli_certificates.py`. A model is given as `package.module:factory`, imported with the
current folder on the path; its weights as safetensors; data as .npy, .npz or .safetensors. Nothing is ever unpickled.

torch and numpy are imported when a command runs and not before: `coresieve --help` stays quick.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from coresieve import __version__, cli_bench, cli_certificates, cli_lab
from coresieve.budget import Budget
from coresieve.cli_arguments import (
    Data,
    Eps,
    Flag,
    Json,
    Keep,
    Keeps,
    Key,
    MaxBytes,
    Methods,
    Model,
    Names,
    Out,
    Page,
    Weights,
    Whole,
    check_coded,
    check_out,
    is_onnx,
    named_out,
    trained,
)
from coresieve.errors import BudgetError, CoresieveError, NotCertifiedError, stored
from coresieve.terminal import (
    accuracy_table,
    bytes_table,
    compare_table,
    complain,
    console,
    escape,
    print_json,
    progress,
    say,
    share,
    size_of,
)

FINE, BAD_INPUT, BAD_USAGE, NOT_MET, INTERRUPTED = 0, 1, 2, cli_certificates.NOT_MET, 130
EXIT_CODES = (
    "Exit codes: 0 done; 1 the input is at fault (the message says what to try); "
    "2 the command line is not understood; 3 the goal of a certificate is not met; 130 interrupted with Ctrl-C."
)

app = App(
    name="coresieve",
    help="Make a trained network smaller, and see how far its answers move.",
    help_epilogue=EXIT_CODES,
    version=__version__,
    suppress_keyboard_interrupt=False,  # main() says so, and with which code
)


def main(tokens: Sequence[str] | None = None) -> int:
    """Run one command and answer its exit code. An error of ours is one message on stderr, no traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± shows a ?, not a traceback
    try:
        code = app(tokens, exit_on_error=False, result_action="return_value")
    except CycloptsError:
        return BAD_USAGE  # its message is already on stderr
    except CoresieveError as error:
        complain("[bold red]error:[/]", str(error))
        return NOT_MET if isinstance(error, NotCertifiedError) else BAD_INPUT
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):
            return FINE  # the help, into a pipe that nobody reads any more
        complain("[bold red]error:[/]", f"the model's own code ended the program (SystemExit: {stop})")
        return BAD_INPUT
    except KeyboardInterrupt:
        with suppress(OSError, SystemExit):
            console(stderr=True).print("interrupted")
        return INTERRUPTED
    return code if isinstance(code, int) else FINE


# --- The commands -------------------------------------------------------------------------------------------


@app.command(sort_key=1)
def demo(
    *, out: Path = Path("out/demo"), seeds: Whole | None = None, quick: Flag = False, json: Json = False
) -> None:
    """Compress a digits network by every method and draw what each size costs.

    Trains the network first, in a second or two. Writes a page with the curves (index.html) and one small
    network (small.safetensors).

    Parameters
    ----------
    out
        Folder for the two files.
    seeds
        How often each random method is repeated.
    quick
        Fewer sizes and seeds: a look in a few seconds.
    """
    if seeds is not None and seeds < 1:
        raise BudgetError(f"--seeds {seeds}", "at least one", "--seeds 5")
    with progress() as bar:
        bar.step("loading torch")
        from coresieve.lab.demo import run

        result = run(out, seeds=seeds, quick=quick, bar=bar)
    if json:
        print_json(result.to_dict())
        return
    repeated = f", mean±std of {result.seeds} seeds" if result.seeds > 1 else ""
    original = f"{100 * result.accuracy:.1f}"
    say(f"[bold]Accuracy on {result.tested} test digits in %{repeated} (the original: {original})[/]")
    say(accuracy_table(result.summary))
    say(f"Curves         {escape(str(result.page))}")
    say(f"Small network  {escape(str(result.file))}  ({result.file_note})")
    say(f"[dim]Look inside    coresieve inspect {escape(str(result.file))}[/]")


@app.command(sort_key=2)
def compress(
    model: Model,
    /,
    *,
    weights: Weights = None,
    data: Data,
    keep: Keep = None,
    eps: Eps = None,
    max_bytes: MaxBytes = None,
    delta: float = 0.05,
    method: str | None = None,
    seed: Whole = 0,
    include: Names = None,
    exclude: Names = None,
    compact: Flag = False,
    bits: Whole | None = None,
    dtype: str | None = None,
    data_key: Key = None,
    out: Out = None,
    force: Flag = False,
    json: Json = False,
) -> None:
    """Make one network smaller and save it.

    coresieve compress model.onnx --data x.npy --keep 10% --out small.onnx

    coresieve compress nets:build --weights w.safetensors --data x.npy --keep 10%

    Parameters
    ----------
    delta
        Probability with which the bound of --eps may fail.
    method
        sieve, corenet, corenet+, corenet++, sparsegpt, wanda, magnitude, svd, uniform, l1, l2 or l1l2
        [default: sieve; corenet++ with --eps].
    seed
        The same seed gives the same network.
    include
        Layers to compress, a pattern such as 'encoder.*'; may be repeated [default: all].
    exclude
        Layers to leave as they are; may be repeated.
    compact
        Write only the weights that stay, coded; as exact as without. --bits, --dtype and --max-bytes do so too.
    bits
        Round the weights to 8, 6 or 4 bits, with a step for each row.
    dtype
        Round the weights to numbers of float16 or bfloat16.
    out
        File to write; a name in .onnx makes it an ONNX model [default: small.onnx or small.safetensors].
    force
        Overwrite the file if it is there.
    """
    Budget.of(keep=keep, eps=eps, max_bytes=max_bytes, delta=delta)
    out, original = named_out(out, model), trained(model, weights)
    check_out(out, force, inputs=(original, data))
    check_coded(out, compact=compact, max_bytes=max_bytes)
    with progress() as bar:
        bar.step("loading torch")
        from coresieve import compression
        from coresieve.inputs import load_inputs, load_model, save_small

        net = load_model(model, weights)
        inputs = load_inputs(data, net, data_key)
        small = compression.compress(
            net,
            bar.over(
                inputs, "reading the sample", then=f"compressing with {method or compression.usual(eps)}"
            ),
            keep=keep,
            eps=eps,
            max_bytes=max_bytes,
            delta=delta,
            method=method,
            seed=seed,
            include=include or ["*"],
            exclude=exclude or [],
            bits=bits,
            dtype=dtype,
        )
        bar.step("saving")
        save_small(small, out, compact or None)
    if json:
        print_json({"out": str(out), "bytes": out.stat().st_size, "report": small.report.to_dict()})
        return
    say(small.report)
    sizes = f"{size_of(out.stat().st_size)}; the original is {size_of(original.stat().st_size)}"
    say(f"Saved {escape(str(out))} ({sizes})")


@app.command(sort_key=3)
def compare(
    model: Model,
    /,
    *,
    weights: Weights = None,
    data: Data,
    keep: Keeps,
    heldout: Path | None = None,
    labels: Path | None = None,
    methods: Methods = None,
    seeds: Whole = 3,
    data_key: Key = None,
    json: Json = False,
) -> None:
    """Put the methods side by side at the sizes asked for.

    coresieve compare nets:build --weights w.safetensors --data x.npy --keep 0.5,0.1

    Parameters
    ----------
    heldout
        Inputs that judge the small networks. Without it a quarter of --data is set aside for that.
    labels
        The right classes of the inputs that judge (or of all of --data, without --heldout), for accuracy.
    seeds
        How often each random method is repeated.
    """
    trained(model, weights)
    for share_kept in keep:
        Budget.of(keep=share_kept)
    if not keep or seeds < 1:
        raise BudgetError(
            f"{len(keep)} sizes, {seeds} seeds", "at least one of each", "--keep 0.5,0.1 --seeds 3"
        )
    with progress() as bar:
        bar.step("loading torch")
        from coresieve.inputs import in_batches, load_array, load_arrays, load_model, set_apart
        from coresieve.lab import compare as lab
        from coresieve.methods import METHODS
        from coresieve.sample import size as count

        methods = methods or tuple(METHODS)
        todo = lab.cells(methods, keep, range(seeds))  # so that an unknown method fails now
        net = load_model(model, weights)
        bar.step("reading the data")
        given = None if heldout is None else load_arrays(heldout, net, data_key)
        right = None if labels is None else load_array(labels, usual="y")
        calibration, judges, right = set_apart(load_arrays(data, net, data_key), given, right)
        bar.step("comparing", total=len(todo))
        rows = []
        for row in lab.compare(
            net,
            in_batches(calibration, net),
            in_batches(judges, net),
            methods=methods,
            keeps=keep,
            seeds=range(seeds),
            labels=right,
        ):
            rows.append(row)
            bar.advance(f"{row['method']} at {share(row['keep'])}")
    where = heldout.name if heldout else f"{data.name}, set aside"
    judged = f"{count(calibration):,} inputs calibrate, {count(judges):,} others judge ({where})"
    if json:
        print_json({"judged": judged, "rows": rows, "summary": lab.summary(rows)})
        return
    repeated = f"; mean±std of {seeds} seeds" if seeds > 1 else ""
    say(f"[bold]{escape(judged)}{repeated}[/]")
    say(compare_table(lab.summary(rows)))
    say("[dim]error: ||f_hat - f||_1 / ||f||_1; flips: predictions that changed[/]")
    for reason in dict.fromkeys(row["failed"] for row in rows if row["failed"]):
        say(f"[dim]-[/] {escape(reason)}")


@app.command(sort_key=4)
def inspect(
    file: Annotated[Path, Parameter(help="A file that `coresieve compress` wrote.")],
    /,
    *,
    page: Page = None,
    json: Json = False,
):
    """Show what a saved network holds, layer by layer."""
    if page is not None:
        from coresieve.lab import network_page

        network_page.check(page)
    with progress() as bar:
        bar.step("loading torch")
        if is_onnx(file):
            from coresieve.graphs.files import read_header
        else:
            from coresieve.storage import read_header

        header = read_header(file)
        if page is not None:
            _write_page(page, file, header)
    if json:
        print_json(header)
        return
    _say_header(file, header)
    if page is not None:
        say(f"Page  {escape(str(page))}")


def _write_page(page: Path, file: Path, header: dict[str, Any]) -> None:
    import shlex

    from coresieve.certificate import Certificate
    from coresieve.lab import network_page
    from coresieve.report import Report

    network_page.write(
        page,
        file,
        shlex.join(["coresieve", "inspect", str(file), "--page", str(page)]),
        report=Report.from_dict(header["report"]) if "report" in header else None,
        certificate=Certificate.from_dict(header["certificate"]) if "certificate" in header else None,
    )


def _say_header(file: Path, header: dict[str, Any]) -> None:
    from coresieve.certificate import Certificate
    from coresieve.report import Report

    about, told = header["file"], []
    if "report" in header:
        with stored("report"):
            told.append(Report.from_dict(header["report"]))
            str(told[0])  # numbers where numbers belong
    if "certificate" in header:
        told.append(escape(str(Certificate.from_dict(header["certificate"]))))
    dtypes = ", ".join(sorted({tensor["dtype"] for tensor in about["tensors"].values()}))
    say(
        f"[bold]{escape(str(file))}[/]  {size_of(about['bytes'])}, {len(about['tensors'])} tensors ({dtypes})"
    )
    if about["version"] is not None:
        say(f"written by coresieve {escape(str(about['version']))}")
    if all("bytes" in tensor for tensor in about["tensors"].values()):
        say(bytes_table(about))
    else:  # a model in ONNX
        for name, tensor in () if header.keys() - {"file"} else about["tensors"].items():
            say(f"{escape(name)}  {tensor['dtype']} {tuple(tensor['shape'])}")
    for part in told:
        say(part)


app.command(cli_certificates.certify, sort_key=5)
app.command(cli_certificates.verify, sort_key=6)
app.command(cli_certificates.smallest, sort_key=7)
app.command(cli_bench.bench, sort_key=8)
app.command(cli_lab.lab_app)
app.command(cli_lab.data_app)
