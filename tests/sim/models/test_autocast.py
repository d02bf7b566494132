"""torch.autocast over fp32 parameters: against programs that were captured of Transformers' models, a plain model that
runs on the CPU, and closed forms."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from captured_layers import BATCH, CONFIGS, LAYER, MODELS, SEQ, capture
from model_programs import GPT, LLAMA, make

from sim.core.errors import InputError
from sim.core.program import Comm, Compute, Item, Phase
from sim.inputs.program_file import CapturedProgram
from sim.inputs.scenario import parse_scenario
from sim.models.captured.operators import computes_of
from sim.models.captured.waits import waits_of
from sim.models.embedding import embedding_block
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from sim.models.source import source_of
from sim.simulation import simulate

FP32 = {"param_dtype": "fp32"}
MATMULS = ("gemm", "grouped_gemm", "attention_forward", "attention_backward")
DTYPES = ("bf16", "fp32")
MATRICES = ("proj", "c_attn", "c_fc", "fc_in", "fc_out", "query_key_value", "dense", "h_to_4h", "4h_to_h")  # modules'
SMALL_KERNELS = {"apertus": 8}  # over an activation's two numbers
WAYS = [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa"), ("gelu_fast", "sdpa"), ("quick_gelu", "sdpa")]
WAYS += [("bloom", "eager"), ("arcee", "sdpa"), ("apertus", "sdpa")]
EXPERTS = ("qwen3_moe", "sdpa")
OTHER_EXPERTS = ("qwen2_moe", "ernie4_5_moe", "deepseek_v2")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], CapturedProgram]:
    """Programs by model and attention, under CUDA's lists."""
    return {
        (name, attention): capture(tmp_path_factory.mktemp(name), name, attention, autocast="bf16")
        for name, attention in (*WAYS, EXPERTS, *((name, "sdpa") for name in OTHER_EXPERTS))
    }


def described(name: str, attention: str = "sdpa", **training: Any) -> Any:
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "framework": "transformers", **FP32}
    kind = {"sdpa": "fused", "eager": "unfused"}[attention]
    return make(MODELS[name], {**sizes, "attention": kind, **training})


def beside_matmuls(items: Iterable[Item]) -> list[Compute]:
    return [i for i in items if isinstance(i, Compute) and i.kind not in MATMULS]


@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_a_layer_keeps_what_the_captured_one_keeps(captured: Any, name: str, attention: str) -> None:
    """Casts of weights apart, which are among a rank's copies of parameters."""
    program = captured[name, attention]
    parameters = {i for i, s in enumerate(program.storages) if s.kind == "parameter"}
    mine = [s for s in program.storages if s.kind == "activation" and LAYER[name] in s.name]
    of_weights = [s for s in mine if parameters & {*program.operators[s.born].reads} and s.name.endswith(MATRICES)]
    scenario = described(name, attention)
    block = layer_block(scenario, 1)
    kept = sum(s.bytes for s in mine) - sum(s.bytes for s in of_weights)
    assert sum(s.bytes for s in block.saved) == pytest.approx(kept, rel=0.001)
    weights = sum(m.elements for m in block.matrices)
    assert sum(s.bytes for s in of_weights) == 2 * weights
    without = layer_block(described(name, attention, autocast=False), 1)
    assert sum(s.bytes for s in without.saved) < 0.96 * kept


@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_kernels_beside_matmuls_move_what_the_captured_ones_move(captured: Any, name: str, attention: str) -> None:
    """Each input read and each output written once."""
    program = captured[name, attention]
    block = layer_block(described(name, attention), 1)
    for phase, items, apart in (("forward", block.forward, 0.06), ("backward", block.backward, 0.06)):
        mine = [o for o in program.operators if o.phase == phase and LAYER[name] in o.module and o.launches]
        kernels = [o for o in mine if not ("mm" in o.name or "attention" in o.name)]
        moved = sum(t.bytes for o in kernels for t in (*o.inputs, *o.outputs))
        assert sum(i.bytes for i in beside_matmuls(items)) == pytest.approx(moved, rel=apart)
        launched = sum(i.kernels for o in kernels for i in computes_of(o))
        small = SMALL_KERNELS.get(name, 3)
        assert sum(i.kernels for i in beside_matmuls(items)) == pytest.approx(launched, abs=small)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_gpt2_has_the_captured_kernels_over_both_dtypes(captured: Any, phase: str) -> None:
    """Elements times operands for which torch's kernels choose a cast: most are of the activation, whose power is of
    fp32 under autocast."""

    def casts(items: Iterable[Item]) -> float:
        return sum(i.single_elements * i.casts for i in items if isinstance(i, Compute))

    operators = captured["gpt2", "sdpa"].operators
    mine = [o for o in operators if o.phase == phase and LAYER["gpt2"] in o.module and o.launches]
    found = casts(i for o in mine for i in computes_of(o))
    block = layer_block(described("gpt2"), 1)
    assert casts(getattr(block, phase)) == pytest.approx(found, rel=0.01)


def test_the_gradients_of_a_projection_that_was_split_are_joined(captured: Any) -> None:
    operators = captured["gpt2", "sdpa"].operators
    (joined,) = (o for o in operators if o.phase == "backward" and LAYER["gpt2"] in o.module and o.name == "aten.cat")
    copies = [i for i in layer_block(described("gpt2"), 1).backward if isinstance(i, Compute) and i.kind == "copy"]
    assert [i.bytes for i in copies] == [sum(t.bytes for t in (*joined.inputs, *joined.outputs))]
    plain = layer_block(described("gpt2", framework="eager"), 1).backward
    assert not [i for i in plain if isinstance(i, Compute) and i.kind == "copy"]


def test_routed_experts_run_in_the_fp32_of_their_parameters(captured: Any) -> None:
    """Transformers' grouped matmul is on none of torch's lists, and its input is cast to the weights' dtype."""
    program, block = captured[EXPERTS], layer_block(described(*EXPERTS), 1)
    matmuls = [i for i in (*block.forward, *block.backward) if isinstance(i, Compute) and i.kind == "grouped_gemm"]
    real = [o for o in program.operators if "layers.1.mlp" in o.module and "grouped_mm" in o.name]
    assert len(matmuls) == len(real) == 6
    assert {i.dtype for i in matmuls} == {"fp32"}
    assert sum(i.bytes for i in matmuls) == pytest.approx(
        sum(t.bytes for o in real for t in (*o.inputs, *o.outputs)), rel=0.01
    )
    assert {i.kernels for i in matmuls} == {8}  # one after another
    waits = [i for o in real for i in waits_of(o, Phase.FORWARD)]  # for where the groups end
    assert len([i for i in (*block.forward, *block.backward) if isinstance(i, Comm)]) == len(waits) == 6
    mine = [s for s in program.storages if s.kind == "activation" and "layers.1" in s.name]
    cast = 2 * (sum(m.elements for m in block.matrices) + 8 * 512)  # with the router's, which is no matrix of a layer
    assert sum(s.bytes for s in block.saved) == pytest.approx(sum(s.bytes for s in mine) - cast, rel=0.001)


@pytest.mark.parametrize("name", OTHER_EXPERTS)
def test_layers_with_routers_gates_and_latents_run_as_captured(captured: Any, name: str) -> None:
    """A router in fp32 (which autocast makes one of 16 bits, but ERNIE's), a gate of shared experts, latents."""
    program, block = captured[name, "sdpa"], layer_block(described(name), 1)
    layer = [o for o in program.operators if LAYER[name] in o.module and o.launches]
    for phase, items in (("forward", block.forward), ("backward", block.backward)):
        real = [i for o in layer if o.phase == phase for i in computes_of(o)]
        for kinds in (("gemm", "grouped_gemm"), ("attention_forward", "attention_backward")):
            run = {dtype: sum(i.flops for i in real if i.kind in kinds and i.dtype == dtype) for dtype in DTYPES}
            mine = [i for i in items if isinstance(i, Compute) and i.kind in kinds]
            assert {d: sum(i.flops for i in mine if i.dtype == d) for d in DTYPES} == pytest.approx(run, rel=1e-6)
        moved = sum(i.bytes for i in real if i.kind not in MATMULS)
        apart = 0.13 if name == "deepseek_v2" else 0.1  # whose rope multiplies complex numbers
        assert sum(i.bytes for i in beside_matmuls(items)) == pytest.approx(moved, rel=apart)
    kept = sum(s.bytes for s in program.storages if s.kind == "activation" and LAYER[name] in s.name)
    cast = 2 * (sum(m.elements for m in block.matrices) + 8 * 512 * (name != "ernie4_5_moe"))
    assert sum(s.bytes for s in block.saved) == pytest.approx(kept - cast, rel=0.01)


GATED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_shared_experts": 1}
AFMOE = CONFIGS["llama"] | GATED | {"model_type": "afmoe", "num_dense_layers": 0, "head_dim": 64}


@pytest.mark.parametrize(("name", "attention", "most"), [("gpt_oss", "eager", 0.08), ("afmoe", "sdpa", 0.1)])
def test_clamped_experts_sinks_and_gates_run_as_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, attention: str, most: float
) -> None:
    """gpt-oss: a softmax in fp32 with a column of sinks, kept beside its copy in 16 bits. AFMoE: a gate in 16 bits, and
    norms behind experts that read their fp32. Beside the captured casts of weights, which are copies of parameters."""
    monkeypatch.setitem(CONFIGS, "afmoe", AFMOE)
    program = capture(tmp_path, name, attention, balanced=True, autocast="bf16")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": name, **CONFIGS[name]}))
    training = {"seq_len": SEQ, "micro_batch_size": BATCH, "global_batch_size": BATCH, "framework": "transformers"}
    training |= FP32 | {"attention": "fused" if attention == "sdpa" else "unfused"}
    scenario = parse_scenario({"model": str(config), "training": training, "cluster": "dgx-h100"})
    assert not [w for w in scenario.warnings if "autocast" in w]
    block = layer_block(scenario, 1)
    layer = [o for o in program.operators if "layers.1" in o.module and o.launches]
    for phase, items in (("forward", block.forward), ("backward", block.backward)):
        real = [i for o in layer if o.phase == phase for i in computes_of(o)]
        moved = sum(i.bytes for i in real if i.kind not in MATMULS)
        assert sum(i.bytes for i in beside_matmuls(items)) == pytest.approx(moved, rel=most)
    parameters = {i for i, s in enumerate(program.storages) if s.kind == "parameter"}
    mine = [s for s in program.storages if s.kind == "activation" and "layers.1" in s.name]
    of_weights = [s for s in mine if len(program.operators[s.born].reads) == 1]
    casts = sum(s.bytes for s in of_weights if parameters & {*program.operators[s.born].reads})
    assert sum(s.bytes for s in block.saved) == pytest.approx(sum(s.bytes for s in mine) - casts, rel=0.005)


def test_experts_of_linear_layers_are_not_followed_through_autocast() -> None:
    """Transformers before 5.0 had a linear layer for each expert's matrix, which autocast casts."""
    matmuls = [
        i for i in layer_block(described(*EXPERTS, software_date="2025-06"), 1).forward if isinstance(i, Compute)
    ]
    assert {i.dtype for i in matmuls if i.kind == "grouped_gemm"} == {"bf16"}


def test_the_captured_step_and_the_described_one_hold_as_much(captured: Any) -> None:
    """The captured one counts casts of weights as activations, the described one as copies of parameters."""
    scenario = described("llama", zero_grad="set_to_none")
    blocks = simulate(scenario).stages[0][0].blocks
    kept = sum(s.bytes for b in blocks for s in b.saved)
    cast = 2 * sum(b.params for b in blocks[1:])
    program = captured["llama", "sdpa"]
    assert kept + cast == pytest.approx(sum(s.bytes for s in program.storages if s.kind == "activation"), rel=0.01)


def test_plain_modules_keep_on_a_cpu_what_the_eager_framework_keeps() -> None:
    """A GPT layer of torch's own modules, run for real under `torch.autocast("cpu")`."""
    torch = pytest.importorskip("torch", reason="runs torch's own modules")
    nn, sequences, tokens, hidden, heads = torch.nn, 2, 128, 256, 8

    class Layer(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x: Any) -> Any:
            shape = (sequences, tokens, 3, heads, hidden // heads)
            q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
            core = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(core.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    layer, found = Layer(), {}
    shapes = {tuple(p.shape) for p in layer.parameters()} | {tuple(p.t().shape) for p in layer.parameters()}

    def pack(x: Any) -> Any:
        node = x.grad_fn
        while node is not None and node.name() in ("ToCopyBackward0", "TBackward0"):
            node = node.next_functions[0][0]
        cast = node is not None and node.name() == "torch::autograd::AccumulateGrad" and tuple(x.shape) in shapes
        if not cast and not isinstance(x, nn.Parameter):
            found[x.untyped_storage().data_ptr()] = x
        return x

    given = torch.randn(sequences, tokens, hidden, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", torch.bfloat16):
        layer(given)
    kept = sum(x.untyped_storage().nbytes() for x in found.values())
    sizes = {"seq_len": tokens, "micro_batch_size": sequences, **FP32}
    block = layer_block(make({"layers": 2, "hidden": hidden, "heads": heads, "vocab": 1024}, sizes), 1)
    assert sum(s.bytes for s in block.saved) == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize(("model", "more"), [(GPT, 4), (LLAMA, 4 + 4 + 2)])
def test_what_is_kept_more_than_without(model: dict[str, Any], more: int) -> None:
    """In units of s·b·h bytes: the inputs of two norms in fp32 (2 each), and where query, key and value, gate and up
    are matmuls of their own, three and two copies of the norms' results."""
    under, without = (layer_block(make(model, {**FP32, "autocast": how}), 1) for how in (None, False))
    saved = [sum(s.bytes for s in block.saved) for block in (under, without)]
    assert saved[0] - saved[1] == more * 1024 * 1024
    assert [b.params for b in (under, without)] == [under.params] * 2


@pytest.mark.parametrize("m", [1, 4])
def test_weights_are_cast_in_each_forward_and_their_gradients_in_each_backward(m: int) -> None:
    """6 bytes an element each; 12 to add a gradient to the sum, in all micro-batches but the first."""
    block = layer_block(make(LLAMA, {**FP32, "global_batch_size": 2 * m}), 1)
    weights = sum(x.elements for x in block.matrices)

    def moved(items: Iterable[Item], end: str) -> float:
        return sum(i.bytes for i in beside_matmuls(items) if i.name.endswith(end))

    assert moved(block.forward, "weight_cast") == 6 * weights
    assert moved(block.backward, "wgrad_cast") == 6 * weights
    assert moved(block.backward, "accumulate") == pytest.approx(12 * weights * (m - 1) / m)
    again = layer_block(make(LLAMA, {**FP32, "recompute": "full"}), 1)
    assert moved(again.recompute, "weight_cast") == 6 * weights
    assert [s.bytes for s in again.saved] == [4 * 1024 * 1024]  # the layer's input, in fp32


def test_the_ends_of_a_model_and_messages_between_stages_have_fp32() -> None:
    under, without = (make(LLAMA, {**FP32, "autocast": how}, pp=2) for how in (None, False))
    assert source_of(under).input_bytes(2) == 2 * source_of(without).input_bytes(2)
    looked_up = [next(i for i in embedding_block(s).forward if isinstance(i, Compute)) for s in (under, without)]
    assert looked_up[0].bytes == 2 * looked_up[1].bytes
    kept = [{s.name: s.bytes for s in head_block(s).saved} for s in (under, without)]
    assert kept[0]["final_norm input"] == 2 * kept[1]["final_norm input"]
    assert kept[0]["output input"] == kept[1]["output input"]
    assert kept[0]["log-softmax in fp32"] == kept[1]["log-softmax in fp32"]


def test_a_compiler_casts_where_it_makes_a_tensor() -> None:
    """No cast but those of weights; the norm reads fp32 and writes 16 bits."""
    block = layer_block(make(LLAMA, {**FP32, "framework": "compiled"}), 1)
    casts = {i.name for i in beside_matmuls((*block.forward, *block.backward)) if i.kind == "cast"}
    assert casts
    assert all(name.endswith(("weight_cast", "wgrad_cast")) for name in casts)
    norm = next(i for i in block.forward if isinstance(i, Compute) and "norm" in i.name)
    assert norm.bytes == (4 + 2) * 1024 * 1024
    kept = [
        sum(s.bytes for s in layer_block(make(LLAMA, {**FP32, "framework": "compiled", "autocast": a}), 1).saved)
        for a in (None, False)
    ]
    assert kept[0] - kept[1] == 2 * 2 * 1024 * 1024  # what two norms read


@pytest.mark.parametrize(
    ("model", "training", "parallelism", "under", "said"),
    [
        (LLAMA, FP32, {}, True, ""),
        (LLAMA, {}, {}, False, ""),
        (LLAMA, {**FP32, "precision": "fp32"}, {}, False, ""),
        (LLAMA, {**FP32, "precision": "fp16"}, {}, True, ""),
        (LLAMA, {**FP32, "autocast": False}, {}, False, ""),
        (LLAMA, {"autocast": False}, {}, False, "training.autocast: of no effect"),
        (LLAMA, FP32, {"dp": 2, "zero": 3}, False, ""),  # FSDP casts parameters
        (LLAMA, FP32, {"dp": 2, "zero": 2}, False, ""),  # as does FSDP that does not reshard
        (LLAMA, FP32, {"dp": 2, "zero": 1}, True, ""),
        (LLAMA, {**FP32, "autocast": True}, {"dp": 2, "zero": 2}, True, ""),
        (LLAMA, {**FP32, "framework": "deepspeed"}, {"dp": 2, "zero": 2}, False, "framework deepspeed's default"),
        (LLAMA, {**FP32, "framework": "deepspeed"}, {}, False, "is not framework deepspeed's default"),
        (LLAMA, {**FP32, "framework": "deepspeed", "autocast": True}, {}, True, ""),
        (LLAMA, {**FP32, "framework": "megatron"}, {}, False, "not simulated with training.framework megatron"),
        (LLAMA, FP32, {"tp": 2}, False, "not simulated with parallelism.tp 2"),
        (LLAMA | {"mlp": "relu"}, FP32, {}, True, ""),
        (LLAMA | {"mlp": "relu2"}, FP32, {}, True, ""),
        (LLAMA | {"mlp": "limited_swiglu"}, FP32, {}, True, ""),
        (LLAMA | {"attention_gate": True}, FP32, {}, True, ""),
        (LLAMA | {"moe": {"experts": 4, "top_k": 1, "ffn": 64}}, FP32, {}, False, "not simulated with model.moe"),
        (MODELS["dbrx"], {**FP32, "framework": "transformers"}, {}, False, "not simulated with model.code dbrx"),
    ],
)
def test_where_a_step_runs_under_autocast(
    model: dict[str, Any], training: dict[str, Any], parallelism: dict[str, Any], under: bool, said: str
) -> None:
    scenario = make(model, training, **parallelism)
    wide = [i for i in layer_block(scenario, 0).forward if isinstance(i, Compute) and i.name.endswith("_weight_cast")]
    assert bool(wide) == under
    notes = [w for w in scenario.warnings if "autocast" in w]
    assert len(notes) == bool(said)
    assert all(said in note for note in notes)


@pytest.mark.parametrize(
    ("model", "training", "parallelism", "message"),
    [
        (LLAMA, {}, {}, "training.autocast: found true with param_dtype bf16, precision bf16, zero 0; it casts whole"),
        (LLAMA, FP32, {"dp": 2, "zero": 3}, "zero 3; it casts whole fp32 parameters"),
        (LLAMA, FP32, {"tp": 2}, "training.autocast: found true; not simulated with parallelism.tp 2"),
        (LLAMA, {**FP32, "lora": {"rank": 4, "weights": "nf4"}}, {}, "training.autocast: found true"),
        (LLAMA, {**FP32, "precision": "fp8"}, {}, "not simulated with training.precision fp8"),
    ],
)
def test_where_it_cannot_be_asked_for(
    model: dict[str, Any], training: dict[str, Any], parallelism: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make(model, {**training, "autocast": True}, **parallelism)
