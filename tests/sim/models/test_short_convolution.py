"""Short gated convolutions (LFM2): parameters, FLOPs, kept bytes and serving's state in closed form."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.flops import matmul_params_per_token, model_flops_per_token
from sim.models.layer import layer_block
from sim.models.layers import layer_specs
from sim.models.parameters import count_parameters
from sim.serve.cache.layer_groups import CacheGroups
from sim.serve.prices.dims import serving_dims
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate

HIDDEN, TAPS, SEQ = 512, 3, 256
STATES = {"kind": "short_conv", "heads": HIDDEN, "head_dim": 1, "state": 1, "conv_kernel": TAPS, "conv_bias": False}
MODEL = {"layers": 4, "hidden": HIDDEN, "heads": 8, "vocab": 1024, "norm": "rmsnorm", "bias": False, "mlp": "swiglu"}


def scenario(states: dict[str, Any] = STATES, tp: int = 1, **keys: Any) -> Scenario:
    training = {"seq_len": SEQ, "global_batch_size": 1, "micro_batch_size": 1, "framework": "eager"}
    return parse_scenario(
        {
            "model": {**MODEL, "state_space": states},
            "cluster": "dgx-h100",
            "parallelism": {"tp": tp},
            **({"training": training} if "inference" not in keys else {}),
            **keys,
        }
    )


@pytest.mark.parametrize("biased", [False, True])
def test_parameters_of_a_layer(biased: bool) -> None:
    """Projections to B, C and x and back, and the taps of each channel."""
    spec = layer_specs(scenario(STATES | {"conv_bias": biased, "bias": biased}).model)[0]
    assert spec.attention_parameters == 4 * HIDDEN**2 + HIDDEN * TAPS + biased * (3 + 1 + 1) * HIDDEN


def test_flops_are_those_of_matrices_and_taps() -> None:
    model = scenario().model
    expected = 6 * matmul_params_per_token(model) + 4 * 3 * 2 * TAPS * HIDDEN
    assert model_flops_per_token(model, SEQ) == pytest.approx(expected, rel=1e-12)
    assert model_flops_per_token(model, 8 * SEQ) == model_flops_per_token(model, SEQ)


def test_kept_for_backward() -> None:
    """Normed input, B, C and x, their product, its convolution, and what the last projection reads."""
    saved = layer_block(scenario(), 0).saved
    size = SEQ * HIDDEN * 2
    by_name = {
        s.name: s.bytes / size for s in saved if s.name in ("projected input", "convolution's input", "convolved")
    }
    assert by_name == {"projected input": 3, "convolution's input": 1, "convolved": 1}
    training = {"seq_len": SEQ, "global_batch_size": 1, "micro_batch_size": 1, "framework": "compiled"}
    compiled = layer_block(scenario(training=training), 0).saved
    assert sum(s.bytes for s in compiled) < sum(s.bytes for s in saved)


def test_serving_keeps_the_last_inputs_however_long_the_sequence() -> None:
    inference = {"requests": {"count": 2, "prompt_len": 100, "output_len": 20}}
    sim = simulate_serving(scenario(inference=inference))
    for length in (100.0, 10_000.0):
        kept = CacheGroups().sequence_bytes(sim.costs.dims, sim.costs.attentions, (4,), length)
        assert kept == pytest.approx(4 * (TAPS - 1) * HIDDEN * 2)
    assert sim.end_s > 0


def test_tensor_parallelism_splits_channels() -> None:
    inference = {"requests": {"count": 2, "prompt_len": 100, "output_len": 20}}
    attention = layer_specs(scenario().model)[0].attention
    assert attention is not None
    one, two = (serving_dims(scenario(tp=tp, inference=inference)) for tp in (1, 2))
    assert attention.sequence_bytes(one, 100) == 2 * attention.sequence_bytes(two, 100)
    assert attention.expanded_width(1) == 2 * attention.expanded_width(2)
    assert sum(m.elements for m in attention.matrices(1)) == 2 * sum(m.elements for m in attention.matrices(2))
    assert simulate(scenario(tp=2)).result["step_time_s"] > 0


def test_a_longer_convolution_moves_more_in_decode_alone() -> None:
    inference = {"requests": {"count": 2, "prompt_len": 100, "output_len": 20}}
    short, long = (scenario(STATES | {"conv_kernel": n}, inference=inference) for n in (3, 6))
    d = serving_dims(short)
    moved = {}
    for s in (short, long):
        attention = layer_specs(s.model)[0].attention
        assert attention is not None
        moved[s.model.state_space.conv_kernel] = [
            sum(item.bytes for item in program)
            for program in (attention.decode(d, 4, 100), attention.prefill(d, 4, 64, 64))
        ]
    assert moved[6][0] == 2 * moved[3][0]
    assert moved[6][1] == moved[3][1]
    assert count_parameters(long.model).total - count_parameters(short.model).total == 4 * 3 * HIDDEN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 2}, "state_space.head_dim: found 2; short_conv has channels"),
        ({"state": 16}, "state_space.state: found 16; short_conv has channels"),
        ({"conv_kernel": 0}, "state_space.conv_kernel: found 0; short_conv needs at least 1"),
        ({"state_dtype": "fp32"}, "state_space.state_dtype: found 'fp32'; short_conv keeps"),
        ({"rank": 8}, "state_space.kind: found short_conv; model.state_space.rank is for mamba1 only"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scenario(STATES | change)


def test_beside_attention_is_refused() -> None:
    with pytest.raises(InputError, match="found 'beside'; short_conv is not simulated beside attention"):
        parse_scenario(
            {
                "model": {**MODEL, "state_space": STATES, "attention_pattern": ["beside"]},
                "training": {"seq_len": SEQ, "global_batch_size": 1},
                "cluster": "dgx-h100",
            }
        )
