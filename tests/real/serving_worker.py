"""One rank of the served model, split over two: what is served, and the times that this rank schedules with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from calibrate.serving.engine import Settings, serve
from calibrate.serving.tensor_parallel import from_rank_0, split
from calibrate.serving.weight_only import quantize
from tests.real.ranks import find_on_this_rank, from_all_ranks
from tests.real.test_serving import model, prompts


def find(name: str, case: dict[str, Any], rank: int) -> Any:
    """Outputs of all requests on every rank, and when each rank's iterations ended."""
    whole = model(case["model"])
    asked = prompts(6, whole.config.vocab, seed=1)
    own = split(whole)
    if case["quantized"]:
        quantize(own.blocks)
    served = serve(
        own, asked, Settings(blocks=60, block_tokens=4, max_running=4, max_batch_tokens=32), agree=from_rank_0
    )
    bytes_here = sum(p.nbytes for layer in own.blocks[1:-1] for p in (*layer.parameters(), *layer.buffers()))
    return from_all_ranks((served.outputs, [end for _, end, _ in served.iterations], bytes_here))


if __name__ == "__main__":
    find_on_this_rank(find, *sys.argv[1:])
