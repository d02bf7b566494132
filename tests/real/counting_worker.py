"""One gloo rank of a script, as it is, with its collectives counted and its steps timed. Arguments: file, script.

Counted and timed is from one optimizer step's end to the next one's: collectives in the third step (in the second DDP
makes its buckets anew), seconds in each.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import sys
import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}


class Counting(TorchDispatchMode):
    """Kind and bytes of every collective that reaches torch's dispatcher: of its largest side."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[tuple[str, int]]] = [[]]
        self.of_dtensors = [0]  # operators of DTensors in each step
        self.ends = [time.perf_counter()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(t in (torch.Tensor, torch.nn.Parameter, FakeTensor) for t in types):
            self.of_dtensors[-1] += any(issubclass(t, DTensor) for t in types)
            return NotImplemented  # DTensor and its like: they come back with the tensors that they hold
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait_tensor", "_wrap")):
            sides = (args[0], args[1], out) if func.namespace == "c10d" else (args[0], out)
            sizes = [sum(x.nbytes for x in tree_leaves(s) if isinstance(x, torch.Tensor)) for s in sides]
            self.steps[-1].append((NAMES.get(name, name), max(sizes)))
        return out

    def stepped(self, *_: object) -> None:
        self.steps.append([])
        self.of_dtensors.append(0)
        self.ends.append(time.perf_counter())


def main(out: str, script: str, timed: bool = False) -> None:
    """Run the script; where it is timed nothing is counted, which takes time itself."""
    torch.set_num_threads(1)
    counting = Counting()
    register_optimizer_step_post_hook(counting.stepped)
    sys.argv = [script]
    if timed:
        runpy.run_path(script, run_name="__main__")
    else:
        with counting:
            runpy.run_path(script, run_name="__main__")
    seconds = [b - a for a, b in zip(counting.ends[2:], counting.ends[3:], strict=False)]
    middle = statistics.median(seconds) if seconds else 0.0
    data = {
        "collectives": counting.steps[2],
        "dtensor_operators": counting.of_dtensors[2],
        "steps_s": seconds,
        "step_s": middle,
    }
    if os.environ["RANK"] == "0":  # torchrun gives all ranks the same arguments
        with open(out, "w", encoding="utf-8") as file:
            json.dump(data, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "--time" in sys.argv[3:])
    # The script's process group still has threads. An interpreter that ends under them now and then aborts.
    os._exit(0)
