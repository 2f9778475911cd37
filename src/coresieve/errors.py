"""Every error a user can meet. Each says what was given, what was expected and what to try.

They share one base, so `except CoresieveError` catches all that is ours; each is also the built-in error
that a Python programmer would expect, so `except ValueError` works too.

>>> raise BudgetError("keep=1.5", "a share in (0, 1]", "keep=0.1 keeps a tenth of the parameters")
Traceback (most recent call last):
    ...
coresieve.errors.BudgetError: keep=1.5: expected a share in (0, 1]. Try: keep=0.1 keeps a tenth of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CoresieveError(Exception):
    """`given: expected ... Try: ...`"""

    def __init__(self, given: str, expected: str, hint: str):
        self.given, self.expected, self.hint = given, expected, hint
        super().__init__(f"{given}: expected {expected}. Try: {hint}.")

    def __reduce__(self):
        return type(self), (self.given, self.expected, self.hint)


class DomainError(CoresieveError, ValueError):
    """A number outside the range a formula is made for."""


class BudgetError(CoresieveError, ValueError):
    """No budget, two budgets, or one that cannot be met."""


class MethodError(CoresieveError, ValueError):
    """An unknown method, or a method that cannot do what was asked of it."""


class SampleError(CoresieveError, ValueError):
    """A sample of inputs that is empty, too small, or not made of batches."""


class NonFiniteError(CoresieveError, ValueError):
    """NaN or infinity in weights or activations."""


class LayerError(CoresieveError, ValueError):
    """No layer to compress, or a pattern that matches none."""


class ForwardError(CoresieveError, RuntimeError):
    """The model's own forward failed; its exception is the cause."""


class StaleError(CoresieveError, RuntimeError):
    """The model's weights changed after it was calibrated."""


class ClaimError(CoresieveError, ValueError):
    """A claim that cannot be made of this network, or a goal that no claim can meet."""


class NotCertifiedError(CoresieveError, RuntimeError):
    """No network could be certified to meet the goal, so none is returned."""


class AlteredError(CoresieveError, ValueError):
    """A certificate whose network, original or data is not the one at hand."""


class FileError(CoresieveError, ValueError):
    """A file that is truncated, corrupted or not ours, or that does not fit the skeleton."""


class MissingExtraError(CoresieveError, ImportError):
    """An optional part of coresieve is not installed."""


@contextmanager
def stored(what: str) -> Iterator[None]:
    """What fails in here, fails because a file's header holds something else than we would have written."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        given = f"a stored {what} that is malformed ({error!r})"
        raise FileError(
            given, f"a {what} as save() writes it", "the file as it was, or a newer coresieve"
        ) from error


class CoresieveWarning(UserWarning):
    """Something a user should know that does not stop the work."""
