"""Times the host: how long it takes to issue a training step's kernels if the GPU waits for nothing else.

The timed model is so narrow that every kernel ends before the next is issued, so the step's time is the host's. Divided
by the number of kernels that the simulator counts in it, this is `host_operator_s` (`sim.programs.compile`). The time
of an optimizer's step on this model is `host_step_s`. On a CPU the same core issues and computes. There the time for
each kernel, less that of a call in a loop, is `operator_in_model_s`, which the simulator adds to every kernel.
"""

from __future__ import annotations

from functools import partial

import torch

from calibrate.bundled_model.model import Build, Head, make_blocks
from calibrate.records import Constant, Record
from calibrate.timings.timing import Bench
from sim.core.program import Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.programs.stages import stage_blocks
from sim.ranks.plan import make_plan

LAYERS = 8
SEQ_LEN = {"cuda": 128, "cpu": 8}
HIDDEN = {"cuda": 256, "cpu": 32}


def narrow(layers: int = LAYERS, device: str = "cuda") -> Scenario:
    """Return the timed model: a GPT of hidden size 256; on a CPU 32, so that a kernel takes no longer than its call."""
    precision = "bf16" if device == "cuda" else "fp32"
    return parse_scenario(
        {
            "version": 1,
            "name": "narrow",
            "model": {
                "layers": layers,
                "hidden": HIDDEN[device],
                "heads": 4,
                "vocab": 1024,
                "mlp": "gelu",
                "norm": "layernorm",
                "positions": "learned",
            },
            "training": {
                "seq_len": SEQ_LEN[device],
                "global_batch_size": 1,
                "micro_batch_size": 1,
                "precision": precision,
                "grad_dtype": precision,
                "attention": "fused",
            },
            "parallelism": {},
            "cluster": "dgx-h100" if device == "cuda" else "cpu-host",
        }
    )


def kernels(scenario: Scenario) -> int:
    """Return the number of kernels that the simulator counts in a micro-batch's forward and backward."""
    plan = make_plan(scenario)
    blocks = stage_blocks(plan, plan.parts[0], 0)
    return sum(max(op.kernels, 1) for b in blocks for op in (*b.forward, *b.backward) if isinstance(op, Compute))


def host(bench: Bench) -> list[Record]:
    """Measure `host_operator_s` and `host_step_s`; on a CPU `operator_in_model_s`. All are seconds."""
    scenario = narrow(device=bench.device)
    model, training = scenario.model, scenario.training
    assert training is not None
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    blocks = make_blocks(model, training, range(model.layers + 2), Build(bench.device, dtype))
    tokens = torch.randint(model.vocab, (1, training.seq_len + 1), device=bench.device)

    def micro_batch() -> None:
        x = tokens[:, :-1]
        for block in blocks:
            x = block(x, tokens[:, 1:]) if isinstance(block, Head) else block(x)
        x.backward()

    issued = kernels(scenario)
    operator_s = bench.time([micro_batch]).seconds / issued
    of = f"a GPT of {LAYERS} layers, {model.hidden} wide"
    how = f"forward and backward of {of}, by the {issued} kernels simulated"
    if bench.device == "cpu":
        x = torch.randn(8)
        call_s = bench.time([partial(torch.add, x, x)]).seconds  # every kernel's own measurement includes it
        return [Constant("operator_in_model_s", max(0.0, operator_s - call_s), f"{how}, less a call in a loop")]
    step = torch.optim.AdamW([p for b in blocks for p in b.parameters()], lr=1e-4, fused=True).step
    return [
        Constant("host_operator_s", operator_s, how),
        Constant("host_step_s", bench.time([step]).seconds, f"fused AdamW over {of}"),
    ]
