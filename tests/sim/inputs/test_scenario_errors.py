"""Scenarios that are wrong: one clear message each."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import load_scenario, parse_scenario
from sim.simulation import simulate
from tests.sim.cases import GOOD

MOE = "model.moe={experts: 8, top_k: 2, ffn: 64}"
SERVE = ["training=null", "inference={requests: {prompt_len: 8, output_len: 8}}"]
LATENTS = ["model.kv_heads=null", "model.head_dim=null"]  # beside MLA
STATES = "model.state_space={heads: 8, head_dim: 64, state: 16}"
MLA = "model.mla={kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8}"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    return file


def message(file: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as error:
        load_scenario(file, overrides)
    text = str(error.value)
    assert "\n" not in text
    return text.replace(str(file), "good.yaml")


CASES: list[tuple[str, str]] = [
    # unknown keys
    ("paralelism.tp=2", "good.yaml: --set paralelism.tp: paralelism: unknown key; did you mean 'parallelism'?"),
    ("parallelism.tpp=2", "--set parallelism.tpp: unknown key; did you mean 'tp'?"),
    # also where their value is null, which means the default of a known key
    ("paralelism=null", "good.yaml: --set paralelism: unknown key; did you mean 'parallelism'?"),
    ("parallelism.tpp=null", "--set parallelism.tpp: unknown key; did you mean 'tp'?"),
    ("model.moe={expertz: null}", "--set model.moe: model.moe.expertz: unknown key; did you mean 'experts'?"),
    ("training.recompute={mode: full, evry: null}", "training.recompute.evry: unknown key; did you mean 'every'?"),
    ("cluster.nodez=null", "--set cluster.nodez: unknown key; did you mean 'nodes'?"),
    ("cluster.gpu.memoryy=null", "--set cluster.gpu.memoryy: unknown key; did you mean 'memory_bytes'?"),
    ("faults.stragglerz=null", "--set faults.stragglerz: unknown key; did you mean 'stragglers'?"),
    ("model.laeyrs=2", "--set model.laeyrs: unknown key; did you mean 'layers'?"),
    ("model.moe={experts: 8, topk: 2, ffn: 64}", "model.moe.topk: unknown key; did you mean 'top_k'?"),
    (
        "cluster.intra_node.bandwidth=1",
        "cluster.intra_node.bandwidth: unknown key; did you mean 'bandwidth_bytes_per_s'?",
    ),
    (
        "cluster.gpu.memory=1",
        "cluster.gpu.memory: unknown key; did you mean one of memory_bytes, memory_shown, memory_bandwidth",
    ),
    ("faults={stragglers: [{rnak: 1}]}", "faults.stragglers[0].rnak: unknown key; did you mean 'rank'?"),
    ("training.recompute={mode: full, layer: 1}", "training.recompute.layer: unknown key; did you mean 'layers'?"),
    ("training.tp_overlap=wgrad", "--set training.tp_overlap: unknown key; it belongs in parallelism"),
    ("parallelism.recompute=full", "--set parallelism.recompute: unknown key; it belongs in training"),
    ("tp=8", "--set tp: unknown key; it belongs in parallelism"),
    # wrong types
    ("training.seq_len=long", "--set training.seq_len: found 'long'; must be an integer"),
    ("training.seq_len=1.5", "found 1.5; must be an integer"),
    ("training.seq_len=true", "found true; must be an integer"),
    ("training.seq_len='128'", "found '128'; must be an integer"),
    ("training.seq_len=[1]", "found a list of 1; must be an integer"),
    ("parallelism.sp=1", "found 1; must be true or false"),
    ("model.dropout=much", "found 'much'; must be a number"),
    ("training=5", "training: found 5; must be a mapping"),
    ("parallelism=[1]", "parallelism: found a list of 1; must be a mapping"),
    ("model=[1]", "model: found a list of 1; must be a preset's name, a path or a mapping"),
    ("cluster=3", "cluster: found 3; must be a preset's name or a mapping"),
    ("name=3", "name: found 3; must be text"),
    ("parallelism.layers_per_stage=3", "found 3; must be a list"),
    ("training.recompute=8", "training.recompute: found 8; must be one of none, selective"),
    ("faults={failures: {kinds: [{name: '', mtbf_s_per_gpu: 1}]}}", "kinds[0].name: found ''; must not be empty"),
    ("faults.stragglers=3", "faults.stragglers: found 3; must be a list"),
    ("faults.stragglers=[{rank: 1, compute_scale: 0.8}]", "compute_scale: found 0.8; must be at least 1"),
    ("training.fp8_recipe=tensorwise", "nothing is scaled: leave the key out (null), or set training.precision to fp8"),
    ("faults.links=[{between: [node0]}]", "faults.links[0].between[1]: is required and missing"),
    ("faults={links: [{between: node0}]}", "found 'node0'; must be a list"),
    # out of limits
    ("model.layers=0", "--set model.layers: found 0; must be at least 1"),
    ("model.layers=10001", "found 10001; must be at most 10,000"),
    ("model.dropout=1", "found 1; must be less than 1"),
    ("parallelism.dp=20000000", "must be at most 10,000,000"),
    ("parallelism.zero=4", "found 4; must be 0, 1, 2 or 3"),
    ("parallelism.zero=true", "parallelism.zero: found true"),
    ("training.global_batch_size=-1", "found -1; must be at least 1"),
    ("training.global_batch_size=" + "9" * 60, "found a very long number"),
    ("parallelism.bucket_bytes=0", "found 0; must be at least 1"),
    ("parallelism.bucket_bytes=25 parsecs", "must be a number of bytes"),
    ("cluster.gpu.memory_bytes=lots", "cluster.gpu.memory_bytes: found 'lots'; must be a number of bytes"),
    ("cluster.gpu.memory_bytes=-1", "must be greater than 0"),
    ("cluster.gpu.peak_flops_per_s={bf16: 0}", "cluster.gpu.peak_flops_per_s.bf16: found 0; must be a number above 0"),
    ("cluster.gpu.peak_flops_per_s={bf17: 1}", "unknown dtype; did you mean 'bf16'?"),
    ("cluster.nodes=0", "cluster.nodes: found 0; must be at least 1"),
    ("cluster.nvlink_domain=12", "good.yaml:8: cluster: nvlink_domain is 12; it must be gpus_per_node (8)"),
    # NaN and infinity
    ("model.dropout=.nan", "model.dropout: found nan; must be a finite number"),
    ("parallelism.schedule_memory=.inf", "found inf; must be a finite number"),
    ("parallelism.schedule_memory=1e999", "found inf; must be a finite number"),
    # names
    ("parallelism.schedule=1f2b", "found '1f2b'; must be 'naive', 'gpipe', '1f1b'"),
    ("parallelism.schedule=zb_h3", "did you mean 'zb_h2'?"),
    ("training.precision=fp12", "found 'fp12'; must be 'fp32', 'bf16'"),
    ("training.recompute=fulll", "training.recompute.mode: found 'fulll'; must be 'none'"),
    (
        "model.moe={experts: 8, top_k: 2, ffn: 8, imbalance: skewed}",
        "model.moe.imbalance: found 'skewed'; must be 'balanced'",
    ),
    ("model.moe={experts: 8, top_k: 2, ffn: 8, imbalance: {zipf: -1}}", "model.moe.imbalance.zipf: found -1"),
    ("model=llama3-9b", "model: found 'llama3-9b'; no such model preset; did you mean 'llama3-8b'?"),
    ("model={preset: 3}", "--set model: model.preset: found 3"),
    ("model=nowhere/config.json", "found 'nowhere/config.json'; no such file"),
    ("model=./", "model: found './'; is a folder without config.json, Hugging Face's"),
    ("calibration=h100", "--set calibration: found 'h100'; no such profile; did you mean 'h100-sxm'? (there are:"),
    ("calibration=./", "--set calibration: found './'; is a folder; a file is needed"),
    ("calibration=nowhere.json", "--set calibration: found 'nowhere.json'; no such file"),
    ("cluster=dgx-h1000", "no such cluster preset; did you mean 'dgx-h100'?"),
    ("cluster={gpu: h1000}", "no such GPU preset; did you mean one of h100-nvl, h100-pcie, h100-sxm?"),
    ("cluster=p5.48xlarge", "no such cluster preset; the nearest is 'p5-efa' (`stepsim clusters` shows"),
    ("cluster={preset: dgx-h101}", "cluster.preset: found 'dgx-h101'"),
    ("cluster={name: dgx-h100}", "cluster.name: found 'dgx-h100'; preset names a shipped cluster: {preset: dgx-h100}"),
    ("cluster={nodes: 2}", "cluster.gpu: is required and missing"),
    ("cluster.inter_node.nic_bandwidth_bytes_per_s=400", "found 400; 400 bytes a second? write 400GB/s or 400Gbps"),
    ("cluster.gpu=h100", "no such GPU preset; did you mean one of h100-nvl, h100-pcie, h100-sxm?"),
    ("cluster={gpu: {memory_bytes: 1GiB}}", "cluster.gpu.memory_bandwidth_bytes_per_s: is required and missing"),
    ("parallelism.rank_order=tp-dp", "found 'tp-dp'; must hold each of tp, cp, dp, pp once"),
    # keys of a mapping one level deeper
    ("model.experts=8", "model.experts: unknown key; it belongs in model.moe"),
    ("cluster.nics_per_node=4", "cluster.nics_per_node: unknown key; it belongs in cluster.inter_node"),
    ("cluster.latency_s=1us", "it belongs in cluster.intra_node or cluster.inter_node"),
    # sections and required keys
    ("version=2", "version: found 2; this program reads version 1"),
    ("model=null", "model: is required and missing"),
    ("cluster=null", "cluster: is required and missing"),
    ("training=null", "training: is required and missing"),
    ("training.seq_len=null", "training.seq_len: is required and missing"),
    ("model.vocab=null", "model.vocab: is required and missing"),
    ("inference={requests: {prompt_len: 1, output_len: 1}}", "inference: cannot be given with training"),
    # shape of the model
    ("model.heads=7", "model.heads: found 7; must divide hidden (256), or give head_dim"),
    ("model.kv_heads=3", "model.kv_heads: found 3; must divide heads (8)"),
    ("model.moe={experts: 2, top_k: 3, ffn: 8}", "model.moe.top_k: found 3; must be at most experts (2)"),
    ("model.moe={experts: 2, top_k: 1, ffn: 8, dense_layers: 9}", "must be at most layers (8)"),
    (MLA, "model.kv_heads: found 4; with mla every head has its own: 8"),
    # options that are no options
    ("parallelism.pp", "--set parallelism.pp: must be KEY=VALUE"),
    ("=3", "--set =3: must be KEY=VALUE"),
    ("parallelism.pp=", "--set parallelism.pp=: has no value; null stands for the key's default"),
    ("a..b=3", "must be KEY=VALUE"),
    (".".join("a" * 17) + "=3", "more than 16 parts"),
    ("parallelism.pp=[1", "is not valid YAML"),
    ("parallelism.dp.x=3", "parallelism.dp holds a single value, so it has no key 'x'"),
    ("parallelism.pp=&a 3", "anchors and aliases"),
]

LAYOUTS: list[tuple[list[str], str]] = [
    (["parallelism.tp=3"], "parallelism.tp: found 3; must divide model.heads (8)"),
    (["model.heads=24", "model.hidden=384", "model.kv_heads=6", "parallelism.tp=4"], "must divide model.kv_heads (6)"),
    (["model.ffn=100", "parallelism.tp=8"], "must divide model.ffn (100)"),
    (["model.head_dim=8", "model.hidden=260", "parallelism.tp=8"], "must divide model.hidden (260)"),
    (["parallelism.sp=true"], "sequence parallelism needs tp above 1"),
    (
        ["parallelism.tp=8", "parallelism.sp=true", "training.seq_len=100"],
        "cp·tp = 8 must divide training.seq_len (100)",
    ),
    (["parallelism.ep=2"], "parallelism.ep: found 2; the model has no experts"),
    (["parallelism.expert_tp=2"], "parallelism.expert_tp: found 2; the model has no experts"),
    (["parallelism.ep_overlap=true"], "the model has no experts"),
    ([MOE, "parallelism.ep=3"], "parallelism.ep: found 3; must divide model.moe.experts (8)"),
    ([MOE, "parallelism.ep=4"], "parallelism.ep: found 4; must divide tp·cp·dp (2)"),
    ([MOE, "parallelism.ep=2", "parallelism.expert_tp=2"], "ep·expert_tp must divide tp·cp·dp (2)"),
    (["model.moe={experts: 8, top_k: 2, ffn: 63}", "parallelism.expert_tp=2"], "must divide model.moe.ffn (63)"),
    (["model.moe={experts: 8, top_k: 2, ffn: 63, shared_experts: 1}", "parallelism.tp=2"], "shared experts' ffn (63)"),
    (
        [MOE, "parallelism.ep=2", "parallelism.pp=2", "parallelism.ep_overlap=true"],
        "only dualpipe, dualpipe_v, interleaved_1f1b (without micro_batch_group) and pp 1 pair",
    ),
    (["cluster.nodes=1", "parallelism.pp=8"], "cluster.nodes: found 1 node of 8 = 8 GPUs; tp·cp·dp·pp = 1·1·2·8 = 16"),
    (["parallelism.dp=4000000", "parallelism.tp=8"], "32,000,000 ranks; at most 10,000,000"),
    (
        ["parallelism.pp=200000", "parallelism.schedule=interleaved_1f1b", "parallelism.virtual_stages=6"],
        "makes 1,200,000 stages; at most 1,000,000",
    ),
    (
        ["training.global_batch_size=33"],
        "found 33; must be a multiple of micro_batch_size·dp = 1·2 = 2 (nearest: 32 or 34)",
    ),
    (["training.micro_batch_size=32"], "(nearest: 64)"),
    (["parallelism.virtual_stages=2", "parallelism.pp=2"], "found 2 with schedule 1f1b; it has 1 stage per rank"),
    (
        ["parallelism.virtual_stages=1", "parallelism.pp=2", "parallelism.schedule=interleaved_1f1b"],
        "it needs 2 or more stages per rank",
    ),
    (
        ["parallelism.virtual_stages=3", "parallelism.pp=2", "parallelism.schedule=zb_v"],
        "found 3 with schedule zb_v; it has 2 stages per rank",
    ),
    (
        ["parallelism.schedule=dualpipe", "parallelism.pp=3"],
        "parallelism.pp: found 3 with schedule dualpipe; must be a multiple of 2",
    ),
    (
        ["parallelism.layers_per_stage=[4, 4]"],
        "found a list of 2; pp 1, schedule 1f1b and virtual_stages 1 make",
    ),
    (["parallelism.pp=2", "parallelism.layers_per_stage=[4, 5]"], "found 9 layers in all; model.layers is 8"),
    (["parallelism.pp=2", "parallelism.layers_per_stage=[-1, 9]"], "parallelism.layers_per_stage[0]: found -1"),
    (["parallelism.pp=2", "parallelism.layers_per_stage=[]"], "found a list of 0"),
    (["parallelism.cp=3"], "2·cp = 6 (zigzag split) must divide training.seq_len (128)"),
    (["parallelism.cp=3", "parallelism.cp_split=striped"], "cp = 3 must divide training.seq_len (128)"),
    (["parallelism.cp=16", "parallelism.cp_method=all_to_all"], "cp must divide heads/tp (8)"),
    (["parallelism.shard_size=3", "parallelism.zero=3"], "parallelism.shard_size: found 3; must divide dp·cp (2)"),
    (["training.precision=fp16", "cluster=cpu-host"], "GPU cpu has no fp16 peak (it has: fp32, bf16)"),
    (["cluster=dgx-v100"], "training.precision: found 'bf16'; GPU v100 has no bf16 peak"),
    (["training.precision=fp8", "cluster=dgx-a100"], "GPU a100-sxm has no fp8 peak"),
    (["training.precision=nvfp4"], "GPU h100-sxm has no nvfp4 peak"),
    (
        ["training.precision=fp32", "training.attention_kernel=flash2"],
        "attention_kernel: found 'flash2'; it takes queries, keys and values in 16 bits, and precision is fp32",
    ),
    (["training.precision=mxfp8"], "GPU h100-sxm has no mxfp8 peak"),
    (
        ["training.param_dtype=fp16"],
        "training.param_dtype: found 'fp16'; precision bf16 keeps parameters in bf16 or fp32",
    ),
    (["training.precision=fp32", "training.param_dtype=bf16"], "precision fp32 keeps parameters in fp32"),
    (
        ["training.recompute={mode: full, layers: 9}"],
        "training.recompute.layers: found 9; must be at most model.layers (8)",
    ),
    (["training.recompute={mode: full, layers: 2, every: 2}"], "found both layers and every"),
    (["training.recompute={mode: selective, layers: 2}"], "only mode full takes it"),
    (
        ["model.positions=learned", "model.max_positions=64"],
        "model.max_positions: found 64; learned positions must cover 128",
    ),
    (
        [MLA, "model.kv_heads=null", "model.head_dim=null", "model.mla.qk_rope_head_dim=5"],
        "model.mla.qk_rope_head_dim: found 5; must be even: positions turn pairs of numbers",
    ),
    ([MLA, "model.kv_heads=null", "model.head_dim=8"], "with mla it is qk_nope_head_dim + qk_rope_head_dim = 12"),
    (
        [MLA, "model.kv_heads=null", "model.head_dim=null", "model.scaled_rope=true"],
        "model.scaled_rope: found true; latent attention (mla) scales its scores instead: leave it out",
    ),
    (["model.scaled_rope=true"], "model.scaled_rope: found true; needs positions: rope, found none"),
    (
        [MLA, *LATENTS, "model.qk_norm=true"],
        "model.qk_norm: found true; latent attention (mla) has norms of both latents, and no others",
    ),
    (
        [MLA, *LATENTS, "model.value_norm=true"],
        "model.value_norm: found true; latent attention (mla) has norms of both latents",
    ),
    ([MLA, *LATENTS, "model.qkv_bias=true"], "model.qkv_bias: found true; latent attention (mla) has no biases"),
    (
        [MLA, *LATENTS, "model.separate_qkv=true"],
        "model.separate_qkv: found true; latent attention (mla) has matrices of its own",
    ),
    (
        [MLA, *LATENTS, "model.rope_share=0.5"],
        "model.rope_share: found 0.5; latent attention (mla) turns mla.qk_rope_head_dim of a head",
    ),
    (["model.rope_share=0.5"], "model.rope_share: found 0.5; needs positions: rope, found none"),
    (["model.no_rope_every=2"], "model.no_rope_every: found 2; needs positions: rope, found none"),
    (["model.qk_norm=l2"], "model.qk_norm: found 'l2', a norm of queries and keys with rope; needs positions: rope"),
    (["model.norm=rmsnorm", "model.norm_bias=true"], "model.norm_bias: found true; an RMS norm has no bias"),
    (
        ["model.separate_qkv=true", "model.merged_projections=true"],
        "separate_qkv: found true beside merged_projections",
    ),
    ([STATES, "model.sinks=true"], "model.sinks: found true; no layer has attention (model.attention_pattern)"),
    ([STATES, "model.state_space.inner_norms=true"], "inner_norms: found true; is for mamba1 only, found mamba2"),
    (["faults.stragglers=[{rank: 2}]"], "faults.stragglers[0].rank: found 2; must be below the number of ranks (2)"),
    (
        ["faults.links=[{between: [node0, node7]}]"],
        "faults.links[0].between[1]: found 'node7'; the cluster has node0 alone",
    ),
    (["faults.links=[{between: [spine, node0]}]"], "found 'spine'"),
    (["distillation={teacher: llama3-8b}"], "distillation.teacher: has a vocabulary of 128256"),
    (["distillation={teacher: llama3-9b}"], "distillation.teacher: found 'llama3-9b'"),
    (["distillation={mode: logits}"], "distillation.teacher: is required and missing"),
    (["distillation=3"], "distillation: found 3; must be a mapping"),
    (["distillation={teacher: {layers: 1, hidden: 8, heads: 3, vocab: 9}}"], "distillation.teacher.heads: found 3"),
    (
        ["distillation={teacher: gpt2, mode: sequence, teacher_parallelism: {tp: 5}}"],
        "must divide the teacher's heads (12)",
    ),
    (
        ["distillation={teacher: gpt2, mode: sequence, teacher_parallelism: {tp: 4}}"],
        "must divide the number of ranks (2)",
    ),
    (["distillation={teacher: gpt2, mode: sequence}", "training.seq_len=2048"], "learned positions must cover 2048"),
    ([*SERVE, "distillation={teacher: gpt2}"], "distillation: needs training"),
    (
        [*SERVE, "parallelism.cp=2", "parallelism.cp_method=all_to_all"],
        "served prompts are split by ring or all_gather",
    ),
    ([*SERVE, "inference.requests={prompt_len: 8}"], "inference.requests.output_len: is required and missing"),
    (
        [*SERVE, "inference.requests={trace: nowhere.csv}"],
        "inference.requests.trace: found 'nowhere.csv'; no such file",
    ),
    ([*SERVE, "inference.requests.rate_per_s=0"], "found 0; must be at least 1e-06"),
    ([*SERVE, "inference.batching=static", "inference.requests.rate_per_s=3"], "a static batch takes equal requests"),
    ([*SERVE, "inference.prefix_cache=gpu", "inference.kv_cache.layout=contiguous"], "need kv_cache.layout paged"),
    ([*SERVE, "inference.kv_cache.memory_fraction=1.5"], "found 1.5; must be at most 1"),
    ([*SERVE, "inference.requests=3"], "inference.requests: found 3; must be a mapping"),
    (
        ["faults={stragglers: [{rank: 1}]}", "faults.stragglers.2.rank=0"],
        "is a list of 1; '2' must be a number from 0 to 1",
    ),
    (["faults.stragglers.5.rank=0"], "faults.stragglers is a list of 0; '5' must be a number from 0 to 0"),
    (["faults.stragglers.0.compute_scale=2"], "faults.stragglers[0]: must have either a rank or a node"),
    (["faults.stragglers=[{rank: 0, node: node0}]"], "faults.stragglers[0]: must have either a rank or a node"),
    (["faults.stragglers=[{node: node1}]"], "stragglers[0].node: found 'node1'; the cluster has node0 alone"),
    (["faults.stragglers=[{node: 1}]"], "stragglers[0].node: found 1; must be a node's name: node1"),
    (["faults={stragglers: [{rank: 1}]}", "faults.stragglers.0.rank=-1"], "--set faults.stragglers[0].rank: found -1"),
]


@pytest.mark.parametrize(("override", "expected"), CASES)
def test_one_wrong_key(good: Path, override: str, expected: str) -> None:
    assert expected in message(good, override)


@pytest.mark.parametrize(("overrides", "expected"), LAYOUTS)
def test_illegal_products(good: Path, overrides: list[str], expected: str) -> None:
    assert expected in message(good, *overrides)


def test_wrong_mappings_name_their_table() -> None:
    with pytest.raises(InputError, match=r"row 7: model\.layers: found 'x'"):
        parse_scenario({"model": {"layers": "x"}, "training": {}, "cluster": "dgx-h100"}, "row 7")
    with pytest.raises(InputError, match="keys must be text"):
        parse_scenario({"model": {1: 2}})
    with pytest.raises(InputError, match="found a set"):
        parse_scenario({"model": {"layers": {1, 2}}})


@pytest.mark.parametrize(
    ("overrides", "where", "said"),
    [
        (
            ["parallelism.schedule=zb_v"],
            "good.yaml:8: parallelism.p2p_overlap: ",
            "schedule zb_v needs overlapped messages (true)",
        ),
        (
            ["training.global_batch_size=40000000"],
            "good.yaml: --set training.global_batch_size: ",
            "forwards and backwards to simulate",
        ),
    ],
)
def test_what_a_simulation_finds_has_its_file_line_and_key(
    tmp_path: Path, overrides: list[str], where: str, said: str
) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(
        GOOD.replace("name: good\n", "name: other\n").replace("  dp: 2\n", "  pp: 2\n  p2p_overlap: false\n")
    )
    with pytest.raises(InputError) as error:
        simulate(load_scenario(file, overrides))
    assert str(error.value).startswith(str(file))
    assert where in str(error.value)
    assert said in str(error.value)


def test_a_folder_without_a_config_is_not_said_to_be_missing(good: Path) -> None:
    (good.parent / "Llama").mkdir()
    assert "model: found 'Llama'; is a folder without config.json" in message(good, "model=Llama")
