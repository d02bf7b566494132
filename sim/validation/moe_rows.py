"""One MoE layer alone, as published for a whole layer: forward and backward seconds, and the allocator's peak.

Megatron-LM's test (tests/functional_tests/test_cases/common/moe_perf/__main__.py) decides what such a row is:

- its `TransformerConfig` sets neither `gated_linear_unit` nor `activation_func` nor `bias_activation_fusion`, so
  experts are GELU MLPs of two matrices, GELU and the weighting by probabilities separate kernels of torch
  (`_weighting` of `sim.models.moe.matmuls`); a row whose model says `mlp` has that;
- each iteration comes behind a long fp32 matmul, under which the host runs ahead until the dispatcher waits for the
  counts of tokens (`_maybe_dtoh_and_synchronize` in token_dispatcher.py), which the router gives: the rest of the
  forward is issued by a host that has nothing in hand, the backward by one that is ahead again. Iterations of some
  10 ms end before the power limit, which acts on longer averages, does anything;
- `gradient_accumulation_fusion` is off and gradients are set to none before each iteration: they are new tensors of
  the parameters' 16 bits, not fp32 `main_grad` buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.program import Program
from sim.inputs.plain_data import mapping
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.dims import Dims, Shard, dims
from sim.models.layers import layer_specs
from sim.models.moe.router import dispatch_choices
from sim.models.moe.routing import moe_of, routing
from sim.models.operators import Operator, backward_of, forward_of, saved_of
from sim.models.precision.quantizing import quantized_weight_bytes
from sim.prices.coefficients import PriceOptions
from sim.prices.operator_prices import Costs
from sim.prices.rank_prices import Pricing
from sim.programs.compile import CompiledProgram, compile_program
from sim.ranks.plan import make_plan
from sim.results.fit import PEAK_UNCERTAINTY
from sim.results.states import matmul_workspace
from sim.validation.prediction import (
    Predictions,
    calibration_of,
    cluster_of,
    profile_named,
    spread,
)
from sim.validation.records import Measurement
from sim.validation.sizes import NAMES
from topology.network import Network
from topology.spec import GpuSpec


def moe_layer(row: Measurement, calibration: str | None) -> Predictions:
    """Router, dispatch, grouped experts and combine of one layer on expert-parallel ranks, no attention."""
    name = calibration or calibration_of(row)
    scenario = parse_scenario(_scenario(row, name), row.id, row.folder)
    plan = make_plan(scenario)
    options = PriceOptions()
    d, network = dims(scenario), Network(scenario.cluster)
    mlp = layer_specs(scenario.model)[0].mlp
    parts = () if mlp is None else mlp.train(scenario, d, 0, Shard())

    def compiled(program: Program, options: PriceOptions) -> CompiledProgram:
        costs = Costs(profile_named(name), scenario.cluster.gpu, options)
        return compile_program(program, Pricing(plan, costs, network).on(0))

    ahead = replace(options, host=False)
    counted = 0 if mlp is None else 1 + _choices(scenario, d)
    router, rest = compiled(forward_of(parts[:counted]), ahead), compiled(forward_of(parts[counted:]), options)
    backward = compiled(backward_of(parts), ahead)
    forward_s = router.makespan_s + rest.makespan_s
    peak = spread(layer_peak_bytes(d, parts, scenario.cluster.gpu), PEAK_UNCERTAINTY)
    found = {
        "forward_s": spread(
            forward_s, (router.makespan_s * _sigma(router) + rest.makespan_s * _sigma(rest)) / forward_s
        ),
        "backward_s": spread(backward.makespan_s, _sigma(backward)),
        "max_allocated_bytes": peak,
        "peak_memory_bytes": peak,
    }
    return {key: value for key, value in found.items() if key in row.measured}


def _choices(scenario: Scenario, d: Dims) -> int:
    """The number of operators behind the router up to the counts of tokens."""
    p, r = scenario.parallelism, routing(scenario, d, 0, Shard())
    return len(dispatch_choices(d, moe_of(scenario), r, p.ep, p.expert_tp))


def layer_peak_bytes(d: Dims, parts: Sequence[Operator], gpu: GpuSpec) -> float:
    """The most bytes that torch's allocator holds while the layer runs forward and backward by itself.

    16-bit parameters, and 8-bit copies where matmuls read such; cuBLAS's workspaces: torch's for the long matmul,
    Transformer Engine's for the router and the streams of grouped matmuls; what the forward saved and no part's
    backward has freed yet; the result and its gradient, which the test holds on to; new gradients of the parameters
    that the backward has passed; what the running part holds (Operator.backward_bytes).
    """
    workspace = matmul_workspace(gpu)
    held = d.act_bytes * sum(p.params + p.expert_params for p in parts) + quantized_weight_bytes(d, parts)
    own = d.framework.engine_workspaces + d.framework.grouped_streams
    held += workspace.torch + own * workspace.transformer_engine
    held += 2 * d.stream_bytes + sum(s.bytes for s in saved_of(parts))
    peak = held
    for part in reversed(parts):
        held += d.grad_bytes * (part.params + part.expert_params)
        peak = max(peak, held + part.backward_bytes)
        held -= sum(s.bytes for s in part.saved)
    return peak


def _sigma(template: CompiledProgram) -> float:
    whole = sum(template.shares.values())
    return sum(u * s for (_, _, u), s in template.shares.items()) / whole if whole else 0.0


_LAYOUT = ("dp", "tp", "cp", "ep", "pp", "expert_tp", "sp")


def _scenario(row: Measurement, calibration: str) -> dict[str, Any]:
    """The row's own short words as a scenario of one layer."""
    given, layout, training = (
        mapping(row.data.get(key) or {}, f"moe_layer: {key}") for key in ("model", "parallelism", "training")
    )
    model = {name: _size(given, name) for name in ("experts", "top_k", "expert_ffn", "width", "seq_len")}
    layout = {"dp": _data_parallel(row.data.get("gpus"), layout)} | layout
    batch = training.get("micro_batch_size", 1)
    precision, _, recipe = str(training.get("precision", "bf16")).partition(" ")  # fp8 blockwise
    return {
        "name": row.id,
        "model": {
            "layers": 1,
            "hidden": model["width"],
            "heads": max(1, model["width"] // 128),
            "ffn": model["expert_ffn"],
            "vocab": 1024,
            "mlp": given.get("mlp", "gelu"),
            "norm": "rmsnorm",
            "bias": False,
            "moe": {
                "experts": model["experts"],
                "top_k": model["top_k"],
                "ffn": model["expert_ffn"],
                "router_fp32": True,
                "shared_experts": _shared_experts(given, model["expert_ffn"]),
            },
        },
        "training": {
            "seq_len": model["seq_len"],
            "precision": precision,
            "fp8_recipe": recipe or None,
            "framework": "megatron_bridge",  # Megatron-Core with the router fused, as the test has it
            "grad_dtype": "bf16",
            "micro_batch_size": batch,
            "global_batch_size": batch * layout["dp"],
        },
        "parallelism": {"sp": layout.get("tp", 1) > 1} | {key: layout[key] for key in _LAYOUT if key in layout},
        "cluster": cluster_of(row).model_dump(mode="json"),
        "calibration": calibration,
    }


def _data_parallel(gpus: object, layout: Mapping[str, Any]) -> int:
    """Return the data-parallel degree: what the row's GPUs leave, or else what its expert-parallel ranks need."""
    tp, cp, pp, ep = (int(layout.get(key, 1)) for key in ("tp", "cp", "pp", "ep"))
    ranks = gpus if isinstance(gpus, int) else ep * pp
    return max(1, ranks // (tp * cp * pp))


def _size(given: Mapping[str, Any], what: str) -> int:
    value = next((given[name] for name in NAMES[what] if name in given), None)
    if not isinstance(value, int) or value < 1:
        allowed = f"a whole number above 0 under one of {', '.join(NAMES[what])}"
        raise InputError(f"moe_layer: model: {what}: found {str(value)[:40]}; allowed: {allowed}")
    return value


def _shared_experts(given: Mapping[str, Any], ffn: int) -> int:
    """The number of shared experts, each as wide as a routed one."""
    width = given.get("shared_expert_ffn") or 0
    if not isinstance(width, int) or width < 0 or width % ffn:
        raise InputError(
            f"moe_layer: model.shared_expert_ffn: found {str(width)[:40]}; allowed: a multiple of expert_ffn ({ffn})"
        )
    return width // ffn
