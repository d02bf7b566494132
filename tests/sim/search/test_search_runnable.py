"""What a search finds can be run: its commands, its files, another trainer's flags; costs, clusters, linked keys."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from sim.commands.layout_options import Prices, parse_clusters
from sim.commands.options import Narrowing, Study
from sim.commands.search import Asked, main, search_clusters, search_one, search_space
from sim.core.errors import InputError
from sim.core.executors import local_workers
from sim.emit import TRAINERS, emit, reasons_against
from sim.inputs.absolute_paths import anchored
from sim.inputs.input_source import Source
from sim.inputs.overrides import merge
from sim.inputs.scenario import load_scenario
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.search.bound import MeshSearch
from sim.search.mesh_prices import MeshPrices
from sim.search.space import MeshSizes, scenario_of
from sim.search.space_of_scenario import make_space
from sim.simulation import simulate
from tests.processes import exit_code
from tests.sim.search.search_spaces import BASE, legal
from topology.network import Network

LLAMA: dict[str, Any] = {
    **BASE,
    "model": "llama3-8b",
    "training": {"seq_len": 1024, "global_batch_size": 16, "recompute": {"mode": "full", "layers": 8}},
    "parallelism": {"dp": 8, "zero": 1, "schedule": "interleaved_1f1b", "virtual_stages": 4},
}
HERE = Study(workers=1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    target = tmp_path / "small.yaml"
    target.write_text(json.dumps(LLAMA), encoding="utf-8")
    return target


def asked(only: str, **more: Any) -> Asked:
    return Asked(narrowing=Narrowing(tuple(only.split()), "1TiB"), **more)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["", *TRAINERS])
def test_commands_and_files_of_found_layouts_run_what_was_found(file: Path, tmp_path: Path, trainer: str) -> None:
    only = "tp=1,2 cp=1 micro_batch_size=1,2 schedule=1f1b,interleaved_1f1b zero=0,1,3 recompute=none,full"
    study = Study(workers=1, overrides=("training.recompute=none",) if trainer else ())
    result = search_one(file, study, asked(only, top=6, trainer=trainer))
    assert len(result.best) == 6
    for row in result.best:
        run = row.runnable
        assert run is not None
        words = shlex.split(run.command)
        assert words[:3] == ["stepsim", "run", str(file)]
        ran = load_scenario(file, words[4::2])
        elsewhere = tmp_path / "elsewhere.yaml"
        elsewhere.write_text(run.yaml)
        assert load_scenario(elsewhere).unchecked_copy(update={"name": ran.name}) == ran
        assert simulate(ran, engine="static").step_time_s == row.step_time_s
        assert run.flags == (emit(ran, trainer) if trainer else None)


def test_a_trainer_s_best_is_the_best_of_all_that_it_can_run() -> None:
    data = merge(BASE, {"training": {"framework": "megatron"}})
    space = make_space(Source("x", data), 4, "x", {"cp": (1,), "micro_batch_size": (1, 2)})
    every = legal(space)
    able = [s for s in (scenario_of(space, x) for x in every) if not reasons_against(s, "megatron")]
    assert 10 < len(able) < len(every) / 2
    narrowed = make_space(Source("x", data), 4, "x", space.only, (), "megatron")
    with local_workers(1) as pool:
        _, (best,) = search_space(narrowed, 1e18, Asked(top=1), pool)
    assert best.step_time_s == min(simulate(s, engine="static").step_time_s for s in able)


def test_the_overlap_of_tensor_parallel_messages_is_searched_where_only_names_it(file: Path) -> None:
    fixed = "tp=1,2 cp=1 pp=1 zero=0 recompute=none micro_batch_size=1"
    overrides = ("parallelism={dp: 8}",)
    study = Study(workers=1, overrides=overrides)

    def found(only: str, study: Study = study, **more: Any) -> set[tuple[int, str]]:
        rows = search_one(file, study, asked(f"{fixed} {only}", top=50, **more)).best
        for row in rows:
            assert row.runnable is not None
            ran = load_scenario(file, shlex.split(row.runnable.command)[4::2])
            assert simulate(ran, engine="static").step_time_s == row.step_time_s
        return {(row.layout.tp, row.layout.tp_overlap) for row in rows}

    assert found("") == {(1, "none"), (2, "none")}
    assert found("tp_overlap=wgrad,none") == {(1, "none"), (2, "none"), (2, "wgrad")}
    # Megatron-LM always overlaps the backward's messages, so its layouts are priced so unless the scenario says none.
    assert found("", trainer="megatron") == {(1, "none"), (2, "wgrad")}
    said = Study(workers=1, overrides=(*overrides, "parallelism.tp_overlap=none"))
    assert found("", said, trainer="megatron") == {(1, "none"), (2, "none")}
    with pytest.raises(InputError, match="found 'wgrat'; must be one of none, wgrad, full; did you mean 'wgrad'"):
        found("tp_overlap=wgrat")


def test_commands_name_what_the_trainer_does_only_where_it_changes_the_step(file: Path) -> None:
    fixed = "tp=1,2 cp=1 pp=1 zero=0 recompute=none micro_batch_size=1"
    study = Study(workers=1, overrides=("parallelism={dp: 8}",))
    for row in search_one(file, study, asked(fixed, top=50, trainer="megatron")).best:
        run = row.runnable
        assert run is not None
        assert ("tp_overlap=wgrad" in run.command) == ("tp_overlap: wgrad" in run.yaml) == (row.layout.tp > 1)
        assert "training.framework=megatron" in run.command
        ran = load_scenario(file, shlex.split(run.command)[4::2])
        assert not [text for text in ran.warnings if "of no effect" in text]


def test_a_trainer_that_never_runs_the_model_is_refused_before_anything_is_laid_out(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.commands.search.search_space", None)
    study = Study(workers=1, overrides=("model=qwen3-30b-a3b", "training.optimizer=sgd"))
    with pytest.raises(InputError, match="torchtitan cannot run this scenario in any layout") as found:
        search_one(file, study, asked("tp=1", trainer="torchtitan"))
    assert "\n  - model: found 48 layers" in str(found.value)
    assert "\n  - training.optimizer: found sgd; torchtitan has Adam and AdamW" in str(found.value)
    assert "parallelism" not in str(found.value)  # which another layout may change


def test_bounds_know_how_torchtitan_reduces_gradients_in_pipelines() -> None:
    plain = {"schedule": None, "virtual_stages": None}
    data = merge(LLAMA, {"training": {"param_dtype": "fp32"}, "parallelism": plain})
    only = {"zero": (3,), "schedule": ("1f1b",), "recompute": ("none",), "micro_batch_size": (1,)}
    space = make_space(Source("x", data), 8, "x", only, (), "torchtitan")
    costs = Costs(load_profile(space.base.calibration), space.base.cluster.gpu)
    for mesh in (MeshSizes(1, 1, 2, 4, 1), MeshSizes(1, 1, 1, 8, 1)):
        search = MeshSearch(space, mesh, MeshPrices(space, mesh, costs, Network(space.base.cluster)), 1e18)
        (way,) = search.partial_layouts().bounded
        (bounded,) = search.layouts(way.part, math.inf, math.inf).bounded
        scenario = scenario_of(space, bounded.part)
        assert scenario.parallelism.accumulate_unsharded is (mesh.pp > 1)
        step = simulate(scenario, engine="static")
        assert 0.8 * step.step_time_s < bounded.bound_s <= step.step_time_s
        assert bounded.memory_bytes <= step.result["peak_memory_bytes"]


def test_linked_values_stand_together(file: Path) -> None:
    only = "tp,pp,micro_batch_size=2:1:4,1:2:1 cp=1 zero=0 schedule=1f1b recompute=none"
    found = search_one(file, HERE, asked(only, top=50)).best
    rows = {(r.layout.tp, r.layout.pp, r.layout.micro_batch_size) for r in found}
    assert rows == {(2, 1, 4), (1, 2, 1)}
    with pytest.raises(InputError, match="must be rows of 2 values joined by ':'"):
        search_one(file, HERE, asked("tp,pp=2:1,4"))


def test_clusters_are_compared_by_their_best_layouts_and_prices(file: Path) -> None:
    only = asked("cp=1 tp=1 pp=1 recompute=none micro_batch_size=1", prices=Prices("dgx-h200=2,dgx-b200=6"))
    found = search_clusters(file, HERE, ["dgx-h200", "dgx-b200"], only)
    assert (found.format, found.gpus) == ("sim-search-clusters/1", 8)
    assert [one.cluster for one in found.clusters] == ["dgx-h200", "dgx-b200"]
    for one, price in zip(found.clusters, (2, 6), strict=True):
        best = one.search.best[0]
        assert best.scenario.cluster.gpu.name.startswith(one.cluster.removeprefix("dgx-"))
        assert best.cost_per_trillion_tokens == pytest.approx(price * 1e12 / best.tokens_per_s_per_gpu / 3600)


def test_numbers_of_gpus_are_compared_by_days_and_cost(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = [word for key in ("cp=1", "tp=1", "pp=1", "recompute=none", "zero=1") for word in ("--only", key)]
    options = (*only, "--tokens", "1T", "--price", "2", "--set", "training.recompute=none", "--json", "-")
    assert exit_code(main, str(file), "--gpus", "16,8", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["gpus"]) == ("sim-search-clusters/2", [8, 16])
    for one, gpus in zip(found["clusters"], (8, 16), strict=True):
        best = one["best"][0]
        assert best["scenario"]["parallelism"]["dp"] == one["gpus"] == gpus
        days = 1e12 / best["tokens_per_s_per_gpu"] / gpus / 86400
        assert best["training_run"]["days"] == pytest.approx(days)
        assert best["training_cost"] == pytest.approx(2 * 24 * gpus * days)
        words = shlex.split(best["command"])
        changes = [word for word in words[words.index("--set") :] if word != "--set"]
        run = simulate(load_scenario(file, changes)).outcome.training_run
        assert run is not None
        assert run.days == best["training_run"]["days"]


def test_tables_of_several_numbers_of_gpus(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = [word for key in ("cp=1", "tp=1", "pp=1", "recompute=none", "zero=1", "dp=8") for word in ("--only", key)]
    page = tmp_path / "several.html"
    options = (*only, "--set", "training.recompute=none", "--html", str(page))
    assert exit_code(main, str(file), "--gpus", "8,16", *options) == 0
    said = capsys.readouterr().out
    assert f"{file.stem}: the best layouts of 8 and 16 GPUs" in said
    assert "GPUs  Layout" in said
    assert "16 GPUs: " in said  # no layout of them has dp 8
    text = page.read_text()
    assert "Best layouts of each number of GPUs" in text
    assert "Fewest days" not in text  # without --tokens
    for words, wrong in (
        (("--gpus", "8,x"), "--gpus: found '8,x'; must be whole numbers above 0 between commas"),
        (("--gpus", "8,16", "--save", "x"), "--save: can be given for one cluster and one number of GPUs only"),
        (("--gpus", "8,16", "--slo", "ttft_p99=1"), "--gpus N,N: is for searches of training steps"),
        (("--tokens", "1T", "--slo", "ttft_p99=1"), "--tokens: is for searches of training steps"),
    ):
        assert exit_code(main, str(file), *words) == 2
        assert wrong in capsys.readouterr().err


def test_what_is_saved_is_what_is_listed(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--only", "tp=1", "--only", "pp=1", "--only", "cp=1", "--top", "2", "--set", "training.recompute=none")
    folder = tmp_path / "found"
    assert exit_code(main, str(file), *options, "--for", "megatron", "--save", str(folder), "--price", "3") == 0
    assert {path.name for path in folder.iterdir()} == {"1.yaml", "1.flags", "2.yaml", "2.flags"}
    said = capsys.readouterr().out
    assert "Cost of 1T tokens" in said
    assert (folder / "1.flags").read_text().strip() in said
    assert load_scenario(folder / "2.yaml").name == f"{load_scenario(file).name}-2"
    for words, wrong in (
        (("--for", "nemo"), "must be one of torchtitan, torchtitan-python, megatron"),
        (("--for", "megatron", "--only", "schedule=zb_v"), "--only schedule=zb_v: megatron has 1f1b, interleaved_1f1b"),
        (("--cluster", "dgx-h20"), "did you mean 'dgx-h200'"),
        (("--price", "a=b"), "--price: found 'a=b'"),
        (
            ("--cluster", "dgx-h100,dgx-h200", "--only", "tp=1", "--save", "x"),
            "--save: can be given for one cluster and one number of GPUs only",
        ),
    ):
        assert exit_code(main, str(file), *words) == 2
        assert wrong in capsys.readouterr().err


def test_a_saved_scenario_finds_its_model_s_folder_from_anywhere(tmp_path: Path) -> None:
    for name in ("own", "llama3-8b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    data = {
        "model": "own",
        "training": {"precision": "bf16"},
        "x": ["llama3-8b", "own/config.json", "nothing.json", ""],
    }
    found = anchored(Source("x.yaml", data, folder=str(tmp_path)))
    config = str(tmp_path / "own" / "config.json")
    assert found == {**data, "model": config, "x": ["llama3-8b", config, "nothing.json", ""]}


def test_prices_and_clusters() -> None:
    assert Prices("2.5").of("any") == 2.5
    assert Prices("a=1,b=2").of("b") == 2
    with pytest.raises(InputError, match="--price: found prices of a; has none for b"):
        Prices("a=1").of("b")
    with pytest.raises(InputError, match="each cluster once"):
        parse_clusters("dgx-h100,dgx-h100")


def test_a_cluster_of_a_search_may_be_a_mapping() -> None:
    """As the message on a GPU's name says."""
    with pytest.raises(InputError, match=r"write \{gpu: l40s, gpus_per_node: 4\}"):
        parse_clusters("l40s")
    assert parse_clusters("{gpu: l40s, gpus_per_node: 4},dgx-h100") == ["{gpu: l40s, gpus_per_node: 4}", "dgx-h100"]
