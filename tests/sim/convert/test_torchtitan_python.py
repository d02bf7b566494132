"""torchtitan's configurations in Python as scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import FULL_RECOMPUTE, TITAN_0_3, TITAN_PYTHON


def test_a_torchtitan_python_config_is_read_and_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "llama3"
    folder.mkdir()
    options = ("--cluster", "dgx-h100", "--config", "llama3_8b")
    data, _ = converted(folder, "config_registry.py", TITAN_PYTHON, *options)
    assert (data["model"], data["name"]) == ("llama3.1-8b", "llama3_8b")
    assert data["training"]["recompute"] == FULL_RECOMPUTE
    assert (data["parallelism"]["tp"], data["parallelism"]["dp"], data["parallelism"]["zero"]) == (8, 2, 3)
    assert "debug, llama3_8b" in refused(folder, "config_registry.py", TITAN_PYTHON, "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("policy", "mode"), [("FullAC.Config()", "full"), ("SelectiveAC.Config()", "selective_op"), ("None", "none")]
)
def test_what_torchtitan_0_3_says_elsewhere_is_read(tmp_path: Path, policy: str, mode: str) -> None:
    text = TITAN_0_3.replace("POLICY_ASYNC", str(mode == "none")).replace("POLICY", policy)
    text = text.replace("enable_sequence_parallel=False", f"enable_sequence_parallel={mode == 'none'}")
    data, _ = converted(tmp_path, "config.py", text, "--cluster", "dgx-b200")
    assert (data["training"]["recompute"], data["training"]["precision"]) == (mode, "mxfp8")
    assert data["parallelism"]["sp"] is (mode == "none")
    assert data["parallelism"].get("tp_overlap") == ("full" if mode == "none" else None)
    assert data["training"]["cuda_graphs"] == "step"  # unless training.disable_cuda_graphs says otherwise
    assert data["training"]["zero_grad"] == "keep"  # trainer.py: zero_grad(set_to_none=disable_cuda_graphs)
    launched = text.replace("seq_len=4096", "seq_len=4096, disable_cuda_graphs=True")
    data, _ = converted(tmp_path, "config.py", launched, "--cluster", "dgx-b200")
    assert "cuda_graphs" not in data["training"]
    assert "zero_grad" not in data["training"]
    assert "found MemoryBudgetAC; can be simulated: SelectiveAC, FullAC" in refused(
        tmp_path, "config.py", text.replace(policy, "MemoryBudgetAC.Config()"), "--cluster", "dgx-b200"
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [("", False), ("force_recompute_mm_shapes_by_fqns=['attention.wo']", True), ("preserve_rng_state=False", True)],
)
def test_what_a_policy_is_given_is_named(tmp_path: Path, given: str, named: bool) -> None:
    """distributed/activation_checkpoint.py of 0.3.0, SelectiveAC.Config."""
    text = TITAN_0_3.replace("POLICY_ASYNC", "False").replace("POLICY", f"SelectiveAC.Config({given})")
    data, said = converted(tmp_path, "config.py", text, "--cluster", "dgx-b200")
    assert data["training"]["recompute"] == "selective_op"
    assert (f"not expressed here: activation_checkpoint.{given.partition('=')[0]}\n" in said) is named
    assert ("activation_checkpoint" in said) is named


def test_values_that_a_python_config_sets_later_or_computes(tmp_path: Path) -> None:
    text = """
from torchtitan.models.llama3 import model_registry

def train(shards=2):
    config = Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=2048, dataset=None),
        parallelism=ParallelismConfig(data_parallel_shard_degree=shards, module_fqns_per_model_part=None),
    )
    config.training.seq_len = 8192
    return config
"""
    data, said = converted(tmp_path, "c.py", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert (data["training"]["seq_len"], data["parallelism"]["dp"]) == (8192, 8)
    assert "parallelism.data_parallel_shard_degree = 'shards': is no plain value, so the default is taken" in said
    assert "module_fqns" not in said


DERIVED = """
from torchtitan.models.llama3 import model_registry

def llama3_8b():
    return Trainer.Config(
        model_spec=model_registry("8B"),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
        training=TrainingConfig(local_batch_size=1, seq_len=8192),
        compile=CompileConfig(enable=True, components=["loss"]),
        activation_checkpoint=SelectiveAC.Config(),
    )

def mxfp8():
    config = llama3_8b()
    config.compile = CompileConfig(enable=True)
    config.loss = CrossEntropyLoss.Config()
    config.model_spec = model_registry("70B", converters=[MXFP8LinearConverter.Config(model_compile_enabled=True)])
    config.activation_checkpoint = FullAC.Config()
    return config

def longer():
    config = mxfp8()
    config.training.seq_len = 16384
    return config

def helper(config):
    other = loop()
def loop():
    config = helper2()
    return TrainingConfig(local_batch_size=2)
def helper2():
    config = loop()
"""


def test_a_python_config_that_begins_with_another(tmp_path: Path) -> None:
    """As most of models/*/config_registry.py of release 0.3.0 do."""
    machine = ("--cluster", "dgx-b200", "--gpus", "8", "--config")
    data, _ = converted(tmp_path, "c.py", DERIVED, *machine, "mxfp8")
    t = data["training"]
    assert (data["model"], t["seq_len"], t["micro_batch_size"], t["precision"]) == ("llama3.1-70b", 8192, 1, "mxfp8")
    assert (t["framework"], t["cross_entropy"], t["recompute"]) == ("compiled", "fused", "full")
    data, _ = converted(tmp_path, "c.py", DERIVED, *machine, "longer")
    assert (data["model"], data["training"]["seq_len"], data["training"]["recompute"]) == (
        "llama3.1-70b",
        16384,
        "full",
    )
    data, _ = converted(tmp_path, "c.py", DERIVED, *machine, "loop", "--model", "llama3-8b")
    assert (data["training"]["seq_len"], data["training"]["micro_batch_size"]) == (2048, 2)


def test_a_python_config_whose_loss_is_computed_in_chunks(tmp_path: Path) -> None:
    """Release 0.3.0, components/loss.py; all of its shipped configs have it."""
    chunks = "loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()), training="
    text = TITAN_PYTHON.replace("training=", chunks)
    options = ("--cluster", "dgx-h100", "--config", "llama3_8b", "--model", "llama3-8b")
    data, _ = converted(tmp_path, "c.py", text, *options)
    assert data["parallelism"]["tp"] == 8
    assert (data["training"]["cross_entropy"], data["training"]["loss_chunks"]) == ("chunked", 8)
    more, _ = converted(tmp_path, "c.py", text.replace("Config(loss_fn", "Config(num_chunks=32, loss_fn"), *options)
    assert more["training"]["loss_chunks"] == 32
    plain, _ = converted(tmp_path, "c.py", text.replace("ChunkedLossWrapper", "Other"), *options)
    assert "cross_entropy" not in plain["training"]


def test_an_optimizer_of_a_python_config_that_is_not_adam_is_named(tmp_path: Path) -> None:
    options = ("--cluster", "dgx-h100", "--config", "llama3_8b", "--model", "llama3-8b")
    for made, named in (("default_adamw(lr=3e-4)", False), ("dist_muon(spec, lr=3e-4)", True)):
        text = TITAN_PYTHON.replace("training=", f"optimizer={made}, training=")
        _, said = converted(tmp_path, "c.py", text, *options)
        assert ("not expressed here: optimizer.name" in said) == named


@pytest.mark.parametrize(
    ("degrees", "shard_size"),
    [
        ("data_parallel_replicate_degree=8, data_parallel_shard_degree=1", 1),
        ("tensor_parallel_degree=8", None),
        ("pipeline_parallel_degree=8, pipeline_parallel_schedule='1F1B'", None),
    ],
)
def test_one_shard_is_under_fsdp_too(tmp_path: Path, degrees: str, shard_size: int | None) -> None:
    """torchtitan 0.3.0 (models/llama3/parallelize.py: `apply_fsdp_to_decoder`), for its casts to 16 bits."""
    text = f"""
from torchtitan.models.llama3 import model_registry

def train():
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=8, seq_len=2048),
        parallelism=ParallelismConfig({degrees}),
    )
"""
    data, said = converted(tmp_path, "c.py", text, "--cluster", "dgx-h100", "--gpus", "8")
    p = data["parallelism"]
    assert (p["zero"], p.get("shard_size"), data["training"]["precision"]) == (3, shard_size, "bf16")
    assert "precision fp32" not in said


def test_a_step_of_reinforcement_learning_is_no_training_step(tmp_path: Path) -> None:
    """torchtitan 0.3.0, experiments/rl/examples: a `Controller.Config` whose `trainer` has a training's parts."""
    text = "from torchtitan.experiments.rl.actors.trainer import PolicyTrainer\n" + TITAN_PYTHON
    said = refused(tmp_path, "c.py", text, "--cluster", "dgx-h100", "--config", "llama3_8b")
    assert "c.py: a step of reinforcement learning, of which a training step is a part: a scenario with `rl`" in said
