"""Results of collectives over integers, such as counts of tokens, if all ranks have the same ones.

They have them if routers are balanced, because choices then depend on nothing but the number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from calibrate.capture.script.collectives import group_of
from calibrate.capture.values.known_values import KnownValues, tensors_in
from sim.core.collectives import collective_kind


class _Form(NamedTuple):
    """Names of the arguments that a collective reads and writes; "": it returns what others write."""

    reads: str
    writes: str
    splits: str = ""


FORMS = {
    "allreduce_": _Form("tensors", "tensors"),
    "allgather_": _Form("input_tensors", "output_tensors"),
    "_allgather_base_": _Form("input_tensor", "output_tensor"),
    "alltoall_base_": _Form("input", "output", "input_split_sizes"),
    "all_reduce": _Form("input", ""),
    "all_reduce_": _Form("input", "input"),
    "all_gather_into_tensor": _Form("input", ""),
    "all_to_all_single": _Form("input", "", "input_split_sizes"),
}


def know_results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, known: KnownValues) -> None:
    """Set what a collective wrote, where that is known; other tensors that it was given are unknown from now on."""
    name = func._schema.name.split("::")[1]
    values = {
        a.name: kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(func._schema.arguments)
    }
    form = FORMS.get(name)
    written = tensors_in((args, kwargs) if form is None else values[form.writes] if form.writes else out)
    read = [] if form is None or not known.balanced else [known.of(x) for x in tensors_in(values[form.reads])]
    if func.namespace == "c10d":
        for x in written:
            known.forget(x)
    if form is None or len(read) != 1 or read[0] is None or read[0].is_floating_point():
        return
    group = group_of(values)
    with unset_fake_temporarily():
        kind = collective_kind(name.rstrip("_"))
        found = _result(kind, read[0], group.size(), dist.get_rank(group), values.get(form.splits))
        parts = found.chunk(len(written)) if len(written) > 1 else [found]
    for x, part in zip(written, parts, strict=True):
        if x.shape == part.shape:
            known.put(x, part)


def _result(kind: str | None, x: torch.Tensor, ranks: int, own: int, splits: Sequence[int] | None) -> torch.Tensor:
    if kind == "all_reduce":
        return x * ranks
    if kind == "all_to_all":
        x = x.split(list(splits) if splits else len(x) // ranks)[own]
    return torch.cat([x] * ranks)
