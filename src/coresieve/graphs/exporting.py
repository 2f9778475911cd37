"""Any PyTorch model as an ONNX file: traced on an example, run by onnxruntime, and compared before it is written.

torch's exporter that traces (`dynamo=False`) is used: it needs no package beside torch and onnx. The first dimension of
every input and output is free. What tracing freezes (a branch on values, a size that Python computed) shows when the
file is run on other numbers of inputs than the example, and is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import torch
from onnx import ModelProto
from torch import Tensor, nn
from torch.utils import _pytree

from coresieve import digests, storage
from coresieve.calibration import eval_mode, forward, moved, uncompiled
from coresieve.errors import ForwardError, SampleError
from coresieve.graphs import files
from coresieve.graphs.model import OnnxModel
from coresieve.graphs.pieces import as_array
from coresieve.sample import Batch, batches, size, take

OPSET = 17  # the oldest with LayerNormalization; onnxruntime has run it since 1.12
SIZES = (3, 1, 2)  # of the batches that the file is compared on


def export(
    path: storage.PathLike, model: nn.Module, header: dict[str, Any], example: Any = None, sparse: bool = True
) -> None:
    """Write `model` and `header` to an ONNX file. `example` is a batch that the model takes."""
    model = uncompiled(model)
    batch = None if example is None else _few(example)
    if isinstance(model, OnnxModel):
        return files.save(path, model, header, sparse=sparse, example=batch)
    if batch is None:
        given = "export_onnx without an example, of a network that was loaded from a file"
        raise SampleError(given, "a batch of inputs to trace", "small.export_onnx(path, example=inputs[:2])")
    name, network = storage._plain_path(path), digests.weights(model)
    with eval_mode(model), torch.no_grad():
        graph = traced(model, batch)
        layers = [
            {"name": slot.name, "outputs": [slot.output]} for slot in OnnxModel.of(graph, name).plan.slots
        ]

        def make(sparse: bool) -> bytes:
            return files.sealed(graph, header, layers, network, name, sparse)

        raw, running = files.runnable(make, sparse, name)
        for points in SIZES:
            check(running, model, _resized(batch, points), name)
    return files.replace(path, raw)


def check(running: Any, model: nn.Module, batch: Batch, path: str) -> None:
    """The file answers these inputs as the model does."""
    batch = moved(model, batch)
    before = list(_outputs(forward(model, batch)).values())
    given = _inputs(batch)
    feeds = {x.name: as_array(given[x.name]) for x in running.get_inputs()}
    files.compare(running, feeds, before, path)


def _few(example: Any) -> Batch:
    """Its first points, SIZES[0] of them: repeated where it has fewer."""
    batch = next(iter(batches([example] if isinstance(example, dict) else example)), None)
    if batch is None or not size(batch):
        raise SampleError("an example without inputs", "a batch of some inputs", "example=inputs[:2]")
    return _resized(batch, SIZES[0])


def _resized(batch: Batch, points: int) -> Batch:
    return take(batch, torch.arange(points) % size(batch))


def traced(model: nn.Module, batch: Batch) -> ModelProto:
    """The graph of one forward, its first dimension free."""
    batch = moved(model, _resized(batch, 2))
    inputs = _inputs(batch)
    outputs = _outputs(forward(model, batch), inputs)
    axes = {name: {0: "batch"} for name, value in {**inputs, **outputs}.items() if value.ndim}
    try:
        with _plainly(), TemporaryDirectory() as folder:
            file = Path(folder) / "traced.onnx"
            torch.onnx.export(
                model if isinstance(batch, Tensor) else _ByName(model, batch), tuple(inputs.values()), file,
                dynamo=False, opset_version=OPSET, dynamic_axes=axes,
                input_names=list(inputs), output_names=list(outputs),
            )  # fmt: skip
            return onnx.load(file)
    except Exception as error:  # each operator that it does not know raises a kind of its own
        told = " ".join(str(error).split())[:400]
        raise ForwardError(f"{type(model).__name__}, which torch.onnx.export refuses ({type(error).__name__}: {told})",
                           "a forward of operators that ONNX knows, in float32, float64 or float16",
                           "exporting the part of the model that has them") from error  # fmt: skip


@contextmanager
def _plainly() -> Iterator[None]:
    """No warnings: what tracing warns of is seen when the file is run. No fused attention: ONNX has none."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    # of a failure it prints the whole graph, whatever it is told
    log = getattr(torch._C, "_jit_onnx_log", None)
    torch._C._jit_onnx_log = lambda *told: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        torch._C._jit_onnx_log = log


class _ByName(nn.Module):
    """The same model with the tensors of a dict one after another; its other arguments stay as they are.

    It holds the model's own modules and parameters, so that they keep their names.
    """

    def __init__(self, model: nn.Module, batch: dict[str, Any]):
        super().__init__()
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self.around = (model,), batch, list(_inputs(batch))
        self.training = False

    def forward(self, *given: Tensor) -> Any:
        (model,), batch, names = self.around
        return model(**{**batch, **dict(zip(names, given, strict=True))})


def _inputs(batch: Batch) -> dict[str, Tensor]:
    """The inputs' names in the graph: x, or the names of the arguments."""
    return (
        {"x": batch} if isinstance(batch, Tensor) else {k: v for k, v in batch.items() if torch.is_tensor(v)}
    )


def _outputs(answer: Any, taken: Iterable[str] = ()) -> dict[str, Tensor]:
    """The same of the outputs: y, or where they stand in what the model returns.

    >>> list(_outputs({"logits": torch.zeros(1), "hidden": (torch.zeros(1), None)}))
    ['logits', 'hidden.0']
    """
    found: dict[str, Tensor] = {}
    for path, leaf in _pytree.tree_flatten_with_path(answer)[0]:
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) or "y"
        while name in found or name in taken:
            name = f"{name}_out"
        if torch.is_tensor(leaf):
            found[name] = leaf
    return found
