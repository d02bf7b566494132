"""The sizes of one rank's piece of a model: what every operator of a layer reads its shapes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES, dtype_bytes, sixteen_bit
from sim.inputs.autocast import adapter_casts, autocasts
from sim.inputs.packed_documents import PackedBatch, pack
from sim.inputs.windows import windows_of
from sim.inputs.zero_keys import sums_apart
from sim.models.streams.sizes import Streams, streams_of
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.megatron import ROUTERS, facts_off, has_fusions
from sim.variants.frameworks.records import framework_of, zero_engine
from sim.variants.model_code import LLAMA, ModelCode, code_of
from sim.variants.recipes import Recipe, recipe_of

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.inputs.parallelism import Parallelism
    from sim.inputs.scenario import Scenario
    from sim.inputs.training_config import Lora, Training
    from topology.spec import ClusterSpec


# Linear layers by the names of `parallelism.tp_overlap_except`, Transformer Engine's for its buffers (`ub_name`).
COLUMN_LAYERS = {"qkv": "qkv", "fc1": "mlp_up"}


class Shard(Struct, frozen=True):
    """Hold a rank's context- and expert-parallel coordinates, which the scenario does not have."""

    cp_rank: int = 0
    ep_rank: int = 0


class Dims(Struct, frozen=True):
    """Sizes on one rank; `seq` is its context-parallel share. A layer's own sizes are in `sim.models.layers`.

    `tokens` = micro-batch · seq / cp; `rows` = the tokens of the parts that sequence parallelism splits
    (tokens / tp with it, else tokens). `linear` is the linear layers' dtype, `act` that of everything else.
    `reduced_over`: ranks that each keep a shard of the sum of gradients, where every micro-batch's are reduced at
    once; 1: whole gradients add up. `experts_reduced_over`: the same of experts.
    """

    batch: int
    full_seq: int
    seq: int
    tokens: int
    rows: int
    hidden: int
    tp: int
    sp: bool
    cp: int
    cp_method: str
    act: str
    linear: str
    act_bytes: float
    linear_bytes: float
    grad_bytes: float
    dropout: float
    attention_dropout: float  # of its probabilities
    framework: Framework
    fused_attention: bool
    attention_kernel: str  # training.attention_kernel, or "" for the profile's
    experts_apart: bool  # each expert's layers run by themselves, one after another
    fp8_attention: bool  # attention multiplies 8-bit numbers
    fp8_activation_input: bool  # of an MLP's activation the input is kept in 8 bits
    tp_overlap: str
    waiting_layers: tuple[str, ...]  # of those that overlap column layers whose forward waits for its whole input
    quantized_for: int  # micro-batches that a quantized weight serves; ZeRO-3 gathers it anew for each
    micro_batches: int
    quantized_copies: int  # of an activation in the matmuls' format: by rows, by columns
    weight_copies: int  # of a weight in the matmuls' format: by rows, by columns
    eight_bit_parameters: bool  # weights are kept in the matmuls' format alone (`training.fp8_param_gather`)
    transposes_frozen: bool  # of frozen 8-bit weights there are rows alone, and each backward transposes them
    recipe: Recipe | None = None  # of quantizing; None: matmuls run in 16 bits or more
    reduced_over: int = 1
    experts_reduced_over: int = 1
    shard_sum_bytes: float = 4.0  # of an element of such a sum
    kept_grad_bytes: float = 4.0  # of an element of the gradients that the optimizer reads
    copies_sent: bool = False  # gradients are copied into the buffer that is reduced (torch's FSDP2)
    filled_bytes: float = 0.0  # of an element of a bucket that each micro-batch fills (`ZeroEngine.fills_buckets`)
    weight_shards: int = 1  # ranks that each quantize their share of a weight before it is gathered
    lora: Lora | None = None
    few_bits: bool = False  # frozen matrices are kept as `lora.weights` says
    norm_in_fp32: bool = False  # norms' weights multiply in fp32
    torch_norms: bool = False  # the stream's norms are torch's layer norm
    adapters: Literal["", "fp32", "autocast"] = ""  # see `sim.inputs.autocast.adapter_casts`
    autocast: bool = False  # matmuls cast fp32 parameters and inputs, see `sim.inputs.autocast`
    returns_wide: bool = False  # a model's results leave autocast, which may copy them to fp32
    wide_stream: bool = False  # beside 16-bit weights the residual stream has fp32, see `_widens_stream`
    normed_bytes: float = 2.0  # of an element that a norm writes
    code: ModelCode = LLAMA  # of the model in Transformers, where the framework runs it
    streams: Streams = Streams()  # of the residual stream, see `sim.models.streams.hyper_connections`
    partial_rows: bool = False  # row-parallel layers leave the sum over tp to the layer, see `sums_branches_together`
    in_sixteen_bits: bool = False  # of a layer that keeps 16 bits where the others have fewer, see `layer_dims`

    @property
    def accumulated(self) -> int:
        """Micro-batches that add up in whole gradients."""
        return self.micro_batches if self.reduced_over == 1 else 1

    @property
    def stream_bytes(self) -> float:
        """The residual stream of one micro-batch on this rank, `[batch, seq, streams · hidden]`, in bytes."""
        return self.rows * self.hidden * self.streams.number * self.of_stream.act_bytes

    @property
    def stream_in_fp32(self) -> bool:
        """Whether the residual stream has fp32 beside matmuls in 16 bits."""
        return self.autocast or self.wide_stream

    @property
    def of_stream(self) -> Dims:
        """The sizes of what reads and writes the residual stream: under autocast it has fp32. Norms give that on, or
        16 bits where a compiler puts the casts of the matmuls behind them into the same kernel."""
        if not self.stream_in_fp32:
            return self
        given = self.act_bytes if self.framework.fuses_chains else FP32_BYTES
        return replace(self, act="fp32", act_bytes=FP32_BYTES, normed_bytes=given)

    @property
    def experts_in_fp32(self) -> bool:
        """Whether routed experts multiply their fp32 parameters as they are (`experts_in_param_dtype`); torch.bmm of
        all experts is on autocast's list."""
        return self.autocast and self.framework.experts_in_param_dtype and not self.code.every_expert

    @property
    def of_experts(self) -> Dims:
        """The sizes of routed experts."""
        if not self.experts_in_fp32:
            return self
        wide = {"act": "fp32", "act_bytes": FP32_BYTES, "linear": "fp32", "linear_bytes": FP32_BYTES}
        return replace(self, autocast=False, normed_bytes=FP32_BYTES, **wide)

    @property
    def sees_masks(self) -> bool:
        """Whether attention gets windows as masks (`Framework.sees_masks`)."""
        return self.framework.sees_masks(self.fused_attention, self.attention_kernel, self.cp)

    @property
    def overlaps_in_library(self) -> bool:
        """Whether one call of a library issues a matmul and the messages beside it (`Framework`)."""
        return self.tp_overlap == "full" and self.sp and self.framework.userbuffers is not None

    def vocabulary_of(self, m: ModelConfig) -> int:
        """Entries of a rank's part of a model's vocabulary, as the framework pads it."""
        return m.padded_vocab(self.tp, self.framework.vocabulary_multiple * self.tp) // self.tp

    @property
    def sums_shared_once(self) -> bool:
        """Whether gradients of what all ranks of tp hold whole are summed over them once a step."""
        return self.tp > 1 and self.sp and self.framework.zero.sums_shared_once

    @property
    def quantized(self) -> bool:
        return self.recipe is not None

    @property
    def saves_originals(self) -> bool:
        """Whether some linear layers keep a 16-bit input and quantize it again (`Framework.saves_originals`)."""
        scaled_anew = self.recipe is not None and not self.recipe.from_history
        return self.framework.saves_originals and scaled_anew and self.lora is None

    @property
    def matmul(self) -> str:
        """The linear layers' matmul, where it is not the usual one."""
        if self.recipe is not None:
            return self.recipe.kernel
        return self.framework.matmul_library if dtype_bytes(self.linear) == 2 else ""

    @property
    def recipe_key(self) -> str:
        """The recipe in the key of a measured block, and what else is in 8 bits."""
        more = ("/attention" if self.fp8_attention else "") + ("/activation" if self.fp8_activation_input else "")
        return more if self.recipe is None else f"/{self.recipe.quantizer}.{self.recipe.name}{more}"

    @property
    def quantized_weight_element_bytes(self) -> float:
        """Return the bytes of a weight in the matmuls' format, its scales included."""
        more = 0.0 if self.recipe is None else self.recipe.weight_scale_bytes
        return dtype_bytes(self.linear) + more


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up: the largest shard decides.

    >>> ceil_div(7, 2)
    4
    """
    return -(-a // b)


def _orders_alike(cluster: ClusterSpec, framework: Framework, recipe: Recipe | None) -> bool:
    """Tell whether a tensor of one scale serves matmuls that read it by rows and those that read it by columns."""
    reads_both = all(gpu.chip.reads_both_orders for gpu in cluster.gpus)
    return recipe is not None and recipe.one_scale and reads_both and framework.skips_transposes


def packed_batch(scenario: Scenario) -> PackedBatch | None:
    """The documents of a step; None where each sequence is one document."""
    t = scenario.training
    if t is None or t.packing is None or t.packing.lengths == (t.seq_len,):
        return None
    return pack(t.packing, t.seq_len, t.global_batch_size, scenario.parallelism.dp, windows_of(scenario.model))


def gathers_quantized_shards(scenario: Scenario) -> bool:
    """Tell whether FSDP gathers layers' matrices in the matmuls' format: the recipe's own way, unless a dtype is
    named."""
    p, t = scenario.parallelism, scenario.training
    recipe = None if t is None or t.lora is not None else recipe_of(t)
    return recipe is not None and recipe.shards_quantized and p.zero == 3 and p.param_gather_dtype in (None, "fp8")


def holds_back_sums(scenario: Scenario) -> bool:
    """Tell whether shards of several micro-batches' gradients add up before the replicas reduce their sum."""
    p = scenario.parallelism
    return p.holds_back_replicas and p.sharded_over[0] < p.dp * p.cp and scenario.micro_batches > 1


def _switched(framework: Framework, m: ModelConfig, t: Training, sharded: bool) -> Framework:
    """The record with a fusion off that the step runs without, or a router's on; `sharded`: gradients are, by an FSDP
    without the first (Megatron's before `accumulates_sharded`, torch's).

    Megatron-Core's grouped experts with biases refuse the fused sum of bias, dropout and residual, which is one switch
    for all layers (transformer/moe/experts.py: "bias_dropout_fusion is not supported in TEGroupedMLP when
    add_bias_linear=True").
    """
    off: dict[str, Any] = {}
    if t.moe_router_fusion is not None and has_fusions(framework):
        off["router"] = ROUTERS[t.moe_router_fusion]
    off |= dict.fromkeys(facts_off(t), False) | ({"ropes_in_projection": True} if t.fused_single_qkv_rope else {})
    if (t.gradient_accumulation_fusion is False or sharded) and framework.accumulates_in_matmul:
        off["accumulates_in_matmul"] = False
    if framework.biases_experts_one_by_one and m.moe is not None and m.bias and t.moe_grouped_gemm is not False:
        off["fuses_residual"] = False
    return replace(framework, **off) if off else framework


def in_sixteen_bits(scenario: Scenario, layer: int) -> bool:
    """Tell whether a layer (from 0, over the whole model) multiplies 16-bit numbers although `precision` has fewer: one
    of the first or last (Megatron-Core, core/fp8_utils.py: `is_first_last_bf16_layer`). Prediction modules are none of
    these layers (core/transformer/multi_token_prediction.py asks without a number)."""
    t = scenario.for_training
    last = scenario.model.layers - t.num_layers_at_end_in_bf16
    return recipe_of(t) is not None and not t.num_layers_at_start_in_bf16 <= layer < last


def layer_dims(scenario: Scenario, layer: int) -> Dims:
    """The sizes of one layer. One in 16 bits is built and run without Transformer Engine's context of 8 bits
    (core/fp8_utils.py: `get_fp8_context`), so that nothing of it is quantized, attention included."""
    d = replace(dims(scenario), cp_method=scenario.parallelism.cp_method_of(layer))
    return _of_sixteen_bits(d) if in_sixteen_bits(scenario, layer) else d


def prediction_dims(scenario: Scenario) -> Dims:
    """The sizes of a module that predicts a further token. Megatron-Core enters no context of 4 bits for it
    (core/transformer/multi_token_prediction.py: `_proj_and_transformer_layer`) but for the layers of a model with
    states, whose stack enters its own (core/models/hybrid/hybrid_block.py), and whose projection is left out here."""
    d = dims(scenario)
    leaves = d.recipe is not None and not d.recipe.in_prediction and scenario.model.state_space is None
    return _of_sixteen_bits(d) if leaves else d


def _of_sixteen_bits(d: Dims) -> Dims:
    usual = {"recipe": None, "linear": d.act, "linear_bytes": d.act_bytes, "weight_shards": 1}
    off = dict.fromkeys(("fp8_attention", "transposes_frozen", "eight_bit_parameters"), False)
    return replace(d, in_sixteen_bits=True, **off, **usual)


def _widens_stream(m: ModelConfig, adapters: str, autocast: bool) -> bool:
    """Tell whether autocast widens the residual stream of a model in 16 bits: it runs the layer norm behind the
    embedding (transformers/models/bloom/modeling_bloom.py: `word_embeddings_layernorm`) in fp32, and a sum of both
    dtypes is fp32 (`dropout_add`)."""
    return adapters == "autocast" and not autocast and m.embedding_norm and m.norm == "layernorm"


def _own_tokens(t: Training, p: Parallelism) -> dict[str, Any]:
    """Fields of `Dims`: how many tokens of a micro-batch the rank has, and how it shares them with others."""
    seq = ceil_div(t.seq_len, p.cp)
    tokens, sp = t.micro_batch_size * seq, p.sp and p.tp > 1
    return {
        "batch": t.micro_batch_size,
        "full_seq": t.seq_len,
        "seq": seq,
        "tokens": tokens,
        "rows": ceil_div(tokens, p.tp) if sp else tokens,
        "tp": p.tp,
        "sp": sp,
        "cp": p.cp,
        "cp_method": p.cp_method,
        "tp_overlap": p.tp_overlap,
        "waiting_layers": tuple(COLUMN_LAYERS[name] for name in p.tp_overlap_except),
    }


def _gradient_sums(scenario: Scenario) -> dict[str, Any]:
    """Fields of `Dims`: the dtypes of gradients, and whether a rank adds up whole ones or shards of them."""
    p, t = scenario.parallelism, scenario.for_training
    whole = p.zero < 2 or scenario.sums_unsharded or p.reduces_rows
    reduced_over, experts_reduced_over = (1, 1) if whole else p.sharded_over
    engine = zero_engine(t, p)
    fills = engine.fills_buckets and not whole and p.sharded_over[0] > 1
    shards = p.shards(scenario.model.may_have_experts)
    copied = p.zero >= 2 and shards and not p.reduces_rows and engine.adds_up_as_sent
    return {
        "grad_bytes": dtype_bytes(scenario.sum_dtype),
        "kept_grad_bytes": dtype_bytes(t.grad_dtype),
        "copies_sent": copied and engine.copies_gathered,
        "micro_batches": max(1, scenario.micro_batches),
        "reduced_over": reduced_over,
        "filled_bytes": dtype_bytes(t.grad_reduce_dtype) if fills else 0.0,
        "experts_reduced_over": experts_reduced_over,
        "shard_sum_bytes": dtype_bytes(t.grad_reduce_dtype if holds_back_sums(scenario) else t.grad_dtype),
    }


def _quantizing(scenario: Scenario, framework: Framework) -> dict[str, Any]:
    """Fields of `Dims`: the matmuls' number format, and what is quantized when and how often."""
    p, t = scenario.parallelism, scenario.for_training
    recipe, frozen = recipe_of(t), t.lora is not None
    alike = _orders_alike(scenario.cluster, framework, recipe)
    gathers_each = _is_sharded(p) and p.reshard_after_forward
    rows_alone = frozen and t.fp8_param_gather and recipe is not None and recipe.one_scale
    return {
        "linear": t.precision,
        "linear_bytes": dtype_bytes(t.precision) + (0.0 if recipe is None else recipe.scale_bytes),
        "recipe": recipe,
        "fp8_attention": t.fp8_dot_product_attention,
        "fp8_activation_input": t.activation_func_fp8_input_store,
        "quantized_copies": 1 if frozen or alike else 2,
        "weight_copies": 1 if rows_alone or alike else 2,
        "eight_bit_parameters": t.fp8_param_gather,
        "transposes_frozen": rows_alone and not alike,
        "quantized_for": 1 if gathers_each else max(1, scenario.micro_batches),
        "weight_shards": p.shard_size if gathers_quantized_shards(scenario) else 1,
    }


def _casts(m: ModelConfig, t: Training, p: Parallelism) -> dict[str, Any]:
    """Fields of `Dims`: the dtypes outside quantized matmuls, and what autocast, adapters and norms turn into fp32."""
    act, autocast = sixteen_bit(t.precision), autocasts(t, p, m)
    adapters = "autocast" if t.lora is not None and autocast else adapter_casts(t, p)
    return {
        "act": act,
        "act_bytes": dtype_bytes(act),
        "normed_bytes": dtype_bytes(act),
        "lora": t.lora,
        "few_bits": t.lora is not None and t.lora.weights is not None,
        "adapters": adapters,
        "autocast": autocast,
        "returns_wide": autocast or adapters == "autocast" or _under_autocast(t, p),
        "wide_stream": _widens_stream(m, adapters, autocast),
        "norm_in_fp32": m.norm_in_fp32,
        "torch_norms": m.norm == "layernorm" and not m.norm_in_fp32,
    }


def _under_autocast(t: Training, p: Parallelism) -> bool:
    """Tell whether a model whose parameters torch's first FSDP casts runs under autocast as well, which adds little but
    a copy of its results (accelerate/accelerator.py: `prepare_model`, not `_prepare_fsdp2`)."""
    return p.zero == 3 and p.fsdp_version == 1 and t.precision != "fp32" and framework_of(t).autocasts


def _is_sharded(p: Parallelism) -> bool:
    """Tell whether several ranks share a parameter (ZeRO-3, FSDP)."""
    return p.zero == 3 and p.sharded_over[0] > 1


def dims(scenario: Scenario) -> Dims:
    """Sizes of one rank's shard of `scenario`.

    Raises:
        ValueError: without `training` (an inference scenario).
    """
    m, t, p = scenario.model, scenario.training, scenario.parallelism
    if t is None:
        raise ValueError("a layer's training program needs `training` in the scenario")
    framework = _switched(framework_of(t), m, t, sums_apart(t, p))
    code = code_of(m.code, framework)
    return Dims(
        **_own_tokens(t, p),
        **_gradient_sums(scenario),
        **_quantizing(scenario, framework),
        **_casts(m, t, p),
        hidden=m.hidden,
        dropout=m.dropout,
        attention_dropout=m.dropout if m.attention_dropout is None else m.attention_dropout,
        streams=streams_of(m),
        framework=framework,
        code=code,
        fused_attention=t.attention == "fused" and code.fused,
        attention_kernel=t.attention_kernel or "",
        experts_apart=t.moe_grouped_gemm is False,
    )
