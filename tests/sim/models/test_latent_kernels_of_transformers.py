"""Rope and assembly of latent attention's queries and keys: as many kernels and bytes as Transformers' modules run."""

from __future__ import annotations

from pathlib import Path

import pytest
from captured_layers import BATCH, LAYER, MODELS, SEQ, capture
from model_programs import make

from sim.core.program import Compute
from sim.models.captured.operators import computes_of
from sim.models.layer import layer_block

OWN = ("rope", "assemble_qk", "output_copy")


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_as_many_kernels_and_bytes_as_captured(tmp_path: Path, name: str) -> None:
    """The angles that heads share, which are a fiftieth here, are left out."""
    program = capture(tmp_path, name, "sdpa", weights="bf16")
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "framework": "transformers", "param_dtype": "bf16"}
    layer = layer_block(make(MODELS[name], sizes), 1)
    for phase, items in (("forward", layer.forward), ("backward", layer.backward)):
        mine = [o for o in program.operators if o.phase == phase and o.module.endswith(f"{LAYER[name]}.self_attn")]
        kernels = [c for o in mine if o.launches and "attention" not in o.name for c in computes_of(o)]
        named = {f"{one}{'_backward' * (phase == 'backward')}" for one in OWN}
        described = [i for i in items if isinstance(i, Compute) and i.name in named]
        assert sum(i.kernels for i in described) == sum(c.kernels for c in kernels)
        assert sum(i.bytes for i in described) == pytest.approx(sum(c.bytes for c in kernels), rel=0.03)
        singly = sum(c.single_elements for c in kernels)
        output = SEQ * BATCH * 8 * 128  # whose copy is priced as strided
        assert sum(i.single_elements for i in described) == pytest.approx(singly, rel=0.05, abs=output)


@pytest.mark.parametrize(("date", "kernels"), [("2026-05", (2, 3)), ("2026-07", (2, 3)), ("2026-09", (3, 12))])
def test_releases_before_put_keys_together_by_one_kernel(date: str, kernels: tuple[int, int]) -> None:
    """Transformers 5.15 fills an empty tensor, and 5.11 rotates slices."""
    sizes = {"seq_len": SEQ, "framework": "transformers", "param_dtype": "bf16", "software_date": date}
    layer = layer_block(make(MODELS["deepseek_v3"], sizes), 1)
    found = {i.name: i for i in (*layer.forward, *layer.backward) if isinstance(i, Compute)}
    assert (found["assemble_qk"].kernels, found["assemble_qk_backward"].kernels) == kernels
    turned = sum(item.kernels for name, item in found.items() if name.startswith("rope_backward"))
    assert turned == (28 if date == "2026-05" else 24)
