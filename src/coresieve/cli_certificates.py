"""The commands about certificates: certify, verify, smallest. Exit code 3 says that a goal is not met.

coresieve certify  nets:build small.safetensors --weights w.safetensors --heldout fresh.npy --max-flips 1%
coresieve verify   small.safetensors --model nets:build --weights w.safetensors --heldout fresh.npy
coresieve smallest nets:build --weights w.safetensors --data x.npy --heldout fresh.npy --max-flips 1%
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from coresieve.cli_arguments import (
    Data,
    Flag,
    Goal,
    Heldout,
    Json,
    Key,
    Labels,
    Model,
    Names,
    Out,
    Share,
    Weights,
    Whole,
    check_out,
    is_onnx,
    named_out,
    trained,
)
from coresieve.errors import FileError
from coresieve.terminal import escape, print_json, progress, say, size_of

if TYPE_CHECKING:
    from torch import nn

    from coresieve.compression import Compressed

NOT_MET = 3

Compact = Annotated[Path, Parameter(help="The small network: a file that coresieve saved, or a state dict.")]
Claims = Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False, name="--claim")]


def certify(
    model: Model,
    compressed: Compact,
    /,
    *,
    weights: Weights = None,
    heldout: Heldout,
    labels: Labels = None,
    max_flips: Goal = None,
    max_outside: Goal = None,
    max_output_error: Goal = None,
    max_accuracy_drop: Goal = None,
    eps: float | None = None,
    delta: Share = 0.05,
    confidence: Share = 0.95,
    claims: Claims = None,
    data_key: Key = None,
    write: Flag = False,
    json: Json = False,
) -> int:
    """Say, with a stated confidence, how far a small network may be from its original.

    Exits with 3 when a goal (--max-...) is not met, so that a build can stop there.

    Parameters
    ----------
    max_flips
        Goal: most fresh inputs whose prediction may change.
    max_outside
        Goal: most fresh inputs that may have an output outside (1 ± eps).
    max_output_error
        Goal: ||f_hat - f||_1 / ||f||_1, for all but a share delta of fresh inputs.
    max_accuracy_drop
        Goal: most accuracy that may be lost; needs --labels.
    eps
        The band around the original's outputs, for the claim coreset.
    delta
        Share of inputs that claims at a level leave out.
    confidence
        With which all claims hold together.
    claims
        Make only this claim; may be repeated: flips, coreset, coreset_eps, output_error, accuracy_drop.
    write
        Store the certificate in the file of the small network.
    """
    original = trained(model, weights)
    if write and compressed.exists() and original.exists() and compressed.samefile(original):
        raise FileError(f"--write into {original}, which holds the original", "the small network's own file",
                        "certify without --write")  # fmt: skip
    with progress() as bar:
        bar.step("loading torch")
        from coresieve import certification
        from coresieve.inputs import load_array, load_inputs, load_model, save_small

        net = load_model(model, weights)
        small = _load_small(compressed, net)
        bar.step("certifying")
        certificate = certification.certify(
            net,
            small,
            load_inputs(heldout, net, data_key),
            confidence=confidence,
            eps=eps,
            delta=delta,
            labels=None if labels is None else load_array(labels, usual="y"),
            claims=claims,
            max_flips=max_flips,
            max_outside=max_outside,
            max_output_error=max_output_error,
            max_accuracy_drop=max_accuracy_drop,
        )
        if write:
            save_small(small, compressed)
    _show(certificate.to_dict() if json else str(certificate))
    if write and not json:
        say(f"Stored in {escape(str(compressed))}")
    return NOT_MET if certificate.met is False else 0


def verify(
    file: Annotated[Path, Parameter(help="A small network that carries a certificate.")],
    /,
    *,
    model: Model,
    weights: Weights = None,
    heldout: Heldout,
    labels: Labels = None,
    data_key: Key = None,
    json: Json = False,
) -> int:
    """Recompute a stored certificate and say whether it is true.

    Exits with 3 when it is not: other weights, other data, or other numbers.
    """
    with progress() as bar:
        bar.step("loading torch")
        from coresieve import certification
        from coresieve.inputs import load_array, load_inputs, load_model

        net = load_model(model, weights)
        small = _load_small(file, net)
        bar.step("verifying")
        wrong = certification.verify(
            net,
            small,
            load_inputs(heldout, net, data_key),
            labels=None if labels is None else load_array(labels, usual="y"),
        )
    certificate = small.certificate
    assert certificate is not None
    if json:
        print_json({"true": not wrong, "wrong": wrong, "certificate": certificate.to_dict()})
    else:
        say(escape(str(certificate)))
        say("")
        for line in wrong:
            say(f"[bold red]differs:[/] {escape(line)}")
        say("[bold red]The certificate is not confirmed.[/]" if wrong else certification.CONFIRMED)
    return NOT_MET if wrong else 0


def smallest(
    model: Model,
    /,
    *,
    weights: Weights = None,
    data: Data,
    heldout: Heldout,
    labels: Labels = None,
    max_flips: Goal = None,
    max_accuracy_drop: Goal = None,
    eps: float | None = None,
    delta: Share | None = None,
    confidence: Share = 0.95,
    method: str = "sieve",
    seed: Whole = 0,
    include: Names = None,
    exclude: Names = None,
    data_key: Key = None,
    out: Out = None,
    force: Flag = False,
    json: Json = False,
) -> None:
    """Find the smallest network that can be certified, and save it with its certificate.

    Exactly one goal: --max-flips, --max-accuracy-drop, or --eps (with --delta). Exits with 3 when no size
    can be certified; then nothing is written.

    Parameters
    ----------
    max_flips
        Most fresh inputs whose prediction may change.
    max_accuracy_drop
        Most accuracy that may be lost; needs --labels.
    eps
        Outputs are to stay within (1 ± eps) of the original's.
    delta
        Most fresh inputs that may have an output outside of that [default: 5%].
    confidence
        With which the goal is certified.
    method
        Any method of `coresieve compress`.
    seed
        The same seed gives the same network.
    include
        Layers to compress, a pattern; may be repeated [default: all].
    exclude
        Layers to leave as they are; may be repeated.
    out
        File to write; a name in .onnx makes it an ONNX model [default: small.onnx or small.safetensors].
    force
        Overwrite the file if it is there.
    """
    out, original = named_out(out, model), trained(model, weights)
    check_out(out, force, inputs=(original, data, heldout))
    with progress() as bar:
        bar.step("loading torch")
        from coresieve import search
        from coresieve.inputs import load_array, load_inputs, load_model, save_small

        net = load_model(model, weights)
        small = search.smallest(
            net,
            load_inputs(data, net, data_key),
            load_inputs(heldout, net, data_key),
            max_flips=max_flips,
            max_accuracy_drop=max_accuracy_drop,
            eps=eps,
            delta=delta,
            confidence=confidence,
            method=method,
            labels=None if labels is None else load_array(labels, usual="y"),
            seed=seed,
            include=include or ["*"],
            exclude=exclude or [],
            bar=bar,
        )
        bar.step("saving")
        save_small(small, out)
    assert small.certificate is not None
    if json:
        print_json({"out": str(out), "bytes": out.stat().st_size, "report": small.report.to_dict(),
                    "certificate": small.certificate.to_dict()})  # fmt: skip
        return
    say(small.report)
    say(escape(str(small.certificate)))
    sizes = f"{size_of(out.stat().st_size)}; the original is {size_of(original.stat().st_size)}"
    say(f"Saved {escape(str(out))} ({sizes})")


def _load_small(path: Path, original: nn.Module) -> Compressed:
    """A file of ours, a plain state dict that fits the original, or any ONNX model."""
    from coresieve.compression import Compressed, load
    from coresieve.inputs import check_file, fill
    from coresieve.report import Report
    from coresieve.storage import is_ours

    if is_onnx(path):
        check_file(path)
        return load(path)
    skeleton = copy.deepcopy(original)
    if is_ours(path):
        return load(path, into=skeleton)
    fill(skeleton, path, "COMPRESSED")
    return Compressed(skeleton, Report(method="another tool's", budget="", seed=0, version=""))


def _show(answer: Any) -> None:
    if isinstance(answer, dict):
        print_json(answer)
    else:
        say(escape(answer))
