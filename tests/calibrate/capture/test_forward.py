"""A forward alone, as inference runs it: captured without backward and optimizer, simulated, and run for real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.program_file import CapturedProgram, read_program
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.captured.model import captured_model
from sim.simulation import simulate
from tests.modules import run_module

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")
pytest.importorskip("transformers", reason="a Hugging Face config needs transformers")

LAYERS, HIDDEN, HEADS, KV_HEADS, MLP, VOCABULARY = 3, 64, 4, 2, 128, 512
ROWS, TOKENS, NEW = 2, 32, 5
LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
}
LAYER = HIDDEN * (2 * HIDDEN + 2 * HIDDEN * KV_HEADS // HEADS + 3 * MLP)  # weights of its matmuls
T5 = {"model_type": "t5", "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": 64}


def captured(folder: Path, config: dict[str, Any], device: str = "cuda", **more: Any) -> CapturedProgram:
    from calibrate.capture.huggingface.step import huggingface_maker
    from calibrate.capture.options import Options

    return written(folder, huggingface_maker(config, Options(TOKENS, ROWS, **more)), device)


def written(folder: Path, make: Callable[[], Any], device: str = "cuda") -> CapturedProgram:
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record

    step, recorder = record(make, device)
    path = folder / f"{len(list(folder.iterdir()))}.json.gz"  # read programs are kept by their paths
    write_program(path, step, recorder)
    return read_program(path)


def scenario(program: CapturedProgram, cluster: str = "dgx-h100", **more: Any) -> Scenario:
    training = {"global_batch_size": program.micro_batch_size}
    return parse_scenario(
        {"name": "x", "model": {"program": program.path}, "training": training, "cluster": cluster, **more}
    )


def test_its_flops_are_two_for_each_weight_and_token_and_attention(tmp_path: Path) -> None:
    program = captured(tmp_path, LLAMA, forward=True)
    weights = LAYERS * LAYER + HIDDEN * VOCABULARY
    attention = LAYERS * 4 * ROWS * TOKENS * TOKENS * HIDDEN
    assert captured_model(program.path).flops[1] == 2 * weights * ROWS * TOKENS + attention
    assert program.forward_alone
    assert {s.kind for s in program.storages} == {"frozen parameter", "buffer", "temporary"}
    assert not any(p.trained for p in program.parameters)


def test_it_is_the_forward_of_the_training_step(tmp_path: Path) -> None:
    """The same operators, so the same time; a step also has a backward, and keeps what it reads."""
    from calibrate.capture import Step

    def make(trains: bool) -> Step:
        layers = [x for _ in range(3) for x in (torch.nn.Linear(256, 256), torch.nn.GELU())]
        model, x = torch.nn.Sequential(*layers), torch.zeros(64, 256)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True) if trains else None
        return Step(model, lambda: model(x).square().mean(), optimizer, 64, 1)

    both = written(tmp_path, lambda: make(True))
    trained = simulate(scenario(both))
    alone = written(tmp_path, lambda: make(False))
    forward = [(o.name, o.module, o.inputs, o.outputs) for o in both.operators if o.phase == "forward"]
    assert [(o.name, o.module, o.inputs, o.outputs) for o in alone.operators] == forward
    simulated = simulate(scenario(alone))
    span = next(s for s in trained.timeline.spans() if s.kind == "F")
    assert simulated.outcome.step_time_s == pytest.approx(span.end_s - span.start_s, rel=1e-9)
    parameters, activation = 4 * sum(p.elements for p in both.parameters), 4 * 64 * 256
    # the step's own input, a layer's, and its result; two workspaces of 32 MiB (cuBLAS)
    assert simulated.outcome.peak_memory_bytes == 2 * 2**25 + parameters + 3 * activation
    assert trained.outcome.peak_memory_bytes > simulated.outcome.peak_memory_bytes + 2 * parameters


def test_generation_is_a_forward_of_the_prompt_and_one_for_each_further_token(tmp_path: Path) -> None:
    program = captured(tmp_path, LLAMA, new_tokens=NEW)
    attention = [o for o in program.operators if o.name.startswith("aten._scaled_dot_product")]
    lengths = [(o.inputs[0].shape[2], o.inputs[1].shape[2]) for o in attention if "layers.0." in o.module]
    assert lengths == [(TOKENS, TOKENS), *((1, TOKENS + i) for i in range(1, NEW))]
    heads = [o.inputs[0].shape for o in program.operators if o.name == "aten.mm" and o.module == "lm_head"]
    assert heads == [(ROWS, HIDDEN)] * NEW  # of the prompt the last token alone
    assert program.seq_len == TOKENS + NEW


@pytest.mark.parametrize("config", [LLAMA, T5], ids=["llama", "t5"])
@pytest.mark.parametrize("more", [{"forward": True}, {"new_tokens": NEW}], ids=["forward", "generate"])
def test_a_real_run_has_the_same_operators_and_memory(
    tmp_path: Path, config: dict[str, Any], more: dict[str, Any]
) -> None:
    from calibrate.real_steps.measure_program import ProgramRunner, check_program, differences

    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    program = captured(tmp_path, config, "cpu", **more)
    s = scenario(program, "cpu-host")
    real = ProgramRunner(s, check_program(s, "x"), str(tmp_path), "cpu")
    assert [r.kind for r in real.step(real.batch(0))] == ["F"]
    assert differences(program, real.operators(), 1) == {}
    assert simulate(s).outcome.peak_memory_bytes == pytest.approx(real.peak_bytes(), rel=0.03)  # rounded to 512


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"pp": 2}, "found 2; must be 1, because a captured forward is not cut into stages; dp runs it on more GPUs"),
        ({"dp": 2, "zero": 3}, "found 3; a captured forward alone has nothing to reduce or update: 0"),
    ],
)
def test_it_is_not_split(tmp_path: Path, layout: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        scenario(captured(tmp_path, LLAMA, forward=True), parallelism=layout)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--forward", "--generate", "4"], "--generate: cannot be given with --forward; it runs the prompt's forward"),
        (["--forward", "--compile"], "--forward: cannot be given with --compile; leave one of them out"),
        (["--generate", "4", "--gradient-checkpointing"], "--generate: cannot be given with --gradient-checkpointing"),
        (["--generate", "4"], "--generate: BertForMaskedLM generates no tokens; --forward captures its forward"),
    ],
)
def test_what_cannot_be_captured_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = run_module("calibrate.capture", ".", "--out", "p.json.gz", *words, cwd=tmp_path)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_the_command_says_that_it_captured_a_forward(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    done = run_module("calibrate.capture", ".", "--forward", "--out", "p.json.gz", cwd=tmp_path)
    assert "a forward alone (no backward, no optimizer): " in done.stdout, done.stderr
    (tmp_path / "x.yaml").write_text(
        "{version: 1, model: {program: p.json.gz}, training: {global_batch_size: 2}, cluster: dgx-h100}"
    )
    shown = run_module("sim.run", "x.yaml", cwd=tmp_path)
    assert "3 blocks, a forward alone" in shown.stdout, shown.stderr
