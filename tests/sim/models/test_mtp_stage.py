"""Modules of multi-token prediction on a pipeline stage of their own (`parallelism.mtp_stage`), in closed form."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.actions import Kind
from sim.core.errors import InputError
from sim.core.program import Block, Compute
from sim.emit import emit
from sim.inputs.scenario import load_scenario
from sim.models.balance import with_balanced_stages
from sim.models.embedding import table_elements
from sim.models.parameters import count_parameters
from sim.programs.stages import Stage, stage_input_bytes
from sim.ranks.plan import make_plan
from sim.results.states import states
from sim.simulation import Simulation, simulate
from tests.sim.cases import FREE_LINKS, SCENARIOS, case
from tests.sim.convert.converting import converted, refused
from tests.sim.convert.launch_files import MEGATRON

MODEL = {"hidden": 512, "ffn": 2048, "vocab": 8192, "mtp_layers": 2}
FOUR = {"pp": 4, "layers_per_stage": [4, 4, 0, 0], "p2p_overlap": True}
INTERLEAVED = {"pp": 3, "schedule": "interleaved_1f1b", "layers_per_stage": [2, 2, 3, 1, 0, 0]}


def two_places(
    layout: dict[str, Any], mtp_stage: int, micro_batches: int = 6, **model: Any
) -> tuple[Simulation, Simulation]:
    """A step with the modules beside the output layer, and one with them on a stage of their own."""
    training = {"global_batch_size": micro_batches, "gradient_clipping": False, "framework": "megatron"}
    made = [case({**layout, "mtp_stage": k}, training, {**MODEL, **model}, FREE_LINKS) for k in (None, mtp_stage)]
    beside, apart = map(simulate, made)
    return beside, apart


def stages_of(sim: Simulation) -> list[Stage]:
    """All stages in model order."""
    return [stage for _, stage in sorted((i, stage) for held in sim.stages for i, stage in held.items())]


def work(blocks: Iterable[Block]) -> tuple[int, float, float, float]:
    """Parameters, FLOPs, bytes moved and bytes kept."""
    listed = list(blocks)
    items = [i for b in listed for i in (*b.forward, *b.recompute, *b.backward) if isinstance(i, Compute)]
    return (
        sum(b.params + b.expert_params for b in listed),
        sum(i.flops for i in items),
        sum(i.bytes for i in items),
        sum(s.bytes for b in listed for s in b.saved),
    )


def seconds(stage: Stage) -> float:
    """Seconds of a micro-batch's forward and backward."""
    return sum(stage.block_seconds(Kind.F)) + sum(stage.block_seconds(Kind.B))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("layout", "k"), [(FOUR, 2), (FOUR, 1), (INTERLEAVED, 4)])
def test_the_sum_over_stages_is_the_same(layout: dict[str, Any], k: int, recompute: str) -> None:
    training = {"framework": "megatron", "recompute": recompute, "global_batch_size": 6}
    made = [case({**layout, "mtp_stage": place}, training, MODEL) for place in (None, k)]
    beside, apart = ([s.blocks for s in stages_of(simulate(s))] for s in made)
    assert work(b for blocks in apart for b in blocks) == pytest.approx(work(b for blocks in beside for b in blocks))
    assert [b.name for b in apart[-1]] == ["head", *["multi-token prediction output"] * 2]
    assert [b.name for b in apart[k]][-2:] == ["multi-token prediction"] * 2
    last = max(i for i, n in enumerate(layout["layers_per_stage"]) if n)
    assert [i for i, blocks in enumerate(apart) if any(b.name == "final norm" for b in blocks)] == [last]


def test_steps_take_what_the_slowest_stage_takes() -> None:
    """One micro-batch passes through all stages, whose sum is the same; each one more costs the slowest stage."""
    alone = two_places(FOUR, 2, 1)
    assert alone[1].step_time_s == pytest.approx(alone[0].step_time_s, rel=1e-6)
    many, more = two_places(FOUR, 2, 16), two_places(FOUR, 2, 24)
    slowest = [max(map(seconds, stages_of(sim))) for sim in many]
    for a, b, each in zip(many, more, slowest, strict=True):
        assert b.step_time_s - a.step_time_s == pytest.approx(8 * each, rel=1e-6)
    module = sum(many[1].stages[2][2].block_seconds(Kind.F)) + sum(many[1].stages[2][2].block_seconds(Kind.B))
    norm = seconds(stages_of(many[1])[1]) - seconds(stages_of(many[0])[1])
    assert seconds(stages_of(many[0])[-1]) - seconds(stages_of(many[1])[-1]) == pytest.approx(module + norm)


@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_each_rank(tied: bool) -> None:
    """A rank has 18 bytes for each of its parameters: the modules' own and a copy of the embedding matrix, without an
    output matrix; the last rank the output matrix alone."""
    _, apart = two_places(FOUR, 2, tied_embeddings=tied)
    s, table = apart.scenario, table_elements(apart.scenario)
    held = [states(apart.plan, list(stages.values())) for stages in apart.stages]
    found = [(x.parameters + x.gradients + x.optimizer) / 18 for x in held]
    assert found[2] == count_parameters(s.model).mtp + table
    assert found[3] == table
    assert found[0] - table + found[1] == count_parameters(s.model).total - table * (1 if tied else 2)


@pytest.mark.parametrize(("tied", "ranks"), [(False, [0, 2]), (True, [0, 2, 3])])
def test_ranks_with_the_embedding_matrix_sum_its_gradients(tied: bool, ranks: list[int]) -> None:
    _, apart = two_places(FOUR, 2, tied_embeddings=tied)
    assert apart.plan.group("embedding", 0) == ranks
    found = {c["rank"]: c["bytes"] for c in apart.result["communication"] if c["group"] == "embedding"}
    assert found == dict.fromkeys(ranks, 4.0 * table_elements(apart.scenario))


def test_messages_behind_the_modules_carry_all_predictions() -> None:
    plan = make_plan(case({**FOUR, "mtp_stage": 1}, {"framework": "megatron"}, MODEL))
    one = 512 * 512 * 2
    assert [stage_input_bytes(plan, i) for i in range(4)] == [one, one, 3 * one, 3 * one]


def test_layers_are_dealt_out_before_the_modules() -> None:
    even = case({"pp": 4, "mtp_stage": 2}, {"framework": "megatron"}, MODEL)
    assert even.parallelism.stage_layers == (3, 3, 2, 0)
    model = {**MODEL, "mtp_layers": 4}
    balanced = case({"pp": 4, "mtp_stage": 2, "layers_per_stage": "balanced"}, {"framework": "megatron"}, model)
    assert with_balanced_stages(balanced).parallelism.stage_layers == (4, 4, 0, 0)  # a module is a layer and a bit


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mtp_stage": 0}, "mtp_stage: found 0; must be the last stage of a rank behind the first: 1 to 3"),
        ({"mtp_stage": 4}, "mtp_stage: found 4; the last stage is 3"),
        ({"pp": 1, "mtp_stage": 1}, "mtp_stage: found 1; the last stage is 0"),
        ({"pp": 2, "mtp_stage": 0}, "mtp_stage: found 0; must be the last stage of a rank behind the first: 1"),
        ({**INTERLEAVED, "mtp_stage": 2}, "must be the last stage of a rank behind the first: 4 to 5"),
        ({**INTERLEAVED, "mtp_stage": 3}, "must be the last stage of a rank behind the first: 4 to 5"),
        ({"mtp_stage": 1, "layers_per_stage": [4, 3, 1, 0]}, "layers_per_stage: found layers behind stage 1"),
        ({"schedule": "zb_v", "mtp_stage": 6}, "found 6; with schedule zb_v the modules are on the last stage: 7"),
        ({"schedule": "dualpipe", "mtp_stage": 2}, "with schedule dualpipe the modules are on the last stage: 3"),
    ],
)
def test_places_that_megatron_refuses_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        case({"pp": 4, **changes}, {"global_batch_size": 24}, MODEL)
    assert said in str(error.value)


def test_without_modules_there_is_nothing_to_place() -> None:
    with pytest.raises(InputError, match=r"mtp_stage: found 2; no prediction modules are trained"):
        case({"pp": 4, "mtp_stage": 2})
    with pytest.raises(InputError, match=r"mtp_stage: found 0; no prediction modules are trained"):
        load_scenario(SCENARIOS / "serve_deepseek_v3.yaml", ["parallelism.mtp_stage=0"])


LAYOUT = "Et*16|t*16,m|L"


def script(layout: str) -> str:
    """A launch script with one prediction module in this layout of three stages."""
    flags = f'--sequence-parallel --mtp-num-layers 1 --pipeline-model-parallel-layout "{layout}"'
    return MEGATRON.replace("--sequence-parallel", flags).replace("PP=2", "PP=3").replace("-4}", "-3}")


def test_a_layout_of_a_launch_script_comes_back(tmp_path: Path) -> None:
    parallelism = converted(tmp_path, "train.sh", script(LAYOUT), "--cluster", "dgx-h100")[0]["parallelism"]
    assert (parallelism["layers_per_stage"], parallelism["mtp_stage"]) == ([16, 16, 0], 1)
    written = emit(load_scenario(SCENARIOS / "mtp_stage_deepseek_v3.yaml"), "megatron")
    assert f'"Ettt|{"tt|" * 29}m|L"' in written


def test_modules_on_several_stages_are_refused(tmp_path: Path) -> None:
    said = refused(tmp_path, "train.sh", script("Et*16|t*16,m|mL"), "--cluster", "dgx-h100")
    assert "--pipeline-model-parallel-layout: found 'Et*16|t*16,m|mL'; all m must be in one stage" in said


def test_modules_beside_the_output_layer_need_no_key(tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "train.sh", script("Et*16|t*16|mL"), "--cluster", "dgx-h100")
    assert "mtp_stage" not in data["parallelism"]


@settings(deadline=None, max_examples=15)
@given(
    pp=st.integers(3, 5),
    micro_batches=st.integers(1, 9),
    modules=st.integers(1, 2),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb_h1"]),
    data=st.data(),
)
def test_a_stage_of_its_own_never_makes_the_slowest_stage_slower(
    pp: int, micro_batches: int, modules: int, schedule: str, data: st.DataObject
) -> None:
    """Messages take next to nothing; the layers are where they were, and the first rank updates one norm more at most.
    The two engines agree."""
    k = data.draw(st.integers(1, pp - 2))
    layers = [8, *[0] * (pp - 1)] if k == 1 else [4, 4, *[0] * (pp - 2)]
    layout = {"pp": pp, "layers_per_stage": layers, "schedule": schedule, "p2p_overlap": True}
    beside, apart = two_places(layout, k, micro_batches, mtp_layers=modules, vocab=64_000)
    assert apart.step_time_s <= beside.step_time_s * (1 + 1e-4)
    assert simulate(apart.scenario, engine="static").step_time_s == simulate(apart.scenario, engine="simpy").step_time_s


def test_the_shipped_scenario() -> None:
    file = SCENARIOS / "mtp_stage_deepseek_v3.yaml"
    beside = ["parallelism.mtp_stage=null"]
    found = [simulate(load_scenario(file, k)) for k in ([], beside, [*beside, "parallelism.layers_per_stage=null"])]
    page = (SCENARIOS.parent / "docs" / "pipeline.md").read_text(encoding="utf-8")
    own, alone, even = (f"{sim.step_time_s:.1f} s" for sim in found)
    said = (
        f"takes {own} a step with the module and the output layer on stages of their own, {alone} with both on the last"
    )
    assert f"{said} stage, and {even} with a layer there, too" in " ".join(page.split())
