"""What choosing tokens out of their logits reads and writes."""

from __future__ import annotations

import pytest

from sim.core.program import Compute
from sim.models.serving.operators import head_samples
from sim.serve.engines import ENGINES
from sim.serve.prices.dims import serving_dims
from tests.sim.cases import scenario_with
from tests.sim.serve.serving_cases import ONE


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tp", [1, 4])
def test_engines_choose_out_of_logits_in_fp32(engine: str, tp: int) -> None:
    """The copy reads 2 bytes and writes 4, the choice reads 4, of all logits on every rank; `bundled` reads 2."""
    d = serving_dims(scenario_with(parallelism={"tp": tp}, inference={"engine": engine, "requests": ONE}))
    kernels = [i for i in head_samples(d, 3) if isinstance(i, Compute) and i.kind in ("cast", "softmax")]
    each = [2] if engine == "bundled" else [2 + 4, 4]
    assert [k.bytes for k in kernels] == [3 * d.vocab * tp * n for n in each]
