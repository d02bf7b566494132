"""What a scenario that loads is warned of: keys without effect, and what is not simulated."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.simulation import simulate
from sim.variants.frameworks.records import FRAMEWORKS
from tests.sim.small_scenario import small


def test_warnings_name_the_padded_vocabulary_and_keys_without_effect() -> None:
    changes = {"reshard_after_forward": False, "accumulate_unsharded": True, "schedule_memory": 2.0}
    warnings = " ".join(parse_scenario(small(parallelism=changes)).warnings)
    assert "1000 is padded to 1024" in warnings
    for key in changes:
        assert f"parallelism.{key}: of no effect" in warnings


@pytest.mark.parametrize(
    ("parallelism", "training", "noted"),
    [
        ({}, {}, ""),
        ({"reshard_after_forward": False}, {}, "parallelism.reshard_after_forward"),
        ({"reshard_after_forward": False, "zero": 3}, {}, ""),
        ({"accumulate_unsharded": True, "zero": 1}, {}, "parallelism.accumulate_unsharded"),
        ({"accumulate_unsharded": True, "zero": 2}, {}, ""),
        ({"all_reduce_once": True, "zero": 1, "shard_size": 1}, {}, "parallelism.all_reduce_once"),
        ({"all_reduce_once": True, "zero": 3}, {}, "parallelism.all_reduce_once"),
        ({"all_reduce_once": True, "zero": 3, "shard_size": 1}, {}, ""),
        (
            {"all_reduce_once": True, "zero": 3, "shard_size": 1, "accumulate_unsharded": True},
            {},
            "parallelism.all_reduce_once",
        ),
        (
            {"all_reduce_once": True, "zero": 2, "shard_size": 1},
            {"framework": "deepspeed"},
            "parallelism.all_reduce_once",
        ),
        ({"accumulate_in_a_row": True, "zero": 1}, {}, "parallelism.accumulate_in_a_row"),
        ({"accumulate_in_a_row": True, "zero": 2}, {}, ""),
        ({"schedule_memory": 1.0}, {}, ""),
        ({"schedule_memory": 2.0}, {}, "parallelism.schedule_memory"),
        ({"schedule_memory": 2.0, "schedule": "zb_search", "pp": 2}, {}, ""),
        ({"param_gather_dtype": "fp32"}, {}, "parallelism.param_gather_dtype"),
        ({"param_gather_dtype": "fp32", "zero": 1}, {}, ""),
        ({"micro_batch_group": 2}, {}, "parallelism.micro_batch_group"),
        ({"ep_overlap": False}, {"optimizer": "sgd"}, ""),
        ({}, {"optimizer": "sgd", "optimizer_dtype": "bf16"}, "training.optimizer_dtype"),
        ({}, {"optimizer_dtype": "bf16", "zero_grad": "keep"}, ""),
        ({}, {"attention_kernel": "flash2"}, ""),
        ({}, {"attention_kernel": "flash2", "attention": "unfused"}, "training.attention_kernel"),
        ({}, {"grad_reduce_dtype": "bf16"}, ""),
        ({}, {"optimizer_offload": "cpu", "optimizer_dtype": "bf16"}, "training.optimizer_dtype"),
        ({}, {"optimizer_offload": "cpu", "master_weights": False}, "training.master_weights"),
        ({"accumulate_in_a_row": False}, {"framework": "meta_llama3"}, "parallelism.accumulate_in_a_row"),
        ({"dp_sync": "per_parameter", "zero": 1}, {"framework": "nanotron"}, "parallelism.dp_sync"),
        ({"bucket_bytes": "1MiB", "zero": 1}, {"framework": "nanotron"}, "parallelism.bucket_bytes"),
        ({}, {"master_weights": False}, ""),
        ({}, {"master_weights": False, "param_dtype": "fp32"}, "training.master_weights"),
    ],
)
def test_a_key_without_effect_is_named_alone(parallelism: dict[str, Any], training: dict[str, Any], noted: str) -> None:
    data = small(parallelism={"dp": 2, **parallelism})
    warnings = parse_scenario({**data, "training": {**data["training"], **training}}).warnings
    assert [text.partition(":")[0] for text in warnings if "of no effect" in text] == [noted] * bool(noted)


EXPERTS = {"experts": 8, "top_k": 2, "ffn": 512}
ALONE = "with dp 1 and cp 1"


@pytest.mark.parametrize(
    ("key", "value", "layout", "why", "effective"),
    [
        ("tp_overlap", "wgrad", {"dp": 2}, "with tp 1", {"tp": 2}),
        ("cp_method", "all_gather", {"dp": 2}, "with cp 1", {"cp": 2}),
        ("cp_split", "striped", {"dp": 2}, "with cp 1", {"cp": 2}),
        ("cp_split", "contiguous", {"cp": 2, "cp_method": "all_to_all"}, "with cp_method all_to_all", {"cp": 2}),
        ("schedule", "gpipe", {"dp": 2}, "with pp 1", {"pp": 2}),
        ("virtual_stages", 4, {"dp": 2}, "with pp 1", None),
        ("zero", 1, {"tp": 2}, ALONE, {"dp": 2}),
        ("p2p_overlap", True, {"tp": 2}, "with pp 1", {"pp": 2}),
        ("dp_sync", "after_backward", {"tp": 2}, ALONE, {"dp": 2}),
        ("bucket_bytes", "100KiB", {"tp": 2}, ALONE, {"dp": 2}),
        ("bucket_bytes", "100KiB", {"dp": 2, "dp_sync": "after_backward"}, "with dp_sync after_backward", None),
        ("bucket_bytes", "100KiB", {"dp": 2, "zero": 3}, "with zero 3", {"dp": 2, "zero": 2}),
        ("dp_sync", "per_parameter", {"dp": 2, "zero": 3}, "with zero 3", {"dp": 2, "zero": 2}),
        ("gather_bucket_bytes", "100KiB", {"tp": 2, "zero": 3}, ALONE, {"dp": 2, "zero": 3}),
        ("param_gather_overlap", False, {"dp": 2, "zero": 3}, "with zero 3, only with 1 and 2", {"dp": 2, "zero": 1}),
        ("param_gather_overlap", False, {"tp": 2, "zero": 1}, ALONE, {"dp": 2, "zero": 1}),
        ("param_gather_dtype", "fp32", {"tp": 2, "zero": 1}, ALONE, {"dp": 2, "zero": 1}),
        ("reshard_after_forward", False, {"tp": 2, "zero": 3}, ALONE, {"dp": 2, "zero": 3}),
        ("accumulate_unsharded", True, {"tp": 2, "zero": 2}, ALONE, {"dp": 2, "zero": 2}),
        ("shard_size", 2, {"dp": 4}, "with zero 0, only with 1, 2 and 3", {"dp": 4, "zero": 1}),
        ("rank_order", "pp-dp-cp-tp", {"dp": 16}, "with one degree above 1 of", {"dp": 8, "tp": 2}),
    ],
)
def test_what_a_degree_of_1_leaves_without_effect_is_named(
    key: str, value: Any, layout: dict[str, Any], why: str, effective: dict[str, Any] | None
) -> None:
    """The note is true: the step is the same without the key. There is none where the key changes the step."""
    without, told = parse_scenario(small(parallelism=layout)), parse_scenario(small(parallelism={**layout, key: value}))
    assert not [text for text in without.warnings if text.startswith(f"parallelism.{key}: of no effect")]
    found = [text for text in told.warnings if text not in without.warnings]
    assert len(found) == 1
    assert found[0].startswith(f"parallelism.{key}: of no effect {why}")
    assert took(told) == took(without)
    if effective is not None:
        plain, changed = (parse_scenario(small(parallelism={**effective, **x})) for x in ({}, {key: value}))
        assert took(changed) != took(plain)
        assert changed.warnings == plain.warnings


def took(scenario: Scenario) -> tuple[float, float]:
    outcome = simulate(scenario).outcome
    return outcome.step_time_s, outcome.peak_memory_bytes


@pytest.mark.parametrize(
    ("layout", "training", "model", "said"),
    [
        ({"tp": 2}, {"grad_reduce_dtype": "bf16"}, {}, ["training.grad_reduce_dtype"]),
        ({"pp": 2}, {"grad_reduce_dtype": "bf16"}, {}, ["training.grad_reduce_dtype"]),
        ({"pp": 2}, {"grad_reduce_dtype": "bf16"}, {"tied_embeddings": True}, []),
        ({"pp": 2, "schedule": "dualpipe"}, {"grad_reduce_dtype": "bf16"}, {}, []),
        ({"zero": 3}, {}, {}, ["parallelism.zero"]),
        ({"zero": 3}, {"param_dtype": "fp32"}, {}, []),  # FSDP casts, in the place of autocast
        ({"zero": 1}, {"framework": "deepspeed"}, {}, []),  # whose engine has buffers
    ],
)
def test_keys_of_replicas_are_named_where_there_is_one(
    layout: dict[str, Any], training: dict[str, Any], model: dict[str, Any], said: list[str]
) -> None:
    warnings = parse_scenario(small(model=model, training=training, parallelism=layout)).warnings
    assert [text.partition(":")[0] for text in warnings if "of no effect" in text] == said


@pytest.mark.parametrize("own", [{"ep_overlap": True}, {"ep_dispatch_dtype": "fp8"}, {"ep_dispatcher": "deepep"}])
def test_keys_of_expert_parallelism_are_named_where_experts_stay(own: dict[str, Any]) -> None:
    data = small(model={"moe": EXPERTS}, parallelism={"dp": 2, **own})
    expected = f"parallelism.{next(iter(own))}: of no effect with ep 1"
    assert expected in parse_scenario(data).warnings


def test_experts_have_replicas_where_dense_layers_have_none() -> None:
    layout = {"tp": 2, "ep": 1, "expert_tp": 1, "dp_sync": "after_backward"}
    data = small(model={"moe": EXPERTS}, parallelism=layout)
    assert not any("dp_sync" in text for text in parse_scenario(data).warnings)


@pytest.mark.parametrize(
    ("training", "layout"),
    [
        ({}, {"tp_overlap": "none", "dp_sync": "bucketed", "schedule": "1f1b", "virtual_stages": None}),
        ({"framework": "deepspeed"}, {"zero": 3}),
        ({"framework": "megatron", "software_date": "2022-01"}, {"dp": 2, "zero": 1}),
        ({"framework": "transformers"}, {"dp": 2, "zero": 2}),
        ({}, {"dp": 2, "tp": 2, "sp": True, "zero": 3}),
    ],
)
def test_defaults_are_no_keys_without_effect(training: dict[str, Any], layout: dict[str, Any]) -> None:
    """Neither where a user writes them nor where a framework sets them, in a result's own scenario too."""
    first = parse_scenario(small(training=training, parallelism=layout))
    again = parse_scenario(first.model_dump("json"))
    assert not [text for text in (*first.warnings, *again.warnings) if "of no effect" in text]


def test_keys_without_effect_on_serving_are_named() -> None:
    inference = {"requests": {"prompt_len": 64, "output_len": 8}}
    layout = {"tp": 2, "cp_method": "all_gather", "tp_overlap": "wgrad"}
    data = {"model": small()["model"], "inference": inference, "cluster": "dgx-h100", "parallelism": layout}
    found = [text for text in parse_scenario(data).warnings if "of no effect" in text]
    assert found == [
        "parallelism.cp_method: of no effect with cp 1",
        "parallelism.tp_overlap: of no effect on serving",
    ]


@pytest.mark.parametrize(
    ("model", "inference", "said"),
    [
        ("llama3-8b", {"quantization": "mxfp4_experts"}, ["quantization: mxfp4_experts is"]),
        ("gpt-oss-20b", {"quantization": "mxfp4_experts"}, []),
        ("deepseek-v3", {"decode_attention": "grouped"}, ["decode_attention:"]),
        ("llama3-8b", {"engine": "trtllm-1.0", "preemption": "swap"}, ["preemption:"]),
        ("llama3-8b", {"engine": "vllm-0.6", "preemption": "swap"}, []),
        ("llama3-8b", {"batching": "static"}, []),
        (
            "llama3-8b",
            {"engine": "vllm-v1", "batching": "static", "max_batch_tokens": 64, "preemption": "swap"},
            ["max_batch_tokens:", "preemption:"],
        ),
        (
            "llama3-8b",
            {"batching": "static", "kv_cache": {"memory_fraction": 0.5, "free_fraction": 0.5}},
            ["kv_cache.memory_fraction:", "kv_cache.free_fraction:"],
        ),
        ("llama3-8b", {"engine": "trtllm-1.0", "batching": "static", "kv_cache": {"memory_fraction": 1.0}}, []),
    ],
)
def test_keys_without_effect_on_a_served_model_are_named(
    model: str, inference: dict[str, Any], said: list[str]
) -> None:
    section = {"requests": {"prompt_len": 64, "output_len": 8}, **inference}
    s = parse_scenario({"model": model, "inference": section, "cluster": "dgx-h200"})
    found = [text for text in s.warnings if "of no effect" in text]
    assert found == [text for text in parse_scenario(s.model_dump("json")).warnings if "of no effect" in text]
    assert len(found) == len(said)
    assert all(text.startswith(f"inference.{word}") for text, word in zip(found, said, strict=True))


@pytest.mark.parametrize(
    ("layout", "param_dtype", "said"),
    [
        ({}, "fp32", False),
        ({"tp": 2}, "fp32", True),
        ({"dp": 2, "zero": 3, "tp": 2}, "fp32", False),
        ({"tp": 2}, "bf16", False),
    ],
)
def test_autocast_that_is_not_simulated_is_said(layout: dict[str, Any], param_dtype: str, said: bool) -> None:
    """FSDP casts parameters before the layer; torch.autocast leaves the residual stream in fp32."""
    data = small(parallelism=layout)
    warnings = parse_scenario({**data, "training": {**data["training"], "param_dtype": param_dtype}}).warnings
    assert any("torch.autocast" in text for text in warnings) is said


@pytest.mark.parametrize(
    ("layout", "why"),
    [({"tp": 2, "pp": 2}, ""), ({"tp": 2, "pp": 2, "sp": True}, "sp, which has split"), ({"tp": 2}, "tp 2 and pp 1")],
)
def test_a_stage_s_input_that_is_not_scattered_is_said(layout: dict[str, Any], why: str) -> None:
    data = small(parallelism={**layout, "p2p_scatter": True})
    said = [text for text in parse_scenario(data).warnings if "p2p_scatter" in text]
    assert (why in said[0]) if why else not said


def test_keys_of_training_alone_are_named_when_serving() -> None:
    data = {
        "model": "llama3-8b",
        "cluster": "dgx-h100",
        "inference": {"requests": {"prompt_len": 10, "output_len": 5}},
        "parallelism": {"dp": 2, "pp": 2, "schedule": "zb_v", "rank_order": "pp-tp-cp-dp"},
    }
    s = parse_scenario(data)
    assert s.warnings == ("parallelism.schedule: of no effect on serving",)
    assert parse_scenario(s.model_dump()).warnings == ()
    zero = parse_scenario({**data, "parallelism": {"dp": 2, "zero": 3, "tp_overlap": "full"}})
    assert zero.warnings == tuple(f"parallelism.{k}: of no effect on serving" for k in ("zero", "tp_overlap"))


def test_transformers_computes_what_a_window_hides_but_with_flash_attn() -> None:
    model = {"preset": "llama3.2-1b", "window": 1024}
    training = {"seq_len": 8192, "global_batch_size": 8, "framework": "transformers"}

    def scenario(**more: Any) -> Any:
        return parse_scenario({"model": model, "training": {**training, **more}, "cluster": "dgx-h100"})

    (note,) = (text for text in scenario().warnings if text.startswith("training.attention_kernel:"))
    assert "model.window 1024 as a mask" in note
    for quiet in ({"attention_kernel": "flash2"}, {"framework": "eager"}, {"seq_len": 1023}):
        assert not [text for text in scenario(**quiet).warnings if text.startswith("training.attention_kernel:")]
    assert simulate(scenario(attention_kernel="flash2")).step_time_s < 0.9 * simulate(scenario()).step_time_s


@pytest.mark.parametrize(
    ("layout", "experts", "said"),
    [
        ({}, {"imbalance": {"zipf": 1.0}}, True),
        ({"dp": 2, "ep": 2}, {"imbalance": {"zipf": 1.0}}, False),
        ({}, {"imbalance": {"zipf": 1.0}, "capacity_factor": 1.0}, False),  # which drops copies of popular experts
    ],
)
def test_popular_experts_that_all_lie_on_one_rank_change_nothing(
    layout: dict[str, Any], experts: dict[str, Any], said: bool
) -> None:
    even = {"experts": 8, "top_k": 2, "ffn": 512}
    plain, uneven = (
        parse_scenario(
            small(model={"moe": even | own, "layers": 2}, parallelism=layout, training={"micro_batch_size": 2})
        )
        for own in ({k: v for k, v in experts.items() if k != "imbalance"}, experts)
    )
    assert any(w.startswith("model.moe.imbalance: of no effect") for w in uneven.warnings) == said
    assert (simulate(plain).outcome.step_time_s == simulate(uneven).outcome.step_time_s) == said


@pytest.mark.parametrize(("more", "empty"), [(0, 0), (2, 0), (3, 1), (12, 10)])
def test_stages_that_hold_nothing_are_counted(more: int, empty: int) -> None:
    """Two more than layers hold the embedding and the output; a scenario that says the split itself gets no note."""
    layers = 4
    cut = {"pp": layers + more}
    found = [w for w in parse_scenario(_of_layers(layers, cut)).warnings if "hold nothing" in w]
    assert found == [f"parallelism.pp: {empty} of {layers + more} stages hold nothing; model.layers is 4"] * bool(empty)
    stated = {**cut, "layers_per_stage": [1] * layers + [0] * more}
    assert not any("hold nothing" in w for w in parse_scenario(_of_layers(layers, stated)).warnings)


def _of_layers(layers: int, parallelism: dict[str, Any]) -> dict[str, Any]:
    data = small(parallelism=parallelism)
    return {**data, "model": {**data["model"], "layers": layers}}


ALL_IN_BF16 = {"param_dtype": "bf16", "master_weights": False, "grad_dtype": "bf16", "optimizer_dtype": "bf16"}


@pytest.mark.parametrize(
    ("framework", "training", "noted"),
    [
        ("compiled", {}, True),
        ("transformers", {}, True),
        ("composer", {}, True),
        ("compiled", {"param_dtype": "fp32"}, False),
        ("compiled", ALL_IN_BF16, False),
        ("compiled", {"precision": "fp32"}, False),
        ("transformers", {"lora": {"rank": 8}}, False),
        ("deepspeed", {}, False),
        ("megatron", {}, False),
        ("nanotron", {}, False),
    ],
)
def test_copies_that_torchs_optimizers_do_not_keep(framework: str, training: dict[str, Any], noted: bool) -> None:
    """torch/distributed/fsdp/_fully_shard/_fsdp_api.py, `MixedPrecisionPolicy`: the optimizer updates the parameters in
    their own dtype."""
    warnings = parse_scenario(small(training={"framework": framework, **training})).warnings
    assert any("copies in fp32; framework" in text for text in warnings) == noted


@pytest.mark.parametrize(
    ("framework", "layout", "noted"),
    [
        ("megatron", {"tp": 2}, True),
        ("nemo", {"tp": 2}, True),
        ("eager", {"tp": 2}, False),
        ("megatron", {"dp": 2}, False),
        ("megatron", {"tp": 2, "tp_overlap": "none"}, False),
        ("megatron", {"tp": 2, "tp_overlap": "wgrad"}, False),
    ],
)
def test_a_trainer_that_always_overlaps_is_named_where_the_default_does_not(
    framework: str, layout: dict[str, Any], noted: bool
) -> None:
    """A user who wrote the key is told nothing; the step is shorter with the value that the note names."""
    data = small(parallelism=layout)
    data["training"] = {**data["training"], "framework": framework}
    found = [text for text in parse_scenario(data).warnings if text.startswith("parallelism.tp_overlap: with none")]
    assert bool(found) is noted
    if noted:
        assert found[0].endswith("its step is shorter: set wgrad")


def test_a_bucket_without_a_unit_is_asked_about() -> None:
    told = parse_scenario(small(parallelism={"dp": 2, "bucket_bytes": 25})).warnings
    assert "parallelism.bucket_bytes: 25 bytes, less than any tensor has; 25MiB is 25 mebibytes" in told
    clear = parse_scenario(small(parallelism={"dp": 2, "bucket_bytes": "25MiB"})).warnings
    assert not [text for text in clear if "mebibytes" in text]


def test_layers_of_balanced_stages_are_offloaded_without_a_note() -> None:
    layout = {"layers_per_stage": "balanced", "pp": 2}
    scenario = parse_scenario(small(parallelism=layout, training={"activation_offload": {"layers": 1}}))
    assert not any("activation_offload" in w for w in scenario.warnings)
    assert any(row["kind"] == "offload" for row in simulate(scenario).result["communication"])


@pytest.mark.parametrize(
    ("model", "noted"),
    [({}, True), ({"bias": True}, False), ({"attention_out_bias": True}, False), ({"dropout": 0.1}, False)],
)
def test_a_residual_sum_without_bias_and_dropout_is_one_kernel(model: dict[str, Any], noted: bool) -> None:
    """megatron/core/fusions/fused_bias_dropout.py; torch launches nothing for a dropout of 0."""
    plain, apart = (
        parse_scenario(small(model={"bias": False, **model}, training={"framework": "megatron", **own}))
        for own in ({}, {"bias_dropout_fusion": False})
    )
    said = any("training.bias_dropout_fusion: of no effect" in w for w in apart.warnings)
    assert said == noted == (simulate(plain).step_time_s == simulate(apart).step_time_s)


@pytest.mark.parametrize(
    ("training", "noted"),
    [
        ({"recompute": "selective"}, True),
        ({"recompute": "selective", "attention": "unfused"}, False),
        ({"recompute": {"mode": "selective", "modules": ["mlp"]}}, False),
        ({"recompute": "selective_op"}, False),
        ({"recompute": "none"}, False),
    ],
)
def test_recomputation_that_saves_nothing_is_told(training: dict[str, Any], noted: bool) -> None:
    own = {"layers": 4, "hidden": 1024, "heads": 8, "vocab": 1024}
    long = {"seq_len": 4096, "global_batch_size": 1}

    def peak_bytes(**changes: Any) -> float:
        step = simulate(parse_scenario(small(model=own, training=long | training | changes)))
        return step.outcome.peak_memory_bytes

    warnings = " ".join(parse_scenario(small(model=own, training=long | training)).warnings)
    assert ("saves almost no memory" in warnings) is noted
    if training["recompute"] != "none":
        assert (peak_bytes() > 0.99 * peak_bytes(recompute="none")) is noted


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("more", [0, 2, 3, 12])
def test_megatron_alone_refuses_stages_that_hold_nothing(framework: str, more: int) -> None:
    """Two more than layers hold the embedding and the output; a listed split may have empty stages."""
    data = _of_layers(4, {"pp": 4 + more})
    data["training"] |= {"framework": framework}
    if not (FRAMEWORKS[framework].fills_stages and more > 2):
        assert parse_scenario(data).parallelism.pp == 4 + more
        return
    with pytest.raises(
        InputError, match=rf"parallelism\.pp: found {4 + more}; framework {framework} refuses stages that"
    ):
        parse_scenario(data)
    listed = data["parallelism"] | {"layers_per_stage": [1] * 4 + [0] * more}
    assert parse_scenario(data | {"parallelism": listed}).parallelism.pp == 4 + more
