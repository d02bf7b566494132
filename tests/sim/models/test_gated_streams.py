"""Qwen 4: gated streams and embeddings of n-grams, by hand and against Transformers' modules; what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.dims import dims
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.layers.ngram_embedding import NgramEmbedding
from sim.models.operators import Operator
from sim.models.parameters import count_parameters
from sim.models.source import source_of
from sim.models.streams.gated_streams import gated_spread, gated_sum
from sim.models.streams.sizes import Streams
from sim.serve.memory import weight_bytes
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate

NGRAMS = {"layers": [1, 3], "rows": [2048, 4096], "heads": 16, "width": 256}
MODEL: dict[str, Any] = {
    "layers": 4,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 2,
    "ffn": 512,
    "vocab": 1024,
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "norm_in_fp32": True,
    "bias": False,
    "positions": "rope",
    "hyper_connections": 4,
    "hyper_connection_kind": "gated",
    "hyper_connection_rank": 32,
    "ngram_embedding": NGRAMS,
}


def training(change: dict[str, Any] | None = None, layout: dict[str, Any] | None = None, **keys: Any) -> Scenario:
    run = {"seq_len": 128, "global_batch_size": 8} | keys
    model = MODEL | (change or {})
    return parse_scenario({"model": model, "training": run, "parallelism": layout or {}, "cluster": "dgx-h200"})


def test_a_model_s_parameters_by_hand() -> None:
    wide = 4 * 256
    branch = wide + 2 * wide * 32 + wide * 4  # norm, gates' two matrices, shares
    ngrams = [rows * 16 + 256 * (wide + 256) + 3 * wide + 4 * wide for rows in (2048, 4096)]
    layer = 256 * (256 + 2 * 64) + 256 * 256 + 3 * 256 * 512 + 2 * branch
    counts = count_parameters(training().model)
    assert counts.total == 2 * 1024 * 256 + 4 * layer + sum(ngrams) + wide + 2 * wide * 32
    assert (counts.norms, counts.ngrams) == (0, sum(ngrams))
    assert counts.total - counts.active == (2048 + 4096) * 16 - 2 * 256  # rows that a token does not read
    source = source_of(training())
    blocks = [layer_block(training(), i) for i in range(4)]
    assert [b.params for b in blocks] == [s.parameters for s in layer_specs(training().model)]
    assert source.input_bytes(1) == 4 * 128 * 256 * 2


def kept_by(parts: tuple[Operator, ...]) -> float:
    return sum(saved.bytes for part in parts for saved in part.saved)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_separate_operators_keep_is_what_transformers_modules_keep(precision: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    modules = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    index = {"n_heads": 4, "kv_heads": 1, "head_dim": 256, "budget": 64, "compress_ratio": 16}
    sizes = {"hidden_size": 256, "hc_lowrank": 32, "num_hidden_layers": 4, "vocab_size": 128, "eos_token_id": 1}
    sizes |= {f"indexer_{key}": value for key, value in index.items()}
    own = transformers.CONFIG_MAPPING["qwen4_exp_text"](**sizes, ple_layer_ids=[1], ngram_vocab_size_base=100)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    residual = modules.Qwen4ExpTextGatedResidual(own).to(dtype)
    ngrams = modules.Qwen4ExpTextPLELayer(own, 0, 0).to(dtype)
    streams = torch.randn(2, 128, 1024, dtype=dtype, requires_grad=True)
    result = torch.randn(2, 128, 256, dtype=dtype, requires_grad=True)

    def branch() -> None:
        _, stream, shares = residual(streams)
        stream + (result.unsqueeze(-2) * shares.unsqueeze(-1)).flatten(-2)

    def embedding() -> None:
        streams + ngrams(streams, torch.randint(0, 128, (2, 128)), None)

    d = dims(training(framework="transformers", precision=precision, micro_batch_size=2))
    rows = ngrams.ple_embedding.ngram_embedding.num_embeddings
    spec = NgramEmbedding(Streams(4, 256, "gated", 32), rows, 16, 256, 3, 4)
    assert spec.parameters == sum(p.numel() for p in ngrams.parameters())
    sums = (*gated_sum(d, "attention", True), gated_spread(d, "attention"))
    for run, parts, module in ((branch, sums, residual), (embedding, spec.train(d), ngrams)):
        weights = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
        found: dict[int, int] = {}
        held: list[Any] = []

        def pack(tensor: Any, weights: Any = weights, found: Any = found, held: Any = held) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes()
                held.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run()
        assert kept_by(parts) == pytest.approx(sum(found.values()), rel=0.005)


def test_fused_gates_take_one_kernel_and_separate_operators_move_more() -> None:
    def items(framework: str) -> list[Compute]:
        forward = layer_block(training(framework=framework), 1).forward
        return [i for i in forward if isinstance(i, Compute) and ("streams" in i.name or "residual" in i.name)]

    fused, apart = items("megatron"), items("transformers")
    assert sum(i.kernels for i in apart) > 2 * sum(i.kernels for i in fused)
    assert sum(i.bytes for i in apart) > 2 * sum(i.bytes for i in fused)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "sp": True}, {"dp": 4, "zero": 3}, {"pp": 2}, {"cp": 2}])
@pytest.mark.parametrize("framework", ["megatron", "transformers", "compiled"])
def test_layouts_run_and_tp_splits_the_tables(layout: dict[str, Any], framework: str) -> None:
    s = training(layout=layout, framework=framework)
    assert simulate(s).step_time_s > 0
    whole, own = layer_block(training(), 0).params, layer_block(s, 0).params
    assert own < whole - 1000 * 16 if s.parallelism.tp > 1 else own == whole


def test_serving_keeps_the_last_tokens_and_inputs_of_a_sequence() -> None:
    def served(change: dict[str, Any]) -> Any:
        requests = {"count": 2, "prompt_len": 256, "output_len": 8}
        run = {"model": MODEL | change, "inference": {"requests": requests}, "cluster": "dgx-h200"}
        return simulate_serving(parse_scenario(run))

    with_them, without = served({}), served({"ngram_embedding": None})
    assert with_them.end_s > without.end_s
    costs, plain = with_them.costs, without.costs
    spec = costs.specs[0].ngrams
    assert spec.sequence_bytes(costs.dims) == 9 * 1024 * 2 + 2 * 8
    more = weight_bytes(costs.dims, costs.specs, costs.stages[0]) - weight_bytes(
        plain.dims, plain.specs, plain.stages[0]
    )
    assert more == 2 * count_parameters(training().model).ngrams


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hyper_connection_rank": None}, "hyper_connection_rank"),
        ({"hyper_connection_kind": "mixed"}, "hyper_connection_rank"),
        ({"hyper_connections": 1, "ngram_embedding": None}, "hyper_connection_kind"),
        ({"mtp_layers": 1}, "mtp_layers"),
        ({"ngram_embedding": NGRAMS | {"layers": [3, 1]}}, "layers"),
        ({"ngram_embedding": NGRAMS | {"layers": [1, 5]}}, "layers"),
        ({"ngram_embedding": NGRAMS | {"rows": [2048]}}, "rows"),
        ({"ngram_embedding": NGRAMS | {"width": 250}}, "width"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=key):
        training(change)


def test_tp_that_does_not_divide_a_row_is_refused() -> None:
    with pytest.raises(InputError, match="n-grams' table"):
        training({"ngram_embedding": NGRAMS | {"width": 16}}, {"tp": 2})
