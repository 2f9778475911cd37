"""ONNX, in and out: a graph from any framework as a module that the methods compress, and back as a graph.

    protos      a file as a graph that is whole: external data, versions, constants
    finding     MatMul and Gemm with constant weights, as layers; why others are none
    pieces      what lies between the layers, run by onnxruntime
    model       OnnxModel: an nn.Module whose layers are real nn.Linear, and whose forward runs the graph
    writing     an OnnxModel as a graph again: other weights, smaller shapes, thin layers
    packing     matrices with zeros in fewer bytes
    files       the file: its seal, and the report and certificate that travel in it
    exporting   any PyTorch model as such a file

Nothing in a graph is code: loading one runs nothing but onnxruntime's own operators.
"""

from coresieve.errors import MissingExtraError

try:
    import onnx as _onnx
    import onnxruntime as _onnxruntime
except ImportError as error:
    given = f"an ONNX file, without {error.name or 'a working onnxruntime'}"
    hint = "pip install 'coresieve[onnx]'"
    raise MissingExtraError(given, "the packages that read and run one", hint) from error

del _onnx, _onnxruntime
