"""Algorithms 1 and 2 as literal loops in float64: the oracle of the tests, used by nothing else."""

from coresieve.reference.corenet import CoreNet, corenet
from coresieve.reference.sparsify import Sparsified, sparsify

__all__ = ["CoreNet", "Sparsified", "corenet", "sparsify"]
