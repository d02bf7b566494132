"""Megatron-LM's launch scripts as scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import EXPERTS, MEGATRON


def test_a_megatron_script_with_variables_and_arrays(tmp_path: Path) -> None:
    data, text = converted(tmp_path, "train.sh", MEGATRON, "--cluster", "dgx-h100")
    p, t = data["parallelism"], data["training"]
    assert (p["tp"], p["pp"], p["dp"], p["sp"], p["zero"], p["dp_sync"]) == (4, 2, 4, True, 1, "bucketed")
    assert (t["micro_batch_size"], t["global_batch_size"], t["recompute"]) == (1, 128, "selective")
    assert data["model"]["vocab"] == 128256
    assert "# not expressed here: --cuda-graph-scope" in text


@pytest.mark.parametrize(
    ("dispatcher", "expected"),
    [("alltoall", {"groups": 8, "top_groups": 4}), ("flex", {"max_nodes_per_token": 4})],
)
def test_a_choice_limited_to_groups(tmp_path: Path, dispatcher: str, expected: dict[str, int]) -> None:
    """NCCL's all-to-all sends every copy by itself, DeepEP and HybridEP a token once to a node."""
    experts = f"""    --num-experts 64 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4 \\
    --moe-token-dispatcher-type {dispatcher} --sequence-parallel"""
    text = MEGATRON.replace("    --sequence-parallel", experts)
    moe = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["model"]["moe"]
    assert {k: moe[k] for k in ("groups", "top_groups", "max_nodes_per_token") if k in moe} == expected


def test_a_capacity_that_experts_are_padded_to(tmp_path: Path) -> None:
    experts = """    --num-experts 64 --moe-router-topk 8 --moe-expert-capacity-factor 1 \\
    --moe-pad-expert-input-to-capacity --moe-token-dispatcher-type alltoall --sequence-parallel"""
    text = MEGATRON.replace("    --sequence-parallel", experts)
    moe = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["model"]["moe"]
    assert (moe["capacity_factor"], moe["pad_to_capacity"]) == (1.0, True)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--normalization LayerNorm", {"norm": "layernorm", "bias": False, "norm_bias": True}),
        ("--rotary-percent 0.25", {"rope_share": 0.25}),
        ("--window-size 127,0", {"window": 128}),
        ("--window-size '(128, 0)' --window-attn-skip-freq 2", {"attention_pattern": ["sliding", "full"] * 16}),
        ("--window-size 128,0 --window-attn-skip-freq [0]*31+[1]", {"attention_pattern": ["full"] * 31 + ["sliding"]}),
        ("--softmax-type learnable", {"sinks": True}),
        ("--position-embedding-type yarn --rotary-scaling-factor 32", {"positions": "rope", "scaled_rope": True}),
        ("--position-embedding-type yarn", {"positions": "rope"}),
        (
            "--position-embedding-type yarn --rotary-scaling-factor 32 --mscale-all-dim 1.0",
            {"positions": "rope"},
        ),
        ("--no-rope-freq 4", {"no_rope_every": 4}),
        ("--no-rope-freq '([0]*3+[1])*8'", {"no_rope_every": 4}),
        ("--quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1.0", {"mlp": "clamped_swiglu"}),
        ("--attention-output-gate", {"attention_gate": True}),
        (
            "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 8",
            {"attention_pattern": ["state_space", "state_space", "state_space", "full"] * 8},
        ),
    ],
)
def test_flags_of_newer_layers(tmp_path: Path, flags: str, expected: dict[str, Any]) -> None:
    text = MEGATRON.replace("    --sequence-parallel", f"    {flags} --sequence-parallel")
    model = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["model"]
    assert {key: model.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--window-size none", "--window-size: found 'none'; must be two whole numbers"),
        ("--window-size 128,0 --window-attn-skip-freq [1]*3", "--window-attn-skip-freq: found '[1]*3'; must be"),
        ("--no-rope-freq [0]*31+[1]*1", None),
        ("--no-rope-freq [1]+[0]*31", "--no-rope-freq: found '[1]+[0]*31'; can be simulated"),
    ],
)
def test_a_layer_s_flag_with_a_value_that_is_none_of_its_own(tmp_path: Path, flags: str, message: str | None) -> None:
    text = MEGATRON.replace("    --sequence-parallel", f"    {flags} --sequence-parallel")
    if message is None:
        assert converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["model"]["no_rope_every"] == 32
    else:
        assert message in refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("flags", "section", "expected"),
    [
        ("--bf16", "training", {"grad_dtype": "fp32"}),
        ("--bf16 --main-grads-dtype bf16", "training", {"grad_dtype": "bf16"}),
        ("--fp16", "training", {"grad_dtype": "fp16"}),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "training", {"grad_dtype": "fp32"}),
        ("--optimizer dist_muon", "training", {"optimizer": "muon"}),
        ("--optimizer muon", "parallelism", {"zero": 0}),
        ("--optimizer dist_muon", "parallelism", {"zero": 1}),
        ("--optimizer muon --use-layer-wise-distributed-optimizer", "parallelism", {"zero": 1}),
        ("", "training", {"global_batch_size": 4, "micro_batch_size": 1}),
        ("--overlap-grad-reduce", "parallelism", {"bucket_bytes": 4 * 40_000_000}),
        ("--overlap-grad-reduce --ddp-bucket-size 10", "parallelism", {"bucket_bytes": 40}),
        ("--use-megatron-fsdp", "parallelism", {"zero": 0}),
        ("--use-megatron-fsdp-v2 --data-parallel-sharding-strategy optim_grads_params", "parallelism", {"zero": 3}),
        (
            "--bf16 --megatron-fsdp-main-grads-dtype bf16 --megatron-fsdp-grad-comm-dtype bf16",
            "training",
            {"grad_dtype": "bf16", "grad_reduce_dtype": "bf16"},
        ),
        # Both overlap without being told to; only the gathers of updated parameters have a flag.
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
            "parallelism",
            {"zero": 3, "dp_sync": "bucketed"},
        ),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
            "parallelism",
            {"zero": 2, "dp_sync": "bucketed", "param_gather_overlap": False},
        ),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", "parallelism", {"dp_sync": "after_backward"}),
        (
            "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
            "parallelism",
            {"zero": 3, "fsdp_version": 2, "reshard_after_forward": False},
        ),
        ("--bf16 --use-torch-fsdp2", "training", {"grad_dtype": "bf16"}),  # it gets no other dtype to reduce in
        ("--bf16 --use-torch-fsdp2 --accumulate-allreduce-grads-in-fp32", "training", {"grad_dtype": "bf16"}),
        ("--num-experts 0", "model", {"hidden": 4096}),
    ],
)
def test_what_megatron_s_flags_and_those_left_out_say(
    tmp_path: Path, flags: str, section: str, expected: dict[str, Any]
) -> None:
    """Defaults of arguments.py, of `validate_args`, and of DistributedDataParallel's buckets."""
    text = MEGATRON.replace("--sequence-parallel", f"--sequence-parallel {flags}")
    for line in ("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--global-batch-size 128"):
        text = text.replace(f"    {line}\n", "")
    found = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0][section]
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("more", "overlaps", "named"),
    [
        ("", True, False),
        (" --no-overlap-p2p-communication", False, False),
        (" --no-overlap-p2p-communication --microbatch-group-size-per-virtual-pipeline-stage 4", False, False),
        (" --no-overlap-p2p-communication --microbatch-group-size-per-virtual-pipeline-stage 8", True, True),
    ],
)
def test_blocking_messages_of_interleaved_stages(tmp_path: Path, more: str, overlaps: bool, named: bool) -> None:
    """In larger groups the simulation has them beside computations, else its ranks wait in a circle."""
    text = MEGATRON.replace("PP=2", "PP=4")
    text = text.replace("--sequence-parallel", f"--sequence-parallel --num-virtual-stages-per-pipeline-rank 2{more}")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["parallelism"]["p2p_overlap"] is overlaps
    assert ("--no-overlap-p2p-communication: interleaved stages in groups" in said) is named


@pytest.mark.parametrize("overlap", ["", "--overlap-grad-reduce"])
def test_torch_s_fsdp2_overlaps_its_reductions_by_itself(tmp_path: Path, overlap: str) -> None:
    """Megatron-LM hands it no such flag (training/training.py: `TorchFullyShardedDataParallelConfig`)."""
    text = MEGATRON.replace("--use-distributed-optimizer", "--use-torch-fsdp2").replace("PP=2", "PP=1")
    text = text.replace("--overlap-grad-reduce", overlap)
    found = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["parallelism"]
    assert {"dp_sync", "bucket_bytes"} & found.keys() == set()
    assert found["zero"] == 3


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--transformer-impl local", "not expressed here: --cuda-graph-scope, --transformer-impl\n"),
        ("--cp-comm-type a2a+x", "--cp-comm-type, --cuda-graph-scope\n"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            "--recompute-num-layers\n",
        ),
        (EXPERTS, "--moe-token-dispatcher-type allgather, the default: an all-to-all is simulated"),
        (f"{EXPERTS} --moe-token-dispatcher-type allgather", "--cuda-graph-scope, --moe-token-dispatcher-type\n"),
        (EXPERTS, "simulated as with --moe-permute-fusion\n"),
    ],
)
def test_what_of_megatron_s_flags_is_not_simulated_is_said(tmp_path: Path, flags: str, note: str) -> None:
    text = MEGATRON.replace("--sequence-parallel", f"--sequence-parallel {flags}")
    if "--recompute" in flags:
        text = text.replace("    --recompute-activations\n", "")
    assert note in converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[1]


def test_a_model_that_is_named_takes_the_place_of_a_script_s_flags(tmp_path: Path) -> None:
    text = MEGATRON.replace("    --vocab-size 128256\n", "    --no-masked-softmax-fusion\n")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100", "--model", "llama3-8b")
    assert data["model"] == "llama3-8b"
    assert "# not expressed here: --cuda-graph-scope\n" in said


@pytest.mark.parametrize(
    ("frequency", "dense", "pattern"),
    [
        ("1", None, None),
        ("'([0]*3+[1]*29)'", 3, None),
        ("2", None, ["experts", "dense"] * 16),
        ('"([0]*1+[1]*3)*8"', None, ["dense", "experts", "experts", "experts"] * 8),
        ("$FREQUENCY", 2, None),
    ],
)
def test_which_layers_have_experts(
    tmp_path: Path, frequency: str, dense: int | None, pattern: list[str] | None
) -> None:
    """gpt_layer_specs.py: every n-th layer, counted from the first, or a list."""
    flags = f"--sequence-parallel --num-experts 8 --moe-layer-freq {frequency}"
    text = 'FREQUENCY="([0]*2+[1]*30)"' + MEGATRON.replace("--sequence-parallel", flags)
    model = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["model"]
    assert model["moe"].get("dense_layers") == dense
    assert model.get("mlp_pattern") == pattern


@pytest.mark.parametrize("frequency", ["0", "'[1]*33'", "'[2]*32'", "'[1]*10**9'", "'open(1)'", "'['"])
def test_layers_with_experts_that_are_no_list_are_refused(tmp_path: Path, frequency: str) -> None:
    text = MEGATRON.replace("--sequence-parallel", f"--sequence-parallel --num-experts 8 --moe-layer-freq {frequency}")
    said = refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert "--moe-layer-freq: found" in said
    assert "a list of 0 and 1 for 32 layers" in said


PRECISION_AWARE = "--use-precision-aware-optimizer --main-grads-dtype fp32 --main-params-dtype fp32"


@pytest.mark.parametrize(
    ("flags", "moments", "left"),
    [
        (f"{PRECISION_AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "bf16", ""),
        (PRECISION_AWARE, "fp32", ""),
        (f"{PRECISION_AWARE} --exp-avg-dtype bf16", None, "--exp-avg-dtype"),
        (f"{PRECISION_AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8", None, "--exp-avg-dtype, --exp-avg-sq-dtype"),
    ],
)
def test_what_adam_s_moments_are_kept_in(tmp_path: Path, flags: str, moments: str | None, left: str) -> None:
    text = MEGATRON.replace("    --cuda-graph-scope full\n", f"    {flags}\n")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["training"].get("optimizer_dtype") == moments
    # fp32 copies are halves where Transformer Engine keeps them, which fp8 with scales of the tensors does not
    for more, kept in (("", "remainders"), ("--fp8-format hybrid --fp8-recipe tensorwise", None)):
        with_more = text.replace(f"    {flags}\n", f"    {flags} {more}\n")
        training = converted(tmp_path, "train.sh", with_more, "--cluster", "dgx-h100")[0]["training"]
        assert training.get("master_weights") == kept
    assert (f"not expressed here: {left}\n" in said) if left else ("not expressed" not in said)


def test_the_vocabulary_that_a_tokenizer_says_can_be_set(tmp_path: Path) -> None:
    text = MEGATRON.replace("--vocab-size 128256", "--vocab-file vocab.json --merge-file merges.txt")
    assert "add --set model.vocab=N" in refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100", "--set", "model.vocab=50257")
    assert data["model"]["vocab"] == 50257


@pytest.mark.parametrize(
    ("cluster", "backend", "expected", "said"),
    [
        ("dgx-h100", "flash", ("fused", "flash2"), "where FlashAttention-3 is installed"),
        ("dgx-a100", "flash", ("fused", "flash2"), ""),
        ("dgx-b200", "flash", ("fused", None), "profile b200-sxm has no flash2 by name"),
        ("dgx-h100", "fused", ("fused", "cudnn"), ""),
        ("dgx-a100", "fused", ("fused", None), "profile a100-sxm has no cudnn by name"),
        ("dgx-h100", "auto", ("fused", None), ""),
        ("dgx-h100", "local", ("unfused", None), ""),
        ("dgx-h100", "new", ("fused", None), "not expressed here: --attention-backend"),
    ],
)
def test_the_backend_of_attention_says_its_kernel(
    tmp_path: Path, cluster: str, backend: str, expected: tuple[str, str | None], said: str
) -> None:
    text = f"{MEGATRON.rstrip()} --attention-backend {backend}"
    data, comment = converted(tmp_path, "train.sh", text, "--cluster", cluster, "--gpus", "8")
    assert (data["training"]["attention"], data["training"].get("attention_kernel")) == expected
    assert said in comment
    assert ("attention-backend" in comment) == bool(said)


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        (
            "--expert-model-parallel-size 16",
            "found 16; --expert-tensor-parallel-size is not given, so Megatron takes --tensor-model-parallel-size (4); "
            "16·4 does not divide the 16 ranks of tp · cp · dp",
        ),
        (
            "--expert_model_parallel_size 8 --expert-tensor-parallel-size 3",
            "found 8; --expert-tensor-parallel-size 3; 8·3 does not divide the 16 ranks of tp · cp · dp",
        ),
    ],
)
def test_degrees_of_experts_that_do_not_go_with_the_ranks_are_told_in_the_scripts_words(
    tmp_path: Path, degrees: str, said: str
) -> None:
    text = f"{MEGATRON.rstrip()} \\\n --num-experts 64 {degrees}\n"
    line = len(text.splitlines())
    message = refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert f"train.sh:{line}: --expert-model-parallel-size: {said}" in message


def test_models_that_are_no_decoders(tmp_path: Path) -> None:
    text = MEGATRON.replace("pretrain_gpt.py", "examples/pretrain_bert.py")
    what = "pretrain_bert.py means an encoder, which flags do not describe here: give --model config.json"
    assert what in refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100", "--model", "llama3-8b")
    assert data["model"] == "llama3-8b"


def test_processes_of_mpirun(tmp_path: Path) -> None:
    launcher = "mpirun -np $((GPUS_PER_NODE * 2)) --npernode 8 -hostfile hosts -x PATH -bind-to none python"
    text = MEGATRON.replace("torchrun ${DISTRIBUTED_ARGS[@]}", launcher).replace("--nproc_per_node $GPUS_PER_NODE", "")
    data, said = converted(tmp_path, "train.sh", text.replace("--nnodes $NNODES", ""), "--cluster", "dgx-h100")
    assert data["parallelism"]["dp"] == 2
    assert "npernode" not in said


@pytest.mark.parametrize(
    ("flags", "offload", "note"),
    [
        ("--optimizer-cpu-offload --use-precision-aware-optimizer", "cpu", ""),
        ("--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d", "cpu", "are simulated beside nothing"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", None, "0.5: a part is not simulated"),
        ("--offload-optimizer-states", True, ""),
        ("--fp8-format hybrid --fp8-param-gather --optimizer-cpu-offload", "cpu", "--fp8-param-gather: parameters are"),
    ],
)
def test_where_the_optimizer_s_states_are(tmp_path: Path, flags: str, offload: object, note: str) -> None:
    text = MEGATRON.replace("    --sequence-parallel\n", f"    --sequence-parallel {flags}\n")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["training"].get("optimizer_offload") == offload
    assert note in said
    assert "not expressed here: --cuda-graph-scope\n" in said  # nothing else


@pytest.mark.parametrize(
    ("flags", "simulated"),
    [
        ("--fp8-format hybrid --fp8-recipe tensorwise", True),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag", True),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", None),
    ],
)
def test_parameters_in_8_bits(tmp_path: Path, flags: str, simulated: bool | None) -> None:
    text = MEGATRON.replace("    --sequence-parallel\n", f"    --sequence-parallel {flags} --fp8-param-gather\n")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-b200")
    assert data["training"].get("fp8_param_gather") is simulated
    assert ("--fp8-param-gather: parameters are gathered and kept in 16 bits" in said) == (not simulated)
    assert "not expressed here: --cuda-graph-scope\n" in said  # nothing else


@pytest.mark.parametrize(
    ("flags", "offload"),
    [
        ("--cpu-offloading-num-layers 12", {"layers": 12}),
        ("--cpu-offloading-num-layers 0", None),
        (
            "--fine-grained-activation-offloading --offload-modules core_attn attn_proj",
            {"modules": ["core_attn", "attn_proj"]},
        ),
        ("--offload-modules core_attn", None),  # without the switch
        ("--fine-grained-activation-offloading --offload-modules gdp_qkv mlp_norm", {"modules": ["mlp_norm"]}),
    ],
)
def test_which_activations_go_to_the_host(tmp_path: Path, flags: str, offload: object) -> None:
    text = MEGATRON.replace("    --sequence-parallel", f"    {flags} --sequence-parallel")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert data["training"].get("activation_offload") == offload
    assert ("--offload-modules: not simulated: gdp_qkv" in said) == ("gdp_qkv" in flags)
    assert "not expressed here: --cuda-graph-scope\n" in said  # nothing else


@pytest.mark.parametrize("asked", [True, False])
def test_norms_of_queries_with_latent_attention_are_those_of_latents(tmp_path: Path, asked: bool) -> None:
    """A model with mla has them; without --qk-layernorm Megatron-LM has none."""
    norms = " --qk-layernorm" if asked else ""
    latents = f"    --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64{norms} --sequence-parallel"
    text = MEGATRON.replace("    --sequence-parallel", latents)
    text = text.replace("    --group-query-attention\n", "").replace("    --num-query-groups 8\n", "")
    data, told = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert "mla" in data["model"]
    assert not data["model"].get("qk_norm")
    assert ("Megatron-LM needs --qk-layernorm for them" in told) != asked
