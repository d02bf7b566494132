"""The space that a search goes through is what parsing accepts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import schedules
from sim.core.errors import InputError
from sim.inputs.overrides import merge
from sim.inputs.scenario import parse_scenario
from sim.search.space import Layout, MeshSizes, is_legal, mesh_is_legal, scenario_of
from tests.sim.search.search_spaces import BASE, VARIANTS, legal, legal_layouts, space_of, varied


def mapping_of(variant: int, x: Layout) -> dict[str, Any]:
    """A layout's scenario as a user would write it."""
    space = space_of(variant)
    degrees = {k: v for k, v in x._asdict().items() if k not in ("micro_batch_size", "recompute")}
    recompute = space.recomputes[x.recompute].model_dump()
    data = merge(BASE, VARIANTS[variant])
    training = {**data["training"], "micro_batch_size": x.micro_batch_size, "recompute": recompute}
    return {**data, "parallelism": {**data["parallelism"], **degrees}, "training": training}


def accepted(variant: int, x: Layout) -> bool:
    """What parsing says."""
    try:
        parse_scenario(mapping_of(variant, x), "test")
    except InputError:
        return False
    return True


any_layout = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 3, 4, 8, 16]),
    sp=st.booleans(),
    cp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3, 4]),
    dp=st.sampled_from([1, 2, 4, 8]),
    ep=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
    schedule=st.sampled_from(list(schedules.FORMS)),
    virtual_stages=st.just(1),
    micro_batch_size=st.sampled_from([1, 2, 3, 4, 16]),
    recompute=st.sampled_from(["none", "selective", "selective_op", "full"]),
    tp_overlap=st.sampled_from(["none", "wgrad", "full"]),
)


OF_ANY_SIZE = [n for n, changes in enumerate(VARIANTS) if "faults" not in changes]  # others are of eight ranks


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(OF_ANY_SIZE), any_layout, st.integers(2, 3))
def test_own_rules_are_those_of_parsing(variant: int, x: Layout, v: int) -> None:
    form = schedules.FORMS[x.schedule]
    per_rank = v if form.least_stages else form.stages_per_rank
    x = x._replace(virtual_stages=per_rank if x.pp > 1 else 1)
    gpus = x.tp * x.cp * x.pp * x.dp
    space = space_of(variant, gpus)
    mesh = MeshSizes(x.tp, x.cp, x.pp, x.dp, x.ep)
    assert (mesh_is_legal(space, mesh) and is_legal(space, x)) == accepted(variant, x)


def test_rules_of_the_training_section_narrow_the_space() -> None:
    """A chunked loss is simulated without tensor parallelism, adapters without selective_op."""
    adapted = legal(varied({"training": {"lora": {"rank": 4}}, "model": {"tied_embeddings": False}}, 8))
    assert {x.tp for x in adapted} == {1, 2, 4, 8}
    assert {x.recompute for x in adapted} == {"none", "selective", "full"}
    assert {x.tp for x in legal(varied({"training": {"cross_entropy": "chunked"}}, 8))} == {1}


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_enumeration_misses_nothing_legal(variant: int) -> None:
    listed = set(legal_layouts(variant))
    assert len(listed) == len(legal_layouts(variant))
    degrees = (1, 2, 4, 8)
    missing = 0
    for tp, cp, pp in itertools.product(degrees, repeat=3):
        if 8 % (tp * cp * pp):
            continue
        for ep, zero, name in itertools.product((1, 2, 4), (0, 3), ("1f1b", "gpipe", "zb_v", "interleaved_1f1b")):
            dp = 8 // (tp * cp * pp)
            v = 2 if name in ("zb_v", "interleaved_1f1b") and pp > 1 else 1
            overlap = space_of(variant).base.parallelism.tp_overlap if tp > 1 else "none"
            x = Layout(tp, False, cp, pp, dp, ep, zero, name, v, 2, "full", overlap)
            same = (
                (pp == 1 and name != "1f1b")
                or (zero and dp * cp == 1)
                or pp * v > space_of(variant).base.model.layers + 2
            )
            missing += not same and accepted(variant, x) and x not in listed
    assert missing == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_scenario_of_a_layout_is_the_parsed_one(data: st.DataObject) -> None:
    variant = data.draw(st.integers(0, len(VARIANTS) - 1))
    x = data.draw(st.sampled_from(legal_layouts(variant)))
    made = scenario_of(space_of(variant), x)
    assert made.model_dump() == parse_scenario(mapping_of(variant, x), "test").model_dump()
    assert parse_scenario(made.model_dump(mode="json"), "test").model_dump() == made.model_dump()


def test_a_layouts_own_stage_decides_in_what_gradients_are_reduced() -> None:
    """Accelerate's FSDP reduces in 16 bits, where nothing else is written (`as_reduced`)."""
    space = varied({"training": {"framework": "transformers"}}, 8)
    found = {
        (x.zero, scenario_of(space, x).for_training.grad_reduce_dtype)
        for x in legal(space)
        if (x.tp, x.cp, x.pp, x.recompute) == (1, 1, 1, "none")
    }
    assert found == {(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "bf16")}
