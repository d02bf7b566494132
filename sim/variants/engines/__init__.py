"""What a serving engine does its own way: its host's time, its CUDA graphs, its kernels, its limits.

`inference.engine` names one of `ENGINES`, or a file (`sim.inputs.engine_file`). Adding an engine is one more record
in the file of its product: the key's allowed values and the JSON Schema follow from the dict, and nothing else in the
simulator asks for an engine's name. `sim.variants.engines.hosts` has their host seconds.
"""

from __future__ import annotations

from sim.variants.engines import sglang, trtllm, vllm
from sim.variants.engines.kernel_facts import TwoBatches
from sim.variants.engines.record import Engine

_BUNDLED = Engine(
    "bundled",
    "bundled",
    (),
    "2026-11",
    "this project's: one kernel after another, a host of no time",
    two_batches=TwoBatches(),
    eplb=True,
)
_RECORDS = (_BUNDLED, *vllm.RECORDS, *sglang.RECORDS, *trtllm.RECORDS)
ENGINES: dict[str, Engine] = {record.name: record for record in _RECORDS}
ENGINE_FILES = ".json"  # how the names of files end that `sim.inputs.engine_file` reads
