"""Bundles of LLMServingSim 2's profiler: what an iteration takes is the sum of what they measured.

The bundles here are of a small model, with times that are linear in each size, so that sums are known at all sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from calibrate.imports.llmservingsim import read
from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.prices.profile import Profile
from sim.serve.prices.costs import IterationCosts, iteration_costs
from sim.serve.prices.iteration_parts import Key, Work
from sim.serve.prices.iteration_shares import loads_of, priced_together
from sim.serve.prices.load import Load
from sim.serve.simulation import simulate_serving

LAYERS, EXPERTS = 4, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
OF_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
META = {"gpu": "NVIDIA GeForce RTX 4090", "model": "own/small", "variant": "bf16", "vllm_version": "0.19.0"}
# Microseconds of a layer: at no token, and for each.
DENSE = {
    "embedding": (300.0, 2.0),
    "final_layernorm": (100.0, 1.0),
    "layernorm": (50.0, 0.5),
    "qkv_proj": (400.0, 3.0),
    "rotary_emb": (20.0, 0.2),
    "o_proj": (200.0, 2.0),
    "gate_up_proj": (900.0, 6.0),
    "act_fn": (30.0, 0.3),
    "down_proj": (500.0, 3.0),
}
MLP = ("gate_up_proj", "act_fn", "down_proj")
HEAD = {"lm_head": (2000.0, 5.0), "sampler": (40.0, 1.0)}
TOKENS, SEQUENCES = (1, 2, 4, 8, 16, 64, 256, 1024, 2048), (1, 2, 4, 8, 64, 256)
CHUNKS, BEFORE, KV = (16, 128, 1024, 2048), (0, 128, 2048, 8192), (16, 128, 1024, 8192)
ALPHA = 0.25


def line(of: tuple[float, float], n: float) -> float:
    return of[0] + of[1] * n


def attention_us(chunk: float, before: float, n: float, kv: float) -> float:
    return 40.0 + 0.1 * chunk + 1e-4 * chunk * before + 0.8 * n + 2e-3 * n * kv + 1e-3 * chunk * bool(n)


def experts_us(tokens: float, chosen: float) -> float:
    return 10.0 + 0.5 * tokens + 30.0 * chosen


def write_csv(path: Path, header: str, rows: Iterable[tuple[Any, ...]]) -> None:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


def write_bundle(folder: Path, moe: bool = False, unequal: bool = False, tps: tuple[int, ...] = (1,)) -> Path:
    """A bundle of the small model, with its `config.json`; on more ranks everything takes as long."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | OF_EXPERTS if moe else CONFIG))
    meta: dict[str, Any] = {**META, "skew_profile": {"grid": {"skew_rep": 4.0}}, "skew_fit": {"enabled": unequal}}
    (folder / "meta.yaml").write_text(json.dumps(meta))
    for tp in tps:
        own = folder / f"tp{tp}"
        own.mkdir()
        dense = {k: v for k, v in DENSE.items() if not (moe and k in MLP)} | ({"qk_norm": (15.0, 0.1)} if moe else {})
        rows = [(name, n, line(of, n)) for name, of in dense.items() for n in TOKENS]
        write_csv(own / "dense.csv", "layer,tokens,time_us", rows)
        write_csv(
            own / "per_sequence.csv",
            "layer,sequences,time_us",
            [(name, n, line(of, n)) for name, of in HEAD.items() for n in SEQUENCES],
        )
        sizes = [
            *product((0,), (0,), SEQUENCES, KV),
            *product(CHUNKS, BEFORE, (0,), (0,)),
            *product(CHUNKS, BEFORE, SEQUENCES[:-1], KV),
        ]
        header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
        write_csv(own / "attention.csv", header, [(*size, attention_us(*size)) for size in sizes])
        if moe and tp == 1:
            grid = [(t, chosen) for t in TOKENS for chosen in (2, 4, 8, 16) if chosen <= 2 * t]
            write_csv(own / "moe.csv", "tokens,activated_experts,time_us", [(*g, experts_us(*g)) for g in grid])
        cells = product((0, *CHUNKS), ("n<=4", "n<=64"), ("sr<=40%", "sr>40%"), ("kvB<=1k", "kvB>1k"), ("kp=0", "kp>0"))
        header = "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples"
        write_csv(own / "skew_fit.csv", header, [(*cell, ALPHA, 4) for cell in cells])
    return folder


def profile_of(folder: Path, gpu: str = "") -> Profile:
    found = read([folder], gpu)
    return Profile("bundle", found.source, reference=found.gpu, blocks=found.blocks)


def scenario_of(
    folder: Path, tp: int = 1, ep: int = 1, requests: Mapping[str, Any] | None = None, **inference: Any
) -> Scenario:
    sent = dict(requests or {"prompt_len": 100, "output_len": 10, "count": 4})
    inference = {"engine": "vllm-0.19", "max_batch_tokens": 2048, "requests": sent, **inference}
    return parse_scenario(
        {
            "model": str(folder / "config.json"),
            "cluster": {"gpu": "rtx4090", "gpus_per_node": 2},
            "parallelism": {"tp": tp, "ep": ep},
            "inference": inference,
        }
    )


def sum_s(load: Load, chosen: int = 0) -> float:
    """A bundle's own parts, added up by hand."""
    often = dict.fromkeys(DENSE, LAYERS) | {"layernorm": 2 * LAYERS, "embedding": 1, "final_layernorm": 1}
    often |= dict.fromkeys(MLP, 0) if chosen else {}
    us = sum(often[name] * line(of, load.tokens) for name, of in DENSE.items())
    us += sum(line(of, load.samples) for of in HEAD.values())
    us += LAYERS * (line((15.0, 0.1), load.tokens) + experts_us(load.tokens, chosen)) if chosen else 0.0
    chunk, seen = load.prefills[0][:2] if load.prefills else (0, 0)
    mean = load.decode_kv / load.decodes - 1 if load.decodes else 0
    return 1e-6 * (us + LAYERS * attention_us(chunk, seen - chunk, load.decodes, mean))


def decodes(n: int, kv: int) -> Load:
    return Load(n, n, n * (kv + 1), (), n)


def with_prompt(chunk: int, before: int, n: int = 0, kv: int = 0) -> Load:
    return Load(chunk + n, n, n * (kv + 1), ((chunk, chunk + before, 1),), n + 1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "dense", tps=(1, 2))


@pytest.fixture(scope="module")
def costs(dense: Path) -> IterationCosts:
    return iteration_costs(scenario_of(dense), profile_of(dense))


# A CUDA graph of as many tokens exists, so that none is padded.
LOADS = {
    "one sequence": decodes(1, 100),
    "between measured lengths": decodes(8, 777),
    "many": decodes(128, 3000),
    "beyond measured lengths": decodes(16, 20_000),
    "a prompt": with_prompt(1024, 0),
    "a prompt behind a prefix": with_prompt(128, 3000),
    "a prompt and single tokens": with_prompt(1024, 300, 8, 500),
    "a short prompt and many": with_prompt(16, 0, 48, 700),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_an_iteration_takes_the_sum_of_what_was_measured(costs: IterationCosts, load: Load) -> None:
    assert costs.device_seconds(load)[0] == pytest.approx(sum_s(load), rel=1e-3)


def test_eager_launches_lengthen_an_iteration_and_not_its_kernels(dense: Path) -> None:
    """Bundles are timed eagerly, but on the GPU: what launches add depends on the scenario's engine alone."""
    load, profile = decodes(8, 128), profile_of(dense)
    graphs, eager = (iteration_costs(scenario_of(dense, cuda_graphs=on), profile) for on in (True, False))
    assert eager.device_seconds(load) == graphs.device_seconds(load)
    assert graphs.stage_seconds(load) == graphs.device_seconds(load)
    assert eager.stage_seconds(load)[0] > eager.device_seconds(load)[0]


def test_prompts_that_attend_together_take_as_long_as_one_chunk_with_as_many_keys(costs: IterationCosts) -> None:
    """Two chunks of 512 tokens behind 2304 and 1792 tokens see what one of 1024 sees behind 1792."""
    together = Load(1024, 0, 0, ((512, 2816, 1), (512, 2304, 1)), 2)
    alone = Load(1024, 0, 0, ((1024, 2816, 1),), 2)
    assert costs.device_seconds(together)[0] == pytest.approx(costs.device_seconds(alone)[0])
    assert costs.device_seconds(Load(1024, 0, 0, ((64, 64, 16),), 2)) < costs.device_seconds(with_prompt(1024, 0))


@pytest.mark.parametrize(("n", "prompt", "output"), [(1, 200, 40), (8, 64, 100)])
def test_a_token_of_a_steady_load_takes_the_sum_of_an_iteration(dense: Path, n: int, prompt: int, output: int) -> None:
    scenario = scenario_of(dense, requests={"prompt_len": prompt, "output_len": output, "count": n})
    result = simulate_serving(scenario, profile_of(dense)).result
    steps = [sum_s(decodes(n, prompt + i)) for i in range(output - 1)]
    assert result["time_per_output_token_s"]["p50"] == pytest.approx(sum(steps) / len(steps), rel=0.02)


def test_experts_are_priced_by_tokens_and_by_how_many_these_choose(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "moe", moe=True)
    costs = iteration_costs(scenario_of(folder), profile_of(folder))
    assert costs.device_seconds(decodes(1, 100))[0] == pytest.approx(sum_s(decodes(1, 100), chosen=2), rel=1e-3)
    load = with_prompt(1024, 0)
    assert costs.device_seconds(load)[0] == pytest.approx(sum_s(load, chosen=EXPERTS), rel=1e-3)


@pytest.mark.parametrize("load", [decodes(16, 999), with_prompt(128, 0, 16, 999)], ids=["alone", "beside a prompt"])
def test_unequal_lengths_lie_between_the_mean_and_the_longest(tmp_path: Path, load: Load) -> None:
    folder = write_bundle(tmp_path / "unequal", unequal=True)
    costs = iteration_costs(scenario_of(folder), profile_of(folder))

    def seconds(shortest: int, longest: int, mean: int = 1000) -> float:
        return costs.attention_s(
            Load(load.tokens, 16, 16 * mean, load.prefills, load.samples, lengths=(shortest, longest)), 0
        )

    assert seconds(1000, 1000) == seconds(0, 0)
    assert seconds(400, 2000) == pytest.approx(seconds(0, 0) + ALPHA * (seconds(0, 0, 2000) - seconds(0, 0)))


def test_steps_of_a_run_take_as_long_as_one_by_one(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "unequal", unequal=True)
    costs = iteration_costs(scenario_of(folder), profile_of(folder))
    first = Load(8, 8, 8000, (), 8, lengths=(200, 3000))
    each = [costs.stage_seconds(first.later(i))[0] for i in range(5)]
    assert costs.decode_run(8, 8000, 5, (200, 3000)) == each
    assert each == sorted(each)


@pytest.mark.parametrize("unequal", [False, True], ids=["equal", "unequal"])
def test_what_takes_how_long_adds_up_to_the_iterations(tmp_path: Path, unequal: bool) -> None:
    folder = write_bundle(tmp_path / "bundle", unequal=unequal)
    requests = {"prompt_len": 64, "output_len": 30, "count": 24, "rate_per_s": 20, "range_ratio": 0.5, "seed": 1}
    served = simulate_serving(scenario_of(folder, requests=requests), profile_of(folder))
    computed = loads_of(i for replica in served.replicas for i in replica.iterations)
    whole_s = sum(served.costs.stage_seconds(load)[0] * times for load, times in computed)
    assert sum(priced_together(served.costs, computed).shares.values()) == pytest.approx(whole_s, rel=0.01)


def test_a_table_that_is_switched_off_changes_nothing(dense: Path) -> None:
    assert not any(" | unequal " in block.key for block in read([dense], "").blocks)
    assert any("skew_fit.csv: disabled" in said for said in read([dense], "").skipped)


@pytest.mark.parametrize(("moe", "ep"), [(False, 1), (True, 2)], ids=["dense", "whole experts on each rank"])
def test_ranks_take_what_one_was_measured_to_take_and_their_messages(tmp_path: Path, moe: bool, ep: int) -> None:
    folder = write_bundle(tmp_path / "bundle", moe=moe, tps=(1, 2))
    costs = iteration_costs(scenario_of(folder, tp=2, ep=ep), profile_of(folder))
    load, tokens = decodes(64, 128), 64
    keys = [Key(Work.LAYER, 0, tokens)] * LAYERS + [Key(Work.EMBEDDING, 0, tokens), Key(Work.HEAD, 0, tokens)]
    messages_s = sum(costs.priced(key).comm_s for key in keys)
    assert messages_s > 0.0
    # Half of the tokens' copies go to each rank, which has half of the experts.
    own_s = sum_s(load, EXPERTS) - 1e-6 * LAYERS * (experts_us(64, 16) - experts_us(32, 8)) if moe else sum_s(load)
    assert costs.device_seconds(load)[0] == pytest.approx(own_s + messages_s, rel=0.02)


def test_experts_that_were_measured_whole_are_estimated_where_ranks_split_them(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "bundle", moe=True, tps=(1, 2))
    scenario = scenario_of(folder, tp=2)
    costs = iteration_costs(scenario, profile_of(folder))
    estimated = iteration_costs(scenario, Profile("nothing", "roofline"))
    key = Key(Work.ROUTED, 0, 64)
    assert costs.priced(key).seconds == pytest.approx(estimated.priced(key).seconds)
    assert costs.priced(Key(Work.LAYER, 0, 64)).seconds > costs.priced(key).seconds
    assert "own/small, tp 2: experts that ranks split" in " ".join(read([folder], "").estimated)


OTHERS: dict[str, dict[str, Any]] = {
    "ranks": {"parallelism": {"tp": 4}},
    "number format": {"inference": {"quantization": "fp8"}},
    "GPU": {"cluster": {"gpu": "h100-sxm", "gpus_per_node": 1}},
    "model": {"model": {"layers": LAYERS + 1}},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_what_was_not_measured_is_estimated_and_said(dense: Path, changes: dict[str, Any]) -> None:
    sent = {"requests": {"prompt_len": 100, "output_len": 10, "count": 2}}
    data: dict[str, Any] = {
        "cluster": {"gpu": "rtx4090", "gpus_per_node": 4},
        **changes,
        "model": {"preset": str(dense / "config.json"), **changes.get("model", {})},
        "inference": {"engine": "vllm-0.19", **sent, **changes.get("inference", {})},
    }
    scenario, profile = parse_scenario(data), profile_of(dense)
    served = simulate_serving(scenario, profile)
    assert iteration_costs(scenario, profile).measured is None
    assert any("iterations that were measured on rtx4090" in said for said in served.result["warnings"])


def test_a_part_that_lacks_a_size_is_named(dense: Path) -> None:
    profile = profile_of(dense)
    block = next(b for b in profile.blocks if " | mixed " in b.key)
    wrong = Profile("own", "", blocks=(*profile.blocks, block._replace(key=block.key.rpartition(" ")[0])))
    with pytest.raises(InputError, match=r"profile 'own': blocks: mixed: found 3 sizes \(a=.*\); allowed: 4"):
        iteration_costs(scenario_of(dense), wrong)


def test_a_bundle_says_what_it_covers(dense: Path) -> None:
    found = read([dense.parent], "")
    assert (found.gpu, found.software["vllm"], len(found.covered)) == ("rtx4090", "0.19.0", 2)
    assert "own/small, tp 1, bf16, vLLM 0.19.0: dense 9" in found.covered[0]


WRONG: dict[str, tuple[str, str, str, str]] = {
    "no gpu": ("meta.yaml", '"gpu": "NVIDIA GeForce RTX 4090", ', "", r"meta.yaml:1: gpu: is missing"),
    "unknown gpu": ("meta.yaml", "GeForce RTX 4090", "Thing", r"meta.yaml: gpu: found 'NVIDIA Thing'.*--gpu"),
    "no yaml": ("meta.yaml", "{", "{{", r"meta.yaml:1: "),
    "other format": ("meta.yaml", '"bf16"', '"fp8"', r"nothing to import: .*variant fp8"),
    "time": ("tp1/dense.csv", "embedding,2,304.0", "embedding,2,-3", r"dense.csv:3: time_us: found '-3'.*above 0"),
    "no number": ("tp1/dense.csv", "embedding,2,304.0", "embedding,2,abc", r"dense.csv:3: time_us: found 'abc'"),
    "size": ("tp1/dense.csv", "embedding,2,", "embedding,0,", r"dense.csv:3: tokens: found '0'; allowed: a whole"),
    "twice": ("tp1/dense.csv", "embedding,2,", "embedding,1,", r"dense.csv:3: is there twice: embedding, 1"),
    "cells": ("tp1/dense.csv", "embedding,2,", "embedding,2,2,", r"dense.csv:3: found 4 cells; allowed: 3"),
    "layer": ("tp1/dense.csv", "embedding,2,", "embeding,2,", r"dense.csv:3: layer: found 'embeding'; allowed: embed"),
    "column": ("tp1/attention.csv", "kv_prefill", "prefill_key", r"attention.csv:1: found columns .*prefill_key"),
    "neither": ("tp1/attention.csv", "0,0,1,16,", "0,0,0,16,", r"attention.csv:2: prefill_chunk and n_decode"),
}


@pytest.mark.parametrize(("file", "old", "new", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    path = write_bundle(tmp_path / "bundle") / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=said):
        read([tmp_path / "bundle"], "")


def test_a_layer_without_rows_is_named(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "bundle") / "tp1" / "dense.csv"
    path.write_text("".join(row for row in path.read_text().splitlines(True) if not row.startswith("o_proj")))
    with pytest.raises(InputError, match=r"dense.csv: has no row of layer o_proj; wanted: act_fn, "):
        read([tmp_path / "bundle"], "")


def test_bundles_of_two_gpus_are_two_profiles(tmp_path: Path) -> None:
    for name, gpu in (("a", "NVIDIA H100 80GB HBM3"), ("b", META["gpu"])):
        meta = write_bundle(tmp_path / name) / "meta.yaml"
        meta.write_text(meta.read_text().replace(META["gpu"], gpu))
    with pytest.raises(InputError, match="bundles of several GPUs"):
        read([tmp_path], "")


def test_a_model_that_was_measured_twice_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_bundle(tmp_path / name)
    with pytest.raises(InputError, match=r"b/tp1: measures the same sizes as .*a/tp1"):
        read([tmp_path], "")


@pytest.mark.parametrize(("lacking", "said"), [("meta.yaml", "has no meta.yaml"), ("tp1", "has no folder tp1")])
def test_a_folder_that_is_no_bundle_is_named(tmp_path: Path, lacking: str, said: str) -> None:
    folder = write_bundle(tmp_path / "bundle")
    (folder / lacking).rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=said):
        read([folder], "")
