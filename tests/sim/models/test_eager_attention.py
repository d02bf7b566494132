"""Attention of Transformers in separate operators (`attn_implementation: eager`) against captured programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import captured_layers
import pytest
from captured_layers import BATCH, LAYER, MODELS, SEQ, capture
from model_programs import make

from sim.core.program import Block, Compute
from sim.inputs.program_file import CapturedOperator
from sim.inputs.scenario import parse_scenario
from sim.models.captured.operators import compute_of, computes_of
from sim.models.layer import layer_block
from sim.simulation import simulate

PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the capture, and of the scenario
    "autocast": ({"autocast": "bf16"}, {"param_dtype": "fp32"}),
    "bf16": ({"weights": "bf16"}, {"param_dtype": "bf16"}),
    "fp32": ({}, {"param_dtype": "fp32", "precision": "fp32"}),
}
WAYS = [(name, precision) for name in ("llama", "gpt2") for precision in PRECISIONS]
WAYS += [
    (name, precision) for name in ("bloom", "gptj", "gpt_neo", "mpt", "xglm") for precision in ("autocast", "bf16")
]
ATTENTION = {"llama": "self_attn", "xglm": "self_attn", "bloom": "self_attention", "gpt_neo": "attn.attention"}
SCORES = BATCH * 8 * SEQ * SEQ


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model's name, the captured operators of a layer's attention without its projections, the described layer."""
    name, precision = request.param
    options, training = PRECISIONS[precision]
    folder: Path = tmp_path_factory.mktemp(name)
    program = capture(folder, name, "eager", **options)
    module = f"{LAYER[name]}.{ATTENTION.get(name, 'attn')}"
    operators = [o for o in program.operators if o.module.endswith(module) and o.launches]
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "framework": "transformers", "attention": "unfused"}
    return name, operators, layer_block(make(MODELS[name], {**sizes, **training}), 1)


def items(block: Block, phase: str) -> list[Compute]:
    return [i for i in getattr(block, phase) if isinstance(i, Compute) and i.kind != "gemm"]


def over_scores(block: Block, phase: str) -> list[Compute]:
    """Operators over all scores, but for copies of heads, which may be as many."""
    core = [i for i in items(block, phase) if i.name.startswith("attention_") and "_out_" not in i.name]
    return [i for i in core if i.shape == (SCORES,) and (i.kind != "copy" or "mask" in i.name or "sinks" in i.name)]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_kernels_over_all_scores_are_those_that_run(both: Any, phase: str) -> None:
    """One by one: what each moves, torch's softmax, and what torch does not vectorize."""
    _, operators, block = both
    mine = over_scores(block, phase)
    run = [o for o in operators if o.phase == phase and o.outputs[0].shape[-2:] == (SEQ, SEQ)]
    real = [compute_of(o) for o in run if "bmm" not in o.name]
    assert [i.bytes for i in mine] == pytest.approx([i.bytes for i in real], rel=1e-5)
    assert [(i.kind, i.kernels, i.single_elements, i.casts) for i in mine] == [
        (i.kind, i.kernels, i.single_elements, i.casts) for i in real
    ]
    assert [i.kernel for i in mine if i.kind == "softmax"] == [i.kernel for i in real if i.kind == "softmax"]


def test_scores_are_multiplied_in_the_dtype_that_multiplies_them(both: Any) -> None:
    """GPT-J's and GPT-Neo's in fp32, unless autocast casts their operands."""
    _, operators, block = both
    for phase in ("forward", "backward"):
        run = [compute_of(o) for o in operators if o.phase == phase and "bmm" in o.name]
        mine = [i for i in getattr(block, phase) if isinstance(i, Compute) and i.kind == "gemm" and i.shape[0] > 1]
        assert sorted((i.dtype, i.flops, i.bytes) for i in mine) == sorted((i.dtype, i.flops, i.bytes) for i in run)


def moved(operators: Sequence[CapturedOperator], phase: str, *names: str) -> tuple[float, int]:
    """Bytes and kernels, but for copies of tables of cosines and sines."""
    found = [o for o in operators if o.phase == phase and o.name in names and o.outputs[0].elements >= BATCH * SEQ * 64]
    made = [compute_of(o) for o in found]
    return sum(i.bytes for i in made), sum(i.kernels for i in made)


def test_heads_are_copied_as_often_as_they_are(both: Any) -> None:
    """Repeated keys and values, heads' order, and the context. Backward: rope brings two gradients of Llama's back by
    copies of its own, and a sum over repeated heads moves what a copy does."""
    name, operators, block = both
    kinds = ("copy", "permute")
    ahead = [i for i in items(block, "forward") if i.kind in kinds and "rope" not in i.name and i.kernels]
    assert (sum(i.bytes for i in ahead), sum(i.kernels for i in ahead)) == moved(operators, "forward", "aten.clone")
    clones = [compute_of(o) for o in operators if o.name == "aten.clone"]
    assert any(i.kind == "permute" for i in ahead) == any(i.kind == "permute" for i in clones)
    back = [i for i in items(block, "backward") if i.kind in kinds]
    real, kernels = moved(operators, "backward", "aten.clone", "aten.cat", "aten.sum", "aten.select_backward")
    size, of_rope = block_element_bytes(block), (8 + 2) * 64 * SEQ * BATCH if name == "llama" else 0
    assert sum(i.bytes for i in back) == real - 2 * size * of_rope
    assert sum(i.kernels for i in back) == kernels - 2 * bool(of_rope)


def block_element_bytes(block: Block) -> float:
    return 4.0 if next(i for i in block.forward if isinstance(i, Compute) and i.kind == "gemm").dtype == "fp32" else 2.0


def test_casts_of_repeated_keys(both: Any) -> None:
    """Llama's keys are turned in fp32 under autocast and cast when they are repeated, and so are their gradients; rope
    counts the casts of the keys themselves."""
    name, operators, block = both
    if name in ("gptj", "gpt_neo"):
        pytest.skip("casts queries and keys in other ways")
    queries, keys = BATCH * SEQ * 8 * 64, BATCH * SEQ * 2 * 64
    for phase in ("forward", "backward"):
        run = [o for o in operators if o.phase == phase and o.name == "aten._to_copy"]
        real = [o for o in run if o.outputs[0].elements == queries and o.outputs[0].dtype == "bf16"]
        mine = [i for i in items(block, phase) if i.name.endswith("repeat_cast")]
        assert bool(mine) == (name == "llama" and bool(real))
        assert [(i.bytes, i.kernels) for i in mine] == [(6.0 * (queries - keys), 0)] * bool(mine)


@pytest.mark.parametrize(("framework", "fused"), [("transformers", False), ("eager", True)])
def test_bloom_s_own_code_has_no_fused_attention(framework: str, fused: bool) -> None:
    scenario = make(MODELS["bloom"], {"framework": framework, "attention": "fused"})
    kinds = {i.kind for i in layer_block(scenario, 1).forward if isinstance(i, Compute)}
    assert ("attention_forward" in kinds) == fused
    notes = [
        w for w in scenario.warnings if w.startswith("training.attention: simulated as unfused; the code of bloom")
    ]
    assert len(notes) == (not fused)


@pytest.mark.parametrize("precision", ["autocast", "bf16"])
@pytest.mark.parametrize("name", ["flint", "gpt_oss"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_kernels_over_scores_with_sinks_are_those_that_run(
    phase: str, name: str, precision: str, tmp_path: Path
) -> None:
    """gpt-oss joins a column to the scores; of rows and sums only the count of kernels over all scores is compared.
    Flint's scores have fp32, also under autocast."""
    options, training = PRECISIONS[precision]
    program = capture(tmp_path, name, "eager", **options)
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "framework": "transformers", "attention": "unfused"}
    block = layer_block(make(MODELS[name], {**sizes, **training}), 1)
    mine = over_scores(block, phase)
    operators = [o for o in program.operators if o.module.endswith("layers.1.self_attn") and o.phase == phase]
    made = [compute_of(o) for o in operators if o.launches and "bmm" not in o.name]
    real = [i for i in made if i.shape[0] in (SCORES, SCORES // SEQ * (SEQ + 1))]
    assert [(i.kind, i.kernels) for i in mine] == [(i.kind, i.kernels) for i in real if i.bytes > SCORES]
    assert [i.bytes for i in mine] == pytest.approx([i.bytes for i in real if i.bytes > SCORES], rel=0.05)


@pytest.mark.parametrize("precision", ["autocast", "bf16"])
def test_probabilities_beside_a_sink_are_read_by_odd_rows(precision: str, tmp_path: Path) -> None:
    """`probs[..., :-1]` is no copy, so that cuBLAS has no fast kernel for it; one that autocast casts is."""
    options, training = PRECISIONS[precision]
    program = capture(tmp_path, "gpt_oss", "eager", **options)
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "framework": "transformers", "attention": "unfused"}
    block = layer_block(make(MODELS["gpt_oss"], {**sizes, **training}), 1)
    operators = [o for o in program.operators if o.module.endswith("layers.1.self_attn") and "bmm" in o.name]
    mine = [i for i in (*block.forward, *block.backward) if isinstance(i, Compute) and i.shape[0] == BATCH * 8]
    found = [i.alignment for i in mine if i.kind == "gemm"]
    assert sorted(found) == sorted(compute_of(o).alignment for o in operators if o.launches)


def test_bloom_s_scores_are_added_to_copied_biases(tmp_path: Path) -> None:
    program = capture(tmp_path, "bloom", "eager", weights="bf16")
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "framework": "transformers", "attention": "unfused"}
    block = layer_block(make(MODELS["bloom"], {**sizes, "param_dtype": "bf16"}), 1)
    (added,) = (o for o in program.operators if "h.1" in o.module and o.name == "aten.baddbmm")
    (copy,) = (i for i in computes_of(added) if i.kind == "copy")
    (mine,) = (i for i in block.forward if isinstance(i, Compute) and i.name == "attention_biases")
    assert (mine.bytes, mine.kernels, mine.single_elements) == (copy.bytes, copy.kernels, copy.single_elements)


@pytest.mark.parametrize("precision", ["autocast", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_peak_is_in_the_gradient_of_a_softmax(
    name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1,024 tokens scores are most of the memory; torch's softmax also holds a product of its two inputs."""
    monkeypatch.setattr(captured_layers, "SEQ", 1024)
    monkeypatch.setitem(captured_layers.CONFIGS["gpt2"], "n_positions", 1024)
    options, training = PRECISIONS[precision]
    program = capture(tmp_path, name, "eager", **options)
    sizes = {"seq_len": 1024, "micro_batch_size": BATCH, "global_batch_size": BATCH, "framework": "transformers"}
    described = make(MODELS[name], {**sizes, **training, "attention": "unfused"})
    captured = parse_scenario(
        {
            "version": 1,
            "model": {"program": str(tmp_path / "eager.json.gz")},
            "training": {"seq_len": 1024, "micro_batch_size": BATCH, "global_batch_size": BATCH},
            "cluster": "dgx-h100",
        }
    )
    assert len(program.operators) > 100
    mine, real = (simulate(s).outcome.memory[0].activations for s in (described, captured))
    assert mine == pytest.approx(real, rel=0.04)
