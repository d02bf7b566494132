"""Write Megatron-LM's arguments.

Source of names and of legal combinations: megatron/training/arguments.py of NVIDIA/Megatron-LM at 000c4ac (November
2025); megatron-core 0.19.2 (September 2026) accepts them too.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sim.core.dtypes import dtype_bytes
from sim.emit.common import Emission
from sim.emit.megatron_experts import experts
from sim.emit.megatron_layers import (
    context,
    ends_of_pipeline,
    fuses_router,
    in_sixteen_bits,
    offloaded,
    precision_aware,
    unfused,
)
from sim.inputs.trainer_names import (
    MEGATRON_BACKENDS,
    MEGATRON_FSDP,
    MEGATRON_OPTIMIZERS,
    MEGATRON_SCHEDULES,
)
from sim.inputs.zero_keys import sums_apart
from sim.models.activation_memory.recompute import stops_early
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.megatron import MEGATRON, MEGATRON_ZERO
from sim.variants.frameworks.records import framework_at, framework_of, frees_gradients
from sim.variants.recipes import RECIPES, recipe_of

INTERLEAVED = "interleaved_1f1b"
VERSION = "# Megatron-LM as of November 2025 (000c4ac) to megatron-core 0.19.2 (September 2026)"
Flags = dict[str, Any]  # by name without dashes; True: a flag without a value, None and False: left out


class Megatron(Emission):
    """Write a command that trains twenty steps on mock data and logs each step."""

    TRAINER: ClassVar = "Megatron-LM"
    KERNELS: ClassVar = MEGATRON_BACKENDS
    LOSSES: ClassVar = ("unfused", "native", "fused")
    OFFLOADS_PARTS: ClassVar = True

    def build(self) -> str:
        """Return the command, one flag on each line."""
        self.common()
        self._check_model()
        self._check_layout()
        self._check_training()
        flags = self._model() | experts(self) | self._batch() | self._layout() | self._replicas() | self._numbers()
        nodes, each = self.nodes
        p = self.scenario.parallelism
        # Required before Blackwell, but not beside pairs, whose exchanges would wait; its FSDP refuses it.
        splits = (p.tp > 1 or p.cp > 1) and p.zero < 2
        ordered = f"CUDA_DEVICE_MAX_CONNECTIONS={32 if p.ep_overlap else 1} " if splits else ""
        lines = [f"{ordered}torchrun --nnodes {nodes} --nproc-per-node {each} pretrain_gpt.py"]
        self.notes.append("NullTokenizer adds a token to vocab-size; with a tokenizer of yours leave both flags out")
        flags |= {"mock-data": True, "tokenizer-type": "NullTokenizer", "train-iters": 20, "lr": "1e-4"}
        flags |= {"log-interval": 1, "eval-iters": 0}
        given = {name: value for name, value in flags.items() if value is not None and value is not False}
        lines += [f"    --{name}" + (f" {value}" if value is not True else "") for name, value in given.items()]
        return "\n".join([VERSION, *(f"# {n}" for n in self.notes), " \\\n".join(lines)])

    @property
    def alone(self) -> bool:
        """Tell whether no other rank holds the same parameters."""
        return not self.scenario.parallelism.replicates(self.scenario.model.may_have_experts)

    @property
    def interleaved(self) -> bool:
        """Tell whether the pipeline has virtual stages, which only one of Megatron-LM's schedules has."""
        return self.scenario.parallelism.form.name == INTERLEAVED

    def _check_model(self) -> None:
        m, p, mode = self.scenario.model, self.scenario.parallelism, self.training.recompute.mode
        for key in m.variations.keys() - self._variations():
            self.refuse(f"model.{key}", "flags are not written for it")
        if m.qk_norm is True and m.norm == "layernorm":
            self.refuse("model.qk_norm", "takes layer norms there, too; write qk_norm: layernorm", "true")
        if m.norm == "layernorm" and not (m.bias if m.norm_bias is None else m.norm_bias):
            self.notes.append("norm_bias false is simulated; Megatron-LM's layer norms have biases (norm_bias: true)")
        if m.mtp_layers > 0 and m.positions == "learned":
            self.refuse("model.positions", "predicts several tokens with positions rope or none only")
        if m.moe is None:
            return
        does = "routes by its data, or evenly (imbalance: balanced)"
        self.has_only("model.moe.imbalance", ("balanced",), does, "drawn")
        self.has_only("parallelism.ep_dispatch_dtype", ("bf16", "fp16", "fp32"), "dispatches tokens in 16 bits")
        if self.training.precision in ("fp16", "fp32"):
            self.refuse("training.precision", "groups the experts' matmuls in bf16 only")
        if p.tp > 1:
            self.has_only("parallelism.sp", (True,), "needs sequence parallelism for experts with tp above 1")
        if p.ep_overlap and (not p.form.pairs or mode == "full"):
            needs = "needs ep above 1, virtual stages where pp is above 1, and no full recomputation"
            self.refuse("parallelism.ep_overlap", needs)

    def _check_layout(self) -> None:
        p = self.scenario.parallelism
        if p.form.name not in MEGATRON_SCHEDULES:
            self.refuse("parallelism.schedule", f"has the schedules {' and '.join(MEGATRON_SCHEDULES)}")
        if p.pp > 1 and p.p2p_overlap and not self.interleaved:
            self.refuse("parallelism.p2p_overlap", "overlaps messages between stages with interleaved_1f1b only")
        if p.pp == 2 and self.interleaved:
            self.has_only("parallelism.p2p_overlap", (True,), "interleaves with blocking messages from pp 3 on")
        if p.tp > 1 and p.pp > 1 and not p.sp:
            self.has_only("parallelism.p2p_scatter", (False,), "sends whole stage inputs since 2023")
        orders = ("tp-cp-dp-pp", "tp-cp-pp-dp")
        self.has_only("parallelism.rank_order", orders, f"has the rank orders {', '.join(orders)}")
        if p.tp > 1 and p.tp_overlap == "full" and not p.sp:
            self.refuse("parallelism.tp_overlap", "needs sp: true for it")
        group, m = p.micro_batch_group if self.interleaved else None, self.scenario.micro_batches
        if group is not None and (group < p.pp or 0 < m % group < p.pp):
            self.refuse("parallelism.micro_batch_group", "needs groups of at least pp micro-batches")
        if p.zero > 0 and not self.alone:
            if p.param_gather_overlap and p.dp_sync != "bucketed":
                self.refuse("parallelism.param_gather_overlap", "needs dp_sync: bucketed")
            if p.zero > 1:
                self._check_fsdp()

    def _check_fsdp(self) -> None:
        p = self.scenario.parallelism
        # Of its FSDP's strategies the two that shard gradients reduce in every backward (`grad_reduce_every_bprop`).
        if self.scenario.micro_batches > 1:
            does = "reduces FSDP's gradients after each micro-batch"
            self.has_only("parallelism.accumulate_unsharded", (False,), does)
            if p.reduces_rows:
                self.refuse("parallelism.accumulate_in_a_row", does)
        self.has_only("parallelism.pp", (1,), f"flags for zero {p.zero} (FSDP) are written for one pipeline stage only")
        if p.shard_size < p.dp * p.cp:
            self.refuse("parallelism.shard_size", "flags shard over all replicas (FSDP)")
        self.has_only("parallelism.dp_sync", ("bucketed",), "reduces FSDP's gradients beside the backward")
        if p.zero == 3:
            self.has_only("parallelism.reshard_after_forward", (True,), "reshards after forward (FSDP)")
            versions = (None,) if framework_of(self.training).zero.or_torch else (None, 2)
            self.has_only("parallelism.fsdp_version", versions, "has an FSDP of its own, for which flags are written")
            self.has_only("parallelism.backward_prefetch", (True,), "gathers layers ahead")

    def _check_training(self) -> None:
        t, r = self.training, self.training.recompute
        if t.param_dtype == "fp32" and t.precision != "fp32":
            self.refuse("training.param_dtype", "keeps 16-bit parameters beside an fp32 master copy")
        self.has_only("training.zero_grad", ("keep", None), "keeps its gradient buffers")
        if t.zero_grad is None and frees_gradients(t, self.scenario.parallelism.zero):
            freed = f"framework {t.framework} frees gradients between steps"
            self.notes.append(f"zero_grad is not set, {freed}; Megatron-LM keeps their buffers (zero_grad: keep)")
        if t.batch_schedule:
            self.notes.append(f"batch_schedule is left out: every step has {t.global_batch_size:,} sequences")
        self.has_only("training.optimizer", tuple(MEGATRON_OPTIMIZERS), "flags are written for Adam, SGD and Lion only")
        self.has_only("training.fused_single_qkv_rope", (False,), "has no argument for it, Megatron-Bridge has a key")
        self.has_only("training.adamw_kernels", (None, "fused"), "has a fused Adam of Apex or Transformer Engine")
        if r.mode == "selective_op":
            self.refuse("training.recompute", "has no such policy of recomputation", r.mode)
        does = "recomputes the first layers of each stage (recompute.layers)"
        self.has_only("training.recompute.every", (None,), does)
        self.has_only("training.recompute.early_stop", (None, False), "runs a layer again to its end")
        if r.mode == "full" and stops_early(self.scenario):
            self.notes.append("recompute full: Megatron-LM runs a layer again to its end, also what no gradient needs")

    def _variations(self) -> dict[str, Flags]:
        """Flags by the key of a model that needs them; none where Megatron-LM is so by itself."""
        m = self.scenario.model
        flags: dict[str, Flags] = {
            "rope_share": {"rotary-percent": m.rope_share},
            "sinks": {"softmax-type": "learnable" if m.sinks else None},
            "no_rope_every": {"no-rope-freq": m.no_rope_every},
            "separate_qkv": {},  # one matmul, whatever the model's own code has
            "merged_projections": {},
            "code": {},  # Megatron's own layers run
            "attention_dropout": {},
        }
        if m.attention_gate is True:
            flags["attention_gate"] = {"attention-output-gate": True}
        if m.norm == "layernorm" and m.norm_bias:
            flags["norm_bias"] = {}
        if m.qk_norm == "layernorm":
            flags["qk_norm"] = {}  # its norms of queries and keys are of the model's kind
        if m.qk_norm == "l2":
            flags["qk_norm"] = {"qk-l2-norm": True}
        if m.mlp in ("gelu_new", "gelu_fast", "gelu_bloom"):
            flags["mlp"] = {}  # Megatron's fused kernel of bias and GELU is that approximation
        if m.mlp == "clamped_swiglu":
            clamped: Flags = {"quick-geglu": True, "activation-func-clamp-value": 7.0, "glu-linear-offset": 1.0}
            flags["mlp"] = clamped  # gpt-oss's limit
        if m.window is not None and {*m.attention_pattern} <= {"sliding", "full"}:
            local = "".join(str(int(m.attention_kind(layer) == "sliding")) for layer in range(m.layers))
            skipped = None if "0" not in local else f"[{','.join(local)}]"
            flags["window"] = {"window-size": f"{m.window - 1},0", "window-attn-skip-freq": skipped}
            flags["attention_pattern"] = {}
        if m.moe is not None:
            flags["moe.shared_gate"] = {"moe-shared-expert-gate": m.moe.shared_gate}
            flags["moe.shared_ffn"] = {}  # `_experts` writes the width
        return flags

    def _model(self) -> Flags:
        m = self.scenario.model
        positions = {"learned": "learned_absolute"}.get(m.positions, m.positions)
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
            "attention-dropout": m.dropout if m.attention_dropout is None else m.attention_dropout,
            "hidden-dropout": m.dropout,
            **attention,
            "swiglu": m.mlp == "swiglu",
            "squared-relu": m.mlp == "relu2",
            "disable-bias-linear": not m.bias,
            "add-qkv-bias": m.qkv_bias,
            "qk-layernorm": m.mla is not None or m.qk_norm in (True, "layernorm"),  # of latents too
            "untie-embeddings-and-output-weights": not m.tied_embeddings,
            "mtp-num-layers": m.mtp_layers or None,
            **{name: value for flags in self._variations().values() for name, value in flags.items()},
        }

    def _batch(self) -> Flags:
        t = self.training
        return {
            "seq-length": t.seq_len,
            "micro-batch-size": t.micro_batch_size,
            "global-batch-size": t.global_batch_size,
        }

    def _layout(self) -> Flags:
        p, interleaved = self.scenario.parallelism, self.interleaved
        if p.tp > 1 and p.tp_overlap == "none":
            always = "Megatron-LM computes weight gradients beside backward's tensor-parallel messages"
            self.notes.append(f"tp_overlap none is simulated; {always} (tp_overlap: wgrad), so its step is shorter")
        return {
            "tensor-model-parallel-size": p.tp,
            "pipeline-model-parallel-size": p.pp,
            "context-parallel-size": p.cp,
            "use-tp-pp-dp-mapping": p.rank_order == "tp-cp-pp-dp",
            "num-virtual-stages-per-pipeline-rank": p.virtual_stages if interleaved and self.even else None,
            "microbatch-group-size-per-virtual-pipeline-stage": p.micro_batch_group if interleaved else None,
            "no-overlap-p2p-communication": interleaved and not p.p2p_overlap,
            "pipeline-model-parallel-layout": f'"{self._stages()}"' if p.pp > 1 and not self.even else None,
            "sequence-parallel": p.sp and p.tp > 1,
            **ends_of_pipeline(self),
            "tp-comm-overlap": p.tp > 1 and p.tp_overlap == "full",
            **context(self),
        }

    def _stages(self) -> str:
        """Embedding, layers, prediction layers and loss, stage by stage: E, t, m, L."""
        p = self.scenario.parallelism
        stages = ["t" * n for n in p.stage_layers]
        stages[0] = "E" + stages[0]
        stages[-1 if p.mtp_stage is None else p.mtp_stage] += "m" * self.scenario.model.mtp_layers
        return "|".join(stages) + "L"

    def _replicas(self) -> Flags:
        p = self.scenario.parallelism
        members = p.dp * p.cp
        out: Flags = {}
        if not self.alone and p.dp_sync == "bucketed":
            out = {"overlap-grad-reduce": True, "ddp-bucket-size": self._bucket()}
        if p.zero == 0 or self.alone:
            return out
        out["use-distributed-optimizer"] = True
        if p.zero == 1:
            hybrid, overlap = members // p.shard_size, p.param_gather_overlap
            instances = hybrid if hybrid > 1 else None
            return {**out, "num-distributed-optimizer-instances": instances, "overlap-param-gather": overlap}
        return {
            **out,
            "use-megatron-fsdp": True,
            **({"fsdp-double-buffer": True} if p.fsdp_double_buffer else {}),
            "data-parallel-sharding-strategy": MEGATRON_FSDP[p.zero],
            "overlap-param-gather": bool(p.param_gather_overlap) and p.zero == 2,
            **({"no-gradient-accumulation-fusion": True} if sums_apart(self.training, p) else {}),
            "ckpt-format": "fsdp_dtensor",
        }

    def _bucket(self) -> int | None:
        """Gradients of a bucket; None where the scenario leaves it to Megatron-LM."""
        p = self.scenario.parallelism
        if "bucket_bytes" in p.model_fields_set:
            return int(p.bucket_bytes // dtype_bytes(self.training.grad_reduce_dtype))
        if p.bucket_bytes == MEGATRON_ZERO.bucket_bytes_of(p.dp, dtype_bytes(self.training.grad_reduce_dtype)):
            return None
        own = "Megatron-LM's own buckets have max(40,000,000, 1,000,000 dp) parameters"
        self.notes.append(f"bucket_bytes is not set, {p.bucket_bytes:,.0f} bytes are simulated; {own}")
        return None

    def _numbers(self) -> Flags:
        t = self.training
        pair = (t.grad_dtype, t.grad_reduce_dtype)
        own = {"fp16": "fp16", "fp32": "fp32"}.get(t.precision, "bf16")  # that of the parameters (core/distributed)
        if pair not in (("fp32", "fp32"), (own, own)):
            either = "" if own == "fp32" else f", or both in {own}"
            self.refuse("training.grad_dtype", f"accumulates and reduces in fp32{either}", "/".join(pair))
        framework = self.framework("megatron")
        recipe = recipe_of(t) if t.precision != "nvfp4" else None
        if recipe is not None and ("te", recipe.name) not in RECIPES:
            self.refuse("training.fp8_recipe", "has no such recipe", recipe.name)
        sixteen = {"fp16": "fp16", "fp32": None}.get(t.precision, "bf16")
        return {
            **({sixteen: True} if sixteen else {}),
            "fp8-format": "hybrid" if t.precision in ("fp8", "mxfp8") else None,
            "fp4-format": "e2m1" if t.precision == "nvfp4" else None,
            "fp8-recipe": recipe.name if recipe is not None and recipe.name != "delayed" else None,
            **({"fp8-param-gather": True} if t.fp8_param_gather else {}),
            **({"reuse-grad-buf-for-mxfp8-param-ag": True} if t.fp8_param_gather and t.precision == "mxfp8" else {}),
            **in_sixteen_bits(self),
            **offloaded(self),
            "grad-reduce-in-bf16": pair[0] == "bf16",
            "accumulate-allreduce-grads-in-fp32": pair[0] == "fp32",
            "attention-backend": self._backend(),
            **precision_aware(self),
            "optimizer": MEGATRON_OPTIMIZERS.get(t.optimizer),  # others are refused
            "calculate-per-token-loss": t.calculate_per_token_loss,
            "sgd-momentum": 0.0 if t.optimizer == "sgd" else None,
            "clip-grad": 1.0 if t.gradient_clipping else 0.0,
            "cross-entropy-loss-fusion": t.cross_entropy in ("native", "fused"),
            **({"no-gradient-accumulation-fusion": True} if t.gradient_accumulation_fusion is False else {}),
            "cross-entropy-fusion-impl": "te" if t.cross_entropy == "fused" else None,
            **unfused(self, framework),
            **self._recompute(),
            **self._recipes(framework),
        }

    def _recipes(self, framework: Framework) -> Flags:
        """Return what NVIDIA's recipes set beside Megatron-LM's defaults, for a framework that has it so."""
        if not framework.accumulates_in_matmul:  # no record of Megatron-Core
            return {}
        m, usual = self.scenario.model, framework_at(MEGATRON.name, self.training.software_date)
        return {
            "no-check-for-nan-in-loss-and-grad": not framework.checks_gradients,
            "ddp-average-in-collective": not framework.averages_gradients,
            "moe-router-fusion": m.moe is not None and fuses_router(self, framework),
            "enable-experimental": m.mla is not None and framework.fuses_latent_rope > usual.fuses_latent_rope,
        }

    def _backend(self) -> str:
        t = self.training
        if t.attention == "unfused":
            return "unfused"
        if t.attention_kernel == "flash3":
            self.notes.append("attention_kernel flash3: Transformer Engine has it only where flash-attn-3 is installed")
        return MEGATRON_BACKENDS.get(t.attention_kernel or "", "auto")

    def _recompute(self) -> Flags:
        r = self.training.recompute
        if r.mode == "selective":
            named = None if r.modules == ("core_attn",) else " ".join(r.modules)
            return {"recompute-granularity": "selective", "recompute-modules": named}
        if r.mode != "full":
            return {}
        method, layers = ("uniform", 1) if r.layers is None else ("block", r.layers)
        return {"recompute-granularity": "full", "recompute-method": method, "recompute-num-layers": layers}
