"""What a scenario of reinforcement learning may hold: mistakes, warnings, commands that are not for it."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from sim.commands.explore import make_server
from sim.commands.run import main as run
from sim.core.errors import InputError
from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from sim.rl.answers import draw_answers
from sim.rl.parts import engine_scenario
from sim.rl.simulation import simulate_rl
from sim.simulation import simulate
from tests.sim.rl.test_rl import SCENARIOS, SMALL


def test_an_engine_that_goes_by_an_unknown_length_says_so() -> None:
    engine = {"rl": {"generation": {"engine": "vllm-0.6", "max_batch_tokens": 4096}}}
    unknown = {"model": {"preset": "llama3.2-1b", "trained_positions": None}}
    warned = [parse_scenario(merge(SMALL, merge(engine, more)), "small").warnings for more in ({}, unknown)]
    assert [[w.split("with ")[1] for w in own if "unknown; " in w] for own in warned] == [[], ["chunked_prefill false"]]


def test_the_engines_warnings_name_its_own_keys() -> None:
    a100 = {"cluster": "dgx-a100", "rl": {"generation": {"quantization": "fp8"}}}
    warnings = simulate_rl(parse_scenario(merge(SMALL, a100), "small")).outcome.warnings
    found = [text for text in warnings if "multiplies no fp8" in text]
    assert [text.partition(":")[0] for text in found] == ["rl.generation.quantization"]


@pytest.mark.parametrize(
    "given",
    ["plan-batch", "emit megatron", "topology x.html", "chakra x", "advise", "steps 3", "runs 5", "tokens 1e9"],
)
def test_no_option_is_dropped_in_silence(given: str) -> None:
    option, *value = f"--{given}".split()
    done = CliRunner().invoke(run, [str(SCENARIOS / "rl_grpo_llama8b.yaml"), option, *value])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith(f"rl_grpo_llama8b.yaml: {option}: is not for an rl step\n")


def test_explore_refuses_a_step() -> None:
    with pytest.raises(InputError, match="explore: is not for an rl step"):
        make_server(SCENARIOS / "rl_grpo_llama8b.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rl": {"steps_off": 1}}, "rl.steps_off: found 1; colocated generation and training take turns"),
        ({"rl": {"colocated": False, "transfer": "ipc"}}, "rl.transfer: found 'ipc'"),
        ({"rl": {"prompt_len": 2000}}, "rl.prompt_len: found"),
        (
            {"rl": {"critic": "gpu"}, "training": {"lora": {"rank": 8}}},
            "rl.critic: found 'gpu'; a critic beside adapters",
        ),
        ({"rl": {"prompts_per_step": 9}}, "training.global_batch_size: found 32; must divide 36 answers of a step"),
        ({"rl": {"generation": {"tp": 3}}}, "rl.generation.tp: found 3; must divide model.heads"),
        ({"rl": {"generation": {"tp": 8}}}, "rl.generation.replicas: found null; one replica needs 8 GPUs"),
        (
            {"rl": {"generation": {"replicas": 9}}},
            "rl.generation.replicas: found 9 replicas of 1 GPU; with colocated true",
        ),
        ({"rl": {"generation": {"engin": "vllm-v1"}}}, "unknown key; did you mean 'engine'"),
        ({"rl": {"reward": "judge"}}, "rl.reward: found 'judge'; must be rule, or a mapping"),
        ({"rl": {"reward": {"tp": 2}}}, "rl.reward.model: is required and missing"),
        ({"rl": {"reward": {"model": "gpt2", "tp": 5}}}, "rl.reward.tp: found 5; must divide the model's heads (12)"),
        ({"rl": {"output_len": "long"}}, "rl.output_len: found 'long'; must be a number of tokens"),
        ({"rl": {"output_len": {"mean": 5000}}}, "rl.output_len: found a mean of 5000; must be at most the longest"),
        (
            {"rl": {"prompt_len": {"mean": 600, "sigma": 0.1}}},
            "512 (rl.prompt_len.max, by default half of training.seq",
        ),
        (
            {"training": {"seq_len": 2048}, "rl": {"reward": {"model": "gpt2"}}},
            "rl.reward.model.max_positions: found 1024; learned positions must cover 2048 tokens",
        ),
        (
            {"training": {"packing": {"mean_seq_len": 100}}},
            "training.packing: cannot be combined with rl; rl.sequences says how",
        ),
        ({"training": {"tokens": 1e9}}, "training.tokens: cannot be combined with rl; one rl step is simulated"),
        (
            {"training": {"batch_schedule": [{"from_tokens": 0, "global_batch_size": 16}]}},
            "training.batch_schedule: cannot be combined with rl",
        ),
        (
            {"inference": {"requests": {"prompt_len": 1, "output_len": 1}}},
            "inference: cannot be combined with rl; rl.generation",
        ),
        ({"faults": {"jitter": {"sigma": 0.1}}}, "faults: cannot be combined with rl"),
        ({"training": None}, "training: is required and missing (it describes the updates of rl)"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_scenario(merge(SMALL, change), "small")
    assert message in str(caught.value)


def test_other_commands_say_what_to_do() -> None:
    with pytest.raises(InputError, match="simulate_rl"):
        simulate(parse_scenario(SMALL, "small"))


def test_the_engine_cuts_prompts_as_it_does_on_such_gpus_for_such_a_model() -> None:
    """Chunks and their budget come from the same defaults: vLLM 0.6 has both for a long model alone."""
    data = merge(SMALL, {"rl": {"generation": {"engine": "vllm-0.6"}}})
    for model, found in (("llama3.2-1b", (True, 512)), ("llama3-8b", (False, 8192))):
        s = parse_scenario({**data, "model": model})
        i = engine_scenario(s, s.rl, draw_answers(s.rl, 1024)).for_serving
        assert (i.chunked_prefill, i.max_batch_tokens) == found


def test_a_reward_model_of_learned_positions_reads_back_the_same() -> None:
    """What the workload sizes is written out, and then no longer told from a table of the model's own."""
    reward = {"layers": 2, "hidden": 64, "heads": 2, "vocab": 128, "positions": "learned"}
    s = parse_scenario(merge(SMALL, {"rl": {"reward": {"model": reward}}}), "small")
    assert parse_scenario(s.model_dump(mode="json")).rl == s.rl
