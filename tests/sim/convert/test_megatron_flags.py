"""Flags of Megatron-LM that stand for others, or for what no key of a scenario says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import MEGATRON

CLUSTER = ("--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("words", "found", "left"),
    [
        ("a2a", {"cp_method": "all_to_all"}, False),
        ("a2a a2a", {"cp_method": "all_to_all"}, False),
        ("a2a+x", {}, True),
        (" ".join(["p2p", "a2a"] * 16), {"cp_method_by_layer": ["ring", "all_to_all"] * 16}, False),
        (
            "a2a+p2p --hierarchical-context-parallel-sizes 2 1",
            {"cp_method": "all_to_all_ring", "hierarchical_context_parallel_sizes": [2, 1]},
            False,
        ),
    ],
)
def test_ways_of_context_parallelism(tmp_path: Path, words: str, found: dict[str, object], left: bool) -> None:
    """Several words are one for each layer (`TransformerConfig.cp_comm_type`)."""
    text = MEGATRON.rstrip() + f" --context-parallel-size 2 --cp-comm-type {words}\n"
    data, said = converted(tmp_path, "train.sh", text, *CLUSTER)
    assert {key: value for key, value in data["parallelism"].items() if key.startswith(("cp_", "hier"))} == found
    assert ("--cp-comm-type" in said) is left
    assert "--hierarchical" not in said


def test_other_names_of_sizes(tmp_path: Path) -> None:
    """training/arguments.py, `validate_args`: the encoder's sizes are the model's; a padded vocabulary is final."""
    text = MEGATRON.replace("--num-layers", "--encoder-num-layers").replace("--seq-length", "--encoder-seq-length")
    data, said = converted(tmp_path, "train.sh", text.rstrip() + " --padded-vocab-size 131072\n", *CLUSTER)
    assert (data["model"]["layers"], data["model"]["vocab"], data["training"]["seq_len"]) == (32, 131072, 8192)
    assert "encoder" not in said
    assert "padded" not in said


def test_recomputed_experts_by_the_former_flag(tmp_path: Path) -> None:
    """core/transformer/transformer_config.py: it adds the experts to the modules, which are attention's alone."""
    text = MEGATRON.rstrip() + " --num-experts 8 --moe-ffn-hidden-size 1024 --moe-layer-recompute\n"
    data, _ = converted(tmp_path, "train.sh", text, *CLUSTER)
    assert data["training"]["recompute"] == {"mode": "selective", "modules": ["core_attn", "moe"]}


def test_timers_that_wait_are_named(tmp_path: Path) -> None:
    """training/arguments.py: level 0 has no overhead; above it timers synchronize with the GPU and have barriers."""
    _, said = converted(tmp_path, "train.sh", MEGATRON.rstrip() + " --timing-log-level 2\n", *CLUSTER)
    assert ", --timing-log-level" in said
    _, said = converted(tmp_path, "train.sh", MEGATRON.rstrip() + " --timing-log-level 0\n", *CLUSTER)
    assert "timing-log-level" not in said


@pytest.mark.parametrize(
    "flag",
    [
        "--yaml-cfg x.yaml",
        "--perform-rl-step",
        "--heterogeneous-layers-config-path x.json",
        "--decoder-seq-length 128",
        "--retro-add-retriever",
        "--patch-dim 14",
        "--num-tokens-to-generate 30",
        "--export-kd-teacher-load x",
        "--rollout-batch-size 32",
    ],
)
def test_what_is_trained_is_said_elsewhere(tmp_path: Path, flag: str) -> None:
    said = refused(tmp_path, "train.sh", MEGATRON.rstrip() + f" {flag}\n", *CLUSTER)
    assert f"{flag.split()[0]}: " in said


def test_apertus_activation_is_read(tmp_path: Path) -> None:
    """Of swiss-ai's fork of Megatron-LM, which trained Apertus."""
    data, said = converted(tmp_path, "train.sh", MEGATRON.replace("--swiglu", "--xielu"), *CLUSTER)
    assert data["model"]["mlp"] == "xielu"
    assert "xielu" not in said.partition("\nversion:")[0]


def test_a_script_that_generates_is_refused(tmp_path: Path) -> None:
    for name in ("tools/run_text_generation_server.py", "examples/inference/gpt/gpt_dynamic_inference.py"):
        said = refused(tmp_path, "serve.sh", MEGATRON.replace("pretrain_gpt.py", name), *CLUSTER)
        assert f"{name.rpartition('/')[2]}: text is generated, and nothing trained" in said


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--attention-dropout 0", (0.1, 0.0)),
        ("--hidden-dropout 0", (None, 0.1)),
        ("--attention-dropout 0 --hidden-dropout 0", (None, None)),
        ("", (0.1, None)),
    ],
)
def test_dropout_of_attention_and_of_its_result(
    tmp_path: Path, flags: str, expected: tuple[float | None, float | None]
) -> None:
    text = MEGATRON.replace("--attention-dropout 0 --hidden-dropout 0", flags)
    scenario, written = converted(tmp_path, "train.sh", text, *CLUSTER)
    model = scenario["model"]
    assert (model.get("dropout") or None, model.get("attention_dropout")) == expected
    unsaid = ", ".join(name for name in ("--attention-dropout", "--hidden-dropout") if name not in flags)
    assert (f"# {unsaid}: not given, so 0.1 as Megatron-LM takes then" in written) is bool(unsaid)


@pytest.mark.parametrize(
    ("tokens", "flag", "said"),
    [
        ("32768", "", "# attention masks from the data loader, 1 GiB to the GPU for each micro-batch"),
        ("32768", "--no-create-attention-mask-in-dataloader", ""),
        ("8192", "", ""),
    ],
)
def test_a_long_sequence_s_mask_is_said(tmp_path: Path, tokens: str, flag: str, said: str) -> None:
    """training/utils.py, `get_batch_on_this_tp_rank`: a byte for each pair of tokens."""
    text = MEGATRON.replace("--seq-length 8192", f"--seq-length {tokens} {flag}")
    _, notes = converted(tmp_path, "train.sh", text, *CLUSTER)
    assert said in notes
    assert ("attention masks" in notes) is bool(said)


def test_sizes_that_the_named_model_does_not_have_are_said(tmp_path: Path) -> None:
    text = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 4096 --num-attention-heads 32 "
        "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --bf16\n"
    )
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100", "--model", "llama3-8b")
    assert data["model"] == "llama3-8b"
    assert "# --num-layers 8: left out; the model that --model names is simulated with its own sizes\n" in said
