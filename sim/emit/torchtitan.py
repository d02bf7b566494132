"""torchtitan's TOML. Names and their meaning: torchtitan/config/job_config.py of the release 0.2.2, the last with TOML;
later ones are configured in Python (`torchtitan_python.py`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import tomli_w

from sim.core.units import counted
from sim.emit.common import Emission
from sim.inputs.model_input import load_model
from sim.inputs.parallelism import overlaps_messages
from sim.inputs.trainer_names import LLAMA3_FLAVORS, TITAN_DDP_BUCKET, TITAN_GATHERS_8_BITS, TITAN_SCHEDULES
from sim.inputs.units import BYTES
from sim.models.activation_memory.recompute import stops_early
from sim.models.dims import gathers_quantized_shards, holds_back_sums, in_sixteen_bits
from sim.variants.frameworks.megatron import FUSIONS
from sim.variants.recipes import RECIPES, recipe_of

CONVERTERS = {"fp8": ["quantize.linear.float8"], "mxfp8": ["quantize.linear.mx"]}  # by precision
OUTSIDE_FLAVORS = {"max_positions", "trained_positions", "attention_pattern", "dropout"}  # keys that no flavor decides


class Titan(Emission):
    """Write a TOML file that trains twenty steps."""

    TRAINER: ClassVar = "torchtitan"
    SEQUENCE_PARALLEL_IS_A_FLAG: ClassVar = False
    SHARDS_OVER_ONE: ClassVar = False  # FSDP where a rank has all parameters (`fsdp_enabled`, parallel_dims.py)
    HEAD: ClassVar = "output"  # the module of the output matrix

    def build(self) -> str:
        """Return the file, with the command that runs it in a comment."""
        tables = self.tables()
        nodes, each = self.nodes
        start = f"torchrun --nnodes {nodes} --nproc-per-node {each} -m torchtitan.train"
        head = ["torchtitan 0.2.2", f"{start} --job.config_file THIS_FILE.toml", *self.notes]
        comment = "".join(f"# {line}\n" for line in head)
        return f"{comment}\n{tomli_w.dumps(tables)}".rstrip()  # print ends the last line

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the sections of the configuration by name; add a reason for each value that cannot be expressed."""
        self.common()
        s, p, t = self.scenario, self.scenario.parallelism, self.training
        flavor = self._flavor()
        compiles = self.framework("torchtitan").uses_torch_compile
        self._check_layout(compiles)
        self._check_training()
        replicate, shard = self._data_parallel()
        accumulated = s.micro_batches if p.pp > 1 else 1
        compiled = ["model"] * compiles + ["loss"] * (t.cross_entropy == "fused")
        return {
            "model": {"name": "llama3", "flavor": flavor, "converters": CONVERTERS.get(t.precision, [])},
            "training": {
                "local_batch_size": t.micro_batch_size * accumulated,
                "global_batch_size": t.global_batch_size,
                "seq_len": t.seq_len,
                "max_norm": 1.0,
                "steps": 20,
                "mixed_precision_param": "bfloat16" if t.precision != "fp32" else "float32",
                "mixed_precision_reduce": "float32",
                **({"dtype": "bfloat16"} if self._all_in_bf16() else {}),
            },
            "parallelism": {
                "data_parallel_replicate_degree": replicate,
                "data_parallel_shard_degree": shard,
                "fsdp_reshard_after_forward": self._reshards(),
                "tensor_parallel_degree": p.tp,
                "enable_async_tensor_parallel": p.tp > 1 and p.tp_overlap == "full",
                "context_parallel_degree": p.cp,
                "context_parallel_rotate_method": "alltoall" if p.cp_method == "ring" else "allgather",
                "pipeline_parallel_degree": p.pp,
                **self._pipeline(),
            },
            "activation_checkpoint": self._recompute(),
            **({"optimizer": {"implementation": "foreach"}} if t.adamw_kernels == "foreach" else {}),
            "compile": {"enable": bool(compiled)} | ({"components": compiled} if len(compiled) == 1 else {}),
            **self._quantized(),
        }

    def _flavor(self) -> str:
        """Return the flavor that the model is, in all but what `OUTSIDE_FLAVORS` and other reasons name."""
        m = self.scenario.model
        for key in m.variations:
            self.refuse(f"model.{key}", "has no llama3 flavor with it")
        others = OUTSIDE_FLAVORS | m.variations.keys()
        for flavor, preset in LLAMA3_FLAVORS.items():
            if load_model(preset).model_dump(exclude=others) == m.model_dump(exclude=others):
                return flavor
        shown = f"{counted(m.layers, 'layer')} of {m.hidden}, {counted(m.heads, 'head')}, vocabulary {m.vocab}"
        has = f"has the llama3 flavors {', '.join(LLAMA3_FLAVORS)}, and no option changes their sizes"
        self.refuse("model", has, shown)
        return ""

    def _check_layout(self, compiles: bool) -> None:
        p = self.scenario.parallelism
        if p.tp > 1 and not self.SEQUENCE_PARALLEL_IS_A_FLAG:
            does = "always combines tensor parallelism with sequence parallelism"
            self.has_only("parallelism.sp", (True,), does)
        if p.tp > 1:
            does = "overlaps chunks (tp_overlap: full) or nothing (none)"
            self.has_only("parallelism.tp_overlap", ("none", "full"), does)
        if p.tp > 1 and p.tp_overlap == "full" and not compiles:
            self.refuse("parallelism.tp_overlap", "needs training.framework: compiled for it")
        if p.cp > 1:
            does = "exchanges keys and values (ring or all_gather), not heads"
            self.has_only("parallelism.cp_method", ("ring", "all_gather"), does)
            self.has_only("parallelism.cp_method_by_layer", (None,), "exchanges keys and values alike in all layers")
        self.has_only("parallelism.rank_order", ("tp-cp-dp-pp",), "orders ranks tp-cp-dp-pp")
        self.has_only("parallelism.micro_batch_group", (None,), "has groups of pp micro-batches")
        if p.dp * p.cp > 1 and p.dp_sync == "after_backward":
            self.refuse("parallelism.dp_sync", "overlaps reductions with backward")

    def _check_training(self) -> None:
        self.has_only("model.dropout", (0,), "has no dropout")
        if not self._all_in_bf16():
            also = "or all in bf16 without copies (param_dtype, grad_dtype, optimizer_dtype, master_weights: false)"
            self.has_only("training.param_dtype", ("fp32",), f"keeps parameters in fp32 (param_dtype: fp32), {also}")
            self.has_only("training.grad_dtype", ("fp32",), "keeps gradients in fp32")
            self.has_only("training.optimizer_dtype", ("fp32",), "keeps fp32 moments")
        if self.training.cuda_graphs == "none":  # with one, gradients stay where the graph adds to them
            self.has_only("training.zero_grad", ("set_to_none", None), "sets gradients to none")
        self.has_only("training.grad_reduce_dtype", ("fp32",), "reduces gradients in fp32")
        self.has_only("training.precision", ("bf16", "fp32", "fp8", "mxfp8"), "has bf16, fp32, fp8 and mxfp8")
        self.has_only("training.fp8_param_gather", (False,), "keeps no parameters in 8 bits")
        self.has_only("training.optimizer", ("adamw",), "has Adam and AdamW")
        self.has_only("training.moe_grouped_gemm", (None,), "groups experts' matmuls")
        self.has_only("training.moe_router_fusion", (None,), "chooses experts by torch's operators")
        for key in FUSIONS:
            self.has_only(f"training.{key}", (None,), "has no such switch")
        self.has_only("parallelism.wgrad_deferral_limit", (None,), "computes weight gradients in each backward")
        early = "parallelism.overlap_param_gather_with_optimizer_step"
        self.has_only(early, (False,), "updates all parameters at once")
        self.has_only("training.moe_shared_expert_overlap", (False,), "runs shared experts behind the routed ones")
        self.has_only("training.gradient_accumulation_fusion", (None,), "adds gradients by kernels of their own")
        self.has_only("training.gradient_clipping", (True,), "always clips")
        self.has_only("training.attention", ("fused",), "uses fused attention")

    def _all_in_bf16(self) -> bool:
        """Tell whether parameters, gradients and moments are in bf16, as `training.dtype` has them
        (torchtitan/config/job_config.py)."""
        t = self.training
        return {t.param_dtype, t.grad_dtype, t.optimizer_dtype} == {"bf16"} and t.master_weights is False

    def _data_parallel(self) -> tuple[int, int]:
        """Return the numbers of replicas and of shards; torchtitan's FSDP shards over dp_shard · cp ranks."""
        p = self.scenario.parallelism
        alone = p.dp * p.cp == 1
        if p.zero in (1, 2):  # on one rank, too: without FSDP torchtitan computes under autocast, or in fp32
            self.refuse("parallelism.zero", "shards everything (zero: 3) or nothing (zero: 0)")
        if p.zero == 3 and p.sharded_over[0] == 1 and not self.SHARDS_OVER_ONE:
            self.refuse("parallelism.zero", "has FSDP with two shards or more only; with one shard write zero: 0")
        if p.zero < 3:
            if p.tp * p.cp * p.pp > 1 and not alone:
                self.refuse("parallelism.zero", "replicates models without sharding only where tp, cp and pp are 1")
            if p.tp * p.pp > 1 and self.training.precision != "fp32":  # `maybe_enable_amp`
                does = "computes in fp32 with tp or pp above 1, unless FSDP (zero: 3) casts to 16 bits"
                self.refuse("parallelism.zero", does)
            self.has_only("training.autocast", (None, True), "runs replicas under torch.autocast")
            if not alone and p.bucket_bytes != BYTES.parse(TITAN_DDP_BUCKET):
                own = f"torchtitan's buckets have {TITAN_DDP_BUCKET}"
                self.notes.append(f"bucket_bytes is not set, {p.bucket_bytes:,.0f} bytes are simulated; {own}")
            return p.dp, 1
        self.has_only("parallelism.fsdp_version", (None, 2), "has torch's FSDP2")
        self.has_only("parallelism.backward_prefetch", (True,), "gathers layers ahead")
        # With a pipeline, gradients are reduced after the last micro-batch (`backward_maybe_with_nosync` of
        # torch.distributed.pipelining.stage); without one, in each micro-batch (torchtitan's `train_step`).
        several = self.scenario.micro_batches > 1
        does = f"reduces gradients once a {'step' if p.pp > 1 else 'micro-batch'} at pp {p.pp}"
        if several and p.reduces_rows:
            self.refuse("parallelism.accumulate_in_a_row", does)
        elif several and p.accumulate_unsharded != (p.pp > 1) and not alone:
            self.refuse("parallelism.accumulate_unsharded", does)
        if holds_back_sums(self.scenario):
            self.refuse("parallelism.all_reduce_once", "all-reduces each reduced shard over the replicas")
        shards = max(1, p.shard_size // p.cp)
        if p.shard_size % p.cp:
            self.refuse("parallelism.shard_size", "shards over a multiple of cp ranks")
        return max(1, p.dp // shards), shards

    def _quantized(self) -> dict[str, dict[str, Any]]:
        """Return the table of the 8-bit matmuls: the fp8 recipe, if it is not torchao's default, or the flag that makes
        FSDP gather 8 bits, and what stays in 16 bits: the output matrix, and layers at the ends."""
        t, layers = self.training, self.scenario.model.layers
        if t.precision not in CONVERTERS:
            return {}
        wide = [n for n in range(layers) if in_sixteen_bits(self.scenario, n)]
        left_out = {"filter_fqns": [self.HEAD, *(f"layers.{n}." for n in wide)]}
        if t.precision == "mxfp8":
            return {"quantize": {"linear": {"mx": left_out}}} if wide else {}  # which leave the output out by default
        recipe, own = recipe_of(t), dict[str, Any]()
        if gathers_quantized_shards(self.scenario):
            own = {TITAN_GATHERS_8_BITS: True}
        elif recipe is not None and recipe.name != "tensorwise":
            if ("torchao", recipe.name) not in RECIPES:
                self.refuse("training.fp8_recipe", "has the recipes tensorwise and rowwise", recipe.name)
            own = {"recipe_name": recipe.name}
        return {"quantize": {"linear": {"float8": own | left_out}}}

    def _reshards(self) -> str:
        """Return when parameters are freed: "always" frees [norm, output], too (distributed/fsdp.py: apply_fsdp)."""
        p = self.scenario.parallelism
        if not p.reshard_after_forward:
            return "never"
        return "default" if p.pp == 1 else "always"

    def _pipeline(self) -> dict[str, Any]:
        p, t = self.scenario.parallelism, self.training
        if p.pp == 1:
            return {}
        name = TITAN_SCHEDULES.get(p.schedule, "")
        if not name:
            self.refuse("parallelism.schedule", f"has the schedules {', '.join(TITAN_SCHEDULES)}")
        usual = overlaps_messages(p.schedule)
        self.has_only("parallelism.p2p_overlap", (usual,), "decides by the schedule whether messages overlap")
        if 0 in p.stage_layers:
            self.refuse(
                "parallelism.layers_per_stage", "starts each pipeline stage with a layer", str(list(p.stage_layers))
            )
        stages: list[list[str]] = []
        first = 0
        for count in p.stage_layers:
            stages.append([f"layers.{n}" for n in range(first, first + count)])
            first += count
        stages[0].insert(0, "tok_embeddings")
        stages[-1] += ["norm", self.HEAD]
        return {
            "pipeline_parallel_schedule": name,
            "pipeline_parallel_microbatch_size": t.micro_batch_size,
            "module_fqns_per_model_part": stages,
        }

    def _recompute(self) -> dict[str, Any]:
        r = self.training.recompute
        if r.mode == "selective":
            self.refuse("training.recompute", "recomputes by operator (selective_op) or by layer", r.mode)
        self.has_only("training.recompute.layers", (None,), "recomputes every n-th layer (recompute.every)")
        if r.mode == "selective_op" or (r.mode == "full" and r.every is not None):
            option = "op" if r.mode == "selective_op" else str(r.every)
            return {"mode": "selective", "selective_ac_option": option, "early_stop": stops_early(self.scenario)}
        if r.mode == "full":
            return {"mode": "full", "early_stop": stops_early(self.scenario)}
        return {"mode": "none"}
