"""A key of a scenario that is changed changes what is written for another trainer, is named there, or is refused."""

from __future__ import annotations

import pytest

from sim.core.errors import InputError
from sim.emit import TRAINERS, emit
from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from tests.sim.inputs.test_keys_each_changed import CHANGES, LAYOUTS
from tests.sim.small_scenario import small


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("at", range(len(LAYOUTS)))
def test_a_changed_key_is_written_named_or_refused(trainer: str, at: int) -> None:
    layout, training, model = LAYOUTS[at]
    unsaid = {key.partition(".")[2]: value for key, value in TRAINERS[trainer].unsaid.items() if key[0] == "t"}
    batch = {"global_batch_size": 8, **unsaid, **training}
    base = small(model={**model, "layers": 4, "norm": "rmsnorm"}, training=batch, parallelism=layout)
    before, silent = written(base, trainer), list[str]()
    if before is None:
        return
    for section, keys in CHANGES.items():
        for key, values in keys.items():
            for value in values:
                changed = merge(base, {section: {key: value}})
                after = written(changed, trainer)
                if after == before and differ(base, changed):
                    silent.append(f"{section}.{key}: {value}")
    assert silent == []


def written(data: dict[str, object], trainer: str) -> str | None:
    try:
        return emit(parse_scenario(data), trainer)
    except InputError:
        return None


def differ(one: dict[str, object], other: dict[str, object]) -> bool:
    """Whether two scenarios' steps differ."""
    first, second = (simulate(parse_scenario(data), engine="static").outcome for data in (one, other))
    return (first.step_time_s, first.peak_memory_bytes) != (second.step_time_s, second.peak_memory_bytes)


@pytest.mark.parametrize("trainer", ["megatron", "torchtitan"])
def test_layers_without_attention_are_refused(trainer: str) -> None:
    model = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "attention_pattern": ["none", "full"]}
    training = {"seq_len": 1024, "global_batch_size": 8}
    scenario = parse_scenario({"model": model, "cluster": "dgx-h100", "training": training})
    with pytest.raises(InputError, match=r"model\.attention_pattern: found .'none', 'full'"):
        emit(scenario, trainer)


def test_a_kernel_that_flags_do_not_choose_is_named_in_a_note() -> None:
    training = {"seq_len": 1024, "global_batch_size": 8, "framework": "megatron", "attention_kernel": "flash3"}
    scenario = parse_scenario({"model": "gpt3-6.7b", "cluster": "dgx-h100", "training": training})
    assert "attention_kernel" in emit(scenario, "megatron")
