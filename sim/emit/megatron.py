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
Flags = dict[str, Any]  # by name without dashes; True: a flag without a value, None and False: left out
_SCHEDULES = {"1f1b": False, "interleaved_1f1b": True}  # Megatron-LM's schedules; True: with virtual stages


class Megatron(Emission):
    """Write a command that trains twenty steps on mock data and logs each step."""

    TRAINER: ClassVar = "Megatron-LM"

    def build(self) -> str:
        """Return the command, one flag on each line."""
        self.common()
        flags = self._model() | self._experts() | self._batch() | self._layout() | self._replicas() | self._numbers()
        nodes, each = self.nodes
        p = self.scenario.parallelism
        # Megatron-LM requires this before Blackwell; on Blackwell it does no harm. Its FSDP refuses it.
        ordered = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if (p.tp > 1 or p.cp > 1) and p.zero < 2 else ""
        lines = [f"{ordered}torchrun --nnodes {nodes} --nproc-per-node {each} pretrain_gpt.py"]
        flags |= {"mock-data": True, "tokenizer-type": "NullTokenizer", "train-iters": 20, "lr": "1e-4"}
        flags |= {"log-interval": 1, "eval-iters": 0}
        given = {name: value for name, value in flags.items() if value is not None and value is not False}
        lines += [f"    --{name}" + (f" {value}" if value is not True else "") for name, value in given.items()]
        return "\n".join([VERSION, *(f"# {n}" for n in self.notes), " \\\n".join(lines)])

    def _model(self) -> Flags:
        m = self.scenario.model
        for key, value in m.variations.items():
            self.refuse(f"model.{key}", value, "flags are not written for it")
        positions = {"learned": "learned_absolute"}.get(m.positions, m.positions)
        if m.mtp_layers > 0 and m.positions == "learned":
            self.refuse("model.positions", m.positions, "predicts several tokens with positions rope or none only")
        grouped = m.kv_heads < m.heads
        attention: Flags = {
            "kv-channels": m.head_dim,
            "group-query-attention": grouped,
            "num-query-groups": m.kv_heads if grouped else None,
        }
        if m.mla is not None:
            attention = {
                "multi-latent-attention": True,
                "q-lora-rank": m.mla.q_lora_rank or None,
                "kv-lora-rank": m.mla.kv_lora_rank,
                "qk-head-dim": m.mla.qk_nope_head_dim,
                "qk-pos-emb-head-dim": m.mla.qk_rope_head_dim,
                "v-head-dim": m.mla.v_head_dim,
            }
        return {
            "num-layers": m.layers,
            "hidden-size": m.hidden,
            "ffn-hidden-size": m.ffn,
            "num-attention-heads": m.heads,
            "max-position-embeddings": max(m.max_positions, self.training.seq_len),
            "position-embedding-type": positions,
            "normalization": "RMSNorm" if m.norm == "rmsnorm" else "LayerNorm",
            "vocab-size": m.vocab - 1,  # its NullTokenizer adds one for the end of a document
            "make-vocab-size-divisible-by": 128,
            "attention-dropout": m.dropout,
            "hidden-dropout": m.dropout,
            **attention,
            "swiglu": m.mlp == "swiglu",
            "squared-relu": m.mlp == "relu2",
            "disable-bias-linear": not m.bias,
            "add-qkv-bias": m.qkv_bias,
            "qk-layernorm": m.qk_norm,
            "untie-embeddings-and-output-weights": not m.tied_embeddings,
            "mtp-num-layers": m.mtp_layers or None,
        }

    def _experts(self) -> Flags:
        moe, p = self.scenario.model.moe, self.scenario.parallelism
        if moe is None:
            return {}
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
        groups, top_groups = moe.groups, moe.top_groups
        if groups is None and moe.max_nodes_per_token is not None:
            groups = max(1, p.ep // self.scenario.cluster.gpus_per_node)
            top_groups = min(groups, moe.max_nodes_per_token)
        return {
            "num-experts": moe.experts,
            "moe-router-topk": moe.top_k,
            "moe-ffn-hidden-size": moe.ffn,
            "moe-grouped-gemm": True,
            "moe-token-dispatcher-type": "flex" if flex else "alltoall",
            "moe-router-force-load-balancing": True,
            "expert-model-parallel-size": p.ep,
            "expert-tensor-parallel-size": p.expert_tp,
            "moe-shared-expert-intermediate-size": moe.shared_experts * moe.ffn or None,
            "moe-layer-freq": f'"([0]*{dense}+[1]*{layers - dense})"' if dense else None,
            "moe-expert-capacity-factor": moe.capacity_factor or None,
            "moe-pad-expert-input-to-capacity": moe.pad_to_capacity,
            "moe-router-dtype": "fp32" if moe.router_fp32 else None,
            "moe-router-num-groups": groups,
            "moe-router-group-topk": None if groups is None else top_groups,
            "overlap-moe-expert-parallel-comm": p.ep_overlap,
        }

    def _batch(self) -> Flags:
        t = self.training
        return {
            "seq-length": t.seq_len,
            "micro-batch-size": t.micro_batch_size,
            "global-batch-size": t.global_batch_size,
        }

    def _layout(self) -> Flags:
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
        orders = ("tp-cp-dp-pp", "tp-cp-pp-dp")
        if p.rank_order not in orders:
            self.refuse("parallelism.rank_order", p.rank_order, f"has the rank orders {', '.join(orders)}")
        if p.tp > 1 and p.tp_overlap == "full" and not p.sp:
            self.refuse("parallelism.tp_overlap", "full", "needs sp: true for it")
        if p.tp > 1 and p.tp_overlap == "none":
            self.notes.append(
                "tp_overlap none: Megatron-LM hides backward's tensor-parallel communication where it can"
            )
        group, m = p.micro_batch_group if interleaved else None, self.scenario.micro_batches
        if group is not None and (group < p.pp or 0 < m % group < p.pp):
            self.refuse("parallelism.micro_batch_group", group, "needs groups of at least pp micro-batches")
        methods = {"ring": "p2p", "all_gather": "allgather", "all_to_all": "a2a"}
        return {
            "tensor-model-parallel-size": p.tp,
            "pipeline-model-parallel-size": p.pp,
            "context-parallel-size": p.cp,
            "use-tp-pp-dp-mapping": p.rank_order == "tp-cp-pp-dp",
            "num-virtual-stages-per-pipeline-rank": p.virtual_stages if interleaved and self.even else None,
            "microbatch-group-size-per-virtual-pipeline-stage": group,
            "no-overlap-p2p-communication": interleaved and not p.p2p_overlap,
            "pipeline-model-parallel-layout": f'"{self._stages()}"' if p.pp > 1 and not self.even else None,
            "sequence-parallel": p.sp and p.tp > 1,
            "tp-comm-overlap": p.tp > 1 and p.tp_overlap == "full",
            "cp-comm-type": methods[p.cp_method] if p.cp > 1 else None,
        }

    def _stages(self) -> str:
        """Embedding, layers, prediction layers and loss, stage by stage: E, t, m, L."""
        counts = self.scenario.parallelism.stage_layers
        stages = ["t" * n for n in counts]
        stages[0] = "E" + stages[0]
        stages[-1] += "m" * self.scenario.model.mtp_layers + "L"
        return "|".join(stages)

    def _replicas(self) -> Flags:
        p, t = self.scenario.parallelism, self.training
        members = p.dp * p.cp
        out: Flags = {}
        if members > 1 and p.dp_sync == "bucketed":
            elements = int(p.bucket_bytes // dtype_bytes(t.grad_reduce_dtype))
            out = {"overlap-grad-reduce": True, "ddp-bucket-size": elements}
        if p.zero == 0 or members == 1:
            return out
        out["use-distributed-optimizer"] = True
        hybrid = members // p.shard_size
        if p.param_gather_overlap and p.dp_sync != "bucketed":
            self.refuse("parallelism.param_gather_overlap", "true", "needs dp_sync: bucketed")
        if p.zero == 1:
            instances = hybrid if hybrid > 1 else None
            overlap = p.param_gather_overlap
            return {**out, "num-distributed-optimizer-instances": instances, "overlap-param-gather": overlap}
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
        return {
            **out,
            "use-megatron-fsdp": True,
            "data-parallel-sharding-strategy": "optim_grads" if p.zero == 2 else "optim_grads_params",
            "no-gradient-accumulation-fusion": True,
            "ckpt-format": "fsdp_dtensor",
        }

    def _numbers(self) -> Flags:
        t = self.training
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
        recipe = recipe_of(t) if t.precision != "nvfp4" else None
        if recipe is not None and ("te", recipe.name) not in RECIPES:
            self.refuse("training.fp8_recipe", recipe.name, "has no such recipe")
        sixteen = {"fp16": "fp16", "fp32": None}.get(t.precision, "bf16")
        return {
            **({sixteen: True} if sixteen else {}),
            "fp8-format": "hybrid" if t.precision in ("fp8", "mxfp8") else None,
            "fp4-format": "e2m1" if t.precision == "nvfp4" else None,
            "fp8-recipe": recipe.name if recipe is not None and recipe.name != "delayed" else None,
            "grad-reduce-in-bf16" if pair[0] == "bf16" else "accumulate-allreduce-grads-in-fp32": True,
            "attention-backend": "flash" if t.attention == "fused" else "unfused",
            "optimizer": "adam" if t.optimizer == "adamw" else "sgd",
            "clip-grad": 1.0 if t.gradient_clipping else 0.0,
            "cross-entropy-loss-fusion": t.cross_entropy == "fused",
            "no-bias-gelu-fusion": not framework.fuses_activation,
            "no-bias-swiglu-fusion": not framework.fuses_activation,
            "no-bias-dropout-fusion": not framework.fuses_residual,
            "no-masked-softmax-fusion": not framework.skips_masked_scores,
            "no-rope-fusion": not framework.fuses_rope,
            **self._recompute(),
        }

    def _recompute(self) -> Flags:
        r = self.training.recompute
        if r.mode == "selective_op":
            self.refuse("training.recompute", r.mode, "has no such policy of recomputation")
        if r.every is not None:
            self.refuse(
                "training.recompute.every", r.every, "recomputes the first layers of each stage (recompute.layers)"
            )
        if r.mode == "selective":
            named = None if r.modules == ("core_attn",) else " ".join(r.modules)
            return {"recompute-granularity": "selective", "recompute-modules": named}
        if r.mode != "full":
            return {}
        method, layers = ("uniform", 1) if r.layers is None else ("block", r.layers)
        return {"recompute-granularity": "full", "recompute-method": method, "recompute-num-layers": layers}
