"""Lets code count what depends on data, as right answers: `correct += (guess == labels).sum().item()`.

`item` of an unknown integer is an `UnknownCount`. It can be added up, divided and printed. Where it would decide what
runs, as a size, an index or in a comparison, the error is raised that reading it would have raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._pytree import tree_leaves

from calibrate.capture.values.answers import READ_AS


class UnknownCount:
    """An integer that nobody knows; a ratio of it is `READ_AS`, as every unknown float."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def _joined(self, other: object = None) -> Any:
        return other * int(READ_AS) if isinstance(other, torch.Tensor) else self

    def _ratio(self, other: object = None) -> Any:
        return READ_AS / other if isinstance(other, torch.Tensor) else READ_AS

    def __rtruediv__(self, other: object) -> Any:
        return other / READ_AS if isinstance(other, torch.Tensor) else READ_AS

    def _decides(self, *_: object) -> NoReturn:
        raise self.error

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __pos__ = __round__ = _joined
    __truediv__ = __float__ = _ratio
    __bool__ = __int__ = __index__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _decides
    __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _decides

    def __eq__(self, other: object) -> NoReturn:
        raise self.error

    def __ne__(self, other: object) -> NoReturn:
        raise self.error

    def __repr__(self) -> str:
        return str(int(READ_AS))

    def __format__(self, spec: str) -> str:
        return int(READ_AS).__format__(spec)


@contextmanager
def counts_read(read: Callable[[torch.Tensor], None] = lambda _: None) -> Iterator[None]:
    """Let `item` of an unknown integer be an `UnknownCount`; truth values, and lists of integers, are refused.

    `read` is called with each such tensor.
    """
    listed = FakeTensor.tolist

    def item(self: FakeTensor) -> Any:
        try:
            return torch.Tensor.item(self)
        except (DataDependentOutputException, ValueError) as error:
            if self.dtype == torch.bool or self.is_floating_point() or self.numel() != 1:
                raise
            read(self)
            return UnknownCount(error)

    def tolist(self: FakeTensor) -> Any:
        values = listed(self)
        for x in tree_leaves(values) if self.dim() else ():
            if isinstance(x, UnknownCount):
                raise x.error
        return values

    with patch.object(FakeTensor, "item", item, create=True), patch.object(FakeTensor, "tolist", tolist):
        yield
