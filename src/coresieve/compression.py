"""compress(): a smaller network from a trained one and a sample of inputs. The original is never changed.

calibrate() is its first half, the one pass over the sample; `Ready.compress` is its second, a draw of one network.
"""

from __future__ import annotations

import copy
import operator
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor, nn

from coresieve import __version__, digests, theory
from coresieve.budget import Budget, check_delta
from coresieve.calibration import Observed, answers_of, eval_mode, observe, uncompiled
from coresieve.certificate import Certificate
from coresieve.digests import KnownRows
from coresieve.errors import (
    AlteredError,
    CoresieveError,
    CoresieveWarning,
    DomainError,
    FileError,
    LayerError,
    SampleError,
    StaleError,
)
from coresieve.fitting import fit
from coresieve.layers import Layer, find
from coresieve.layers.low_rank import LowRank
from coresieve.methods import Method, resolve
from coresieve.methods.method import Job, Work
from coresieve.methods.promise import Promise, points_needed, widths
from coresieve.report import LayerReport, Report
from coresieve.rounding import Rounding, bits_of, round_layers
from coresieve.sample import Batch, Sample, count
from coresieve.storage import COMPACT, file_size, load_model, read_header, save_model

POINTS_READ = 20_000  # by default, by a method that fits its weights to the sample


@dataclass
class Compressed:
    """The smaller network and how it came about; calling it calls the network."""

    model: nn.Module
    report: Report
    rows: KnownRows | None = field(default=None, repr=False)  # what calibrated it, which may not certify it
    certificate: Certificate | None = field(default=None, repr=False)  # certify() puts it here
    compact: bool = False  # how save() writes it when not told
    max_bytes: int | None = None  # the budget of its file, where that was one
    example: Batch | None = field(
        default=None, repr=False
    )  # some inputs, to trace the network for export_onnx

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __str__(self) -> str:
        return "\n\n".join(str(part) for part in (self.report, self.certificate) if part is not None)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        compact: bool | None = None,
        bits: int | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        """Write weights, report and certificate to one safetensors file; a file that is there is replaced whole or
        not at all.

        compact: only the weights that stay, coded; as exact as without. By default where `bits` or `dtype` is given,
        where the network came from a compact file, and where its budget was `max_bytes`.
        bits, dtype: round the weights before, as `rounded` does.
        """
        small = self if bits is None and dtype is None else self.rounded(bits=bits, dtype=dtype)
        if self.certificate is not None:
            what = "the network" if small is self else "the network, once rounded,"
            check_unaltered(self.certificate, digests.weights(small.model), what)
            small.certificate = self.certificate
        packed = (self.compact or small is not self) if compact is None else compact
        save_model(path, small.model, small._header(), compact=packed, max_bytes=self.max_bytes)

    def rounded(self, *, bits: int | None = None, dtype: str | torch.dtype | None = None) -> Compressed:
        """A copy whose weights are coarser: 8, 6 or 4 `bits` with a step for each row, or float16's or bfloat16's
        numbers (`dtype`). Its report tells by how much; certify it anew."""
        rounding = Rounding.of(bits, dtype)
        if rounding is None:
            raise DomainError("rounded() without bits= and dtype=", "one of them", "bits=8")
        model, report = _copy(self.model), copy.deepcopy(self.report)
        round_layers(model, report.layers, rounding)
        report.rounding = str(rounding)
        report.notes.append(f"weights rounded to {rounding} afterwards: errors above were measured before")
        return replace(self, model=model, report=report, certificate=None, compact=True)

    def bytes(self, *, compact: bool | None = None) -> int:
        """Of the file that save() would write."""
        return file_size(self.model, self._header(), compact=self.compact if compact is None else compact)

    def export_onnx(
        self, path: str | os.PathLike[str], *, example: Sample | None = None, sparse: bool = True
    ) -> None:
        """Write an ONNX file that onnxruntime runs with the same outputs, the report and certificate in its metadata.

        example: a batch that the network takes; by default some inputs of the calibration. The file is run on it, and
        compared, before it takes its name. The number of inputs a batch is free.
        sparse: of matrices with zeros, write the other values and the gaps between them; the runtime unpacks them when
        it loads the file. Without it they are dense, for tools that want plain weights.
        """
        from coresieve.graphs.exporting import export

        if self.certificate is not None:
            check_unaltered(self.certificate, digests.weights(self.model), "the network")
        export(path, self.model, self._header(), self.example if example is None else example, sparse)

    def _header(self) -> dict[str, Any]:
        """What travels with the weights."""
        report = self.report.to_dict()
        del report["seconds"]  # the same network is the same file, however long it took
        header: dict[str, Any] = {"report": report}
        if self.rows is not None:
            header |= self.rows.to_texts()
        if self.certificate is not None:
            header["certificate"] = self.certificate.to_dict()
        return header


def load(path: str | os.PathLike[str], into: nn.Module | None = None) -> Compressed:
    """Put a saved network into `into`, a fresh network of the original's architecture, bit for bit.

    `into` is changed in place, its layers' shapes too where the compression changed them; on an error it is as before.
    An ONNX file needs none: it holds the whole network.
    """
    if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).lower().endswith(".onnx"):
        return _load_onnx(path, into)
    if not isinstance(into, nn.Module):
        raise LayerError(f"into={type(into).__name__}", "a torch.nn.Module to fill",
                         "a fresh network, made by the code that made the original")  # fmt: skip
    into = uncompiled(into)
    about = read_header(path)["file"]
    rank = about["structure"].get("", {}).get("rank")
    if rank is not None and isinstance(into, nn.Linear):  # a module cannot turn into another kind in place
        into = LowRank(into.in_features, into.out_features, rank, bias=into.bias is not None)
    told: list[Compressed] = []

    def understand(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        told.append(_told(header, into))
        if (certificate := told[0].certificate) is not None:
            check_unaltered(certificate, digests.state(tensors), os.fsdecode(path))
        if not torch.equal(
            *(x.get("graph_sha256", torch.zeros(0)) for x in (tensors, dict(into.named_buffers())))
        ):
            raise FileError(f"{os.fsdecode(path)}, which belongs to another graph", "weights of this ONNX model",
                            "the model that was compressed")  # fmt: skip

    load_model(path, into, understand)
    told[0].compact = about["format"] == COMPACT
    return told[0]


def from_onnx(path: str | os.PathLike[str]) -> nn.Module:
    """The model in an ONNX file from any framework, its layers nn.Linear, for every function that takes a model."""
    from coresieve.graphs import files

    return files.load(path)[0]


def _load_onnx(path: str | os.PathLike[str], into: nn.Module | None) -> Compressed:
    from coresieve.graphs import files

    if into is not None:
        given = f"into={type(into).__name__} for an ONNX file"
        raise LayerError(given, "no skeleton: the file holds the whole network", "cs.load(path)")
    model, header = files.load(path)
    if header is None:
        return Compressed(model, Report(method="another tool's", budget="", seed=0, version=""))
    small = _told(header, model)
    if small.certificate is not None:
        check_unaltered(small.certificate, digests.weights(model), os.fsdecode(path))
    return small


def _told(header: dict[str, Any], model: nn.Module) -> Compressed:
    rows, certificate = header.get("calibration_rows"), header.get("certificate")
    return Compressed(
        model,
        Report.from_dict(header.get("report", {})),
        None if rows is None else KnownRows.from_texts(rows, header.get("choosing_rows", "")),
        None if certificate is None else Certificate.from_dict(certificate),
    )


def check_unaltered(certificate: Certificate, weights: str, what: str) -> None:
    """A certificate speaks of the very weights that were judged; `weights` is the digest of those at hand."""
    if certificate.digests.get("compressed") != weights:
        raise AlteredError(
            f"{what} with other weights than its certificate speaks of",
            "the weights that were certified",
            "certify() again (small.rounded(...), where it is to be rounded), or small.certificate = None",
        )


def compress(
    model: nn.Module,
    calibration: Sample,
    *,
    keep: float | None = None,
    eps: float | None = None,
    max_bytes: int | None = None,
    delta: float = 0.05,
    method: str | Method | None = None,
    seed: int = 0,
    points: int | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    bits: int | None = None,
    dtype: str | torch.dtype | None = None,
) -> Compressed:
    """A smaller network from a sample of inputs, by exactly one budget: `keep`, `eps` or `max_bytes`.

    keep: the share of non-zero parameters that stays, over all layers that are compressed, biases counted.
    eps, delta: the outputs may be off by a factor 1 ± eps, except with probability delta, by the paper's theory.
    max_bytes: what `save` writes is at most this large, report and all.
    bits, dtype: the weights that stay are rounded, as by `Compressed.rounded`, before errors are measured.
    calibration: a tensor, an array, a DataLoader or any iterable of batches. No labels are needed.
    method: a name or a configuration; by default "sieve", and with `eps` "corenet++", which has a theory.
    points: how many of its points to use; by default up to 20,000, or as many as the method's theory asks for.
    include, exclude: patterns of layer names.
    """
    method = resolve(usual(eps) if method is None else method)
    method.check(Budget.of(keep=keep, eps=eps, max_bytes=max_bytes, delta=delta))
    Rounding.of(bits, dtype)
    ready = calibrate(model, calibration, method=method, delta=delta, seed=seed, points=points,
                      include=include, exclude=exclude)  # fmt: skip
    return ready.compress(keep=keep, eps=eps, max_bytes=max_bytes, seed=seed, bits=bits, dtype=dtype)


def usual(eps: float | None = None) -> str:
    """The method when none is named."""
    return "sieve" if eps is None else "corenet++"


def calibrate(
    model: nn.Module,
    calibration: Sample,
    *,
    method: str | Method = "sieve",
    delta: float = 0.05,
    seed: int = 0,
    points: int | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
) -> Ready:
    """Run the sample through the model once and keep what `method` needs of it; then `ready.compress(...)` at will.

    `points` is how many of the sample's points are used, as the paper's S; by default as many as its theory asks for at
    this `delta`, and for a method that fits its weights to them up to 20,000, which stay in memory. The model runs in
    eval mode and is put back as it was.
    """
    method, seed = resolve(method), check_seed(seed)
    check_delta(delta)
    if points is not None and (
        isinstance(points, bool) or not isinstance(points, SupportsIndex) or points < 2
    ):
        raise SampleError(
            f"points={points!r}", "a whole number of at least 2", "leave it out for the theory's number"
        )
    if not isinstance(model, nn.Module):
        raise LayerError(
            f"a model of type {type(model).__name__}", "a torch.nn.Module", "pass the network itself"
        )
    model = uncompiled(model)
    found = find(model, include, exclude)
    for layer in found.layers:
        layer.check_finite()
    given = count(calibration)
    S, T = _points_wanted(found.layers, method, delta, given)
    observed = observe(
        model,
        found.layers,
        calibration,
        (points or S, T),
        seed,
        method.wants_sensitivities,
        method.wants_sample,
    )
    ran = [seen.layer for seen in observed.seen]
    if not any(layer.chosen for layer in ran):
        raise SampleError("a forward in which no layer to compress runs", "inputs that reach the layers",
                          "check include=, exclude= and the model's forward")  # fmt: skip
    never = [f"{x.name} stays exact: it never ran in the forward" for x in found.layers if x not in ran]
    return Ready(model, method, delta, observed, given or observed.points + observed.judging.points,
                 found.notes + never, fingerprint(model))  # fmt: skip


def _points_wanted(
    layers: Sequence[Layer], method: Method, delta: float, given: int | None
) -> tuple[int, int]:
    """|S| and |T| as the theory asks for; with candidates to judge, |S| as the amplification theorem does. A method
    that fits its weights to the sample reads all of it, up to a number that bounds its time."""
    if method.wants_sample:
        return POINTS_READ, 0
    if not method.wants_judges:
        return points_needed(layers, delta), 0
    eta, _, _ = widths(layers)
    tau = method.trials(eta, delta, in_theory=True)
    T = theory.amplification_points(eta, delta, tau)
    S, before = 2, 0
    while before != S:  # |P| is in |S|; of a stream that cannot say its size P is what will be read, S and T
        S, before = points_needed(layers, theory.amplification_delta(delta, given or S + T, tau)), S
    return S, T


def check_seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex) or operator.index(seed) < 0:
        raise DomainError(f"seed={seed!r}", "a whole number, 0 or more", "seed=0")
    return operator.index(seed)


@dataclass
class Ready:
    """A calibrated model: `ready.compress(keep=0.1, seed=3)` draws a network, without touching the data again."""

    model: nn.Module
    method: Method
    delta: float
    observed: Observed
    points_given: int
    notes: list[str]
    fingerprints: dict[str, tuple]

    def compress(
        self,
        *,
        keep: float | None = None,
        eps: float | None = None,
        max_bytes: int | None = None,
        delta: float | None = None,
        seed: int = 0,
        bits: int | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> Compressed:
        """Draw a network of this budget. The same seed gives the same bits."""
        start, rounding = time.perf_counter(), Rounding.of(bits, dtype)
        delta = self.delta if delta is None else delta
        budget = Budget.of(keep=keep, eps=eps, max_bytes=max_bytes, delta=delta)
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
            if budget.max_bytes is None:
                small = self._compress(budget, seed, rounding)
            else:
                small = self._fit(budget.max_bytes, seed, rounding)
        small.report.seconds = time.perf_counter() - start
        return small

    def _fit(self, max_bytes: int, seed: int, rounding: Rounding | None) -> Compressed:
        def draw(keep: float) -> Compressed:
            small = self._compress(Budget.of(keep=keep, delta=self.delta), seed, rounding)
            small.report.budget = str(Budget(max_bytes=max_bytes))
            return replace(small, compact=True, max_bytes=max_bytes)

        layers = [seen.layer for seen in self.observed.seen if seen.layer.chosen]
        entries = sum(layer.nonzero() for layer in layers)
        return fit(draw, Compressed.bytes, max_bytes, entries=entries, bits=bits_of(rounding))

    def _compress(self, budget: Budget, seed: int, rounding: Rounding | None = None) -> Compressed:
        self.method.check(budget)
        seed = check_seed(seed)
        now = fingerprint(self.model)
        changed = [name for name in now | self.fingerprints if now.get(name) != self.fingerprints.get(name)]
        if changed:
            raise StaleError(f"a model that changed since it was calibrated (in {', '.join(changed[:3]) or 'itself'})",
                             "the weights and modules that the sample saw", "call calibrate() again")  # fmt: skip
        job = self._job(_copy(self.model), budget, seed, self._promise(budget))
        with eval_mode(job.model), eval_mode(job.original):
            self.method.compress(job)
            report = self._report(job, rounding)
        for name, original in self.model.named_modules():
            job.model.get_submodule(name).train(original.training)  # modules that took another's place, too
        example = self.observed.measuring.inputs[0]
        return Compressed(
            job.model, report, self.observed.rows, compact=rounding is not None, example=example
        )

    def _promise(self, budget: Budget) -> Promise | None:
        if not self.method.wants_sensitivities:
            return None
        eta, _, _ = widths([seen.layer for seen in self.observed.seen])
        trials = self.method.trials(eta, budget.delta, in_theory=budget.eps is not None)
        promise = Promise.of(self.observed, budget, trials, self.points_given)
        if budget.eps is not None and self.observed.points < promise.points_needed:
            warnings.warn(
                CoresieveWarning(f"{budget}: {promise.sentence()} Give calibrate() more points."),
                stacklevel=5,
            )
        return promise

    def _job(self, small: nn.Module, budget: Budget, seed: int, promise: Promise | None) -> Job:
        works = []
        for index, seen in enumerate(self.observed.seen):
            if not seen.layer.chosen:
                continue
            layer = Layer(seen.layer.name, {name: small.get_submodule(name) for name in seen.layer.modules})  # type: ignore[misc]
            line = LayerReport(layer.name, *layer.shape, before=layer.nonzero())
            if promise is not None:
                line.delta_hat = promise.delta_hats[layer.name]
            works.append(Work(index, layer, seen, line))
        return Job(self.model, small, works, self.observed, budget, seed, [], promise)

    def _report(self, job: Job, rounding: Rounding | None) -> Report:
        for work in job.works:
            work.line.after = _nonzero(job.model, work.layer)
        if rounding is not None:
            round_layers(job.model, [work.line for work in job.works], rounding)
            if job.budget.eps is not None:
                job.notes.append(f"the rounding to {rounding} comes on top of what the theorem bounds")
        report = Report(
            method=str(self.method), budget=str(job.budget), seed=job.seed, version=__version__,
            rounding=str(rounding or ""), layers=[work.line for work in job.works], notes=job.notes + self.notes,
            points=self.observed.points, points_judging=self.observed.judging.points,
            points_measured=self.observed.measuring.points,
        )  # fmt: skip
        if job.promise is not None:
            report.points_needed = job.promise.points_needed
            report.a_priori_missing = "; ".join(job.promise.missing())
            if not report.a_priori_missing:
                report.a_priori = job.promise.a_priori({w.layer.name: w.per_draw for w in job.works})
        report.guarantee = _guarantee(job)
        _measure(report, job)
        return report


def _guarantee(job: Job) -> str:
    if job.budget.eps is None:
        return "A size was asked for: nothing is promised of the error."
    assert job.promise is not None
    if all(work.line.after == work.line.before for work in job.works):
        return "Every row stays exact, so the answers are the original's."
    return job.promise.sentence()


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise CoresieveError(f"{type(model).__name__}, which cannot be copied ({error})", "a model for copy.deepcopy",
                             "detach tensors among its attributes that carry gradients") from error  # fmt: skip


def _nonzero(small: nn.Module, layer: Layer) -> int:
    """Counted in the model itself, each shared parameter once."""
    parameters = {id(p): p for name in layer.modules for p in small.get_submodule(name).parameters()}
    return sum(int(torch.count_nonzero(p)) for p in parameters.values())


def _measure(report: Report, job: Job) -> None:
    """The relative l1 error of each layer's answers and of the network's, on points of S."""
    total, errors = _Error(), {work.layer.name: _Error() for work in job.works}
    names = {work.layer.name: list(work.layer.modules) for work in job.works}
    for batch, exact in zip(job.observed.measuring.inputs, job.observed.measuring.answers, strict=True):
        small = answers_of(job.model, names, batch)
        if aside := (names.keys() & exact.layers.keys()) - small.layers.keys():
            raise LayerError(f"a copy of the model whose forward goes around its own layer {min(aside)}",
                             "a forward that runs the modules of its own object",
                             "a forward that reaches its layers through self only")  # fmt: skip
        for work in job.works:
            z = exact.layers.get(work.layer.name)
            errors[work.layer.name].add(small.layers.get(work.layer.name), z if z is None else work.left(z))
        total.add(small.output, exact.output)
    for work in job.works:
        work.line.error = errors[work.layer.name].relative()
    report.error = total.relative()


class _Error:
    """||approximate - exact||_1 / ||exact||_1, batch by batch."""

    def __init__(self):
        self.off = self.scale = 0.0

    def add(self, approximate: Tensor | None, exact: Tensor | None) -> None:
        if approximate is None or exact is None or approximate.shape != exact.shape:
            return  # a layer that this batch skips, or that sees other points than before: nothing to compare
        self.off += float((approximate.double() - exact.double()).abs().sum())
        self.scale += float(exact.double().abs().sum())

    def relative(self) -> float | None:
        return self.off / self.scale if self.scale > 0 else None


WIDE = 8192  # bytes in a line of a digest
PLACES = np.random.default_rng(0).integers(1, 2**62, WIDE // 8) * 2 + 1


def fingerprint(model: nn.Module) -> dict[str, tuple]:
    """Of each module its type and what it holds itself: changes when a weight, a buffer or the module does."""
    return {
        name: (
            type(module).__qualname__,
            *((key, _digest(x)) for key, x in (*module._parameters.items(), *module._buffers.items())),
        )
        for name, module in model.named_modules()
    }


def _digest(tensor: Tensor | None) -> tuple | None:
    """Shape, type and sums over the bits weighted by place: quick, and no accident leaves them as they were."""
    if tensor is None:
        return None
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return tuple(tensor.shape), tensor.dtype
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    whole = len(bits) // WIDE * WIDE
    last = np.concatenate([bits[whole:], np.zeros(-len(bits) % WIDE, np.uint8)]).view(np.int64)
    sums = np.einsum("ij,j->i", bits[:whole].view(np.int64).reshape(-1, WIDE // 8), PLACES)
    places = np.arange(1, 2 * len(sums) + 1, 2, dtype=np.int64)
    return tuple(tensor.shape), tensor.dtype, int(sums @ places), int(last @ PLACES[: len(last)])
