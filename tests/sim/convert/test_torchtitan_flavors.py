"""torchtitan's flavors of a model that differ in its attention alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused

TEXT = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
"""


@pytest.mark.parametrize("ending", ["", "_flex", "_varlen", "_flex_attn"])
def test_a_flavor_with_an_attention_of_its_own(tmp_path: Path, ending: str) -> None:
    """models/llama3/__init__.py: `attn_backend`, `attn_mask_type`."""
    text = TEXT.replace("8B", f"8B{ending}")
    data, said = converted(tmp_path, "a.toml", text, "--cluster", "dgx-h100", "--gpus", "8")
    plain, _ = converted(tmp_path, "a.toml", TEXT, "--cluster", "dgx-h100", "--gpus", "8")
    assert data == plain
    assert ("attention stays within a text there" in said) == bool(ending)


def test_what_counts_with_a_pipeline_or_experts_alone_needs_no_note(tmp_path: Path) -> None:
    more = """[parallelism]
pipeline_parallel_schedule = "Interleaved1F1B"
expert_tensor_parallel_degree = 1
"""
    _, said = converted(tmp_path, "a.toml", TEXT + more, "--cluster", "dgx-h100", "--gpus", "8")
    assert "not expressed" not in said


def test_a_config_that_another_files_function_begins(tmp_path: Path) -> None:
    """experiments/graph_trainer/llama3/config_registry.py of torchtitan 0.3.0."""
    text = """
from torchtitan.experiments.graph_trainer.configs import to_graph_trainer_config
from torchtitan.models.llama3.config_registry import llama3_8b

def graph_llama3_8b():
    return to_graph_trainer_config(llama3_8b(), None)
"""
    options = ("--cluster", "dgx-h100", "--gpus", "8", "--config", "graph_llama3_8b")
    said = refused(tmp_path, "config_registry.py", text, *options)
    assert "no function of this file makes a config; it begins with llama3_8b of other files: convert these" in said


@pytest.mark.parametrize(("factor", "graphs"), [("1.0", "step"), ("None", None)])
def test_hybridep_and_the_graph_of_a_step(tmp_path: Path, factor: str, graphs: str | None) -> None:
    """torchtitan 0.3.0, models/deepseek_v3/config_registry.py; trainer.py: `_validate_cuda_graphs`."""
    text = f"""
from torchtitan.models.deepseek_v3 import model_registry

def train():
    return Trainer.Config(
        model_spec=model_registry("16B", moe_comm_backend="hybridep", non_blocking_capacity_factor={factor}),
        training=TrainingConfig(local_batch_size=1, seq_len=4096),
        parallelism=ParallelismConfig(data_parallel_shard_degree=8, expert_parallel_degree=8),
    )
"""
    data, _ = converted(tmp_path, "config_registry.py", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert data["parallelism"]["ep_dispatcher"] == "hybridep"
    assert data["training"].get("cuda_graphs") == graphs
