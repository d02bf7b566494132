"""Matches predictions of fake tensors with targets, as losses of detection do (DETR, arXiv:2005.12872, section 3.1).

They give the costs of all pairs to scipy on the host and get pairs of places, as many as there are targets. How many
there are depends on no cost. So the first target takes the first prediction, the second the second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch._subclasses.fake_tensor import FakeTensor

NAME = "linear_sum_assignment"


@contextmanager
def matched_in_turn() -> Iterator[None]:
    """Replace scipy's function in all modules that imported it; without scipy do nothing."""
    scipy = sys.modules.get("scipy.optimize")
    real = getattr(scipy, NAME, None)
    with ExitStack() as stack:
        for module in list(sys.modules.values()) if real is not None else ():
            if vars(module).get(NAME) is real:
                stack.enter_context(patch.object(module, NAME, _in_turn(real)))
        yield


def _in_turn(real: Any) -> Callable[..., Any]:
    def match(costs: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(costs, FakeTensor):
            return real(costs, *args, **kwargs)
        import numpy

        places = numpy.arange(min(costs.shape))
        return places, places

    return match
