"""What new users get wrong: units, other programs' names, the wrong file; each is one message that says what to do."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import pytest

from sim.commands.layout_options import limit_bytes, parse_only
from sim.core.errors import InputError
from sim.core.json_text import parse_json
from sim.inputs.explain import all_keys, explain
from sim.inputs.measured_run import load_measured
from sim.inputs.scenario import json_schema, load_scenario
from sim.inputs.synonyms import NO_KEY, synonyms, value_synonyms
from sim.inputs.yaml_input import parse_yaml
from sim.prices.profiles import load_profile
from sim.studies.regression import regress
from sim.traces.reading import load as load_traces
from sim.validation.tables import read_table
from tests.processes import ROOT

SCENARIO = ROOT / "scenarios" / "1f1b_pp8.yaml"
PROFILE = ROOT / "sim" / "presets" / "profiles" / "cpu.json"
RUN = ROOT / "scenarios" / "measured" / "tp2.json"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.seq_len=8k", "found '8k'; must be an integer: write 8192 (or 8_192)"),
        ("training.global_batch_size=4M", "write 4194304 (or 4_194_304)"),
        ("training.software_date=2024-13", "found '2024-13'; must be a month or a day, such as 2024-12 or 2024-12-05"),
        ("model=somebody/Llama-3.1-8B-tuned", "the nearest shipped model is 'llama3.1-8b'"),
        ("model=Qwen/Qwen2.5-14B-Instruct", "hf download Qwen/Qwen2.5-14B-Instruct config.json"),
        (
            "model=google/some-model",
            "looks like a Hugging Face Hub id: run `hf download google/some-model config.json`",
        ),
        ("model=folder/config.json", "no such file"),
        ("model=https://huggingface.co/google/some-model/tree/main", "looks like a Hugging Face Hub id"),
        ("cluster.nic_bandwidth=400", "here it is cluster.inter_node.nic_bandwidth_bytes_per_s"),
        ("cluster.gpu.peak_flops_per_s=989", "must be a mapping of dtypes, such as {bf16: 989e12}"),
        ("training.lora=16", "training.lora: found 16; must be a mapping of rank, targets, dropout"),
        ("parallelism={pp:8}", "parallelism.pp:8: is one key without a value; write pp: 8"),
        ("cluster={topology:two.json}", "is one key without a value; write topology: two.json"),
        ("training.lora_rank=16", "unknown key; here it is training.lora.rank"),
        ("training.lora={r: 16}", "training.lora.r: unknown key; here it is training.lora.rank"),
        ("faults.stragglers=[{rank: 3, slowdown: 1.3}]", "here it is faults.stragglers.compute_scale"),
        ("parallelism.stages_per_rank=2", "here it is parallelism.virtual_stages"),
        ("parallelism.pipeline_model_parallel_size=8", "unknown key; here it is parallelism.pp"),
        ("tensor_parallel_degree=8", "unknown key; here it is parallelism.tp"),
        ("training.gradient_checkpointing=true", "here it is training.recompute"),
        ("training.grad_dtype=fp4", "must be 'fp32', 'bf16' or 'fp16'; 'fp4' is read as 'nvfp4'"),
        (
            "training.precision=fp4",
            "GPU h100-sxm has no nvfp4 peak (it has: fp32, tf32, bf16, fp16, fp8, int8); 'fp4' is",
        ),
        ("model.num_hidden_layers=8", "here it is model.layers"),
        ("model.hidden_act=silu", "unknown key; here it is model.mlp"),
        ("model.sliding_window=4096", "unknown key; here it is model.window"),
        ("training.gradient_accumulation_steps=4", "here training.global_batch_size = micro_batch_size × dp × "),
        ("training.learning_rate=1e-4", "unknown key; there is no such key here, since it changes neither"),
        ("training.framework=torchtitan", "here it is eager or compiled"),
        ("training.framework=Megatron-LM", "here it is megatron"),
        ("training.recompute=op", "here it is selective_op"),
        ("training.attention=flash_attention_3", "must be 'fused' or 'unfused'; here it is fused"),
        ("parallelism.schedule=ZBVZeroBubble", "here it is zb_v"),
        ("parallelism.zero=FULL_SHARD", "must be 0, 1, 2 or 3; here it is 3"),
        ("parallelism.pipeline=8", "unknown key; here it is parallelism.pp"),
        ("serving={}", "unknown key; here it is inference"),
        ("parallelism.schedule=[1f1b]", "found a list of 1; must be 'naive', 'gpipe', '1f1b'"),
        ("training.optimizer={name: adamw}", "found a mapping; must be 'adamw', 'sgd', 'muon', 'sgd_momentum'"),
        ("training.framework=5", "found 5; must be 'eager', 'megatron'"),
        ("profile=mine.json", "unknown key; here it is calibration"),
        ("cluster.gpus=256", "here it is cluster.nodes or cluster.gpus_per_node"),
        ("model.moe.moe_intermediate_size=768", "here it is model.moe.ffn"),
        ("cluster.network.bandwidth=400Gbps", "--set cluster.network.bandwidth: cluster.network: unknown key"),
        ("training.global_batch_size=1e3", "found 1000.0; must be an integer: write 1000"),
        ("training.global_batch_size=1e99", "found 1e+99; must be an integer"),
        ("cluster.gpu.memory_bytes=80", "80 bytes? write 80GiB"),
        ("cluster.inter_node.latency_s=5", "5 seconds? write 5us or 5ms"),
        ("cluster.gpu.memory_bandwidth_bytes_per_s=fast", "such as 50GB/s or 400Gbps"),
    ],
)
def test_keys_and_values(override: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load_scenario(SCENARIO, [override])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("inference.engine=bundle", "did you mean 'bundled'?"),
        ("inference.requests.trace=requests.csv", "cannot stand beside trace, which is another form of this mapping"),
        ("inference.requests.prompt_length=8", "here it is inference.requests.prompt_len"),
        ("inference.requests.input_length=8", "here it is inference.requests.prompt_len"),  # not output_len
        (
            "inference.requests.prompt_len={mean: 900, sigma: 0.5}",
            "must be one number of tokens, such as 900, of which",
        ),
        ("inference.requests.output_len=[100, 200]", "found a list of 2; must be one number of tokens of which"),
        ("inference.requests.output_len={min: 1, max: 2}", "write requests: {trace: FILE.csv} with columns"),
        ("inference.lora.targets=[q_proj, v_proj]", "here it is qkv"),
        ("inference.requests.random_range_ratio=1", "here it is inference.requests.range_ratio"),
        ("inference.batch_size=32", "here it is inference.max_running_requests"),  # not training.micro_batch_size
        ("inference.quantization=fp8_e4m3", "here it is fp8"),
        ("inference.kv_cache.block_size=32", "here it is inference.kv_cache.block_tokens"),  # not training.seq_len
        ("inference.rate_per_s=4", "unknown key; it belongs in inference.requests"),
        ("inference.requests.rate_per_s=inf", "found 'inf'; must be a number; here it is null"),
        ("inference.page_size=32", "here it is inference.kv_cache.block_tokens"),
        ("inference.chunked_prefill_size=4096", "here it is inference.max_batch_tokens"),
        ("inference.speculative.num_speculative_tokens=3", "here it is inference.speculative.tokens"),
        ("inference.enable_expert_parallel=true", "here it is parallelism.ep"),
        ("inference.kv_cache.free_gpu_memory_fraction=0.8", "here it is inference.kv_cache.free_fraction"),
    ],
)
def test_keys_and_values_of_serving(override: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load_scenario(ROOT / "scenarios" / "serve_llama8b.yaml", [override])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rl.generation.gpus=8", "here it is rl.generation.replicas"),  # not cluster.nodes
        ("rl.kl_coef=0.1", "here it is rl.reference"),
        ("rl.algorithm=grpo", "here it is rl.critic"),
        ("rl.rollout.tp=2", "here it is rl.generation"),
        ("training.gpus=8", "here it is cluster.nodes"),
    ],
)
def test_keys_of_reinforcement_learning(override: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load_scenario(ROOT / "scenarios" / "rl_grpo_llama8b.yaml", [override])
    assert str(error.value).endswith(said)


def test_every_synonym_leads_to_a_key_that_there_is() -> None:
    known = set(all_keys())
    keys = {word: key for word, key in synonyms().items() if key != NO_KEY}
    for key in keys.values():
        explain(key)  # raises InputError for no key
    assert not {word for word in keys if f"{keys[word].partition('.')[0]}.{word}" in known}


def test_every_word_for_a_value_leads_to_an_allowed_one() -> None:
    """And no word is itself allowed, as the message would never be seen."""
    schema = json_schema()
    for (key, word), values in value_synonyms().items():
        allowed = allowed_values(schema, key)
        assert set(values) <= allowed, key
        assert word not in allowed, (key, word)


def allowed_values(schema: object, key: str) -> set[str]:
    """All values that the JSON Schema lists under a key of this name."""
    found: set[str] = set()
    if isinstance(schema, list):
        return found.union(*(allowed_values(item, key) for item in schema))
    if isinstance(schema, dict):
        for name, item in schema.items():
            found |= _enums(item) if name == key else allowed_values(item, key)
    return found


def _enums(schema: object) -> set[str]:
    if isinstance(schema, list):
        return set[str]().union(*(_enums(item) for item in schema))
    if not isinstance(schema, dict):
        return set()
    own = {"null"} if "null" in str(schema.get("type", "")) else {str(v) for v in schema.get("enum", ())}
    return own.union(*(_enums(item) for item in schema.values()))


def test_sizes_and_bandwidths_with_units() -> None:
    words = (
        "cluster.gpu.memory_bytes=70G",
        "cluster.gpu.memory_bandwidth_bytes_per_s=3.35 TB/s",
        "cluster.inter_node.nic_bandwidth_bytes_per_s=400Gbps",
        "cluster.intra_node.bandwidth_bytes_per_s=450GB/s",
    )
    cluster = load_scenario(SCENARIO, words).cluster
    assert (cluster.gpu.memory_bytes, cluster.gpu.memory_bandwidth_bytes_per_s) == (70e9, 3.35e12)
    assert (cluster.inter_node.nic_bandwidth_bytes_per_s, cluster.intra_node.bandwidth_bytes_per_s) == (50e9, 450e9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:\n\tb: 1\n", "x:2: is not valid YAML: a tab; YAML indents with spaces"),
        ("a: [1, 2\nb: 3\n", "x:2: is not valid YAML: a comma is missing, or the [ of line 1 has no ]"),
        ("a: {b: 1\nc: 2\n", "x:2: is not valid YAML: a comma is missing, or the { of line 1 has no }"),
        ("a: {b: 1,\n", "x:2: is not valid YAML: a value is missing here, or a [ or { before it has no end"),
        ("a:\n  b: 1\n   c: 1\n", "check indentation and colons of lines 2 and 3"),
        ("a: 1\nb: 'x\nc: 1\n", "the quote that begins in line 2 has no end"),
        ("a:\n   b: 1\n  c: 1\n", "check indentation and colons of lines 2 and 3"),
    ],
)
def test_indentation(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        parse_yaml(text, "x")
    assert said in str(error.value)


def test_a_file_of_another_kind_is_named_with_the_command_that_takes_it() -> None:
    for read, path, said in (
        (load_scenario, PROFILE, "is a calibration profile; a scenario is wanted (name it with --set calibration="),
        (load_scenario, RUN, "is a measured run; a scenario is wanted (`stepsim compare"),
        (load_measured, SCENARIO, "for two scenarios there is `stepsim diff A B`"),
        (load_measured, Path("tp8"), "tp8: is a shipped scenario; a measured run is wanted"),
        (load_measured, PROFILE, "is a calibration profile; a measured run is wanted"),
        (read_table, RUN, "is a measured run; a table of measurements is wanted"),
        (read_table, SCENARIO, "is a scenario; a table of measurements is wanted"),
        (load_profile, SCENARIO, "is a scenario; a calibration profile is wanted"),
        (load_profile, RUN, "is a measured run; a calibration profile is wanted"),
        (_traces, SCENARIO, "is a scenario; a recorded trace is wanted: profiler JSON, Chakra's .et or Nsight"),
        (_traces, RUN, "is a measured run; a recorded trace is wanted: profiler JSON"),
    ):
        with pytest.raises(InputError) as error:
            read(path)  # type: ignore[operator]
        assert said in str(error.value)


def test_recordings_and_other_encodings_are_named_whatever_their_length(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for raw, said in (
        (
            b'{"schemaVersion": 1, "traceEvents": [' + b" " * 2_000_000,
            "x.yaml: is a profiler trace; a scenario is wanted",
        ),
        (b"<!DOCTYPE html>\n<html>", "x.yaml: is an HTML page; a scenario is wanted (a browser opens it)"),
        (gzip.compress(b"model: llama3-8b"), "x.yaml: is a file compressed with gzip; a scenario is wanted"),
        ("model: llama3-8b".encode("utf-16"), "x.yaml:1: is not UTF-8 text but UTF-16 or UTF-32; save it as UTF-8"),
    ):
        path.write_bytes(raw)
        with pytest.raises(InputError) as error:
            load_scenario(path)
        assert said in str(error.value)


@pytest.mark.parametrize("name", ["x.yaml", "x.json"])
@pytest.mark.parametrize(("raw", "said"), [(None, "no such file"), (b"", "is empty"), (b"\n \n", "is empty")])
def test_a_file_that_is_missing_or_empty_is_said_to_be(name: str, raw: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if raw is not None:
        path.write_bytes(raw)
    for read in (load_scenario, load_measured, read_table, _traces, load_profile):
        with pytest.raises(InputError) as error:
            read(path if read is not load_profile else str(path))  # type: ignore[operator]
        assert str(error.value).startswith(f"{path}: {said}"), read
    with pytest.raises(InputError, match="is a file; allowed: a folder" if raw is not None else "no such folder"):
        regress(path, live=False)


def test_a_key_that_json_says_twice_is_refused_with_its_lines(tmp_path: Path) -> None:
    """As in YAML. Python's parser would take the last one in silence."""
    path = tmp_path / "x.json"
    table = '{"format": "measurements/1", "kind": "kernel",\n "rows": [{"id": "a"},\n {"id": "b", "id": "c"}]}'
    profile = '{"format": "profile/1",\n\n "format": "profile/1"}'
    for read, text, said in (
        (read_table, table, ":3: rows[1].id: is given twice (first in line 3)"),
        (lambda p: load_profile(str(p)), profile, ":3: format: is given twice (first in line 1)"),
    ):
        path.write_text(text)
        with pytest.raises(InputError) as error:
            read(path)
        assert str(error.value) == f"{path}{said}"


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"format": "measurements/1", "kind": "training_step", "rows": []}')
    with pytest.raises(InputError) as error:
        read_table(path)
    assert str(error.value) == f"{path}: rows: is an empty list; a table has one row or more"


def test_a_key_given_twice_is_found_at_once_among_very_many() -> None:
    """Each name is looked at once: with each compared to all before it this takes minutes."""
    keys = ", ".join(f'"{i}": 0' for i in range(100_000))
    begin = time.process_time()
    with pytest.raises(InputError, match="x:1: 99999: is given twice"):
        parse_json(f'{{{keys}, "99999": 1}}', "x")
    assert time.process_time() - begin < 20.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("[NaN]", "found NaN; only finite numbers are allowed"),
        ("9" * 5000, "Exceeds the limit"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "is not JSON"),
        ('{"a": 1, "a": 2}', "a: is given twice"),
    ],
)
def test_a_line_of_json_that_is_wrong_is_told_by_its_number(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        parse_json(text, "trace.jsonl", line=7)
    assert str(error.value).startswith(f"trace.jsonl:7: {said}")


def test_a_training_log_in_place_of_json_is_told_where_its_times_go() -> None:
    log = " [2026-11-29 10:00:00] iteration 10/ 100 | elapsed time per iteration (ms): 5712.3 | lm loss: 1.0E+01 |"
    with pytest.raises(InputError, match="looks like a training log: give its median step time to `stepsim run"):
        parse_json(log, "log.txt")
    with pytest.raises(InputError) as error:
        parse_json("{", "x.json")
    assert "log" not in str(error.value)


def _traces(path: Path) -> None:
    load_traces([path])


def test_a_key_may_be_asked_for_without_its_section() -> None:
    assert explain("zero") == explain("parallelism.zero")
    assert explain("schedule").startswith("parallelism.schedule:")
    with pytest.raises(InputError, match="did you mean"):
        explain("traning")


def test_options_of_a_search() -> None:
    assert parse_only(["parallelism.tp=4", "training.micro_batch_size=2"]) == ({"tp": [4], "micro_batch_size": [2]}, [])
    assert limit_bytes("70G") == 70e9
    with pytest.raises(InputError, match="70 bytes\\? write 70GiB"):
        limit_bytes("70")


def test_a_measured_time_that_is_text_is_shown_as_text(tmp_path: Path) -> None:
    row = '{"id": "a", "scenario": "1f1b_pp8", "measured": {"step_time_s": "38.9"}}'
    path = tmp_path / "steps.json"
    path.write_text(f'{{"format": "measurements/1", "kind": "training_step", "rows": [{row}]}}')
    assert "step_time_s: found '38.9'; allowed: a number above 0" in read_table(path).rows[0].unreadable
