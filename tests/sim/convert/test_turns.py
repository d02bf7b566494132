"""Rollouts of several turns: each reader of reinforcement learning says that an answer is simulated as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import OF_RL, converted, converted_rl
from tests.sim.convert.test_grpo import LONG, TRL
from tests.sim.convert.test_openrlhf_ray import TODAY
from tests.sim.convert.test_verl import COMMAND, with_keys

SAID = "{}: an answer is simulated as one, without the waits and prompts between its turns"


def test_of_verl(tmp_path: Path) -> None:
    turns = [f"actor_rollout_ref.rollout.multi_turn.{key}" for key in ("enable=True", "max_assistant_turns=5")]
    data, said = converted_rl(tmp_path, with_keys(COMMAND, *turns))
    assert SAID.format(turns[0].removesuffix("=True")) in said
    assert "not expressed" not in said
    once, said = converted_rl(tmp_path, with_keys(COMMAND, turns[0].replace("True", "False")))
    assert data == once == converted_rl(tmp_path, COMMAND)[0]
    assert "turns" not in said


@pytest.mark.parametrize("key", ["multi_turn_scheduler: math_tip_trick", "max_tool_calling_iterations: 4"])
def test_of_trl_and_ms_swift(tmp_path: Path, key: str) -> None:
    data, said = converted(tmp_path, "a.yaml", f"{TRL}{key}\n", *LONG)
    assert SAID.format(key.split(":")[0]) in said
    plain, said = converted(tmp_path, "a.yaml", TRL, *LONG)
    assert data == plain
    assert "turns" not in said


def test_of_openrlhf(tmp_path: Path) -> None:
    flag = "--train.agent_func_path"
    said = converted(tmp_path, "a.sh", TODAY.replace("--ds.zero_stage", f"{flag} a.py --ds.zero_stage"), *OF_RL)[1]
    assert SAID.format(flag) in said
    assert "turns" not in converted(tmp_path, "a.sh", TODAY, *OF_RL)[1]
