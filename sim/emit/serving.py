"""Write the command line of a serving engine for a scenario, with the flags that `sim.convert.serving` reads.

What is written is read back by the converter. Keys of the engine that do not come back are refused, keys of its clients
and of what stands before it are named in a comment. So a flag's name stands once, in `sim/convert/serving/flags.yaml`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct, field

from sim.convert.scripts.containers import started
from sim.convert.scripts.script import Given, read_script
from sim.convert.serving.names import Server, names_of_flags
from sim.convert.serving.options import GRAPHS, SETTINGS
from sim.convert.serving.pools import KV_ROLES, ROLES, SERVER_ROLES
from sim.convert.serving.scenario import TENSORRT_LLM, convert_serving
from sim.convert.serving.tiers import GIB
from sim.convert.settings import Machine, flat
from sim.core.errors import InputError
from sim.core.units import as_written
from sim.emit.common import Reason
from sim.inputs.hub import hub_id_of
from sim.inputs.model_input import preset_name
from sim.inputs.scenario import Scenario, parse_scenario
from sim.inputs.workloads import RequestPattern
from sim.variants.engines import ENGINES

PRODUCTS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": TENSORRT_LLM, "dynamo": ""}  # "": the scenario's engine
NO_ENGINE = "bundled"
PACKAGES = {"vLLM": "vllm", "SGLang": "sglang", TENSORRT_LLM: "tensorrt_llm"}
COMMANDS = {
    "vLLM": "vllm serve {}",
    "SGLang": "python3 -m sglang.launch_server --model-path {}",
    TENSORRT_LLM: "trtllm-serve {}",
}
BENCHMARKS = {  # of `flags.yaml`, with what starts each
    "vLLM": ("vLLM", "vllm bench serve"),
    "SGLang": ("SGLang", "python3 -m sglang.bench_serving"),
    TENSORRT_LLM: ("TensorRT-LLM, serving", "python3 -m tensorrt_llm.serve.scripts.benchmark_serving"),
}
IN_DYNAMO = {"vLLM": "vllm", "SGLang": "sglang", TENSORRT_LLM: "trtllm"}
# Keys that say nothing of the engine's process: those of its clients, of chance, and of what stands before it
OUTSIDE = (
    *("requests", "sampling", "router", "autoscaling", "engine"),
    *("speculative.acceptance", "speculative.seed", "speculative.lookup", "lora.adapters", "lora.zipf", "lora.seed"),
)
SAME = {  # keys that a setting says as it is
    "max_running_requests": "running",
    "max_batch_tokens": "tokens",
    "max_prompt_tokens": "prompt_tokens",
    "max_request_tokens": "longest",
    "stream_interval": "interval",
    "schedule_conservativeness": "conservativeness",
    "cuda_graph_max_size": "graphs_to",
    "two_batch_overlap": "two_batches",
    "kv_cache.block_tokens": "block",
    "kv_cache.memory_fraction": "memory",
    "kv_cache.free_fraction": "free",
    "kv_cache.memory_bytes": "cache_bytes",
    "kv_cache.max_tokens": "cache_tokens",
    "lora.rank": "adapter_rank",
    "lora.max_loras": "adapter_places",
    "batch_wait.iterations": "wait_iterations",
    "batch_wait.tokens_ratio": "wait_ratio",
    "balanced_prompts.timeout_iterations": "balance_timeout",
    "balanced_prompts.wait_iterations": "balance_wait",
    "eplb.redundant_experts": "redundant",
}
OF_REQUESTS = {
    "prompt_len": "prompt",
    "output_len": "output",
    "range_ratio": "ratio",
    "count": "count",
    "rate_per_s": "rate",
    "burstiness": "burstiness",
    "max_concurrency": "concurrency",
    "seed": "seed",
}


def emit_serving(scenario: Scenario, target: str) -> tuple[str, list[Reason]]:
    """Return the text for one of `sim.emit.SERVERS`, and reasons against it."""
    out = ServingEmission(scenario, target)
    return out.build(), out.reasons


class ServingEmission(Struct, dict=True):
    """Write a serving scenario's command line, and collect reasons and notes."""

    given: Scenario
    target: str
    reasons: list[Reason] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def build(self) -> str:
        """Return the script, or Dynamo's deployment file."""
        asked = self.given.for_serving
        product = PRODUCTS[self.target] or ENGINES[asked.engine].product
        product = "vLLM" if product not in PACKAGES else product
        self.product, self.flags = product, names_of_flags().servers[product]
        found = ENGINES[asked.engine]
        if found.name != NO_ENGINE and found.product != product:
            self.refuse("inference.engine", f"found {found.name}; --emit {self.target} starts {product}")
            return ""
        self.engine = found
        own = flat(_unlike(_dump(self.given), _dump(_with_engine(self.given, {}, found.name))))
        self.scenario = self.given
        if found.name == NO_ENGINE:
            self.engine = [one for one in ENGINES.values() if one.product == product][-1]
            self.notes.append(
                f"inference.engine bundled: what it leaves out is as {self.engine.name} sets it by itself"
            )
            try:
                self.scenario = _with_engine(self.given, own, self.engine.name)
            except InputError as error:
                self.refuse("inference.engine", f"found bundled; {self.engine.name} cannot run this: {error}")
                return ""
        text = self._text({key: value for key, value in own.items() if not key.startswith("requests")})
        self._check(text)
        if self.reasons:
            return ""
        return "".join(f"# {note}\n" for note in dict.fromkeys(self.notes)) + text

    def refuse(self, key: str, found: str) -> None:
        """Add a reason against the value of a key."""
        self.reasons.append(Reason(tuple(key.split(".")), f"{key}: {found}"))

    def _model(self) -> str:
        name = preset_name(self.scenario.model)
        hub_id = hub_id_of(name)
        if hub_id is None:
            self.notes.append(f"model: put the folder or Hub id of the checkpoint in place of {name or 'CHECKPOINT'}")
        return hub_id or name or "CHECKPOINT"

    def _text(self, own: Mapping[str, Any]) -> str:
        model, pools = self._model(), self.scenario.for_serving.disaggregated
        p = self.scenario.parallelism
        layouts = [("", {"tp": p.tp, "pp": p.pp, "dp": p.dp, "ep": p.ep, "cp": p.cp, "expert_tp": p.expert_tp}, own)]
        if pools is not None:
            sizes = [getattr(pools, role) for role in ROLES]
            memory = "kv_cache.memory_fraction"
            layouts = [
                (
                    role,
                    size.degrees(self.scenario.model),
                    own if (m := size.memory_fraction) is None else {**own, memory: m},
                )
                for role, size in zip(ROLES, sizes, strict=True)
            ]
        servers = [(role, self._settings(role, layout, mine)) for role, layout, mine in layouts]
        if self.target == "dynamo":
            return self._dynamo(model, servers)
        return self._script(model, servers)

    def _settings(self, role: str, layout: Mapping[str, int], own: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's settings, by the names of `flags.yaml`; True for a switch."""
        s = self._layout(layout)
        replicas = s.get("dp", 1) if s.get("dp_attention") else 1  # SGLang's limits are of all of them
        for key, name in SAME.items():
            if own.get(key) is not None:
                s[name] = own[key]
        if self.product == TENSORRT_LLM:  # what its graphs go to
            s["running"] = self.scenario.for_serving.max_running_requests
        for name in ("running", "tokens"):
            s |= {name: s[name] * replicas} if name in s else {}
        self._of_kernels(s, own)
        self._of_cache(s, own, layout)
        self._of_drafts(s, own)
        if role and self.product == "vLLM" and self.target != "dynamo":
            kv_role = next(theirs for theirs, ours in KV_ROLES.items() if ours == role)
            s["transfer"] = json.dumps({"kv_connector": "NixlConnector", "kv_role": kv_role})
        elif role:
            theirs = next(theirs for theirs, ours in SERVER_ROLES.items() if ours == role)
            s["role"] = theirs.upper() if self.product == TENSORRT_LLM and self.target != "dynamo" else role
        return s

    def _layout(self, d: Mapping[str, int]) -> dict[str, Any]:
        tp, dp, ep, cp = d["tp"], d["dp"], d["ep"], d.get("cp", 1)
        shared = ep * d["expert_tp"] > tp * cp
        s: dict[str, Any] = {"tp": tp, "pp": d.get("pp", 1), "dp": dp, "cp": cp}
        if self.product == "vLLM":
            s |= {"experts_on_all": True} if ep > 1 else {}
        else:
            s |= {"ep": ep} if ep > 1 else {}
            if shared and self.product == "SGLang":
                s |= {"tp": tp * dp, "dp_attention": True}
            elif shared:
                s |= {"tp": dp, "dp": 1, "attention_dp": True}
        return {key: value for key, value in s.items() if value != 1 or value is True}

    def _of_kernels(self, s: dict[str, Any], own: Mapping[str, Any]) -> None:
        names = names_of_flags()
        of_trt = self.product == TENSORRT_LLM
        if (precision := own.get("precision")) in ("bf16", "fp16"):
            s["dtype"] = {"bf16": "bfloat16", "fp16": "float16"}[precision]
        weights = {ours: flag for flag, ours in reversed(names.weights.items()) if _said_by(flag, ours, of_trt)}
        if (flag := weights.get(own.get("quantization", ""))) is not None:
            s["quantization"] = flag
            if flag != "fp8":
                self.notes.append(f"model: name the checkpoint whose weights are stored so ({own['quantization']})")
        if (policy := own.get("capacity_policy")) is not None:
            s["policy"] = next((flag for flag, ours in names.policies.items() if ours == policy), None)
        if (backend := own.get("all2all_backend")) is not None:
            flags = [flag for flag, ours in names.all2all.items() if ours == backend]
            s["all2all"] = "deepep_low_latency" if flags[:1] == ["deepep"] and self.product == "vLLM" else flags[:1]
            s["all2all"] = s["all2all"][0] if isinstance(s["all2all"], list) and s["all2all"] else s["all2all"]
        for key, on, off in (
            ("cuda_graphs", "", "eager"),
            ("chunked_prefill", "chunked", "not_chunked"),
            ("async_scheduling", "async", "not_async"),
        ):
            if own.get(key) is not None and (name := on if own[key] else off):
                s[name] = True
        if sizes := own.get("cuda_graph_sizes"):
            s["graph_sizes"] = list(sizes)
        s |= {"dense_tp": 1} if own.get("dense_over_replicas") is False else {}
        s |= {"own_head": True} if own.get("head_over_replicas") is False else {}
        s |= {"eplb": True} if self.scenario.for_serving.eplb else {}
        s |= {"balanced": True} if self.scenario.for_serving.balanced_prompts else {}
        s |= {"with_adapters": True} if self.scenario.for_serving.lora else {}
        s |= {"preempt": "swap"} if own.get("preemption") == "swap" else {}

    def _of_cache(self, s: dict[str, Any], own: Mapping[str, Any], layout: Mapping[str, int]) -> None:
        if (dtype := own.get("kv_cache.dtype")) is not None:
            flags = [flag for flag, ours in names_of_flags().caches.items() if ours == dtype]
            words = {"bf16": "bfloat16", "fp8": "fp8" if self.product == TENSORRT_LLM else "fp8_e4m3"}
            s |= {"cache": words.get(dtype, flags[0])} if flags else {}
        if (prefixes := own.get("prefix_cache")) is not None:
            s["no_prefixes" if prefixes == "none" else "prefixes"] = True
        if self.product == "vLLM" and "cache_tokens" in s:
            s["cache_blocks"] = s["cache_tokens"] // self.scenario.for_serving.kv_cache.block_tokens
        host = own.get("kv_cache.tiers.host.capacity_bytes")
        if host:
            s |= {"host_gib": host * layout["tp"] / GIB} if self.product == "vLLM" else {"host_bytes": round(host)}
            s |= {"hierarchical": True, "host_gb": host / 1e9} if self.product == "SGLang" else {}
            s["host_policy"] = own.get("kv_cache.tiers.write_policy", "write_back")
        if (offloaded := own.get("weight_offload.cpu_bytes")) is not None:
            s["offload_gib"] = offloaded / GIB

    def _of_drafts(self, s: dict[str, Any], own: Mapping[str, Any]) -> None:
        drafts = self.scenario.for_serving.speculative
        if drafts is None:
            return
        name = None if drafts.draft is None else preset_name(drafts.draft)
        draft = None if drafts.draft is None else hub_id_of(name or "") or name or "DRAFT"
        states = drafts.hidden_states
        if self.product == "vLLM":
            method = "ngram" if drafts.lookup is not None else "mtp" if draft is None else "draft_model"
            method = {0: method, 1: "eagle"}.get(states, "eagle3")
            config = {"method": method, "num_speculative_tokens": drafts.tokens}
            s["speculative"] = json.dumps(config | ({} if draft is None else {"model": draft}))
            return
        algorithm = {0: "STANDALONE" if draft else "NEXTN", 1: "EAGLE"}.get(states, "EAGLE3")
        if self.product == TENSORRT_LLM:
            algorithm = "MTP" if draft is None else "DraftTarget" if not states else "Eagle"
        s |= {"algorithm": algorithm, "drafted": drafts.tokens} | ({} if draft is None else {"draft": draft})
        if drafts.branches > 1:
            s |= {"branches": drafts.branches, "draft_tokens": drafts.checked + 1}

    def _words(self, settings: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """The flags, and, for TensorRT-LLM, the keys of its YAML. What neither can say is found as it is read back."""
        words: list[str] = []
        options: dict[str, Any] = {}
        keys = {name: key for key, name in reversed(SETTINGS.items())}
        for name, value in settings.items():
            said = self._flag(name)
            if said is not None and value is not None:
                dashed = f"--{said.replace('-', '_') if self.product == TENSORRT_LLM else said}"
                words.append(dashed if value is True else f"{dashed} {_argument(value)}")
            elif self.product == TENSORRT_LLM and name in ("prefixes", "no_prefixes"):
                _put(options, "kv_cache_config.enable_block_reuse", name == "prefixes")
            elif self.product == TENSORRT_LLM and name in keys:
                _put(options, keys[name], value)
        if self.product == TENSORRT_LLM and "eager" in settings:
            options[GRAPHS] = None
        elif self.product == TENSORRT_LLM:  # graphs of every batch that may run, which is what is simulated
            graphs = {"enable_padding": True} | ({} if GRAPHS in options else {"max_batch_size": settings["running"]})
            options[GRAPHS] = graphs | options.get(GRAPHS, {})
        return words, options

    def _flag(self, name: str) -> str | None:
        flags = self.flags.flags.get(name, "").split()
        return flags[0] if flags else None

    def _script(self, model: str, servers: list[tuple[str, dict[str, Any]]]) -> str:
        version = max(self.engine.since, tuple(map(int, re.findall(r"\d+(?=\.|$)", self.engine.name))))
        lines = [f"pip install '{PACKAGES[self.product]}=={'.'.join(map(str, version))}.*'"]
        urls: dict[str, str] = {}
        for i, (role, settings) in enumerate(servers):
            words, options = self._words(settings)
            if role:
                words.append(f"--port {8001 + i}")
                urls[role] = f"localhost:{8001 + i}"
            if self.product == TENSORRT_LLM:
                file = f"{role or 'options'}.yml"
                text = yaml.safe_dump(options, sort_keys=False, default_flow_style=None)
                lines.append(f"cat > {file} <<'EOF'\n{text}EOF")
                words.append(f"--extra_llm_api_options {file}")
            command = COMMANDS[self.product].format(shlex.quote(model))
            lines.append(" \\\n  ".join([command, *words]) + " &")
        if urls:
            lines += self._proxy(urls)
        lines.append(self._benchmark(model))
        return "\n".join(["#!/bin/bash", *filter(None, lines)]) + "\n"

    def _proxy(self, urls: Mapping[str, str]) -> list[str]:
        """What sends prompts to servers of one role, and their caches to those of the other."""
        if self.product == "SGLang":
            words = " ".join(f"--{role} http://{url}" for role, url in urls.items())
            return [f"python3 -m sglang_router.launch_router --pd-disaggregation {words} &"]
        if self.product == TENSORRT_LLM:
            sections = {f"{theirs}_servers": role for theirs, role in SERVER_ROLES.items()}
            data = {name: {"num_instances": 1, "urls": [urls[role]]} for name, role in sections.items()}
            text = yaml.safe_dump({"hostname": "localhost", "port": 8000, **data}, sort_keys=False)
            return [f"cat > disagg.yml <<'EOF'\n{text}EOF", "trtllm-serve disaggregated -c disagg.yml &"]
        self.notes.append("a proxy, such as vLLM's toy_proxy_server.py, has to send prompts to ports 8001 and 8002")
        return []

    def _benchmark(self, model: str) -> str:
        """The command that sends the scenario's requests; nothing for those of a trace."""
        which, start = BENCHMARKS[self.product]
        names, requests = names_of_flags().benchmarks[which], self.scenario.for_serving.requests
        if not isinstance(requests, RequestPattern):
            return ""
        values = {name: getattr(requests, key) for key, name in OF_REQUESTS.items()}
        if names.range_ends_at_length:  # from ratio·length to the length
            spread = values["ratio"]
            values |= {key: round(values[key] * (1 + spread)) for key in ("prompt", "output")}
            values["ratio"] = (1 - spread) / (1 + spread)
        values["ratio"] = values["ratio"] or None
        values["burstiness"] = values["burstiness"] if values["burstiness"] != 1 else None
        if (sampling := self.scenario.for_serving.sampling) is not None:
            values |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "logprobs": sampling.logprobs}
            values |= {key: value for key in ("top_p", "repetition_penalty") if (value := getattr(sampling, key)) != 1}
        words = [
            f"--{self._of_benchmark(names, name)} {_argument(value)}"
            for name, value in values.items()
            if value is not None and name in names.flags
        ]
        return " \\\n  ".join([f"{start} --model {shlex.quote(model)} --dataset-name random", *words])

    @staticmethod
    def _of_benchmark(names: Server, name: str) -> str:
        return names.flags[name].split()[0]

    def _dynamo(self, model: str, servers: list[tuple[str, dict[str, Any]]]) -> str:
        """A DynamoGraphDeployment: its frontend, and a worker for each role."""
        module = IN_DYNAMO[self.product]
        per_node = self.scenario.cluster.gpus_per_node
        services: dict[str, Any] = {"Frontend": {"componentType": "frontend", "replicas": 1}}
        for role, settings in servers:
            words, options = self._words(settings)
            gpus = settings.get("tp", 1) * settings.get("pp", 1) * settings.get("cp", 1)
            gpus *= 1 if settings.get("dp_attention") else settings.get("dp", 1)
            setup = ""
            if options:
                text = yaml.safe_dump(options, sort_keys=False)
                setup = f"cat > options.yml <<'EOF'\n{text}EOF\n"
                words.append("--extra-engine-args options.yml")
            command = " ".join([f"python3 -m dynamo.{module} --model {shlex.quote(model)}", *words])
            flag = "--model-path" if self.product != "vLLM" else "--model"
            command = command.replace("--model ", f"{flag} ", 1)
            worker: dict[str, Any] = {"componentType": "worker", "replicas": 1}
            worker |= {"subComponentType": role} if role else {}
            worker["resources"] = {"limits": {"gpu": str(min(gpus, per_node))}}
            worker |= {"multinode": {"nodeCount": -(-gpus // per_node)}} if gpus > per_node else {}
            container = {"image": f"nvcr.io/nvidia/ai-dynamo/{module}-runtime", "command": ["bash", "-c"]}
            worker["extraPodSpec"] = {"mainContainer": {**container, "args": [f"{setup}{command}"]}}
            services[f"{role.capitalize()}Worker"] = worker
        data = {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoGraphDeployment",
            "metadata": {"name": self.scenario.name.replace("_", "-").lower()},
            "spec": {"services": services},
        }
        self.notes.append(f"image: choose the tag of Dynamo whose {self.product} is that of {self.engine.name}")
        return yaml.safe_dump(data, sort_keys=False, width=10_000)

    def _check(self, text: str) -> None:
        """Read what was written, and refuse or note each key that does not come back."""
        file = Path("emitted.yaml" if self.target == "dynamo" else "emitted.sh")
        cluster = self.scenario.model_dump()["cluster"]
        machine = Machine(cluster, None, None)
        script = text
        if self.target == "dynamo":
            found = started(file, text)
            assert found is not None
            script = found.script
        try:
            data = read_script(file, script, Given(), lambda read: convert_serving(file, read, machine)).scenario
            data = {**data, "calibration": self.scenario.calibration}
            if not preset_name(self.scenario.model):
                data["model"] = self.scenario.model_dump()["model"]
            traced = not isinstance(self.scenario.for_serving.requests, RequestPattern)
            if traced or self.target == "dynamo":
                data["inference"] |= {"requests": _dump(self.scenario)["requests"]}
                self.notes.append("inference.requests: are not in what is written here")
            if self.target == "dynamo":
                data["inference"]["engine"] = self.engine.name
            after = parse_scenario(data, "what --emit wrote")
        except InputError as error:
            self.refuse("inference", f"{self.product} has no such layout or settings: {error}")
            return
        for here, back in (
            ({"model": self.scenario.model_dump("json")["model"]}, {"model": after.model_dump("json")["model"]}),
            ({"inference": _dump(self.scenario)}, {"inference": _dump(after)}),
            (_degrees(self.scenario), _degrees(after)),
            (_layout(self.scenario), _layout(after)),
        ):
            if self.reasons and "tp" not in here.get("parallelism", {"tp": 1}):
                break  # they follow from what is refused
            self._compare(here, back)

    def _compare(self, here: Mapping[str, Any], back: Mapping[str, Any]) -> None:
        for key, found_here, found_back in _differences(here, back):
            name = key.partition(".")[2]
            if any(name == one or name.startswith(f"{one}.") for one in OUTSIDE):
                self.notes.append(f"{key} {found_here}: the command does not say it")
            else:
                self.refuse(key, f"found {found_here}; flags of {self.product} cannot say it (they give {found_back})")


def _with_engine(scenario: Scenario, own: Mapping[str, Any], engine: str) -> Scenario:
    """The scenario with this engine, and of its section only the requests and these keys."""
    data = scenario.model_dump(mode="json")
    kept = {"requests": data["inference"]["requests"], "engine": engine}
    if (pools := data["inference"]["disaggregated"]) is not None:
        usual = data["inference"]["kv_cache"]["memory_fraction"]
        for pool in pools.values():
            pool["memory_fraction"] = None if pool["memory_fraction"] == usual else pool["memory_fraction"]
        kept["disaggregated"] = pools
    for key, value in own.items():
        if key.partition(".")[0] not in ("requests", "engine", "disaggregated"):
            _put(kept, key, value)
    layout = _degrees(scenario)["parallelism"]
    found = parse_scenario(
        {**data, "inference": {**kept, "engine": scenario.for_serving.engine}, "parallelism": layout}
    )
    more = _unlike(_layout(scenario)["parallelism"], _layout(found)["parallelism"])
    return parse_scenario({**data, "inference": kept, "parallelism": {**layout, **more}}, scenario.name)


def _degrees(scenario: Scenario) -> dict[str, Any]:
    names = ("tp", "pp", "dp", "cp", "ep", "expert_tp")
    return {"parallelism": {name: getattr(scenario.parallelism, name) for name in names}}


def _layout(scenario: Scenario) -> dict[str, Any]:
    """What `parallelism` has beside the degrees."""
    whole = scenario.parallelism.model_dump(mode="json")
    return {"parallelism": {key: value for key, value in whole.items() if key not in _degrees(scenario)["parallelism"]}}


def _dump(scenario: Scenario) -> dict[str, Any]:
    return scenario.for_serving.model_dump(mode="json")


def _unlike(found: Mapping[str, Any], usual: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keys of nested mappings whose values are not the usual ones."""
    own: dict[str, Any] = {}
    for key, value in found.items():
        other = None if usual is None else usual.get(key)
        if value != other:
            own[key] = _unlike(value, other if isinstance(other, dict) else None) if isinstance(value, dict) else value
    return own


def _differences(here: Any, back: Any, path: str = "") -> list[tuple[str, str, str]]:
    """Keys of nested mappings that differ, and both values as they are written."""
    if isinstance(here, dict) and isinstance(back, dict):
        keys = dict.fromkeys([*here, *back])
        return [one for key in keys for one in _differences(here.get(key), back.get(key), f"{path}.{key}".strip("."))]
    shown: Callable[[Any], str] = lambda value: as_written(value)[:60]  # noqa: E731
    return [] if here == back else [(path, shown(here), shown(back))]


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a key with dots in nested mappings."""
    *sections, last = key.split(".")
    for section in sections:
        inner = data.get(section)
        data = data.setdefault(section, {}) if isinstance(inner, dict) or inner is None else data[section]
    data[last] = value


def _said_by(flag: str, ours: str, of_trt: bool) -> bool:
    """Whether a word for weights in few bits is the engine's, not the end of a checkpoint's name."""
    return flag.isupper() == of_trt and (flag != ours or flag == "fp8")


def _argument(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.15g}"
    return shlex.quote(str(value))
