"""Activations of some layers, or of parts of layers, in host memory: which bytes, when, and how many are left."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.core.actions import Kind
from sim.core.errors import InputError
from sim.core.program import BLOCK_END, Block, BlockKind, Comm, Program, Wait
from sim.emit import emit
from sim.inputs.scenario import Scenario
from sim.models.activation_memory.offload_modules import by_module
from sim.models.dims import Shard, layer_dims
from sim.models.layer import layer_block, layer_parts
from sim.programs.host_copies import host_copies, on_device
from sim.programs.stages import Stage
from sim.simulation import simulate
from tests.sim.cases import scenario_with

SEQ, HIDDEN, KV, FFN, LAYERS = 2048, 4096, 1024, 14336, 8  # of Llama 3 8B, with fewer layers
LLAMA = {"preset": "llama3-8b", "layers": LAYERS}


def scenario(offload: Any, layout: Any = None, model: Any = None, **training: Any) -> Scenario:
    keys = {"seq_len": SEQ, "global_batch_size": 16, "framework": "megatron", "activation_offload": offload}
    return scenario_with(keys | training, layout or {"dp": 8}, model=model or LLAMA, cluster="dgx-h100")


def stage_of(s: Scenario) -> Stage:
    return simulate(s).stages[0][0]


def saved(block: Block) -> float:
    return sum(x.bytes for x in block.saved)


def there(stage: Stage, program: Program, kind: Kind) -> list[float]:
    """Saved bytes on the device while each block computes, by the program's copies and waits."""
    blocks = list(stage.blocks if kind is Kind.F else stage.blocks[::-1])
    names = [b.name for b in stage.blocks]
    copied = {names[c.block]: c.bytes for c in stage.offload}
    held = {} if kind is Kind.F else {b.name: saved(b) - copied.get(b.name, 0.0) for b in blocks}
    out, running = [0.0] * len(blocks), 0
    arrived: set[str] = set()
    for item in program:
        if isinstance(item, Comm) and item.kind == "reload":
            name = item.name.removesuffix(" activations")
            assert item.bytes == copied[name]
            held[name] += item.bytes
        elif isinstance(item, Wait) and item.handle[:1] == "o":
            held[names[int(item.handle[1:])]] -= copied[names[int(item.handle[1:])]]
        elif isinstance(item, Wait) and item.handle[:1] == "r" and item.handle[1:].isdecimal():
            arrived.add(names[int(item.handle[1:])])
        elif item == BLOCK_END:
            block = blocks[running]
            if kind is Kind.F:
                held[block.name] = saved(block)
            else:
                assert block.name not in copied or block.name in arrived
            out[names.index(block.name)] = sum(held.values())
            held = held if kind is Kind.F else {k: v for k, v in held.items() if k != block.name}
            running += 1
    return out


EVERY: list[Any] = [True, {"modules": ["core_attn", "attn_proj"]}, {"modules": ["mlp_norm"]}]


@pytest.mark.parametrize(
    ("offload", "layout"),
    [
        *((offload, {"dp": 8}) for offload in (*EVERY, {"layers": 1}, {"layers": 4}, {"layers": 7})),
        *((offload, {"pp": 2, "dp": 4}) for offload in (*EVERY, {"layers": 1}, {"layers": 3})),
    ],
)
def test_what_is_on_the_device_is_what_the_programs_copy(offload: Any, layout: dict[str, int]) -> None:
    stage = stage_of(scenario(offload, layout, framework="eager"))
    wanted = on_device([saved(b) for b in stage.blocks], stage.offload)
    assert there(stage, stage.forward(False, False), Kind.F) == pytest.approx(wanted)
    assert there(stage, stage.backward(Kind.B, False, False), Kind.B) == pytest.approx(wanted)


@pytest.mark.parametrize("away", [1, 2, 4, 6, 7])
def test_layers_leave_room_for_the_others(away: int) -> None:
    """L - N layers are there at once, as Transformer Engine's synchronizer says; layer i leaves before the forward of
    layer L - N + i, and comes back from the backward of layer L - N - 1 + i on."""
    stage = stage_of(scenario({"layers": away}))
    layers = [i for i, b in enumerate(stage.blocks) if b.kind is BlockKind.LAYER]
    copies = host_copies(stage.blocks, scenario({"layers": away}).for_training.activation_offload)
    assert [(c.block, c.until) for c in copies] == [(layers[i], layers[LAYERS - away - 1 + i]) for i in range(away)]
    size = saved(stage.blocks[layers[0]])
    assert {c.bytes for c in copies} == {size}
    present = on_device([saved(b) for b in stage.blocks], copies)
    embedding, head = saved(stage.blocks[0]), saved(stage.blocks[-1])
    assert max(present[i] for i in layers) == pytest.approx(embedding + (LAYERS - away) * size)
    assert present[-1] == pytest.approx(embedding + head + (LAYERS - away) * size)


ATTENTION = 2 * (2 * HIDDEN + 2 * KV)  # queries, keys, values and the result of a token, in bytes


@pytest.mark.parametrize(
    ("modules", "model", "each"),
    [
        (["attn_norm", "mlp_norm"], LLAMA, 0),  # both are part of the matmuls behind them
        (["qkv_linear"], LLAMA, 2 * 2 * HIDDEN),  # the norm's input and result
        (["mlp_norm"], "mixtral-8x7b", 2 * HIDDEN),
        (["core_attn", "attn_proj"], LLAMA, ATTENTION),
        (["core_attn"], LLAMA, ATTENTION - 2 * HIDDEN),  # the output projection keeps the result
        (["expert_fc1"], "mixtral-8x7b", 2 * 2 * HIDDEN),  # two experts for each token
        (["moe_act"], "mixtral-8x7b", 2 * 2 * 2 * FFN),
    ],
)
def test_bytes_of_parts(modules: list[str], model: Any, each: float) -> None:
    s = scenario({"modules": modules}, model=model)
    moved = sum(x.bytes for x in layer_block(s, 0).saved if x.module in modules)
    assert moved == SEQ * each
    assert saved(layer_block(s, 0)) == saved(layer_block(scenario(False, model=model), 0))


@pytest.mark.parametrize("model", [LLAMA, "mixtral-8x7b", "deepseek-v3"])
def test_parts_are_told_by_fields_and_not_by_names(model: Any) -> None:
    s = scenario({"modules": ["core_attn", "attn_proj", "qkv_linear", "attn_norm"]}, model=model)
    parts = layer_parts(s, layer_dims(s, 5), 5, Shard())
    renamed = tuple(replace(p, name=f"part {i}") for i, p in enumerate(parts))
    found, again = ([x.module for p in by_module(s, each) for x in p.saved] for each in (parts, renamed))
    assert found == again
    assert {"core_attn", "attn_proj", "qkv_linear"} <= set(found)


def test_a_warning_says_that_joined_norms_stay() -> None:
    warned = [w for w in scenario({"modules": ["attn_norm", "mlp_norm"]}).warnings if "of no effect on" in w]
    of_experts = scenario({"modules": ["attn_norm", "mlp_norm"]}, model="mixtral-8x7b").warnings
    assert len(warned) == 2
    assert [w.split()[5] for w in of_experts if "of no effect on" in w] == ["attn_norm"]


def test_layers_that_run_again_send_their_inputs() -> None:
    s = scenario({"modules": ["layer_input"]}, recompute="full")
    stage = stage_of(s)
    copies = [c for c in stage.offload if c.bytes]
    assert {c.bytes for c in copies} == {2 * SEQ * HIDDEN}
    assert len(copies) == LAYERS - 1


def test_the_last_layer_s_parts_stay_where_its_backward_follows() -> None:
    """Megatron-Core does not offload the last group of a name if the next backward is this micro-batch's."""
    step = simulate(scenario({"modules": ["qkv_linear"]}, {"pp": 2, "dp": 4}))
    first, last = (next(iter(stages.values())) for stages in step.stages)
    assert len([c for c in first.offload if c.bytes]) == LAYERS // 2
    assert len([c for c in last.offload if c.bytes]) == LAYERS // 2 - 1


def test_prediction_modules_come_last() -> None:
    s = scenario({"modules": ["qkv_linear"]}, model={**LLAMA, "mtp_layers": 1})
    stage = stage_of(s)
    kinds = [stage.blocks[c.block].kind for c in stage.offload if c.bytes]
    assert kinds == [BlockKind.LAYER] * LAYERS  # the module's own stays


def test_less_on_the_device_and_no_quicker() -> None:
    steps = [simulate(scenario(offload)) for offload in (False, {"layers": 2}, {"layers": 4}, {"layers": 6}, True)]
    peaks = [step.result["peak_memory_bytes"] for step in steps]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] < peaks[0]
    times = [step.result["step_time_s"] for step in steps]
    assert min(times) == pytest.approx(times[0], rel=1e-12)


def test_copies_that_take_no_time_cost_none() -> None:
    fast = {"preset": "dgx-h100", "gpu": {"host_bandwidth_bytes_per_s": 1e18}}

    def seconds(offload: Any) -> float:
        keys = {"seq_len": SEQ, "global_batch_size": 16, "framework": "megatron", "activation_offload": offload}
        s = scenario_with(keys, {"dp": 8}, model=LLAMA, cluster=fast)
        return float(simulate(s).result["step_time_s"])

    assert seconds({"layers": 4}) == pytest.approx(seconds(False), rel=2e-3)
    assert seconds({"modules": ["core_attn", "attn_proj"]}) == pytest.approx(seconds(False), rel=2e-3)


@pytest.mark.parametrize(
    ("offload", "training", "words"),
    [
        ({}, {}, "give either layers or modules"),
        ({"layers": 2, "modules": ["mlp_norm"]}, {}, "give either layers or modules"),
        ({"layer": 2}, {}, r"layer: unknown key; did you mean 'layers'\?"),
        ("host", {}, "found 'host'; must be true or false"),
        ({"layers": 8}, {}, r"layers: found 8; must be less than model.layers \(8\)"),
        ({"modules": ["attn_proj"]}, {}, "found 'attn_proj'; needs core_attn beside it"),
        ({"modules": ["moe_act"]}, {}, "found 'moe_act'; needs model.moe"),
        ({"modules": ["layer_input"]}, {}, "found 'layer_input'; needs training.recompute full"),
        ({"modules": ["mlp_norm"]}, {"recompute": "full"}, "needs training.recompute none or selective, not full"),
        ({"modules": ["mlp_norm", "mlp_norm"]}, {}, "each at most once"),
    ],
)
def test_what_is_refused(offload: Any, training: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=rf"training\.activation_offload.*{words}"):
        scenario(offload, **training)


def test_flags_of_megatron() -> None:
    def flags(offload: Any, layout: Any = None, **training: Any) -> str:
        return " ".join(emit(scenario(offload, layout, **training), "megatron").replace("\\", "").split())

    assert "--cpu-offloading-num-layers 4" in flags({"layers": 4})
    some = "--fine-grained-activation-offloading --offload-modules core_attn attn_proj"
    assert some in flags({"modules": ["core_attn", "attn_proj"]}, {"pp": 2})
    for offload, layout, training, words in (
        (
            {"layers": 2},
            {"pp": 2},
            {},
            r"parallelism\.pp: found 2; Megatron-LM offloads activations of whole layers without",
        ),
        (
            {"layers": 2},
            {"dp": 8},
            {"recompute": "selective"},
            r"training\.recompute: found selective; .* without recomputation only",
        ),
        (True, {"dp": 8}, {}, "found true; Megatron-LM offloads activations of layers, all but the last"),
    ):
        with pytest.raises(InputError, match=words):
            flags(offload, layout, **training)
