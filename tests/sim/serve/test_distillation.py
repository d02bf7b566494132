"""Distillation simulated: what the teacher adds, on the student's GPUs and on its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import load_scenario
from sim.models.parameters import count_parameters
from sim.results.losses import largest_losses, parts_of_step
from sim.simulation import simulate
from tests.sim.cases import shipped_result

SCENARIOS = Path(__file__).parents[3] / "scenarios"


def test_on_the_same_gpus_times_add_up() -> None:
    r = shipped_result("distill_logits")
    t = r["distillation"]
    alone = simulate(
        load_scenario(SCENARIOS / "distill_logits.yaml").unchecked_copy(update={"distillation": None})
    ).result
    assert t["student_step_s"] == pytest.approx(alone["step_time_s"] + t["loss_s"], rel=1e-3)
    assert t["student_step_s"] > alone["step_time_s"]
    assert r["step_time_s"] == t["student_step_s"] + t["forward_s"] + t["send_s"]
    assert r["mfu"] / alone["mfu"] == pytest.approx(alone["step_time_s"] / r["step_time_s"])


def test_teachers_weights_are_held_once_per_replica() -> None:
    r = shipped_result("distill_logits")
    teacher = load_scenario(SCENARIOS / "distill_logits.yaml").distillation
    assert teacher is not None
    eighth = 2 * count_parameters(teacher.teacher).total / 8
    assert r["distillation"]["parameter_bytes"] == pytest.approx(eighth, rel=0.01)
    student = shipped_result("distill_logits_apart")
    more = r["peak_memory_bytes"] - student["peak_memory_bytes"]
    assert more >= r["distillation"]["parameter_bytes"]
    assert student["memory"][0].get("teacher") is None


def test_forward_is_at_least_its_flops() -> None:
    """2 flops a weight and token, on all eight GPUs."""
    scenario = load_scenario(SCENARIOS / "distill_logits.yaml")
    assert scenario.distillation is not None
    weights = count_parameters(scenario.distillation.teacher).total - 128256 * 8192
    least = 2 * weights * 32 * 4096 / 8 / scenario.cluster.gpu.peak_flops_per_s["bf16"]
    assert least < shipped_result("distill_logits")["distillation"]["forward_s"] < 4 * least


def test_apart_the_longer_decides() -> None:
    r = shipped_result("distill_logits_apart")
    t = r["distillation"]
    own = t["forward_s"] + t["send_s"]
    assert t["send_s"] > 0
    assert r["step_time_s"] == max(own, t["student_step_s"])
    assert r["tokens_per_s_per_gpu"] == pytest.approx(r["tokens_per_s"] / 16)


def test_a_teacher_must_fit_on_its_own_gpus() -> None:
    """70.6 billion parameters of 2 bytes on two GPUs of 80 GiB, or on one."""
    two, one = (
        shipped_result("distill_logits_apart", "cluster=dgx-h100", f"distillation.teacher_parallelism.tp={tp}")
        for tp in (2, 1)
    )
    assert two["fits_in_memory"]
    assert not one["fits_in_memory"]
    assert one["warnings"][-1].endswith("the teacher does not fit on its own GPUs")


def test_logits_take_the_links_between_teacher_and_student() -> None:
    """Of 32 × 4,096 × 128,256 logits of 2 bytes, bytes that a GPU receives or sends, by hand, over what its link takes.

    An eighth of the vocabulary lies on each teacher's rank: on the student's own GPUs 7/8 of what each of 8 needs come
    over NVLink (450 GB/s, 0.8 of it), to the last of eight stages 7/8 of all; from eight GPUs of a node of its own, an
    eighth over each NIC (50 GB/s, 0.96). A teacher cut as the student is has them where they are needed.
    """
    every, nvlink, nic = 32 * 4096 * 128_256 * 2, 450e9 * 0.8, 50e9 * 0.96
    pipeline = ("parallelism.dp=1", "parallelism.pp=8", "parallelism.zero=0")
    for name, overrides, seconds in (
        ("distill_logits", (), every / 8 * 7 / 8 / nvlink),
        ("distill_logits", pipeline, every * 7 / 8 / nvlink),
        ("distill_logits_apart", (), every / 8 / nic),
        ("distill_logits_apart", pipeline, every / nic),
    ):
        sent = shipped_result(name, *overrides)["distillation"]["send_s"]
        assert seconds < sent < 1.3 * seconds  # latencies, NVLink's protocol
    assert shipped_result("distill_logits", "distillation.teacher_parallelism.tp=1")["distillation"]["send_s"] == 0


def test_a_slow_rank_slows_the_teacher_on_it() -> None:
    """Its peers wait at every collective: s · compute + communication, as docs/faults.md has it for the student."""

    def forward_s(name: str, scale: float, link: float = 1.0) -> float:
        faults = (
            f"{{stragglers: [{{rank: 3, compute_scale: {scale}}}], "
            f"links: [{{between: [node0, node0], bandwidth_scale: {link}}}]}}"
        )
        return float(shipped_result(name, f"faults={faults}")["distillation"]["forward_s"])

    once, twice, thrice, four = (forward_s("distill_logits", s) for s in (1.0, 2.0, 3.0, 4.0))
    assert once == shipped_result("distill_logits")["distillation"]["forward_s"]
    assert four - thrice == pytest.approx(thrice - twice, rel=0.01)  # at full speed kernels of rope wait for the host
    communication = 2 * once - twice
    assert 0.2 * once < communication < 0.4 * once  # two all-reduces a layer
    assert forward_s("distill_logits", 1.0, 0.5) == pytest.approx(once + communication, rel=0.05)
    assert forward_s("distill_logits_apart", 2.0, 0.5) == once


def test_sequences_are_written_first() -> None:
    r = shipped_result("distill_sequence")
    t = r["distillation"]
    assert t["generated_tokens"] == 32 * 2048
    assert r["step_time_s"] == pytest.approx(t["generate_s"] + t["student_step_s"])
    longer = shipped_result("distill_sequence", "distillation.prompt_len=1024")
    assert longer["distillation"]["generate_s"] > 1.3 * t["generate_s"]


def test_the_cache_has_what_the_student_leaves() -> None:
    """Written in one wave where there is room for all 32 sequences, in several where the student's states take it."""
    roomy = shipped_result("distill_sequence")
    assert roomy["distillation"]["cache_bytes"] == pytest.approx(32 * 4096 * 80 * 2 * 128 * 2, rel=0.01)
    held = sum(roomy["memory"][0][k] for k in ("parameters", "gradients", "optimizer"))
    gpu = f"{{preset: h200-sxm, memory_bytes: {held + 4e9}}}"  # the engine may have 0.9 of it, but not what is held
    tight = shipped_result("distill_sequence", f"cluster={{preset: dgx-h200, gpu: {gpu}}}")
    assert tight["distillation"]["cache_bytes"] < roomy["distillation"]["cache_bytes"]
    assert tight["distillation"]["generate_s"] > 1.2 * roomy["distillation"]["generate_s"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("distill_logits", "TEACHER"),
        ("distill_logits_apart", "TEACHER"),
        ("distill_sequence", "GENERATE"),
    ],
)
def test_the_teachers_turn_is_in_the_timeline(name: str, kind: str) -> None:
    sim = simulate(load_scenario(SCENARIOS / f"{name}.yaml"))
    (turn,) = [s for s in sim.timeline.spans() if s.kind == kind]
    assert (turn.start_s, turn.end_s) == (0.0, sim.teacher.own_s if sim.teacher else None)
    assert sim.timeline.step_time_s == pytest.approx(sim.result["step_time_s"])
    first = min(s.start_s for s in sim.timeline.spans() if s.kind == "F")
    assert first < 0.01 if name == "distill_logits_apart" else first >= turn.end_s
    (curve,) = sim.memory_over(1)
    assert float(curve.total.max()) == pytest.approx(sim.result["peak_memory_bytes"])
    assert {sim.timeline.kinds[sim.timeline.kind[row]] for row in sim.critical_rows} <= {
        "F",
        "B",
        "OPTIMIZER",
        "ALL_GATHER",
        "REDUCE_SCATTER",
        "ALL_REDUCE",
    }


@pytest.mark.parametrize("name", ["distill_logits", "distill_logits_apart", "distill_sequence"])
def test_the_page_says_what_the_teacher_takes(name: str) -> None:
    sim = simulate(load_scenario(SCENARIOS / f"{name}.yaml"))
    parts = {p.key: p.seconds for p in parts_of_step(sim.outcome, sim.timeline)}
    t = sim.result["distillation"]
    assert parts["teacher"] == pytest.approx(sim.result["step_time_s"] - t["student_step_s"])
    assert sum(parts.values()) == pytest.approx(sim.result["step_time_s"], rel=1e-3)
    student = sim.student
    assert parts["useful"] == pytest.approx(student.utilization.mfu * student.step_time_s)
    assert "other" not in parts
    assert largest_losses(sim.outcome, sim.timeline)[0][0].key == "teacher"


def test_a_prompt_leaves_room_to_write() -> None:
    with pytest.raises(InputError, match="prompt_len: found 4096"):
        shipped_result("distill_sequence", "distillation.prompt_len=4096")


def test_a_replica_reads_no_more_sequences_than_it_has() -> None:
    """Eight replicas of the teacher share eight sequences, in however many micro-batches the student takes them."""
    keys = [
        "parallelism={dp: 2, pp: 4, zero: 1}",
        "distillation.teacher_parallelism.tp=1",
        "training.global_batch_size=8",
    ]
    read_s = {}
    for size in (1, 2, 4):
        own = [*keys, f"training.micro_batch_size={size}"]
        teacher = simulate(load_scenario(SCENARIOS / "distill_logits.yaml", own)).teacher
        assert teacher is not None
        read_s[size] = teacher.forward_s
    assert read_s[1] == read_s[2] == read_s[4]
