"""Options of the engine, searched beside the layout for the highest rate within promised latencies."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sim.commands.search import main
from sim.inputs.scenario import parse_scenario
from sim.search.serving_units import CLOSE
from sim.serve.simulation import simulate_serving
from tests.processes import invoked
from tests.sim.serve.serving_cases import searched

LONG: dict[str, Any] = {
    "model": "llama3.2-1b",
    "cluster": "dgx-h100",
    "inference": {"requests": {"prompt_len": 3000, "output_len": 24, "count": 150, "rate_per_s": 15.0, "seed": 1}},
}
BOTH = "ttft_p99=0.2,itl_p99=0.008"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options") / "long.yaml"
    path.write_text(json.dumps(LONG))
    return path


def test_a_smaller_token_batch_is_found_where_a_larger_one_breaks_the_inter_token_promise(file: Path) -> None:
    vary = ("--gpus", "1", "--vary", "inference.max_batch_tokens=8192,512")
    (best,) = searched(file, BOTH, *vary)["best"]
    assert best["options"] == {"max_batch_tokens": 512}
    requests = {**LONG["inference"]["requests"], "rate_per_s": best["rate_per_s"]}
    for tokens, kept in ((512, True), (8192, False)):
        inference = {"requests": requests, "max_batch_tokens": tokens}
        result = simulate_serving(parse_scenario({**LONG, "inference": inference})).result
        assert (result["inter_token_latency_s"]["p99"] <= 0.008) == kept
    # Without that promise the larger one carries more: every iteration reads the weights once.
    (best,) = searched(file, "ttft_p99=0.2", *vary)["best"]
    assert best["options"] == {"max_batch_tokens": 8192}


@pytest.mark.slow
def test_the_search_finds_what_brute_force_finds(file: Path) -> None:
    values = {"max_batch_tokens": (2048, 512), "kv_cache.dtype": ("bf16", "fp8")}
    vary = [x for key, own in values.items() for x in ("--vary", f"inference.{key}={','.join(map(str, own))}")]
    found = searched(file, BOTH, "--gpus", "2", *vary)
    every: dict[str, dict[tuple[Any, ...], float]] = {}
    for choice in itertools.product(*values.values()):
        sets = [x for key, v in zip(values, choice, strict=True) for x in ("--set", f"inference.{key}={v}")]
        for row in searched(file, BOTH, "--gpus", "2", *sets)["best"]:
            every.setdefault(str(row["parallelism"]), {})[choice] = row["rate_per_s"]
    assert len(found["best"]) == len(every) == 3
    for row in found["best"]:
        rates = every[str(row["parallelism"])]
        assert row["rate_per_s"] == pytest.approx(max(rates.values()), rel=2 * (CLOSE - 1))
        assert rates[tuple(row["options"].values())] >= max(rates.values()) / CLOSE**2
        assert min(rates.values()) < max(rates.values()) / CLOSE**2  # there was something to find


def test_engines_are_compared(file: Path) -> None:
    slo, found = "ttft_p99=1,itl_p99=0.02", {}
    for engine in ("vllm-0.2", "sglang-0.5"):
        (best,) = searched(file, slo, "--gpus", "1", "--set", f"inference.engine={engine}")["best"]
        found[engine] = best["rate_per_s"]
    assert found["sglang-0.5"] > 1.1 * found["vllm-0.2"]
    result = searched(file, slo, "--gpus", "1", "--vary", f"inference.engine={','.join(found)}")
    assert {row["options"]["engine"]: row["rate_per_s"] for row in result["best"]} == found
    assert result["best"][0]["options"] == {"engine": "sglang-0.5"}
    assert result["same_host_times"] == []


def test_each_engine_has_its_best_options_and_who_has_another_s_host_times_is_named(file: Path, tmp_path: Path) -> None:
    engines, tokens = ("vllm-0.14", "vllm-0.17", "vllm-0.2"), (8192, 512)
    vary = ("--vary", f"engine={','.join(engines)}", "--vary", f"max_batch_tokens={','.join(map(str, tokens))}")
    page = tmp_path / "page.html"
    result = searched(file, BOTH, "--gpus", "1", *vary, "--html", str(page))
    for row in result["best"]:
        alone = searched(file, BOTH, "--gpus", "1", "--set", f"inference.engine={row['options']['engine']}", *vary[2:])
        (best,) = alone["best"]
        assert {**row, "options": row["options"]["max_batch_tokens"]} == {
            **best,
            "options": best["options"]["max_batch_tokens"],
        }
    assert sorted(row["options"]["engine"] for row in result["best"]) == sorted(engines)
    assert result["same_host_times"] == [["vllm-0.14", "vllm-0.17"]]
    assert "one record of host times" in page.read_text()


def test_a_layout_that_no_engine_can_serve_is_left_out_once(file: Path) -> None:
    result = searched(file, BOTH, "--gpus", "1", "--set", "model=llama3-70b", "--vary", "engine=vllm-0.14,sglang-0.5")
    assert result["best"] == []
    (refused,) = result["refusals"]
    assert refused["options"] == {}
    assert refused["reason"] == "does not fit in memory: weights 131.4 GiB, the GPU has 79.11 GiB"


def test_without_vary_nothing_but_layouts_is_searched(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = searched(file, BOTH, "--gpus", "1", "--html", str(page))
    assert [row["options"] for row in result["best"]] == [{}]
    assert ">Options<" not in page.read_text()


def test_table_and_page_show_the_options(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    options = ["--gpus", "1", "--vary", "chunked_prefill=true,false", "--html", str(page)]
    done = CliRunner().invoke(main, [str(file), "--slo", BOTH, *options], catch_exceptions=False)
    for text in (done.stdout, page.read_text()):
        assert "chunked_prefill=" in text
    assert ">Options<" in page.read_text()


def test_a_choice_that_no_scenario_has_is_one_refusal_of_the_others_search(file: Path) -> None:
    result = searched(file, BOTH, "--gpus", "1", "--vary", "kv_cache.dtype=fp8,int3")
    assert [row["options"] for row in result["best"]] == [{"kv_cache.dtype": "fp8"}]
    (refusal,) = result["refusals"]
    assert refusal["options"] == {"kv_cache.dtype": "int3"}
    assert "inference.kv_cache.dtype: found 'int3'" in refusal["reason"]


def test_where_nothing_is_simulated_no_latency_is_blamed(file: Path) -> None:
    options = ["--gpus", "1", "--vary", "inference.max_batch_tokens=abc,0"]
    done = invoked(main, str(file), "--slo", BOTH, *options, code=1)
    assert "no layout can be simulated" in done.stdout
    assert "within these latencies" not in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--slo", BOTH, "--vary", "inference.max_batch_token=1"),
            "did you mean 'max_batch_tokens'? (allowed: engine, max_",
        ),
        (
            ("--slo", BOTH, "--vary", "max_num_seqs=1"),
            "; here it is inference.max_running_requests (allowed: engine, max_",
        ),
        (("--slo", BOTH, "--vary", "parallelism.tp=1"), "--vary parallelism.tp: --slo searches values of keys of infe"),
        (("--vary", "inference.max_batch_tokens=1"), "--vary: is for searches of serving (--slo)"),
        (
            ("--slo", BOTH, "--vary", "max_batch_tokens=1", "--vary", "inference.max_batch_tokens=2"),
            "--vary inference.max_batch_tokens: is given twice",
        ),
        (("--slo", BOTH, "--vary", "max_batch_tokens"), "--vary max_batch_tokens: must be KEY=VALUE,…"),
    ],
)
def test_wrong_options_are_one_message(file: Path, options: tuple[str, ...], said: str) -> None:
    done = invoked(main, str(file), *options, code=2)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
