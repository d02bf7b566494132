"""The flags that start a scenario's layout in another trainer: torchtitan's TOML or Megatron-LM's arguments.

Names are those of torchtitan/config/job_config.py (pytorch/torchtitan at 000204a, of August 2025, with TOML files)
and megatron/training/arguments.py (NVIDIA/Megatron-LM at 000c4ac, of November 2025). What a trainer cannot
do like the scenario is refused, every reason at once; what it does a little differently stands in a comment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sim.dtypes import dtype_bytes
from sim.errors import InputError
from sim.scenario import Scenario
from sim.training_config import Training

TRAINERS = ("torchtitan", "megatron")
_FLAVORS = {  # torchtitan/models/llama3: layers, hidden, heads, kv_heads, ffn
    "8B": (32, 4096, 32, 8, 14336), "70B": (80, 8192, 64, 8, 28672), "405B": (126, 16384, 128, 8, 53248),
}  # fmt: skip
_TITAN_SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B", "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}  # fmt: skip


def emit(scenario: Scenario, trainer: str) -> str:
    """The text of the flags.

    Raises:
        InputError: for an unknown trainer, a workload that is no training, or a layout that the trainer lacks.
    """
    if trainer not in TRAINERS:
        raise InputError(f"--emit: found '{trainer[:40]}'; must be one of {', '.join(TRAINERS)}")
    if scenario.training is None:
        raise InputError(f"{scenario.name}: --emit: the scenario has no training section, and {trainer} trains")
    out = (_Titan if trainer == "torchtitan" else _Megatron)(scenario, scenario.training)
    text = out.build()
    if out.reasons:
        shown = "".join(f"\n  - {reason}" for reason in out.reasons)
        raise InputError(f"{scenario.name}: --emit {trainer}: cannot be expressed:{shown}")
    return text


@dataclass
class _Emission:
    """What is written and what cannot be."""

    scenario: Scenario
    training: Training
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, key: str, value: Any, why: str, when: bool = True) -> None:
        """Note a reason if it holds."""
        if when:
            self.reasons.append(f"{key} {value}: {why}")

    def common(self) -> None:
        """What neither trainer has."""
        t, p = self.training, self.scenario.parallelism
        self.refuse("distillation", "given", "trains one model", self.scenario.distillation is not None)
        self.refuse("training.activation_offload", "true", "is no option", t.activation_offload)
        self.refuse("training.recompute", t.recompute.mode, "is no policy of it", t.recompute.mode == "selective_op"
                    and isinstance(self, _Megatron))  # fmt: skip
        self.refuse("parallelism.cp_split", p.cp_split, "splits zigzag", p.cp > 1 and p.cp_split != "zigzag")
        self.refuse("parallelism.dp_sync", p.dp_sync, "reduces buckets", p.dp_sync == "per_parameter")
        if self.scenario.faults is not None:
            self.notes.append("faults are left out")

    @property
    def nodes(self) -> tuple[int, int]:
        """Nodes, and processes on each."""
        ranks, per_node = self.scenario.parallelism.ranks, self.scenario.cluster.gpus_per_node
        return -(-ranks // per_node), min(ranks, per_node)

    @property
    def even(self) -> bool:
        """Whether all stages hold as many layers."""
        return len(set(self.scenario.parallelism.layers_per_stage)) == 1


class _Titan(_Emission):
    def build(self) -> str:
        self.common()
        s, p, t = self.scenario, self.scenario.parallelism, self.training
        flavor = self._flavor()
        self._refusals()
        replicate, shard = self._data_parallel()
        accumulated = s.micro_batches if p.pp > 1 else 1
        tables: dict[str, dict[str, Any]] = {
            "model": {"name": "llama3", "flavor": flavor, "converters": self._converters()},
            "training": {
                "local_batch_size": t.micro_batch_size * accumulated, "global_batch_size": t.global_batch_size,
                "seq_len": t.seq_len, "max_norm": 1.0,
                "mixed_precision_param": "bfloat16" if t.precision != "fp32" else "float32",
                "mixed_precision_reduce": "float32", "compile": t.elementwise == "compiled",
            },
            "parallelism": {
                "data_parallel_replicate_degree": replicate, "data_parallel_shard_degree": shard,
                "fsdp_reshard_after_forward": "always" if p.reshard_after_forward else "never",
                "tensor_parallel_degree": p.tp, "enable_async_tensor_parallel": p.tp_overlap == "full",
                "context_parallel_degree": p.cp,
                "context_parallel_rotate_method": "alltoall" if p.cp_method == "ring" else "allgather",
                "pipeline_parallel_degree": p.pp, **self._pipeline(),
            },
            "activation_checkpoint": self._recompute(),
        }  # fmt: skip
        nodes, each = self.nodes
        start = (
            f"torchrun --nnodes {nodes} --nproc-per-node {each} -m torchtitan.train --job.config_file THIS_FILE.toml"
        )
        return "\n".join([f"# {start}", *(f"# {n}" for n in self.notes), *_toml(tables)])

    def _flavor(self) -> str:
        m = self.scenario.model
        shape = (m.layers, m.hidden, m.heads, m.kv_heads, m.ffn)
        found = next((name for name, sizes in _FLAVORS.items() if sizes == shape), "")
        llama = (
            m.mlp == "swiglu" and m.norm == "rmsnorm" and m.positions == "rope" and not (m.bias or m.tied_embeddings)
        )
        same = found and llama and m.moe is None and m.mla is None and not m.mtp_layers and m.vocab == 128_256
        if not same:
            shown = f"{m.layers} layers of {m.hidden}, {m.heads} heads, vocabulary {m.vocab}"
            self.refuse(
                "model", shown, f"its llama3 flavors are {', '.join(_FLAVORS)}, and no option changes their sizes"
            )
        return found

    def _refusals(self) -> None:
        p, t = self.scenario.parallelism, self.training
        self.refuse(
            "parallelism.sp", "false", "tensor parallelism comes with sequence parallelism", p.tp > 1 and not p.sp
        )
        self.refuse("parallelism.tp_overlap", "wgrad", "overlaps chunks (full) or nothing", p.tp_overlap == "wgrad")
        self.refuse("parallelism.tp_overlap", "full", "needs elementwise: compiled", p.tp_overlap == "full"
                    and t.elementwise != "compiled")  # fmt: skip
        self.refuse("parallelism.cp_method", "all_to_all", "passes keys and values on, not heads", p.cp > 1
                    and p.cp_method == "all_to_all")  # fmt: skip
        self.refuse("parallelism.rank_order", p.rank_order, "orders ranks tp-cp-dp-pp", p.rank_order != "tp-cp-dp-pp")
        self.refuse(
            "training.param_dtype",
            t.param_dtype,
            "keeps parameters in fp32 (param_dtype: fp32)",
            t.param_dtype != "fp32",
        )
        self.refuse("training.grad_reduce_dtype", t.grad_reduce_dtype, "reduces in fp32", t.grad_reduce_dtype != "fp32")
        self.refuse(
            "training.precision", t.precision, "has bf16, fp32, fp8 and mxfp8", t.precision in ("fp16", "nvfp4")
        )
        self.refuse("training.optimizer", t.optimizer, "has Adam and AdamW", t.optimizer != "adamw")
        self.refuse("training.gradient_clipping", "false", "always clips", not t.gradient_clipping)
        self.refuse("training.attention", t.attention, "uses fused attention", t.attention != "fused")
        self.refuse("training.elementwise", t.elementwise, "runs eager or compiled", t.elementwise == "megatron")
        self.refuse(
            "parallelism.dp_sync",
            p.dp_sync,
            "overlaps reductions with backward",
            p.dp > 1 and p.dp_sync == "after_backward",
        )

    def _data_parallel(self) -> tuple[int, int]:
        """Replicas and shards; its FSDP shards over dp_shard · cp ranks."""
        p = self.scenario.parallelism
        alone = p.dp * p.cp == 1
        self.refuse("parallelism.zero", p.zero, "shards all (zero 3) or nothing", p.zero in (1, 2) and not alone)
        if p.zero == 0:
            more = p.tp * p.cp * p.pp > 1
            self.refuse(
                "parallelism.zero",
                0,
                "replicates whole models on ranks of data parallelism alone",
                more and p.dp * p.cp > 1,
            )
            return p.dp, 1
        shards = max(1, p.shard_size // p.cp)
        self.refuse("parallelism.shard_size", p.shard_size, "is a multiple of cp", bool(p.shard_size % p.cp))
        return max(1, p.dp // shards), shards

    def _converters(self) -> list[str]:
        return {"fp8": ["float8"], "mxfp8": ["mx"]}.get(self.training.precision, [])

    def _pipeline(self) -> dict[str, Any]:
        p, t = self.scenario.parallelism, self.training
        if p.pp == 1:
            return {}
        name = _TITAN_SCHEDULES.get(p.schedule, "")
        self.refuse("parallelism.schedule", p.schedule, f"has {', '.join(_TITAN_SCHEDULES)}", not name)
        self.refuse(
            "parallelism.layers_per_stage", list(p.layers_per_stage), "stages begin at a layer", 0 in p.layers_per_stage
        )
        starts = [sum(p.layers_per_stage[:i]) for i in range(1, len(p.layers_per_stage))]
        return {
            "pipeline_parallel_schedule": name, "pipeline_parallel_microbatch_size": t.micro_batch_size,
            "pipeline_parallel_split_points": [f"layers.{n}" for n in starts],
        }  # fmt: skip

    def _recompute(self) -> dict[str, Any]:
        r = self.training.recompute
        self.refuse(
            "training.recompute", r.mode, "recomputes by operator (selective_op) or by layer", r.mode == "selective"
        )
        self.refuse("training.recompute.layers", r.layers, "takes every n-th layer (every)", r.layers is not None)
        if r.mode == "selective_op" or (r.mode == "full" and r.every is not None):
            return {"mode": "selective", "selective_ac_option": "op" if r.mode == "selective_op" else str(r.every)}
        return {"mode": "full" if r.mode == "full" else "none"}


def _toml(tables: dict[str, dict[str, Any]]) -> list[str]:
    out = []
    for name, table in tables.items():
        out += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items())]
    return out


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(v) for v in value)}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


class _Megatron(_Emission):
    def build(self) -> str:
        self.common()
        groups = [self._model(), self._experts(), self._batch(), self._layout(), self._replicas(), self._numbers()]
        flags = [(name, value) for group in groups for name, value in group]
        nodes, each = self.nodes
        lines = [f"torchrun --nnodes {nodes} --nproc-per-node {each} pretrain_gpt.py"]
        lines += [f"    --{name}" + (f" {value}" if value != "" else "") for name, value in flags]
        lines += ["    --mock-data", "    --tokenizer-type NullTokenizer", "    --train-iters 20", "    --lr 1e-4"]
        return "\n".join([*(f"# {n}" for n in self.notes), " \\\n".join(lines)])

    def _model(self) -> list[tuple[str, Any]]:
        m = self.scenario.model
        positions = {"learned": "learned_absolute"}.get(m.positions, m.positions)
        out: list[tuple[str, Any]] = [
            ("num-layers", m.layers), ("hidden-size", m.hidden), ("ffn-hidden-size", m.ffn),
            ("num-attention-heads", m.heads),
            ("max-position-embeddings", m.max_positions), ("position-embedding-type", positions),
            ("normalization", "RMSNorm" if m.norm == "rmsnorm" else "LayerNorm"), ("vocab-size", m.vocab),
            ("make-vocab-size-divisible-by", 128), ("attention-dropout", m.dropout), ("hidden-dropout", m.dropout),
        ]  # fmt: skip
        if m.mla is not None:
            out += [("multi-latent-attention", ""),
                    *([("q-lora-rank", m.mla.q_lora_rank)] if m.mla.q_lora_rank else []),
                    ("kv-lora-rank", m.mla.kv_lora_rank), ("qk-head-dim", m.mla.qk_nope_head_dim),
                    ("qk-pos-emb-head-dim", m.mla.qk_rope_head_dim), ("v-head-dim", m.mla.v_head_dim)]  # fmt: skip
        else:
            out.append(("kv-channels", m.head_dim))
            out += [("group-query-attention", ""), ("num-query-groups", m.kv_heads)] if m.kv_heads < m.heads else []
        switches = (("swiglu", m.mlp == "swiglu"), ("squared-relu", m.mlp == "relu2"),
                    ("disable-bias-linear", not m.bias),
                    ("add-qkv-bias", m.qkv_bias), ("qk-layernorm", m.qk_norm),
                    ("untie-embeddings-and-output-weights", not m.tied_embeddings))  # fmt: skip
        out += [(name, "") for name, on in switches if on]
        return out + ([("mtp-num-layers", m.mtp_layers)] if m.mtp_layers else [])

    def _experts(self) -> list[tuple[str, Any]]:
        moe, p = self.scenario.model.moe, self.scenario.parallelism
        if moe is None:
            return []
        self.refuse(
            "model.moe.imbalance", "drawn", "routes by its data; balanced is forced", moe.imbalance != "balanced"
        )
        sixteen = p.ep_dispatch_dtype in ("bf16", "fp16", "fp32")
        self.refuse("parallelism.ep_dispatch_dtype", p.ep_dispatch_dtype, "dispatches 16 bits", not sixteen)
        dense, layers = moe.dense_layers, self.scenario.model.layers
        out: list[tuple[str, Any]] = [
            ("num-experts", moe.experts), ("moe-router-topk", moe.top_k), ("moe-ffn-hidden-size", moe.ffn),
            ("moe-grouped-gemm", ""), ("moe-token-dispatcher-type", "alltoall"),
            ("moe-router-force-load-balancing", ""),
            ("expert-model-parallel-size", p.ep), ("expert-tensor-parallel-size", p.expert_tp),
        ]  # fmt: skip
        out += [("moe-shared-expert-intermediate-size", moe.shared_experts * moe.ffn)] if moe.shared_experts else []
        out += [("moe-layer-freq", f'"([0]*{dense}+[1]*{layers - dense})"')] if dense else []
        out += [("moe-expert-capacity-factor", moe.capacity_factor)] if moe.capacity_factor else []
        if moe.max_nodes_per_token is not None:
            nodes = max(1, p.ep // self.scenario.cluster.gpus_per_node)
            out += [("moe-router-num-groups", nodes), ("moe-router-group-topk", min(nodes, moe.max_nodes_per_token))]
        return out + ([("overlap-moe-expert-parallel-comm", "")] if p.ep_overlap else [])

    def _batch(self) -> list[tuple[str, Any]]:
        t = self.training
        return [
            ("seq-length", t.seq_len),
            ("micro-batch-size", t.micro_batch_size),
            ("global-batch-size", t.global_batch_size),
        ]

    def _layout(self) -> list[tuple[str, Any]]:
        p = self.scenario.parallelism
        self.refuse("parallelism.schedule", p.schedule, "has 1f1b and interleaved_1f1b",
                    p.pp > 1 and p.schedule not in ("1f1b", "interleaved_1f1b"))  # fmt: skip
        interleaved = p.pp > 1 and p.schedule == "interleaved_1f1b"
        self.refuse("parallelism.p2p_overlap", "true", "overlaps messages with interleaved_1f1b alone",
                    p.pp > 1 and p.p2p_overlap and not interleaved)  # fmt: skip
        orders = {"tp-cp-dp-pp": [], "tp-cp-pp-dp": [("use-tp-pp-dp-mapping", "")]}
        self.refuse("parallelism.rank_order", p.rank_order, f"has {', '.join(orders)}", p.rank_order not in orders)
        self.refuse(
            "parallelism.tp_overlap", "full", "needs sp: true", p.tp > 1 and p.tp_overlap == "full" and not p.sp
        )
        if p.tp > 1 and p.tp_overlap == "none":
            self.notes.append(
                "tp_overlap none: Megatron-LM hides backward's tensor-parallel communication where it can"
            )
        out: list[tuple[str, Any]] = [("tensor-model-parallel-size", p.tp), ("pipeline-model-parallel-size", p.pp),
                                      ("context-parallel-size", p.cp), *orders.get(p.rank_order, [])]  # fmt: skip
        if interleaved and self.even:
            out.append(("num-virtual-stages-per-pipeline-rank", p.virtual_stages))
        out += [("no-overlap-p2p-communication", "")] if interleaved and not p.p2p_overlap else []
        out += [("pipeline-model-parallel-layout", f'"{self._stages()}"')] if p.pp > 1 and not self.even else []
        out += [("sequence-parallel", "")] if p.sp and p.tp > 1 else []
        out += [("tp-comm-overlap", "")] if p.tp > 1 and p.tp_overlap == "full" else []
        methods = {"ring": "p2p", "all_gather": "allgather", "all_to_all": "a2a"}
        return out + ([("cp-comm-type", methods[p.cp_method])] if p.cp > 1 else [])

    def _stages(self) -> str:
        """Embedding, layers, prediction layers and loss, stage by stage: E, t, m, L."""
        counts = self.scenario.parallelism.layers_per_stage
        stages = ["t" * n for n in counts]
        stages[0] = "E" + stages[0]
        stages[-1] += "m" * self.scenario.model.mtp_layers + "L"
        return "|".join(stages)

    def _replicas(self) -> list[tuple[str, Any]]:
        p, t = self.scenario.parallelism, self.training
        members = p.dp * p.cp
        out: list[tuple[str, Any]] = []
        if members > 1 and p.dp_sync == "bucketed":
            out += [
                ("overlap-grad-reduce", ""),
                ("ddp-bucket-size", int(p.bucket_bytes // dtype_bytes(t.grad_reduce_dtype))),
            ]
        if p.zero == 0 or members == 1:
            return out
        out.append(("use-distributed-optimizer", ""))
        hybrid = members // p.shard_size
        if p.zero == 1:
            out += [("num-distributed-optimizer-instances", hybrid)] if hybrid > 1 else []
            return out + ([("overlap-param-gather", "")] if p.param_gather_overlap else [])
        self.refuse("parallelism.pp", p.pp, f"zero {p.zero} (its FSDP) is for one pipeline stage here", p.pp > 1)
        self.refuse("parallelism.shard_size", p.shard_size, "its FSDP shards over all replicas here", hybrid > 1)
        self.refuse(
            "parallelism.reshard_after_forward",
            "false",
            "its FSDP reshards",
            p.zero == 3 and not p.reshard_after_forward,
        )
        strategy = "optim_grads" if p.zero == 2 else "optim_grads_params"
        return [*out, ("use-megatron-fsdp", ""), ("data-parallel-sharding-strategy", strategy),
                ("no-gradient-accumulation-fusion", ""), ("ckpt-format", "fsdp_dtensor")]  # fmt: skip

    def _numbers(self) -> list[tuple[str, Any]]:
        t = self.training
        sixteen = {"fp16": "fp16", "fp32": ""}.get(t.precision, "bf16")
        self.refuse("training.param_dtype", t.param_dtype, "keeps 16-bit parameters beside an fp32 master copy",
                    t.param_dtype == "fp32" and t.precision != "fp32")  # fmt: skip
        pair = (t.grad_dtype, t.grad_reduce_dtype)
        self.refuse("training.grad_dtype", "/".join(pair), "accumulates and reduces in fp32, or both in bf16",
                    pair not in (("fp32", "fp32"), ("bf16", "bf16")))  # fmt: skip
        self.refuse(
            "training.elementwise",
            t.elementwise,
            "runs its own fused kernels or eager ones",
            t.elementwise == "compiled",
        )
        low = {"fp8": [("fp8-format", "hybrid")], "mxfp8": [("fp8-format", "hybrid"), ("fp8-recipe", "mxfp8")],
               "nvfp4": [("fp4-format", "e2m1")]}  # fmt: skip
        out: list[tuple[str, Any]] = [(sixteen, "")] if sixteen else []
        out += low.get(t.precision, [])
        grads = "grad-reduce-in-bf16" if pair[0] == "bf16" else "accumulate-allreduce-grads-in-fp32"
        out += [(grads, ""), ("attention-backend", "flash" if t.attention == "fused" else "unfused")]
        out += [
            ("optimizer", "adam" if t.optimizer == "adamw" else "sgd"),
            ("clip-grad", 1.0 if t.gradient_clipping else 0.0),
        ]
        out += [("cross-entropy-loss-fusion", "")] if t.cross_entropy == "fused" else []
        if t.elementwise == "eager":
            fusions = ("bias-gelu", "bias-swiglu", "bias-dropout", "masked-softmax", "rope")
            out += [(f"no-{f}-fusion", "") for f in fusions]
        return out + self._recompute()

    def _recompute(self) -> list[tuple[str, Any]]:
        r = self.training.recompute
        self.refuse(
            "training.recompute.every",
            r.every,
            "recomputes the first layers of each stage (layers)",
            r.every is not None,
        )
        if r.mode == "selective":
            return [("recompute-granularity", "selective")]
        if r.mode != "full":
            return []
        method = ("uniform", 1) if r.layers is None else ("block", r.layers)
        return [("recompute-granularity", "full"), ("recompute-method", method[0]), ("recompute-num-layers", method[1])]
