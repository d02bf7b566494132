"""Prices of a serving iteration's operators against what they must move and compute, and against measured kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.core.operator_kinds import MOE_LAYER
from sim.core.program import Comm, Compute
from sim.inputs.scenario import parse_scenario
from sim.models.serving.operators import embedding_tokens
from sim.prices.coefficients import Coefficients
from sim.prices.kernel_file import kernel_file
from sim.prices.kernel_tables import lookup, make_table
from sim.prices.profile import PointTable, Profile
from sim.prices.profiles import load_profile
from sim.prices.roofline import Device, shape_bytes
from sim.prices.serving_parts import MeasuredParts
from sim.serve.prices.costs import IterationCosts, iteration_costs
from sim.serve.prices.iteration_parts import Key, Work
from sim.serve.prices.load import Load
from sim.serve.simulation import simulate_serving
from sim.validation.tables import read_table
from tests.sim.cases import scenario_with
from topology.presets import GPUS


def costs_of(changes: dict[str, Any], profile: str | Profile = "h200-sxm", cluster: Any = "dgx-h200") -> IterationCosts:
    inference = {"requests": {"prompt_len": 8, "output_len": 8}, **changes.pop("inference", {})}
    scenario = parse_scenario({"model": "deepseek-v3", "cluster": cluster, "inference": inference, **changes})
    return iteration_costs(scenario, load_profile(profile) if isinstance(profile, str) else profile)


def operator(costs: IterationCosts, program: Any, name: str) -> tuple[Compute, float]:
    """An operator of a program, and its seconds."""
    found = next(item for item in program if item.name == name)
    assert isinstance(found, Compute)
    return found, costs.prices._operator(found).seconds


@pytest.mark.parametrize("profile", ["h100-sxm", "h200-sxm", "b200-sxm"])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_however_many_heads_read_a_latent_it_is_read_once(profile: str, kv: str) -> None:
    """128 heads over one latent (tp 1) take no more than eight times as long as 16 (tp 8), as their products do, and no
    less than reading it."""
    found = []
    for tp in (1, 8):
        changes = {
            "parallelism": {"tp": tp},
            "inference": {"kv_cache": {"dtype": kv}},
            "model": {"preset": "deepseek-v3", "layers": 4},
        }
        costs = costs_of(changes, profile, f"dgx-{profile.removesuffix('-sxm')}")
        op, seconds = operator(costs, costs.attentions[0].decode(costs.dims, 128, 2048), "attention")
        assert op.flops == 2 * 128 * (128 // tp) * 2048 * (512 + 512 + 64)
        assert seconds > costs.prices.device.seconds(op.kind, op.flops, op.bytes, op.dtype)
        found.append(seconds)
    assert found[1] < found[0] < 8 * found[1]


def test_add_and_norm_is_one_pass_as_measured() -> None:
    """liger_kernels: fused_add_rms_norm on an H100, 2,048 rows, fp32."""
    rows = [
        r
        for r in read_table("scenarios/published/liger_kernels.json").rows
        if r.id.startswith("liger_076") and "_forward_" in r.id
    ]
    large = [r for r in rows if r.data["H"] in (4096, 8192, 16384)]
    assert len(large) == 3
    for row in large:
        model = {"preset": "llama3-8b", "hidden": row.data["H"]}
        costs = costs_of({"model": model, "inference": {"precision": "fp32"}}, "h100-sxm", "dgx-h100")
        _, seconds = operator(costs, costs.specs[-1].serve_tokens(costs.dims, 2048), "attention_norm")
        assert seconds == pytest.approx(row.measured["seconds"], rel=0.1)


def test_fewer_bytes_keep_the_efficiency_where_nothing_was_measured() -> None:
    """Half of the cache's bytes take half of the time, at whatever efficiency the profile has."""
    profile = Profile("p", "", coefficients=Coefficients(matmul_efficiency=0.5))
    found = []
    for kv in ("bf16", "fp8"):
        costs = costs_of({"model": "llama3-8b", "inference": {"kv_cache": {"dtype": kv}}}, profile)
        op, seconds = operator(costs, costs.attentions[0].decode(costs.dims, 64, 8192), "attention")
        assert seconds == pytest.approx(2 * op.bytes / 4.8e12, rel=0.01)
        found.append(seconds)
    assert found[1] == pytest.approx(found[0] / 2, rel=0.01)


def test_dispatch_in_eight_bits_sends_half() -> None:
    sent = {}
    for dtype in ("bf16", "fp8"):
        costs = costs_of({"parallelism": {"dp": 8, "ep": 8, "ep_dispatch_dtype": dtype}})
        messages = {i.name: i.bytes for i in costs.specs[-1].serve_tokens(costs.dims, 128) if isinstance(i, Comm)}
        sent[dtype] = (messages["dispatch"], messages["combine"])
    assert sent["bf16"] == (128 * 8 * 7168 * 2, 128 * 8 * 7168 * 2)
    assert sent["fp8"] == (128 * 8 * 7168, 128 * 8 * 7168 * 2)


def test_a_look_up_reads_and_writes_a_row_a_token() -> None:
    costs = costs_of({"model": "llama3-8b"})
    op, _ = operator(costs, embedding_tokens(costs.dims, 100), "embedding")
    assert op.bytes == 100 * 4096 * 2 * 2


EXPERTS = [(4096, 14336, 2, 8), (4096, 1536, 8, 128)]  # hidden, inner, top_k, experts: Mixtral, Qwen3 235B


@pytest.mark.parametrize(("gpu", "quantization", "dtype"), [("h200", "none", "bf16"), ("b200", "fp8", "fp8")])
@pytest.mark.parametrize("sizes", EXPERTS)
def test_experts_take_what_was_measured(gpu: str, quantization: str, dtype: str, sizes: tuple[int, ...]) -> None:
    """A layer of experts in each split that was measured; a server's long run adds what the power limit takes."""
    points, _ = kernel_file(gpu).table(MOE_LAYER, dtype)
    hidden, inner, top_k, experts = sizes
    moe = {"experts": experts, "top_k": top_k, "ffn": inner, "capacity_factor": 1}  # evenly, as was measured
    model = {"layers": 1, "hidden": hidden, "heads": 64, "ffn": hidden, "vocab": 128, "mlp": "swiglu", "moe": moe}
    like = [i for i, row in enumerate(points.shapes.tolist()) if tuple(row[1:5]) == sizes and row[0] >= 512]
    like = [i for i in like if points.shapes[i, 5] * points.shapes[i, 6] <= 64][::9]
    assert len(like) > 5
    for i in like:
        tokens, *_, expert_tp, ep = points.shapes[i].tolist()
        layout = {"tp": expert_tp * ep, "ep": ep, "expert_tp": expert_tp}
        changes = {"model": model, "parallelism": layout, "inference": {"quantization": quantization}}
        costs = costs_of(changes, f"{gpu}-sxm", f"dgx-{gpu}")
        op, seconds = operator(costs, costs.specs[-1].serve_tokens(costs.dims, tokens), "experts")
        assert op.shape == tuple(points.shapes[i].tolist())
        assert 0.97 < seconds / points.seconds[i] < 1.5


def test_experts_between_measured_sizes_are_met() -> None:
    """A tenth of an H200's 14,020 layers left out: half are met within 5 %, nine tenths within 35 %."""
    points, _ = kernel_file("h200").table(MOE_LAYER, "bf16")
    gpu = GPUS["h200-sxm"]
    device = Device(gpu.name, gpu.peak_flops_per_s, gpu.memory_bandwidth_bytes_per_s)
    out = np.arange(len(points.seconds)) % 10 == 3
    rest = PointTable(
        *(
            getattr(points, f)[~out] if f in ("shapes", "seconds", "spread", "samples") else getattr(points, f)
            for f in PointTable.__struct_fields__
        )
    )
    table = make_table(MOE_LAYER, "bf16", [rest], device, True, 0.1)
    errors = []
    for i in np.flatnonzero(out)[::5]:
        shape = tuple(points.shapes[i].tolist())
        efficiency = lookup(table, MOE_LAYER, shape, 0)[0]  # type: ignore[index]
        predicted = (device.shape_seconds(MOE_LAYER, shape, "bf16") + table.floor_s) / efficiency
        errors.append(abs(predicted / points.seconds[i] - 1))
    assert np.median(errors) < 0.05
    assert np.quantile(errors, 0.9) < 0.35


def test_an_evenly_chosen_part_of_the_experts_takes_its_part_of_the_time() -> None:
    """An A100's layers were measured with uneven tokens: a rank of eight with the most popular experts took a third."""
    found = {}
    for ep in (1, 8):
        changes = {"model": "mixtral-8x7b", "parallelism": {"tp": ep, "ep": ep}}
        costs = costs_of(changes, "a100-sxm", "dgx-a100")
        _, found[ep] = operator(costs, costs.specs[-1].serve_tokens(costs.dims, 4096), "experts")
    assert found[8] == pytest.approx(found[1] / 8, rel=0.1)


def test_experts_that_nobody_chose_are_not_read() -> None:
    """32 tokens of 8 experts each choose 163 of 256, E·(1 − (1 − k/E)^T): 20 of a rank's 32, 25 on the fullest of 8
    ranks; measured were all, evenly."""
    costs = costs_of({"parallelism": {"tp": 8, "ep": 8}, "inference": {"quantization": "fp8"}})
    op, seconds = operator(costs, costs.specs[-1].serve_tokens(costs.dims, 32), "experts")
    known = shape_bytes(MOE_LAYER, op.shape, "fp8")
    assert op.kernel == "fp8_block"
    assert op.bytes == pytest.approx(known * 25 / 32, rel=0.02)
    usual = replace(op, bytes=known)
    whole = costs.prices.pricing.costs.compute(usual)
    floor_s, bytes_per_s = costs.prices.pricing.costs.floor_s(usual), costs.prices.device.bandwidth_bytes_per_s
    read_s, known_s = op.bytes / bytes_per_s, known / bytes_per_s
    assert seconds == pytest.approx(whole.seconds * (read_s + floor_s) / (known_s + floor_s), rel=0.02)


@pytest.mark.parametrize(
    ("profile", "model", "form"),
    [
        ("h100-sxm", "mixtral-8x7b", "mxfp4_experts"),
        ("h100-sxm", "gpt-oss-120b", "fp8_mxfp4_experts"),
        ("a100-sxm", "qwen3-30b-a3b", "mxfp4_experts"),
        ("b200-sxm", "llama3-8b", "int4_weight_only"),
        ("b200-sxm", "gemma3-27b", "llm_int8"),
    ],
)
def test_more_bandwidth_makes_no_iteration_slower(profile: str, model: str, form: str) -> None:
    """Nor do weights in fewer bits, whatever of an operator's time is bound by memory: a part, all, or nothing."""
    found = []
    for scale in (0.7, 1.0, 1.1, 1.5, 2.5):
        bytes_per_s = scale * GPUS[profile].memory_bandwidth_bytes_per_s
        gpu = {"preset": profile, "memory_bandwidth_bytes_per_s": bytes_per_s}
        cluster = {"preset": f"dgx-{profile.removesuffix('-sxm')}", "gpu": gpu}
        costs = costs_of({"model": model, "inference": {"quantization": form}}, profile, cluster)
        sizes = (64, 256, 1024, 4096)
        prompts = [costs.device_seconds(Load(n, 0, 0, ((n, n, 1),), 1))[0] for n in sizes]
        found.append(prompts + [costs.device_seconds(Load(n, n, 500 * n, (), n))[0] for n in sizes])
    for slower, faster in pairwise(found):
        assert all(b <= a * (1 + 1e-9) for a, b in zip(slower, faster, strict=True))


@pytest.mark.parametrize("profile", ["h100-sxm", "b200-sxm"])
def test_more_tokens_are_never_a_fifth_quicker(profile: str) -> None:
    """One launch of experts takes as long for one token as for two: what fewer bytes save is not the launch."""
    changes = {
        "parallelism": {"tp": 8, "ep": 8},
        "inference": {"quantization": "fp8"},
        "model": {"preset": "qwen3-30b-a3b"},
    }
    costs = costs_of(changes, profile, f"dgx-{profile.removesuffix('-sxm')}")
    seconds = [operator(costs, costs.specs[-1].serve_tokens(costs.dims, n), "experts")[1] for n in (1, 2, 4, 8, 16)]
    assert all(later > 0.8 * earlier for earlier, later in pairwise(seconds))


def test_without_measured_layers_experts_are_their_kernels_and_share_a_launch() -> None:
    changes = {"parallelism": {"tp": 8, "ep": 8}, "inference": {"quantization": "mxfp4_experts"}}
    costs = costs_of(changes, "a100-sxm", "dgx-a100")
    program = costs.specs[-1].serve_tokens(costs.dims, 8)
    assert "experts" not in {item.name for item in program}
    op, seconds = operator(costs, program, "experts_up")
    assert op.kind == "grouped_gemm"
    assert seconds < 32 * costs.prices.pricing.costs.profile.coefficients.group_launch_s


def test_prompts_of_unlike_lengths_are_one_kernel() -> None:
    """64 prompts of 96 to 160 tokens take what 64 of 128 do: one launch of a layer's attention, not one a length."""
    costs = costs_of({"model": "llama3-8b"}, "h100-sxm", "dgx-h100")
    lengths = tuple((128 + n, 128 + n, 1) for n in range(-32, 33) if n)
    alike, unlike = (costs.stage_seconds(Load(8192, prefills=p))[0] for p in (((128, 128, 64),), lengths))
    assert unlike == pytest.approx(alike, rel=0.01)


def test_replicas_wait_for_none_but_those_that_they_share_experts_with() -> None:
    """The slowest clock of those that wait for each other counts (`Costs.pace`): of eight replicas each its own, of
    eight ranks that send each other tokens all."""
    load = Load(8192, prefills=((8192, 8192, 1),))
    dense, mixture = ({"model": name, "parallelism": {"dp": 8}} for name in ("llama3-8b", "mixtral-8x7b"))
    one = costs_of({"model": "llama3-8b"}, "h100-sxm", "dgx-h100").stage_seconds(load)
    assert costs_of(dense, "h100-sxm", "dgx-h100").stage_seconds(load) == one
    shared = costs_of({**mixture, "parallelism": {"dp": 8, "ep": 8}}, "h100-sxm", "dgx-h100")
    apart = costs_of(mixture, "h100-sxm", "dgx-h100")
    assert shared.prices.pricing._usual.pace > apart.prices.pricing._usual.pace == 1.0


def unfused_bytes_and_flops(model: str, tp: int, **sizes: int) -> tuple[float, float, list[str]]:
    """What the attention of one rank moves and computes, and its operators."""
    costs = costs_of(
        {"model": model, "parallelism": {"tp": tp}, "inference": {"attention": "unfused"}}, "h100-sxm", "dgx-h100"
    )
    attention = costs.attentions[0]
    if "q_len" in sizes:
        program = attention.prefill(costs.dims, sizes["batch"], sizes["q_len"], sizes["kv_len"])
    else:
        program = attention.decode(costs.dims, sizes["batch"], sizes["kv_len"])
    found = [i for i in program if isinstance(i, Compute) and i.name.startswith("attention")]
    matmuls = sum(i.flops for i in found if i.kind == "gemm")
    return sum(i.bytes for i in found if i.kind == "softmax"), matmuls, [i.name for i in found]


@pytest.mark.parametrize("tp", [1, 4])
def test_unfused_attention_moves_all_scores_and_computes_the_masked_half(tp: int) -> None:
    """Two matmuls of 2·b·a·q·kv·d flops, and b·a·q·kv scores of two bytes read and written (Dao 2022, algorithm 0)."""
    scores = 3 * (32 // tp) * 512 * 2048
    moved, flops, names = unfused_bytes_and_flops("llama3-8b", tp, batch=3, q_len=512, kv_len=2048)
    assert (moved, flops) == (2 * 2 * scores, 2 * 2 * scores * 128)
    assert [n.removeprefix("attention_") for n in names] == ["scores", "softmax", "context", "context_copy"]
    moved, flops, _ = unfused_bytes_and_flops("llama3-8b", tp, batch=3, kv_len=2048)
    assert (moved, flops) == (2 * 2 * scores / 512, 2 * 2 * scores * 128 / 512)


def test_unfused_attention_over_a_latent() -> None:
    """128 heads share one latent of 512 and 64 numbers, whose first 512 are the values."""
    moved, flops, _ = unfused_bytes_and_flops("deepseek-v3", 1, batch=2, kv_len=1024)
    scores = 2 * 128 * 1024
    assert (moved, flops) == (2 * 2 * scores, 2 * scores * (576 + 512))


def test_unfused_attention_delays_the_first_token_alone_and_holds_scores() -> None:
    def served(attention: str) -> dict[str, Any]:
        scenario = scenario_with(
            inference={
                "batching": "static",
                "attention": attention,
                "requests": {"prompt_len": 4096, "output_len": 8, "count": 4},
            }
        )
        return simulate_serving(scenario).result

    fused, unfused = served("fused"), served("unfused")
    assert unfused["time_to_first_token_s"]["p50"] > 1.1 * fused["time_to_first_token_s"]["p50"]
    assert unfused["time_per_output_token_s"]["p50"] == pytest.approx(fused["time_per_output_token_s"]["p50"], rel=0.02)
    scores = 2 * 2 * 32 * 4 * 4096 * 4096
    assert unfused["memory"][0]["buffers"] - fused["memory"][0]["buffers"] == pytest.approx(scores)


def test_unfused_attention_needs_the_cache_in_its_own_precision() -> None:
    with pytest.raises(InputError, match=r"kv_cache\.dtype: found 'fp8'; unfused attention reads"):
        costs_of({"inference": {"attention": "unfused", "kv_cache": {"dtype": "fp8"}}})


def test_chunks_between_kept_sizes_are_near_their_own_price() -> None:
    """Of any chunk behind any cached prefix, against the attention kernel priced at these very lengths."""
    costs = costs_of({"model": "llama3-8b"}, "h100-sxm", "dgx-h100")
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(2), np.log(30_000), (80, 2))).astype(int)
    errors = [
        costs._chunk_s(0, tokens, cached, 1) / costs.priced(Key(Work.PREFILL, 0, tokens, cached, 1)).seconds - 1
        for tokens, cached in sizes.tolist()
    ]
    assert abs(np.mean(errors)) < 0.01
    assert np.mean(np.abs(errors)) < 0.02
    assert np.quantile(np.abs(errors), 0.95) < 0.06


def test_checks_of_drafted_tokens_take_what_was_measured_of_as_many_together() -> None:
    """A profile without them has prompts, one of which each sequence then is."""
    grid = {(n, length): 1e-3 * n + 1e-6 * length for n in (1, 4) for length in (16, 64)}
    prefill = {(chunk, before): 1e-2 * chunk for chunk in (4, 16) for before in (0, 64)}
    parts = MeasuredParts({"check4": grid, "prefill": prefill})
    assert [parts.check(n, length, 4) for n, length in grid] == pytest.approx(list(grid.values()))
    assert parts.check(3, 20, 4) < parts.check(4, 20, 4) < parts.check(4, 60, 4)
    assert parts.check(3, 20, 16) == pytest.approx(3 * 0.16)
