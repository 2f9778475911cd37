"""The methods by name. One file a method; adding one adds a file and a line here.

>>> resolve("corenet+")
CoreNet(prune_neurons=True, amplify=1)
"""

from __future__ import annotations

import difflib

from coresieve.errors import MethodError
from coresieve.methods.corenet import CoreNet
from coresieve.methods.magnitude import Magnitude
from coresieve.methods.method import Method
from coresieve.methods.norms import L1, L1L2, L2
from coresieve.methods.sieve import Sieve
from coresieve.methods.sparsegpt import SparseGPT
from coresieve.methods.svd import SVD
from coresieve.methods.uniform import Uniform
from coresieve.methods.wanda import Wanda

METHODS: dict[str, Method] = {
    "sieve": Sieve(),
    "corenet": CoreNet(),
    "corenet+": CoreNet(prune_neurons=True),
    "corenet++": CoreNet(prune_neurons=True, amplify=None),
    "uniform": Uniform(),
    "l1": L1(),
    "l2": L2(),
    "l1l2": L1L2(),
    "svd": SVD(),
    "magnitude": Magnitude(),
    "wanda": Wanda(),
    "sparsegpt": SparseGPT(),
}


def resolve(method: str | Method) -> Method:
    """A method's configuration, from its name or as it is."""
    if isinstance(method, Method):
        return method
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]
    if isinstance(method, type) and issubclass(method, Method):
        raise MethodError(
            f"the class {method.__name__}", "a configuration made from it", f"method=cs.{method.__name__}()"
        )
    close = difflib.get_close_matches(str(method), METHODS, n=1)
    raise MethodError(
        f"method={method!r}",
        f"one of {', '.join(METHODS)}, or a configuration such as CoreNet(amplify=8)",
        f"method={(close or ['corenet'])[0]!r}",
    )


__all__ = [
    "L1", "L1L2", "L2", "METHODS", "SVD", "CoreNet", "Magnitude", "Method", "Sieve", "SparseGPT", "Uniform", "Wanda",
    "resolve",
]  # fmt: skip
