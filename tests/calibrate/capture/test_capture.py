"""Capture of training steps that somebody else wrote."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sim.core.program import Compute
from sim.inputs.scenario import parse_scenario
from sim.models.captured.model import captured_model
from sim.models.dims import Shard
from sim.models.embedding import embedding_block
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from tests.modules import run_module

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from calibrate.capture import Step  # noqa: E402
from calibrate.capture.run_step import record  # noqa: E402

SOURCE = """
import torch
from calibrate.capture import Step

def step():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    x = torch.zeros(32, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Step(model, lambda: model(x).square().mean(), optimizer, 32, 1, "bf16", 1.0)

def wrong():
    model = torch.nn.Linear(4, 4)
    return Step(model, lambda: model(torch.zeros(3, 5)).sum(), torch.optim.AdamW(model.parameters()), 3, 1)

def nothing():
    return 1
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(SOURCE, encoding="utf-8")
    return run_module("calibrate.capture", *words, cwd=folder)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("capture")
    done = run(folder, "mine:step", "--out", "p.json.gz")
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads(gzip.decompress((folder / "p.json.gz").read_bytes()))
    return data


def rows(program: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Operators of one name, with phase, module and tensors in words."""
    tables, ops = program["tables"], program["operators"]
    return [
        {
            "phase": tables["phases"][ops["phase"][i]],
            "module": tables["modules"][ops["module"][i]],
            "inputs": [tables["tensors"][t] for t in ops["inputs"][i]],
            "outputs": [tables["tensors"][t] for t in ops["outputs"][i]],
            "launches": ops["launches"][i],
        }
        for i, n in enumerate(ops["name"])
        if tables["names"][n] == name
    ]


def test_matmuls_run_in_16_bits_in_their_modules(program: dict[str, Any]) -> None:
    forward = rows(program, "aten.addmm")
    assert [(r["phase"], r["module"]) for r in forward] == [("forward", "0"), ("forward", "2")]
    assert all(t[0] == "bf16" for r in forward for t in r["inputs"])
    backward = rows(program, "aten.mm")  # the first layer's input needs no gradient
    assert [(r["phase"], r["module"]) for r in backward] == [("backward", "2"), ("backward", "2"), ("backward", "0")]


def test_a_multiply_add_counts_what_the_shapes_say(program: dict[str, Any]) -> None:
    def flops(r: dict[str, Any]) -> int:
        a, b = [t[1] for t in r["inputs"] if len(t[1]) == 2][-2:]
        return int(2 * a[0] * a[1] * b[1])

    one = 2 * 32 * 64 * 256
    assert sum(flops(r) for name in ("aten.addmm", "aten.mm") for r in rows(program, name)) == 5 * one


def test_views_launch_nothing(program: dict[str, Any]) -> None:
    assert all(r["launches"] == 0 for r in rows(program, "aten.t"))
    assert all(r["launches"] == 1 for r in rows(program, "aten.gelu"))


def test_lives_of_storages(program: dict[str, Any]) -> None:
    kinds, s = program["tables"]["kinds"], program["storages"]
    total: dict[str, int] = {}
    for size, kind in zip(s["bytes"], s["kind"], strict=True):
        total[kinds[kind]] = total.get(kinds[kind], 0) + size
    parameters = 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert total["parameter"] == total["gradient"] == parameters
    assert total["optimizer state"] == 2 * parameters
    saved = 32 * 64 * 2 + 32 * 256 * 2 * 2 + 2 * 64 * 256  # inputs of both layers and of GELU; the second's weight
    assert total["activation"] >= saved


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("mine:wrong", "mine.py:13: RuntimeError: a and b must have same reduction dim"),
        ("mine:nothing", "must return a calibrate.capture.Step"),
        ("mine:missing", "has no missing"),
        ("nowhere.json", "nowhere.json: no such file"),
        ("mine", "allowed: a config.json, its folder, or package.module:function"),
        ("train.py", "write --script train.py --world-size N for a training script"),
    ],
)
def test_what_fails_is_one_message(tmp_path: Path, what: str, said: str) -> None:
    done = run(tmp_path, what, "--out", "p.json.gz")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "p.json.gz").exists()


def test_hugging_face_config(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="a Hugging Face config needs transformers")
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for extra in ([], ["--gradient-checkpointing"]):
        words = ["--seq-len", "64", "--autocast", "bf16", *extra]
        done = run(tmp_path, str(tmp_path), "--out", "p.json.gz", *words)
        assert done.returncode == 0, done.stderr
        program = json.loads(gzip.decompress((tmp_path / "p.json.gz").read_bytes()))
        attention = rows(program, "aten._scaled_dot_product_cudnn_attention")
        phases = [r["phase"] for r in attention]
        assert phases == ["forward"] * 2 + (["recomputed"] * 2 if extra else [])
        assert attention[0]["inputs"][1][1] == [1, 2, 64, 16]  # as many KV heads as the model has


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (
            {
                "model_type": "bert",
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 128,
                "vocab_size": 100,
                "max_position_embeddings": 64,
            },
            82_084,
        ),
        (
            {
                "model_type": "t5",
                "d_model": 64,
                "d_kv": 16,
                "num_layers": 2,
                "num_heads": 4,
                "d_ff": 128,
                "vocab_size": 100,
                "decoder_start_token_id": 0,
                "pad_token_id": 0,
            },
            171_264,
        ),
    ],
)
def test_encoders_are_captured_as_they_are_pre_trained(tmp_path: Path, config: dict[str, Any], parameters: int) -> None:
    """As many parameters as AutoModelForMaskedLM and AutoModelForSeq2SeqLM have."""
    pytest.importorskip("transformers", reason="a Hugging Face config needs transformers")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = run(tmp_path, str(tmp_path), "--out", "p.json.gz", "--seq-len", "32")
    assert done.returncode == 0, done.stderr
    program = json.loads(gzip.decompress((tmp_path / "p.json.gz").read_bytes()))
    assert sum(elements for _, elements, *_ in program["parameters"]) == parameters


SCENARIO = {
    "name": "small",
    "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 512},
    "training": {"seq_len": 128, "micro_batch_size": 2, "global_batch_size": 2, "precision": "fp32"},
    "cluster": "cpu-host",
}
BUNDLED = """
import sys, json
import torch
from calibrate.capture import Step
from calibrate.bundled_model.model import _make_block
from calibrate.parallel.comm import Group, Tape
from calibrate.parallel.expert import ExpertParallel
from calibrate.bundled_model.rotation import make_constants
from sim.inputs.scenario import parse_scenario

def step():
    s = parse_scenario(json.loads(SCENARIO))
    m, t = s.model, s.for_training
    dtype = torch.bfloat16 if t.precision == "bf16" else torch.float32
    constants = make_constants(m, t.seq_len, "cpu", dtype)
    blocks = [_make_block(m, t, i, None, constants) for i in range(m.layers + 2)]
    tokens = torch.zeros(t.micro_batch_size, t.seq_len, dtype=torch.long)
    numbers, alone = torch.arange(tokens.numel()), [Group(name, (0,), 0, None, Tape()) for name in ("ep", "expert_tp")]
    for layer in blocks[1:-1]:
        if layer.moe is not None:
            layer.moe = ExpertParallel(layer.moe, *alone, numbers)

    def loss():
        x = tokens
        for block in blocks[:-1]:
            x = block(x)
        return blocks[-1](x, tokens)

    model = torch.nn.ModuleList(blocks).to(dtype)
    return Step(model, loss, torch.optim.AdamW(model.parameters()), t.seq_len, t.micro_batch_size)
"""


LLAMA = {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rope", "kv_heads": 2}


LATENT = {
    **{k: v for k, v in LLAMA.items() if k != "kv_heads"},
    "mla": {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}
MOE = {"experts": 8, "top_k": 2, "ffn": 96}
FINE = {"experts": 48, "top_k": 6, "ffn": 32, "shared_experts": 2}  # 1,536 copies of tokens, 32 for each expert


@pytest.mark.parametrize(
    ("model", "attention", "precision"),
    [
        ({"moe": MOE}, "unfused", "fp32"),
        ({**LLAMA, "moe": FINE}, "fused", "bf16"),
        ({**LLAMA, "hidden": 128, "moe": {**MOE, "experts": 6, "top_k": 1, "capacity_factor": 1.0}}, "unfused", "bf16"),
        ({**LATENT, "moe": FINE}, "unfused", "fp32"),
        ({}, "unfused", "fp32"),
        ({}, "fused", "bf16"),
        (LLAMA, "unfused", "fp32"),
        (LLAMA, "fused", "bf16"),
        (LATENT, "unfused", "fp32"),
        (LATENT, "fused", "bf16"),
    ],
)
def test_bundled_model_is_as_it_is_described(
    tmp_path: Path, attention: str, precision: str, model: dict[str, Any]
) -> None:
    """The simulator's own description and the captured implementation agree in flops and in what a layer saves."""
    training = {**SCENARIO["training"], "attention": attention, "precision": precision}  # type: ignore[dict-item]
    data = {**SCENARIO, "training": training, "model": {**SCENARIO["model"], **model}}  # type: ignore[dict-item]
    (tmp_path / "bundled.py").write_text(f"SCENARIO = {json.dumps(json.dumps(data))}\n{BUNDLED}", encoding="utf-8")
    done = run(tmp_path, "bundled:step", "--out", "p.json.gz")
    assert done.returncode == 0, done.stderr
    captured = [b for b in captured_model(str(tmp_path / "p.json.gz")).pieces if b.forward]
    scenario = parse_scenario({**data, "cluster": "dgx-h100"})
    layers = [layer_block(scenario, i, Shard()) for i in range(2)]
    described = [embedding_block(scenario), *layers, head_block(scenario)]
    for kinds in (("gemm", "grouped_gemm"), ("attention_forward",), ("attention_backward",)):
        flops = [
            [
                sum(c.flops for c in (*b.forward, *b.backward) if isinstance(c, Compute) and c.kind in kinds)
                for b in blocks
            ]
            for blocks in (captured, described)
        ]
        assert flops[0] == flops[1]
    saved = [sum(x.bytes for x in blocks[2].saved) for blocks in (captured, described)]  # the first shares its mask
    assert saved[0] == pytest.approx(saved[1], rel=0.01)


def test_what_a_model_makes_in_its_first_forward_alone_is_in_no_step() -> None:
    """A mask that is built once and kept costs nothing from the second step on."""

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)
            self.mask: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mask is None:
                self.mask = torch.ones(8, 8).tril().cumsum(0)
            return self.inner(x) * self.mask

    def step() -> Step:
        model, x = Masked(), torch.zeros(8, 8)
        return Step(model, lambda: model(x).sum(), torch.optim.SGD(model.parameters()), 8, 1)

    names = [row.name for row in record(step)[1].rows if row.phase == "forward"]
    assert "aten.mul" in names
    assert not {"aten.ones", "aten.tril", "aten.cumsum"} & set(names)


def test_views_in_place_start_no_kernel() -> None:
    def step() -> Step:
        model, x = torch.nn.Linear(8, 8), torch.zeros(8, 8)

        def loss() -> torch.Tensor:
            return model(x).sin().unsqueeze_(0).squeeze_(0).sum()

        return Step(model, loss, torch.optim.SGD(model.parameters()), 8, 1)

    launches = {row.name: row.launches for row in record(step)[1].rows}
    assert (launches["aten.unsqueeze_"], launches["aten.squeeze_"], launches["aten.sin"]) == (0, 0, 1)


def test_results_without_elements_start_no_kernel() -> None:
    """As the rest of a head that has rope as a whole (Phi-3), which is cast and copied."""

    def step() -> Step:
        model, x = torch.nn.Linear(8, 8), torch.zeros(8, 8)

        def loss() -> torch.Tensor:
            y = model(x)
            return y.sum() + y[:, 8:].exp().sum()

        return Step(model, loss, torch.optim.SGD(model.parameters()), 8, 1)

    forward = [row for row in record(step)[1].rows if row.phase == "forward"]
    assert [row.launches for row in forward if row.name in ("aten.exp", "aten.sum")] == [1, 0, 1]


def test_each_operator_of_the_table_of_kernels_is_torchs() -> None:
    from sim.models.captured.kernels import KERNELS
    from sim.models.captured.operators import SOLVERS

    names = [name.removeprefix("aten.") for name in (*KERNELS, *SOLVERS) if name.startswith("aten.")]
    assert [name for name in names if not hasattr(torch.ops.aten, name)] == []


def test_a_deep_copy_has_its_weights_once() -> None:
    """As a reference model has, or an average of weights."""
    import copy

    def step() -> Step:
        model, x = torch.nn.Linear(64, 64, bias=False), torch.zeros(8, 64)
        reference = copy.deepcopy(torch.nn.ModuleList([model, model])).requires_grad_(False)
        assert reference[0].weight is reference[1].weight
        optimizer = torch.optim.SGD(model.parameters())
        return Step(model, lambda: (model(x) - reference[0](x)).square().sum(), optimizer, 8, 1)

    recorder = record(step)[1]
    weights = [life for life in recorder.lives if life.bytes == 4 * 64 * 64 and life.kind != "gradient"]
    assert len(weights) == 2
    assert not [row for row in recorder.rows if row.name == "aten.t" and row.launches]


def test_a_roll_over_two_dimensions_is_two_and_a_distance_is_a_matmul() -> None:
    def step() -> Step:
        model, x = torch.nn.Linear(64, 64), torch.zeros(48, 64)

        def loss() -> torch.Tensor:
            y = torch.roll(model(x), (1, 2), (0, 1))
            return torch.cdist(y, torch.zeros(32, 64)).sum()

        return Step(model, loss, torch.optim.SGD(model.parameters()), 8, 1)

    forward = [row.name for row in record(step)[1].rows if row.phase == "forward" and row.launches]
    assert forward.count("aten.roll") == 2
    assert forward.count("aten.mm") == 1
    assert "aten._euclidean_dist" not in forward


def test_a_check_of_all_elements_passes() -> None:
    """Its answer is unknown where it depends on weights, and known where it does not."""
    seen = []

    def step() -> Step:
        model, x = torch.nn.Linear(64, 64), torch.zeros(48, 64)

        def loss() -> torch.Tensor:
            y = model(x)
            torch._check_tensor_all(y.sum() == 1)
            seen.append((bool(torch.isfinite(y).all()), bool((x > 0).all())))
            return y.sum()

        return Step(model, loss, torch.optim.SGD(model.parameters()), 8, 1)

    record(step)
    assert seen == [(True, False)] * 2
