"""What a command is given: a model by the name of its factory, weights and arrays in files.

A model is an ONNX file, or `package.module:factory`, imported with the current folder on the path; its weights are
safetensors; data is .npy, .npz or .safetensors. The factory is the user's own code and runs;
nothing in a file ever does, for nothing is unpickled.
"""

from __future__ import annotations

import importlib
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from coresieve import digests, sample
from coresieve.cli_arguments import is_onnx, trained
from coresieve.compression import Compressed, from_onnx
from coresieve.errors import CoresieveError, FileError, ForwardError, SampleError
from coresieve.sample import Batch

_HOW = "nets:build, where nets.py in the current folder holds def build(): return nn.Sequential(...)"
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


def load_model(spec: str, weights: Path | None = None) -> nn.Module:
    """The model in an ONNX file; or that `package.module:factory` makes, filled with the weights of the file."""
    file = trained(spec, weights)
    check_file(file)  # before a factory that may take its time
    if weights is None:
        return from_onnx(file)
    model = make_model(spec)
    fill(model, weights)
    return model


def make_model(spec: str) -> nn.Module:
    made = factory = _find(spec)
    if not isinstance(factory, nn.Module):
        if not callable(factory):
            raise FileError(
                f"{spec} is a {type(factory).__name__}", "a function or class that makes a model", _HOW
            )
        try:
            made = factory()
        except CoresieveError:
            raise
        except (Exception, SystemExit) as reason:  # else an exit(0) in there would look like work well done
            raise ForwardError(
                f"{spec}() raised {_told(reason)}", "a factory without arguments", _HOW
            ) from reason
    if not isinstance(made, nn.Module):
        raise FileError(f"{spec}() made a {type(made).__name__}", "a torch.nn.Module", _HOW)
    return made


def _find(spec: str) -> Any:
    """The object that the spec names."""
    name, _, path = spec.partition(":")
    if not (name and path):
        raise FileError(f"MODEL {spec!r}", "package.module:factory or model.onnx", _HOW)
    found = _module(spec, name)
    for part in path.split("."):
        if not hasattr(found, part):
            inside = getattr(found, "__dict__", {})
            made_here = [
                n for n, x in inside.items() if callable(x) and getattr(x, "__module__", None) == name
            ]
            hint = f"{name}:{' or '.join(made_here[:5])}" if made_here else _HOW
            raise FileError(f"MODEL {spec!r}: {name} has no {part!r}", "the name of a factory in it", hint)
        found = getattr(found, part)
    return found


def _module(spec: str, name: str) -> Any:
    """Import it, the current folder being on the path (and staying there: models import lazily too)."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as reason:
        missing = reason.name or ""
        if f"{name}.".startswith(f"{missing}."):
            hint = "the folder that holds it as the current one, and its name without .py"
            raise FileError(f"MODEL {spec!r}: no module {missing!r}", "a module that exists", hint) from None
        problem, hint = reason, f"pip install {missing}"
    except (Exception, SystemExit) as reason:
        problem, hint = reason, f"python -c 'import {name}' to see where"
    raise FileError(f"importing {name} raised {_told(problem)}", "a module that imports", hint) from problem


def _told(reason: BaseException) -> str:
    """The exception and the line that raised it, in place of a traceback."""
    frames = traceback.extract_tb(reason.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(reason).__name__}{where} ({_line(reason)})"


def _line(reason: BaseException) -> str:
    return " ".join(str(reason).split()).rstrip(".")


def fill(model: nn.Module, weights: Path, what: str = "--weights") -> None:
    if weights.suffix in _PICKLES:
        expected = "a safetensors file: a pickle can run any code when it is opened"
        hint = "safetensors.torch.save_model(model, 'weights.safetensors') where the model was trained"
        raise FileError(f"{what} {weights}", expected, hint)
    try:
        safetensors.torch.load_model(model, weights)
    except (SafetensorError, OSError) as reason:
        raise FileError(
            f"{what} {weights} ({_line(reason)})", "a whole safetensors file", "saving it again"
        ) from reason
    except RuntimeError as reason:
        told = _line(reason).partition(": ")[2]
        told = told if len(told) < 400 else f"{told[:400]}..."
        expected = "the state dict of the model that the factory makes"
        hint = "the factory with the sizes that the network was trained with"
        raise FileError(f"{what} {weights} does not fit the model ({told})", expected, hint) from reason


def load_array(path: Path, key: str | None = None, usual: str = "x", alone: bool = True) -> Tensor:
    """The file's only array; of several (or where it may not be `alone`) the one called `key`, or as is usual."""
    check_file(path)
    arrays = _arrays(path)
    name = next(iter(arrays)) if len(arrays) == 1 and alone else key or usual
    if name not in arrays:
        holds = ", ".join(sorted(arrays)) or "nothing"
        hint = "--data-key with a name that it holds" if usual == "x" else "a file with that array alone"
        raise FileError(f"{path} holds {holds}", f"an array named {name!r}", hint)
    array = arrays[name]
    if not isinstance(array, Tensor):
        try:
            array = sample.as_tensor(array)
        except SampleError:
            hint = "np.save(path, array.astype('float32'))"
            raise FileError(f"{path} holds {array.dtype}", "numbers that torch knows", hint) from None
    if array.is_complex():
        raise FileError(
            f"{path} holds {array.dtype}",
            "real numbers",
            "np.save(path, abs(array)), or a column for each part",
        )
    if array.ndim == 0 or len(array) == 0:
        raise SampleError(
            f"{path} of shape {tuple(array.shape)}", "an input per row, and some rows", "np.load to see it"
        )
    return array


def _arrays(path: Path) -> dict[str, Any]:
    kinds = {".npy": _npy, ".npz": _npz, ".safetensors": safetensors.torch.load_file}
    if path.suffix not in kinds:
        raise FileError(
            f"{path}", "a name that ends in .npy, .npz or .safetensors", "np.save('calib.npy', array)"
        )
    try:
        return kinds[path.suffix](path)
    except (
        Exception
    ) as reason:  # zipfile, zlib, tokenizer and struct errors: whatever a damaged file leads to
        given = f"{path} ({type(reason).__name__}: {_line(reason)})"
        raise FileError(
            given, "a whole file of plain numbers, nothing pickled", "saving it again as numbers"
        ) from reason


def _npy(path: Path) -> dict[str, Any]:
    array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("an archive of arrays under the name of one array")
    return {"x": array}


def _npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def check_file(path: Path) -> None:
    try:
        what = "is a file" if path.is_file() else "is no file" if path.exists() else "does not exist"
    except OSError as error:  # a name too long, a folder that may not be read
        what = f"({error.strerror})"
    if what != "is a file":
        raise FileError(
            f"{path} {what}", "a file", f"ls {shlex.quote(str(path.parent))} to see what there is"
        )


def load_arrays(path: Path, model: nn.Module, key: str | None = None) -> Batch:
    """A model's inputs: the file's array; for an ONNX model with several inputs a dict of arrays, by their names.

    Of several arrays a graph's only input finds its own name, where nobody names another.
    """
    inputs = getattr(model, "inputs", [])
    if len(inputs) < 2:
        names = [] if key or not inputs or not path.is_file() else list(_arrays(path))
        return load_array(path, inputs[0] if inputs and inputs[0] in names else key)
    if key is not None:
        raise FileError(f"--data-key {key}", f"arrays for all inputs of the model: {', '.join(inputs)}",
                        "the command without --data-key")  # fmt: skip
    arrays: Batch = {name: load_array(path, name, alone=False) for name in inputs}
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{len(array):,} of {name}" for name, array in arrays.items())
        raise SampleError(f"{path} with {lengths}", "as many of each", "a row of each for every input")
    return arrays


def load_inputs(path: Path, model: nn.Module, key: str | None = None) -> list[Any]:
    return in_batches(load_arrays(path, model, key), model)


def in_batches(arrays: Batch, model: nn.Module) -> list[Any]:
    """The rows in batches. Whole numbers become floats, unless the model looks them up in an embedding.

    An ONNX model knows the types of its inputs itself.
    """
    if isinstance(arrays, dict):
        slices = torch.arange(sample.size(arrays)).split(sample.POINTS_A_BATCH)
        return [sample.take(arrays, index) for index in slices]
    looks_up = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
    as_it_is = arrays.is_floating_point() or looks_up or hasattr(model, "inputs")
    return list(sample.batches(arrays if as_it_is else arrays.float()))


def save_small(small: Compressed, path: Path, compact: bool | None = None) -> None:
    """In the kind of file that the name asks for."""
    small.export_onnx(path) if is_onnx(path) else small.save(path, compact=compact)


def set_apart(
    data: Batch, heldout: Batch | None, labels: Tensor | None
) -> tuple[Batch, Batch, Tensor | None]:
    """What calibrates, what judges and its labels: disjoint, by setting a quarter of `data` aside.

    >>> calibrates, judges, right = set_apart(torch.arange(8.0), None, torch.arange(8))
    >>> len(calibrates), len(judges), bool((judges == right).all())
    (6, 2, True)
    """
    judged = data if heldout is None else heldout
    if labels is not None and labels.numel() != sample.size(judged):
        expected = f"one for each of the {sample.size(judged):,} inputs that judge"
        hint = "labels that belong to --heldout, or to --data where there is no --heldout"
        raise SampleError(f"{labels.numel():,} labels", expected, hint)
    if labels is not None:
        if labels.is_floating_point() and bool((labels != labels.long()).any()):
            raise SampleError("labels with fractions", "whole numbers", "the index of the right output")
        labels = labels.flatten().long()
    if heldout is not None:
        if n := digests.KnownRows(digests.rows(data)).overlap(digests.rows(heldout)):
            raise SampleError(f"{n:,} of {sample.size(heldout):,} inputs in --heldout, which --data also holds",
                              "inputs that played no part in the compression", "split the data once")  # fmt: skip
        return data, heldout, labels
    n = sample.size(data)
    if n < 4:
        raise SampleError(f"{n} inputs in --data", "at least 4, to set some aside", "--heldout FILE")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    judges, rest = order[: n // 4], order[n // 4 :]
    return sample.take(data, rest), sample.take(data, judges), None if labels is None else labels[judges]
