"""Names of operators, messages, tensors and blocks are labels for people: no figure depends on them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

import sim.distillation
import sim.graph.compiled
import sim.programs.interleave
import sim.programs.stages
from sim.core.program import Block, Comm, Compute, Item, Program
from sim.inputs.scenario import parse_scenario
from sim.prices.price import Price
from sim.prices.rank_prices import Pricing
from sim.programs.compile import CompiledProgram, compile_program
from sim.programs.stages import stage_blocks
from sim.serve.simulation import simulate_serving
from sim.simulation import Simulation, simulate

GPT = {"layers": 4, "hidden": 1024, "heads": 16, "vocab": 50257}
LLAMA = {
    "layers": 4,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 4,
    "ffn": 5632,
    "vocab": 32000,
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "positions": "rope",
    "tied_embeddings": False,
}
MOE = {**LLAMA, "moe": {"experts": 8, "top_k": 2, "ffn": 1024, "shared_experts": 1}}
SPINE = {"preset": "dgx-h100", "inter_node": {"kind": "fat_tree", "oversubscription": 8}}
WORDS = (
    "mlp_up",
    "output_unaligned_dgrad",
    "x_grad",
    "query",
    "norm input",
    "log-sum-exp",
    "attention:flash3",
    "head",
    "embedding",
    "layer 0",
    "prefill",
    "served linear",
    "loss_sum",
    "a_lora_dgrad",
    "b_a_wgrad",
    "gelu",
    "a.b c#d",
    "optimizer",
    "block",
)

CASES: dict[str, dict[str, Any]] = {
    "fp8": {"model": LLAMA, "training": {"precision": "fp8", "elementwise": "megatron"}, "parallelism": {"tp": 2}},
    "adapters": {"model": LLAMA, "training": {"lora": {"rank": 8}, "elementwise": "compiled"}},
    "unaligned head": {
        "model": GPT,
        "training": {"precision": "fp16", "elementwise": "composer"},
        "parallelism": {"dp": 2},
    },
    "rerun operators": {"model": LLAMA, "training": {"recompute": "selective_op"}},
    "rerun attention": {"model": GPT, "training": {"recompute": "selective", "attention": "unfused"}},
    "rerun layers": {
        "model": LLAMA,
        "training": {"recompute": "full", "elementwise": "compiled"},
        "parallelism": {"dp": 2, "zero": 3},
    },
    "offload": {"model": LLAMA, "training": {"activation_offload": True}},
    "split backward": {"model": LLAMA, "parallelism": {"pp": 4, "schedule": "zb_h1"}},
    "both ways": {"model": {**LLAMA, "layers": 8}, "parallelism": {"pp": 4, "schedule": "dualpipe"}},
    "experts": {"model": MOE, "parallelism": {"dp": 4, "ep": 4, "pp": 2}},
    "shared links": {
        "model": LLAMA,
        "cluster": SPINE,
        "parallelism": {"tp": 8, "pp": 4, "dp": 4, "zero": 2, "schedule": "1f1b"},
    },
    "distillation": {
        "model": LLAMA,
        "distillation": {"teacher": {**LLAMA, "hidden": 4096, "heads": 32}},
        "parallelism": {"tp": 2},
    },
}


def make(name: str) -> Simulation:
    case = CASES[name]
    training = {"seq_len": 1024, "global_batch_size": 32, **case.get("training", {})}
    return simulate(parse_scenario({"name": "x", "cluster": "dgx-h100", **case, "training": training}))


def figures(step: Simulation) -> dict[str, Any]:
    """Every number of a step, with the memory's curves. The table of time by operator is left out: labels are its rows,
    so that equal names share one."""
    curves = [(c.rank, c.time_s.tolist(), c.total.tolist()) for c in step.memory]
    engine = {**step.result["engine"], "wall_s": 0.0}
    numbers = {key: value for key, value in step.result.items() if key != "time_by_operator"}
    return {**numbers, "engine": engine, "curves": curves, "teacher": step.teacher}


class Renamer:
    """Gives everything another name, at random but the same names in each run."""

    def __init__(self) -> None:
        self.random, self.renamed = random.Random(7), 0

    def name(self) -> str:
        self.renamed += 1
        return f"{self.random.choice(WORDS)}{self.random.choice(('', '_input', '_grad', ' input'))}"

    def program(self, program: Program) -> Program:
        return tuple(self.item(item) for item in program)

    def item(self, item: Item) -> Item:
        return replace(item, name=self.name()) if isinstance(item, Compute | Comm) else item

    def block(self, block: Block) -> Block:
        return replace(
            block,
            name=self.name(),
            forward=self.program(block.forward),
            backward=self.program(block.backward),
            recompute=self.program(block.recompute),
            saved=tuple(s._replace(name=self.name()) for s in block.saved),
        )

    def blocks(self, *args: Any) -> tuple[Block, ...]:
        return tuple(self.block(b) for b in stage_blocks(*args))

    def compiled(self, program: Program, price: Price) -> CompiledProgram:
        return compile_program(self.program(program), price)


@pytest.mark.parametrize("name", CASES)
def test_no_figure_depends_on_a_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = figures(make(name))
    renamer = Renamer()
    for module in (sim.programs.stages, sim.distillation):
        monkeypatch.setattr(module, "stage_blocks", renamer.blocks)
    for module in (sim.graph.compiled, sim.programs.interleave):
        monkeypatch.setattr(module, "compile_program", renamer.compiled)
    after = figures(make(name))
    assert renamer.renamed > 100
    assert after == before
    assert name != "shared links" or after["contention"]["lost_s"] > 0


@pytest.mark.parametrize(("model", "quantization"), [("llama3-8b", "llm_int8"), ("mixtral-8x7b", "fp8")])
def test_no_figure_of_a_service_depends_on_a_name(
    model: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = {"prompt_len": 500, "output_len": 20, "count": 20, "rate_per_s": 20}
    inference = {"requests": requests, "quantization": quantization}
    made = {"name": "x", "model": model, "cluster": "dgx-h100", "inference": inference, "parallelism": {"tp": 2}}

    def figures() -> dict[str, Any]:
        result = simulate_serving(parse_scenario(made)).result
        return {**result, "engine": {**result["engine"], "wall_s": 0.0}}

    before, renamer, compute = figures(), Renamer(), Pricing.compute
    monkeypatch.setattr(Pricing, "compute", lambda self, op: compute(self, replace(op, name=renamer.name())))
    assert figures() == before
    assert renamer.renamed > 10
