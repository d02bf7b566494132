"""What a framework did at a date, and what changes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.inputs.scenario import Scenario
from sim.models.dims import dims
from sim.models.layer import layer_block
from sim.models.linear import linear
from sim.models.operators import Linear, Operator
from sim.models.output.head import cross_entropy, output_parts
from sim.models.parameters import count_parameters
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.rank_prices import Pricing
from sim.ranks.plan import make_plan
from sim.simulation import simulate
from sim.validation.stated import stated_training
from sim.variants.frameworks.records import FRAMEWORKS, framework_at
from tests.sim.cases import scenario_with
from topology.network import Network


def scenario(cluster: str = "dgx-h100", parallelism: dict[str, Any] | None = None, **training: Any) -> Scenario:
    return scenario_with(
        {"seq_len": 4096, "global_batch_size": 16, **training}, {"dp": 8, **(parallelism or {})}, cluster=cluster
    )


def result(s: Scenario) -> dict[str, Any]:
    return simulate(s).result


def test_a_former_fact_ends_with_its_month() -> None:
    assert framework_at("compiled", "2025-09-30").attention_kernel == "torch_2024"
    between = framework_at("compiled", "2025-10")
    assert (between.attention_kernel, between.repeats_fused_keys) == ("torch", True)
    assert not framework_at("compiled", "2026-02").repeats_fused_keys
    newest = max(former.until for former in FRAMEWORKS["compiled"].former)
    assert framework_at("compiled", newest) == framework_at("compiled", None) == FRAMEWORKS["compiled"]


@pytest.mark.parametrize("date", ["2024-13", "24-12", "December"])
def test_a_date_is_a_month_or_a_day(date: str) -> None:
    with pytest.raises(InputError, match=r"training\.software_date"):
        scenario(software_date=date)


def test_attention_of_2024_takes_longer_on_hopper_alone() -> None:
    def attention_s(cluster: str, date: str | None) -> float:
        rows = result(scenario(cluster, framework="compiled", software_date=date))["time_by_operator"][0]["operators"]
        return sum(row["seconds"] for row in rows if row["operator"].startswith("attention:"))

    assert attention_s("dgx-h100", "2024-12") == pytest.approx(attention_s("dgx-h100", None) * 0.621 / 0.324, rel=0.1)
    assert attention_s("dgx-a100", "2024-12") == attention_s("dgx-a100", None)


def test_matmuls_of_cuda_11_take_longer_on_an_h100_alone() -> None:
    def matmul_s(cluster: str, date: str) -> float:
        rows = result(scenario(cluster, framework="eager", software_date=date))["time_by_operator"][0]["operators"]
        return sum(row["seconds"] for row in rows if row["operator"].startswith(("mlp_up_0", "mlp_down")))

    slower = matmul_s("dgx-h100", "2023-09") / matmul_s("dgx-h100", "2023-10")
    assert 1.02 < slower <= 1.1  # a slower matmul draws less power, so the power limit slows it less
    assert matmul_s("dgx-a100", "2023-09") == matmul_s("dgx-a100", "2023-10")


def column_layer(s: Scenario) -> Operator:
    return linear(dims(s), Linear("up", 4096, 4096, (8192,), "column"))


def test_blackwell_quantizes_a_tensor_of_one_scale_once() -> None:
    """Read in 16 bits, written in 8: 3 bytes an element, 4 with the transposed copy."""

    def cast_bytes(**changes: Any) -> float:
        ops = column_layer(scenario(**{"cluster": "dgx-b200", "framework": "megatron", "precision": "fp8", **changes}))
        return next(op.bytes for op in ops.backward if isinstance(op, Compute) and op.name == "up_grad_cast")

    elements = 4096 * 8192
    assert cast_bytes() == 3 * elements
    assert cast_bytes(precision="mxfp8") > 4 * elements  # a scale for 32 elements differs by rows and columns
    for kept_twice in ({"software_date": "2024-09"}, {"cluster": "dgx-h100"}):
        assert cast_bytes(**kept_twice) == 4 * elements
    assert cast_bytes(framework="compiled") == 6 * elements  # and a read for the largest value


@pytest.mark.parametrize("tp", [1, 2])
def test_a_loss_over_a_split_vocabulary_holds_the_tensors_of_its_operators(tp: int) -> None:
    """torch/distributed/tensor/parallel/loss.py, not compiled: the dense gradient, the exponentials and their sum."""

    def held_bytes(date: str) -> tuple[float, float, float]:
        part = cross_entropy(dims(scenario(parallelism={"tp": tp}, framework="compiled", software_date=date)), 1000)
        return sum(s.bytes for s in part.saved), part.forward_bytes, part.backward_bytes

    logits = 4096 * 1000
    apart = (tp > 1) * 4 * logits
    assert held_bytes("2025-04") == (2 * logits, 0, 2 * logits)  # 16-bit logits, then their gradient beside them
    assert held_bytes("2025-03") == (4 * logits, 6 * logits + apart, 8 * logits + apart)


def test_a_compiled_loss_keeps_what_torch_keeps() -> None:
    torch = pytest.importorskip("torch")
    kept: list[int] = []

    def loss(logits: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    def keep(tensor: Any) -> Any:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    logits = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        torch.compile(loss, backend="aot_eager_decomp_partition")(logits, torch.zeros(64, dtype=torch.long))
    part = cross_entropy(dims(scenario(framework="compiled")), 1000)
    assert max(kept) == 2 * 64 * 1000
    assert sum(kept) - max(kept) < 64 * 32  # each row's target, maximum and logarithm
    assert sum(s.bytes for s in part.saved) == 2 * 4096 * 1000


def test_composer_computes_the_loss_again_for_each_metric() -> None:
    """LanguageCrossEntropy and LanguagePerplexity: a copy in fp32 (6 bytes a logit) and its log-softmax (8), each."""
    s = scenario(framework="composer")
    ahead = [item for part in output_parts(s, dims(s)) for item in part.forward if isinstance(item, Compute)]
    extra = [op for op in ahead if op.name.startswith("metric")]
    logits = 4096 * s.model.padded_vocab(1)
    assert sum(op.bytes for op in extra) == 2 * (6 + 8) * logits
    assert sum(op.kernels for op in extra) == 4
    assert s.for_training.cross_entropy == "fused"
    eager = scenario(framework="eager")
    assert not [item for part in output_parts(eager, dims(eager)) for item in part.forward if "metric" in item.name]


def test_captured_kernels_cost_the_host_nothing() -> None:
    """Graphs of layers leave embedding, head and loss to the host."""

    def host_s(graphs: str) -> float:
        s = scenario(parallelism={"dp": 1, "tp": 8, "sp": True}, framework="megatron", cuda_graphs=graphs)
        rows = result(s)["time_by_operator"][0]["operators"]
        return sum(row["seconds"] for row in rows if row["operator"] == "host" and row["phase"] != "optimizer")

    assert host_s("none") > 0.05
    assert host_s("none") / 3 > host_s("layers") > host_s("step") == 0.0


def test_nanotron_sums_whole_gradients_at_zero_1() -> None:
    def sent(framework: str) -> dict[str, float]:
        s = scenario(parallelism={"zero": 1}, framework=framework)
        return {c["kind"]: c["bytes"] for c in result(s)["communication"] if c["bytes"] > 4}

    usual, whole = sent("eager"), sent("nanotron")
    assert whole["all_reduce"] == pytest.approx(usual["reduce_scatter"], rel=1e-3)
    assert whole["all_gather"] == usual["all_gather"]


def test_nanotron_at_zero_1_sums_gradients_when_the_last_backward_has_ended() -> None:
    """No DDP then, so nothing hides the sum; without ZeRO DDP's buckets go out under the backward."""

    def exposed_s(zero: int, framework: str) -> float:
        s = scenario(parallelism={"zero": zero, "dp_sync": "bucketed"}, framework=framework)
        return result(s)["exposed_comm_s"]

    assert exposed_s(1, "nanotron") > 5 * exposed_s(0, "nanotron")
    assert exposed_s(1, "eager") < exposed_s(1, "nanotron")


def test_nanotron_orders_queries_keys_and_values_for_its_kernels() -> None:
    """Seven times a token's queries, read and written, in 16 bits."""
    layer = layer_block(scenario(framework="nanotron"), 1)
    found = [op for op in layer.forward if isinstance(op, Compute) and op.name == "attention_copies"]
    assert [(op.bytes, op.kernels) for op in found] == [(7 * 2 * 2 * 4096 * 4096, 9)]


@pytest.mark.parametrize(("tp", "parts"), [(2, ("own", "before")), (4, ("own", "before", "after"))])
def test_nanotron_starts_a_matmul_with_its_own_rows(tp: int, parts: tuple[str, ...]) -> None:
    """While the others' rows arrive; together they are the whole matmul."""

    def matmuls(overlap: str) -> dict[str, float]:
        s = scenario(parallelism={"dp": 1, "tp": tp, "sp": True, "tp_overlap": overlap}, framework="nanotron")
        found = [op for op in layer_block(s, 1).forward if isinstance(op, Compute) and op.name.startswith("qkv")]
        return {op.name: op.flops for op in found}

    (whole,), cut = matmuls("none").values(), matmuls("wgrad")
    assert list(cut) == [f"qkv_{part}" for part in parts]
    assert sum(cut.values()) == whole
    assert cut["qkv_own"] == whole / tp


def test_nanotron_describes_each_tensor_in_messages_before_it() -> None:
    """Five small messages beside a stage's output, two beside a gradient, each as long as one alone."""

    def sends(framework: str) -> dict[str, float]:
        s = scenario(parallelism={"dp": 1, "pp": 2}, framework=framework, global_batch_size=2)
        pricing = Pricing(make_plan(s), Costs(load_profile(s.calibration), s.cluster.gpu), Network(s.cluster))
        asked = {
            "output": (0, 1, 1e6, True),
            "gradient": (1, 0, 1e6, False),
            "back": (1, 0, 1e6, True),
            "own": (0, 1, 1e6, None),
            "small": (0, 1, 64.0, None),
        }
        return {name: pricing.send(*each).seconds for name, each in asked.items()}

    usual, described = sends("eager"), sends("nanotron")
    assert described["output"] == pytest.approx(usual["output"] + 5 * usual["small"])
    assert described["gradient"] == pytest.approx(usual["gradient"] + 2 * usual["small"])
    assert described["back"] == pytest.approx(usual["back"] + 5 * usual["small"])  # an output, to a lower rank
    assert described["own"] == usual["own"]


def test_gradients_of_gate_and_up_cut_from_one_matmul_are_joined() -> None:
    """Two reads and two writes an element of the inner width beyond those of the same kernels apart."""

    def moved(framework: str) -> float:
        layer = layer_block(scenario(framework=framework), 1)
        return sum(op.bytes for op in layer.backward if isinstance(op, Compute) and op.name.startswith("swiglu_back"))

    assert moved("nanotron") / moved("eager") == pytest.approx(13 / 9)


def test_megatron_of_2023_keeps_nothing_for_transformer_engine() -> None:
    """Neither its workspace, 32 MiB on Hopper, nor an empty gradient of each shape of a weight."""
    now, then = (result(scenario(framework="megatron", software_date=d))["memory"][0] for d in (None, "2023-07"))
    h, ffn, kv = 4096, 14336, 1024
    shapes = {(h + 2 * kv, h), (h, h), (2 * ffn, h), (h, ffn)}
    assert now["buffers"] - then["buffers"] == pytest.approx(2 * sum(n * k for n, k in shapes) + 32 * 2**20)


def test_adamw_operator_by_operator_moves_20_accesses() -> None:
    """As many as torch's AdamW tensor by tensor, within 8 % on an H100 (scenarios/cuda/h100.json)."""

    def adamw_s(own: Scenario) -> float:
        rows = result(own)["time_by_operator"][0]["operators"]
        return sum(row["seconds"] for row in rows if row["operator"] == "adamw")

    own = scenario(framework="composer", param_dtype="fp32")
    table = json.loads((Path(__file__).parents[3] / "scenarios" / "cuda" / "h100.json").read_text(encoding="utf-8"))
    (point,) = [p for p in table["points"] if p["op"] == "optimizer:adamw_single_tensor"]
    measured_s = point["seconds"][-1] / (point["shape"][-1][0] / 28)  # of a number
    parameters = count_parameters(own.model).total
    assert adamw_s(own) / parameters == pytest.approx(measured_s, rel=0.08)


def test_copies_around_attention_are_counted() -> None:
    """Four of a token's queries, read and written, in 16 bits."""
    layer = layer_block(scenario(framework="composer"), 1)
    found = [op.bytes for op in layer.forward if isinstance(op, Compute) and op.name == "attention_copies"]
    assert found == [4 * 2 * 2 * 4096 * 4096]


def test_multi_token_prediction_looks_tokens_up_on_the_last_stage() -> None:
    """The embedding matrix stands at both ends: 2 + 4 + 12 bytes a parameter of it, but for the module's own."""

    def last(mtp: int) -> float:
        s = scenario_with(
            {"seq_len": 512, "global_batch_size": 2}, {"pp": 2}, model={"preset": "llama3-8b", "mtp_layers": mtp}
        )
        return float(result(s)["memory"][1]["parameters"])

    table, layer = 128256 * 4096, 218_112_000 + 2 * 4096 * 4096 + 3 * 4096
    assert last(1) - last(0) == pytest.approx(2 * (table + layer), rel=1e-3)


def test_megatron_of_2023_adds_the_bias_of_projections_by_a_kernel_of_its_own() -> None:
    def added(date: str, **model: Any) -> list[Compute]:
        s = scenario_with(
            {"seq_len": 512, "global_batch_size": 1, "framework": "megatron", "software_date": date},
            model={"preset": "gpt2-xl", **model},
        )
        layer = layer_block(s, 0).forward
        return [item for item in layer if isinstance(item, Compute) and item.name == "qkv_bias"]

    (kernel,) = added("2023-07")
    assert kernel.bytes == 2 * 512 * 3 * 1600 * 2  # read and written, queries, keys and values, 16 bits
    assert added("2024-01") == added("2023-07", bias=False) == []


def test_megatron_sent_pieces_of_messages_until_pipelines_moved_to_its_core() -> None:
    def sends_pieces(date: str, **keys: Any) -> bool:
        parallelism = {"tp": 2, "pp": 2, "dp": 1, "sp": False, **keys}
        return scenario(parallelism=parallelism, framework="megatron", software_date=date).parallelism.p2p_scatter

    assert sends_pieces("2023-05")
    assert not sends_pieces("2023-05", p2p_scatter=False)
    assert not sends_pieces("2023-06")


def test_nemos_launcher_kept_cudnn_off_for_half_a_year() -> None:
    """Its config.yaml sets NVTE_FUSED_ATTN to 0 from early 2024 to August; one sequence has nothing to transpose."""
    kernels = {d: framework_at("nemo", d).attention_kernel for d in ("2023-11", "2024-07", "2024-09", None)}
    assert list(kernels.values()) == ["megatron", "flash2", "megatron", "megatron"]
    assert stated_training("NeMo 24.07, Megatron-Core", {})["framework"] == "nemo"
    assert "framework" not in stated_training("NeMo, Megatron-Core (24.04 in v4.0)", {"run": {"round": "v4.0"}})

    def copies(sequences: int) -> int:
        training = {"framework": "nemo", "software_date": "2024-07", "micro_batch_size": sequences}
        block = layer_block(scenario(**training), 0)
        return len([i for i in block.forward if getattr(i, "name", "") == "attention_copies"])

    assert (copies(1), copies(2)) == (0, 1)


def test_an_id_that_holds_a_year_says_no_date() -> None:
    table = "torch 1963fc8 (2024-12-23) for t1 to t6; others per source"
    dates = [stated_training(table, {"id": f"llama_{year}_h2048"})["software_date"] for year in ("2025", "2024", "b2")]
    assert dates == ["2024-12-23"] * 3
