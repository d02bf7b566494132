"""Write Megatron-LM's arguments.

Source of names and of legal combinations: megatron/training/arguments.py of NVIDIA/Megatron-LM at 000c4ac (November
2025); megatron-core 0.19.2 (September 2026) accepts them too.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sim.core.dtypes import dtype_bytes
from sim.emit.common import Emission
from sim.models.moe.dispatchers import dispatcher_of
from sim.models.recipes import RECIPES, recipe_of

VERSION = "# Megatron-LM as of November 2025 (000c4ac) to megatron-core 0.19.2 (September 2026)"
_SCHEDULES = {"1f1b": False, "interleaved_1f1b": True}  # Megatron-LM's schedules; True: with virtual stages


class Megatron(Emission):
    """Write a command that trains twenty steps on mock data and logs each step."""

    TRAINER: ClassVar = "Megatron-LM"

    def build(self) -> str:
        """Return the command, one flag on each line."""
        self.common()
        groups = [self._model(), self._experts(), self._batch(), self._layout(), self._replicas(), self._numbers()]
        flags = [(name, value) for group in groups for name, value in group]
        nodes, each = self.nodes
        p = self.scenario.parallelism
        # Megatron-LM requires this before Blackwell; on Blackwell it does no harm. Its FSDP refuses it.
        ordered = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if (p.tp > 1 or p.cp > 1) and p.zero < 2 else ""
        lines = [f"{ordered}torchrun --nnodes {nodes} --nproc-per-node {each} pretrain_gpt.py"]
        flags += [
            ("mock-data", ""),
            ("tokenizer-type", "NullTokenizer"),
            ("train-iters", 20),
            ("lr", "1e-4"),
            ("log-interval", 1),
            ("eval-iters", 0),
        ]
        lines += [f"    --{name}" + (f" {value}" if value != "" else "") for name, value in flags]
        return "\n".join([VERSION, *(f"# {n}" for n in self.notes), " \\\n".join(lines)])

    def _model(self) -> list[tuple[str, Any]]:
        m = self.scenario.model
        for key, value in m.variations.items():
            self.refuse(f"model.{key}", value, "flags are not written for it")
        positions = {"learned": "learned_absolute"}.get(m.positions, m.positions)
        if m.mtp_layers > 0 and m.positions == "learned":
            self.refuse("model.positions", m.positions, "predicts several tokens with positions rope or none only")
        out: list[tuple[str, Any]] = [
            ("num-layers", m.layers),
            ("hidden-size", m.hidden),
            ("ffn-hidden-size", m.ffn),
            ("num-attention-heads", m.heads),
            ("max-position-embeddings", max(m.max_positions, self.training.seq_len)),
            ("position-embedding-type", positions),
            ("normalization", "RMSNorm" if m.norm == "rmsnorm" else "LayerNorm"),
            ("vocab-size", m.vocab - 1),  # its NullTokenizer adds one for the end of a document
            ("make-vocab-size-divisible-by", 128),
            ("attention-dropout", m.dropout),
            ("hidden-dropout", m.dropout),
        ]
        if m.mla is not None:
            out += [
                ("multi-latent-attention", ""),
                *([("q-lora-rank", m.mla.q_lora_rank)] if m.mla.q_lora_rank else []),
                ("kv-lora-rank", m.mla.kv_lora_rank),
                ("qk-head-dim", m.mla.qk_nope_head_dim),
                ("qk-pos-emb-head-dim", m.mla.qk_rope_head_dim),
                ("v-head-dim", m.mla.v_head_dim),
            ]
        else:
            out.append(("kv-channels", m.head_dim))
            out += [("group-query-attention", ""), ("num-query-groups", m.kv_heads)] if m.kv_heads < m.heads else []
        switches = (
            ("swiglu", m.mlp == "swiglu"),
            ("squared-relu", m.mlp == "relu2"),
            ("disable-bias-linear", not m.bias),
            ("add-qkv-bias", m.qkv_bias),
            ("qk-layernorm", m.qk_norm),
            ("untie-embeddings-and-output-weights", not m.tied_embeddings),
        )
        out += [(name, "") for name, on in switches if on]
        return out + ([("mtp-num-layers", m.mtp_layers)] if m.mtp_layers else [])

    def _experts(self) -> list[tuple[str, Any]]:
        moe, p = self.scenario.model.moe, self.scenario.parallelism
        if moe is None:
            return []
        if moe.imbalance != "balanced":
            self.refuse("model.moe.imbalance", "drawn", "routes by its data, or evenly (imbalance: balanced)")
        if p.ep_dispatch_dtype not in ("bf16", "fp16", "fp32"):
            self.refuse("parallelism.ep_dispatch_dtype", p.ep_dispatch_dtype, "dispatches tokens in 16 bits")
        if self.training.precision in ("fp16", "fp32"):
            self.refuse("training.precision", self.training.precision, "groups the experts' matmuls in bf16 only")
        if p.tp > 1 and not p.sp:
            self.refuse("parallelism.sp", "false", "needs sequence parallelism for experts with tp above 1")
        if p.ep_overlap and (
            p.ep == 1 or (p.pp > 1 and p.virtual_stages == 1) or self.training.recompute.mode == "full"
        ):
            self.refuse(
                "parallelism.ep_overlap",
                "true",
                "needs ep above 1, virtual stages where pp is above 1, and no full recomputation",
            )
        if flex := dispatcher_of(moe, p.ep).once_to_a_node:
            self.notes.append("moe-token-dispatcher-type flex: DeepEP; releases before 0.15 need moe-enable-deepep too")
        dense, layers = moe.dense_layers, self.scenario.model.layers
        out: list[tuple[str, Any]] = [
            ("num-experts", moe.experts),
            ("moe-router-topk", moe.top_k),
            ("moe-ffn-hidden-size", moe.ffn),
            ("moe-grouped-gemm", ""),
            ("moe-token-dispatcher-type", "flex" if flex else "alltoall"),
            ("moe-router-force-load-balancing", ""),
            ("expert-model-parallel-size", p.ep),
            ("expert-tensor-parallel-size", p.expert_tp),
        ]
        out += [("moe-shared-expert-intermediate-size", moe.shared_experts * moe.ffn)] if moe.shared_experts else []
        out += [("moe-layer-freq", f'"([0]*{dense}+[1]*{layers - dense})"')] if dense else []
        out += [("moe-expert-capacity-factor", moe.capacity_factor)] if moe.capacity_factor else []
        out += [("moe-pad-expert-input-to-capacity", "")] if moe.pad_to_capacity else []
        out += [("moe-router-dtype", "fp32")] if moe.router_fp32 else []
        if moe.groups is not None:
            out += [("moe-router-num-groups", moe.groups), ("moe-router-group-topk", moe.top_groups)]
        elif moe.max_nodes_per_token is not None:
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
        if p.form.name not in _SCHEDULES:
            self.refuse("parallelism.schedule", p.schedule, f"has the schedules {' and '.join(_SCHEDULES)}")
        interleaved = _SCHEDULES.get(p.form.name, False)
        if p.pp > 1 and p.p2p_overlap and not interleaved:
            self.refuse(
                "parallelism.p2p_overlap", "true", "overlaps messages between stages with interleaved_1f1b only"
            )
        if p.pp == 2 and interleaved and not p.p2p_overlap:
            self.refuse("parallelism.p2p_overlap", "false", "interleaves with blocking messages from pp 3 on")
        orders = {"tp-cp-dp-pp": [], "tp-cp-pp-dp": [("use-tp-pp-dp-mapping", "")]}
        if p.rank_order not in orders:
            self.refuse("parallelism.rank_order", p.rank_order, f"has the rank orders {', '.join(orders)}")
        if p.tp > 1 and p.tp_overlap == "full" and not p.sp:
            self.refuse("parallelism.tp_overlap", "full", "needs sp: true for it")
        if p.tp > 1 and p.tp_overlap == "none":
            self.notes.append(
                "tp_overlap none: Megatron-LM hides backward's tensor-parallel communication where it can"
            )
        out: list[tuple[str, Any]] = [
            ("tensor-model-parallel-size", p.tp),
            ("pipeline-model-parallel-size", p.pp),
            ("context-parallel-size", p.cp),
            *orders.get(p.rank_order, []),
        ]
        if interleaved and self.even:
            out.append(("num-virtual-stages-per-pipeline-rank", p.virtual_stages))
        if interleaved and p.micro_batch_group is not None:
            group, m = p.micro_batch_group, self.scenario.micro_batches
            if group < p.pp or 0 < m % group < p.pp:
                self.refuse("parallelism.micro_batch_group", group, "needs groups of at least pp micro-batches")
            out.append(("microbatch-group-size-per-virtual-pipeline-stage", group))
        out += [("no-overlap-p2p-communication", "")] if interleaved and not p.p2p_overlap else []
        out += [("pipeline-model-parallel-layout", f'"{self._stages()}"')] if p.pp > 1 and not self.even else []
        out += [("sequence-parallel", "")] if p.sp and p.tp > 1 else []
        out += [("tp-comm-overlap", "")] if p.tp > 1 and p.tp_overlap == "full" else []
        methods = {"ring": "p2p", "all_gather": "allgather", "all_to_all": "a2a"}
        return out + ([("cp-comm-type", methods[p.cp_method])] if p.cp > 1 else [])

    def _stages(self) -> str:
        """Embedding, layers, prediction layers and loss, stage by stage: E, t, m, L."""
        counts = self.scenario.parallelism.stage_layers
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
        if p.param_gather_overlap and p.dp_sync != "bucketed":
            self.refuse("parallelism.param_gather_overlap", "true", "needs dp_sync: bucketed")
        if p.zero == 1:
            out += [("num-distributed-optimizer-instances", hybrid)] if hybrid > 1 else []
            return out + ([("overlap-param-gather", "")] if p.param_gather_overlap else [])
        # Of its FSDP's strategies the two that shard gradients reduce in every backward (`grad_reduce_every_bprop`).
        if p.accumulate_unsharded and self.scenario.micro_batches > 1:
            self.refuse("parallelism.accumulate_unsharded", "true", "reduces FSDP's gradients after each micro-batch")
        if p.reduces_rows and self.scenario.micro_batches > 1:
            self.refuse("parallelism.accumulate_in_a_row", "true", "reduces FSDP's gradients after each micro-batch")
        if p.pp > 1:
            self.refuse(
                "parallelism.pp", p.pp, f"flags for zero {p.zero} (FSDP) are written for one pipeline stage only"
            )
        if hybrid > 1:
            self.refuse("parallelism.shard_size", p.shard_size, "flags shard over all replicas (FSDP)")
        if p.zero == 3 and not p.reshard_after_forward:
            self.refuse("parallelism.reshard_after_forward", "false", "reshards after forward (FSDP)")
        strategy = "optim_grads" if p.zero == 2 else "optim_grads_params"
        return [
            *out,
            ("use-megatron-fsdp", ""),
            ("data-parallel-sharding-strategy", strategy),
            ("no-gradient-accumulation-fusion", ""),
            ("ckpt-format", "fsdp_dtensor"),
        ]

    def _numbers(self) -> list[tuple[str, Any]]:
        t = self.training
        sixteen = {"fp16": "fp16", "fp32": ""}.get(t.precision, "bf16")
        if t.param_dtype == "fp32" and t.precision != "fp32":
            self.refuse("training.param_dtype", t.param_dtype, "keeps 16-bit parameters beside an fp32 master copy")
        if t.optimizer_dtype != "fp32":
            self.refuse("training.optimizer_dtype", t.optimizer_dtype, "flags are written for fp32 moments only")
        if t.master_weights is False and t.param_dtype != "fp32":
            self.refuse("training.master_weights", "false", "keeps an fp32 master copy")
        if t.zero_grad == "set_to_none":
            self.refuse("training.zero_grad", "set_to_none", "keeps its gradient buffers")
        pair = (t.grad_dtype, t.grad_reduce_dtype)
        if pair not in (("fp32", "fp32"), ("bf16", "bf16")):
            self.refuse("training.grad_dtype", "/".join(pair), "accumulates and reduces in fp32, or both in bf16")
        if t.optimizer == "muon":
            self.refuse("training.optimizer", t.optimizer, "flags are written for Adam and SGD only")
        framework = self.framework("megatron")
        low = {
            "fp8": [("fp8-format", "hybrid")],
            "mxfp8": [("fp8-format", "hybrid")],
            "nvfp4": [("fp4-format", "e2m1")],
        }
        out: list[tuple[str, Any]] = [(sixteen, "")] if sixteen else []
        out += low.get(t.precision, [])
        recipe = recipe_of(t)
        if recipe is not None and t.precision != "nvfp4":
            if ("te", recipe.name) not in RECIPES:
                self.refuse("training.fp8_recipe", recipe.name, "has no such recipe")
            out += [("fp8-recipe", recipe.name)] if recipe.name != "delayed" else []
        grads = "grad-reduce-in-bf16" if pair[0] == "bf16" else "accumulate-allreduce-grads-in-fp32"
        out += [(grads, ""), ("attention-backend", "flash" if t.attention == "fused" else "unfused")]
        out += [
            ("optimizer", "adam" if t.optimizer == "adamw" else "sgd"),
            ("clip-grad", 1.0 if t.gradient_clipping else 0.0),
        ]
        out += [("cross-entropy-loss-fusion", "")] if t.cross_entropy == "fused" else []
        fusions = {
            "bias-gelu": framework.fuses_activation,
            "bias-swiglu": framework.fuses_activation,
            "bias-dropout": framework.fuses_residual,
            "masked-softmax": framework.skips_masked_scores,
            "rope": framework.fuses_rope,
        }
        out += [(f"no-{name}-fusion", "") for name, fused in fusions.items() if not fused]
        return out + self._recompute()

    def _recompute(self) -> list[tuple[str, Any]]:
        r = self.training.recompute
        if r.mode == "selective_op":
            self.refuse("training.recompute", r.mode, "has no such policy of recomputation")
        if r.every is not None:
            self.refuse(
                "training.recompute.every", r.every, "recomputes the first layers of each stage (recompute.layers)"
            )
        if r.mode == "selective":
            named = [] if r.modules == ("core_attn",) else [("recompute-modules", " ".join(r.modules))]
            return [("recompute-granularity", "selective"), *named]
        if r.mode != "full":
            return []
        method = ("uniform", 1) if r.layers is None else ("block", r.layers)
        return [("recompute-granularity", "full"), ("recompute-method", method[0]), ("recompute-num-layers", method[1])]
