"""One record for each family whose own code in Transformers computes a layer otherwise than Llama's or Mixtral's.

`model.code` names a record, and the readers of Hugging Face's configs fill it in. Frameworks that run Transformers'
modules (`runs_model_code`) go by it; others have layers of their own for all families. Files are those of
transformers/models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from sim.variants.frameworks.parts import (
    AS_CHOSEN_ROUTER,
    CAST_SIGMOID_ROUTER,
    CASTING_ROUTER,
    COHERE_ROUTER,
    COHERE_SIGMOID_ROUTER,
    ERNIE_ROUTER,
    GPT_OSS_ROUTER,
    GRANITE_ROUTER,
    GROUPED_SIGMOID_ROUTER,
    GROUPED_SOFTMAX_ROUTER,
    NARROW_SIGMOID_ROUTER,
    PLAIN_SIGMOID_ROUTER,
    SIGMOID_ROUTER,
    SPARSE_MIXER_ROUTER,
    UNSCALED_SIGMOID_ROUTER,
    WIDE_AS_CHOSEN_ROUTER,
    WIDE_ROUTER,
    RouterKernels,
)

if TYPE_CHECKING:
    from sim.variants.frameworks.facts import Framework


class ModelCode(NamedTuple):
    """Hold how a model's own code computes a layer. Defaults: Llama's code (llama/modeling_llama.py), Mixtral's
    router."""

    # A fused attention kernel can take the place of separate operators; torch's own function can (`_supports_sdpa`).
    fused: bool = True
    sdpa: bool = True

    # Attention by separate operators alone:
    # Scores are scaled by a kernel of their own, in the matmul (which adds ALiBi's biases, too; its backward scales the
    # gradients of queries and keys), or not at all.
    scale: Literal["scores", "matmul", "none"] = "scores"
    scores_in_fp32: bool = False  # queries and keys are cast to fp32 and multiplied so, unless autocast casts them back
    scores_without_autocast: bool = False  # which it does not where the code turns autocast off for them
    # The largest score of a row is found and subtracted before the softmax: of those joined to sinks, or of all.
    shifts_by_largest: Literal["", "sinks", "all"] = "sinks"
    # Sinks are joined to the scores as one more key, or the result is multiplied by a factor of theirs and of the
    # scores (`sim.models.attention.sink_factor`).
    sinks: Literal["joined", "factor"] = "joined"
    sinks_in_fp32: bool = False  # joined sinks stay fp32, whatever the scores are
    # The softmax writes fp32, which is cast to the activations' dtype; else the dtype of what it reads.
    softmax_in_fp32: bool = True
    alibi: bool = False  # a kernel adds fp32 biases of positions
    # The mask's numbers are added to the scores, or scores are filled where it is true, or chosen by one mask and added
    # to another, or added to it and raised to the least number of their dtype.
    mask: Literal["added", "filled", "chosen and added", "added and raised"] = "added"
    transposes_keys: bool = True  # torch.matmul copies keys to [head_dim, seq]

    # Rope's products in separate kernels have the activations' dtype, fp32 from the product with fp32 cosines on
    # ("promoted"), or fp32 throughout, of queries and keys that were cast, or from the products on, of queries and keys
    # and of what was rotated, cast apart ("fp32 products"); the result is cast back.
    rope_dtype: Literal["own", "promoted", "fp32", "fp32 products"] = "own"
    # Rope rotates a number of a head's first half with one of its second, or numbers that lie side by side: as complex
    # ones or, in latent attention, by slices.
    rope_pairs: Literal["halves", "slices", "complex"] = "halves"
    # Queries are multiplied by a factor of their positions, which each layer makes anew, or by the scores' factor
    # (`sim.models.attention.query_factor`).
    scales_queries: Literal["", "positions", "number"] = ""
    # A head's part with rope is joined to the rest while a token's heads lie beside each other, [seq, heads, head_dim].
    joins_by_tokens: bool = False

    # How queries, keys and values are cut out of one matmul's result. Of torch.split one kernel joins the three
    # gradients; with rope its own copies bring them there. Of three indices or slices ("select") each gradient is put
    # into zeros as large as the result, and these are added up. Lists of one index ("index") copy keys and values
    # forward; backward each of these gradients is added into such zeros by torch's kernels for any list of indices. Of
    # the shards that a model was trained in, each with its queries, keys and values ("shards"), all three are copied
    # forward, and one kernel joins their gradients. Of a token's heads, each with its query, key and value ("heads"),
    # the gradients are joined in heads' order by one kernel and copied to tokens' order by another, so that rope copies
    # nothing.
    split: Literal["split", "select", "index", "heads", "shards"] = "split"

    # Gate and up of a dense MLP are one matmul (`model.merged_projections` says so of query, key and value, too).
    merges_gate: bool = False
    # Rope's cosines and sines of half a head are copied to all of it in each layer, which keeps them.
    repeats_cosines: bool = False

    # Queries, keys and values are clamped: as one matmul's result ("merged"), or each in place ("apart").
    clamps_qkv: Literal["", "merged", "apart"] = ""

    # Torch's fused attention gets the causal mask in every layer, so that it computes all pairs: as truths, of which it
    # makes numbers each time, or as numbers.
    masks_causal: Literal["", "truths", "numbers"] = ""
    # With such a mask, one key of all query heads is not copied for each of them, as other families' keys are.
    broadcasts_keys: bool = False
    gate_apart: bool = False  # gates of attention have a projection of their own, where Qwen3-Next's are the query's
    softplus_gates: bool = False  # gates of heads are a softplus in fp32, not a sigmoid
    # A linear layer's bias is added by a kernel of its own (falcon/modeling_falcon.py: FalconLinear.forward).
    adds_biases_apart: bool = False

    router_without_autocast: bool = False  # the router of experts multiplies in fp32 under autocast, too
    router: RouterKernels | None = None  # the router's kernels beside its matmul; None: those of the framework's record
    # The chosen experts' weights have the logits' dtype, so that 16-bit results are weighted and summed in 16 bits.
    casts_router_weights: bool = False

    casts_norm_weights: bool = False  # a norm casts its 16-bit weight to fp32 (`norm_in_fp32`)
    norm_weights_from_1: bool = False  # a norm multiplies by 1 plus its weight
    norms_heads_in_turn: bool = False  # a layer norm of each head is a module of its own (`qk_norm: by_head`)
    # The results of attention and MLP are multiplied by a constant before they are added to the residual stream, or
    # both are.
    scales_branches: Literal["", "branch", "both"] = ""
    # All experts compute all tokens, where ep does not distribute them (`sim.models.moe.every_expert`).
    every_expert: bool = False
    scales_experts: bool = False  # a kernel multiplies the routed experts' result by a constant
    averages_shared: bool = False  # the sum of routed and shared experts' results is divided by two
    sums_shared_in_fp32: bool = False  # the results of routed and shared experts are cast to fp32 to be added
    experts_one_by_one: bool = False  # a loop over experts, whose gradients have all experts' size (`moe.one_by_one`)


LLAMA = ModelCode()
COHERE_MOE = ModelCode(rope_dtype="fp32", router=COHERE_ROUTER, casts_router_weights=True)
MODEL_CODE: dict[str, ModelCode] = {
    # afmoe/modeling_afmoe.py: AfmoeTokenChoiceRouter, AfmoeAttention (`gate_proj`)
    "afmoe": ModelCode(router=CAST_SIGMOID_ROUTER, gate_apart=True),
    # aria/modeling_aria.py: AriaTextTopKRouter, gpt-oss's without biases
    "aria": ModelCode(
        router=GPT_OSS_ROUTER._replace(backward_kernels=3, backward_accesses=1), casts_router_weights=True
    ),
    # beam/modeling_beam.py: BeamTopKRouter, as DeepSeek V3's but for the scale, which the experts' result gets;
    # BeamAttention (`gate_proj`), depth_scaled_residual_add, BeamRotaryEmbedding.forward (fp32)
    "beam": ModelCode(
        rope_dtype="promoted",
        router=GROUPED_SIGMOID_ROUTER,
        gate_apart=True,
        router_without_autocast=True,
        scales_experts=True,
        scales_branches="both",
    ),
    # bloom/modeling_bloom.py: BloomAttention. ALiBi is what `baddbmm` adds the scaled product to.
    "bloom": ModelCode(fused=False, scale="matmul", transposes_keys=False, split="select"),
    # codegen/modeling_codegen.py: CodeGenAttention.forward (`mp_num`, `embed_positions` in fp32); scores as GPT-J's
    "codegen": ModelCode(
        scores_in_fp32=True, softmax_in_fp32=False, joins_by_tokens=True, rope_dtype="promoted", split="shards"
    ),
    "cohere": ModelCode(rope_dtype="fp32"),  # cohere/modeling_cohere.py: apply_rotary_pos_emb
    # cohere2_moe/modeling_cohere2_moe.py: Cohere2MoeTopKRouter with a softmax and with a sigmoid,
    # Cohere2MoeSparseMoeBlock (`shared_expert_combination_strategy`: average and sum)
    "cohere2_moe": COHERE_MOE._replace(averages_shared=True),
    "cohere2_moe_sum": COHERE_MOE,
    "cohere2_moe_sigmoid": COHERE_MOE._replace(averages_shared=True, router=COHERE_SIGMOID_ROUTER),
    "cohere2_moe_sigmoid_sum": COHERE_MOE._replace(router=COHERE_SIGMOID_ROUTER),
    # dbrx/modeling_dbrx.py: DbrxExperts, DbrxFFN.route_tokens_to_experts, DbrxAttention.forward (`clip_qkv`)
    "dbrx": ModelCode(experts_one_by_one=True, router=CASTING_ROUTER, casts_router_weights=True, clamps_qkv="merged"),
    # deepseek_v2/modeling_deepseek_v2.py: DeepseekV2TopkRouter, apply_rotary_emb
    "deepseek_v2": ModelCode(router=WIDE_AS_CHOSEN_ROUTER, rope_pairs="complex"),
    # deepseek_ocr2/modeling_deepseek_ocr2.py: DeepseekOcr2TextTopkRouter, beside Llama's attention
    "deepseek_ocr2": ModelCode(router=WIDE_AS_CHOSEN_ROUTER),
    # deepseek_v3/modeling_deepseek_v3.py: DeepseekV3TopkRouter; GLM 4.5, dots.llm1, K-EXAONE and Solar have the same
    "deepseek_v3": ModelCode(router=GROUPED_SIGMOID_ROUTER, rope_pairs="slices"),
    # deepseek_v4/modeling_deepseek_v4.py: DeepseekV4PreTrainedModel (neither sdpa nor flash_attn; `sinks` among
    # _keep_in_fp32_modules_strict)
    "deepseek_v4": ModelCode(fused=False, sinks_in_fp32=True),
    "ernie4_5": ModelCode(
        rope_dtype="fp32 products", repeats_cosines=True
    ),  # ernie4_5/modeling_ernie4_5.py: apply_rotary_pos_emb
    # ernie4_5_moe/modeling_ernie4_5_moe.py: Ernie4_5_MoeTopKRouter.forward, apply_rotary_pos_emb
    "ernie4_5_moe": ModelCode(
        rope_dtype="fp32 products",
        repeats_cosines=True,
        router_without_autocast=True,
        router=ERNIE_ROUTER,
        casts_router_weights=True,
    ),
    # falcon/modeling_falcon.py: FalconModel.forward ("Always materialize the mask", in which ALiBi's numbers are put),
    # FalconAttention.forward (`scaled_dot_product_attention` without enable_gqa), FalconAttention._split_heads
    "falcon": ModelCode(masks_causal="truths", broadcasts_keys=True, split="index", adds_biases_apart=True),
    "falcon_rw": ModelCode(masks_causal="numbers", split="select", adds_biases_apart=True),
    # flint/modeling_flint.py: eager_attention_forward, FlintTopKRouter (the config's default divides by the sum)
    "flint": ModelCode(
        scores_in_fp32=True,
        scores_without_autocast=True,
        shifts_by_largest="",
        router_without_autocast=True,
        router=PLAIN_SIGMOID_ROUTER,
    ),
    # flex_olmo/modeling_flex_olmo.py: rope of OLMo, OLMoE's router
    "flex_olmo": ModelCode(rope_dtype="promoted", router=AS_CHOSEN_ROUTER, casts_router_weights=True),
    "gemma4": ModelCode(casts_norm_weights=True),  # gemma4/modeling_gemma4.py: Gemma4RMSNorm
    # gemma/modeling_gemma.py: GemmaRMSNorm; Gemma 2 and 3, VaultGemma and Qwen 3.5 without experts have the same
    "gemma": ModelCode(norm_weights_from_1=True),
    # glm/modeling_glm.py: GlmMLP, apply_rotary_pos_emb; GLM-4-0414 has the same. glm4v/modeling_glm4v.py and GLM-OCR
    # make the cosines once.
    "glm": ModelCode(merges_gate=True, repeats_cosines=True),
    "glm4v": ModelCode(merges_gate=True),
    "gpt2": ModelCode(softmax_in_fp32=False),  # gpt2/modeling_gpt2.py: eager_attention_forward
    # gpt_neo/modeling_gpt_neo.py: GPTNeoSelfAttention._attn
    "gpt_neo": ModelCode(sdpa=False, scale="none", scores_in_fp32=True, softmax_in_fp32=False, mask="chosen and added"),
    "gpt_neox": ModelCode(split="heads"),  # gpt_neox/modeling_gpt_neox.py: GPTNeoXAttention.forward (`chunk`)
    # gpt_oss/modeling_gpt_oss.py: GptOssTopKRouter
    "gpt_oss": ModelCode(router=GPT_OSS_ROUTER, casts_router_weights=True),
    # gptj/modeling_gptj.py: eager_attention_forward
    "gptj": ModelCode(scores_in_fp32=True, softmax_in_fp32=False, joins_by_tokens=True),
    # granite/modeling_granite.py: GraniteDecoderLayer.forward (residual_multiplier); HyperCLOVA X's layer has the same.
    # granitemoe/modeling_granitemoe.py: GraniteMoeTopKRouter
    "granite": ModelCode(scales_branches="branch", router=GRANITE_ROUTER, casts_router_weights=True),
    # granite_swa/modeling_granite_swa.py: eager_attention_forward; granitemoe_swa has the same
    "granite_swa": ModelCode(
        scales_branches="branch", router=GRANITE_ROUTER, casts_router_weights=True, sinks="factor"
    ),
    # helium/modeling_helium.py: apply_rotary_pos_emb, HeliumRMSNorm
    "helium": ModelCode(repeats_cosines=True, casts_norm_weights=True),
    # hy_v3/modeling_hy_v3.py: HYV3TopKRouter, HYV3MoE.forward (`enable_moe_fp32_combine`)
    "hy_v3": ModelCode(router=SIGMOID_ROUTER, sums_shared_in_fp32=True),
    "hy_v3_narrow": ModelCode(router=SIGMOID_ROUTER),  # without `enable_moe_fp32_combine`
    "hunyuan_v1_moe": ModelCode(router=WIDE_ROUTER),  # hunyuan_v1_moe/modeling_hunyuan_v1_moe.py: HunYuanMoEV1Gate
    # hy_v4/modeling_hy_v4.py: HYV4TopkRouter, apply_rotary_pos_emb, HYV4PreTrainedModel (neither sdpa nor flash_attn)
    "hy_v4": ModelCode(fused=False, sinks_in_fp32=True, router=GROUPED_SIGMOID_ROUTER),
    # lara_mini/modeling_lara_mini.py: LaraMiniTopKRouter, of fp32 logits, with norm_topk_prob; LaraMiniRMSNorm
    "lara_mini": ModelCode(
        router=WIDE_ROUTER._replace(forward_kernels=6, backward_kernels=11),
        casts_router_weights=True,
        casts_norm_weights=True,
    ),
    # laguna/modeling_laguna.py: LagunaTopKRouter, LagunaAttention.forward, LagunaSparseMoeBlock
    "laguna": ModelCode(
        router=CAST_SIGMOID_ROUTER, casts_router_weights=True, softplus_gates=True, scales_experts=True
    ),
    # lfm2_moe/modeling_lfm2_moe.py: Lfm2MoeTopKRouter
    "lfm2_moe": ModelCode(router=NARROW_SIGMOID_ROUTER, casts_router_weights=True),
    # llama4/modeling_llama4.py: Llama4TextMoe, apply_rotary_emb, eager_attention_forward
    "llama4": ModelCode(every_expert=True, rope_pairs="complex", softmax_in_fp32=False),
    # longcat_flash/modeling_longcat_flash.py: LongcatFlashTopkRouter, whose biases are added (8)
    "longcat_flash": ModelCode(
        router=WIDE_AS_CHOSEN_ROUTER._replace(forward_kernels=6, forward_bytes=20.0), rope_pairs="slices"
    ),
    # mimo_v2_flash/modeling_mimo_v2_flash.py: eager_attention_forward, MiMoV2FlashTopkRouter
    "mimo_v2_flash": ModelCode(router=GROUPED_SIGMOID_ROUTER, softmax_in_fp32=False, shifts_by_largest="all"),
    # minimax_m2/modeling_minimax_m2.py: MiniMaxM2TopKRouter
    "minimax_m2": ModelCode(router=UNSCALED_SIGMOID_ROUTER),
    # minimax_m3_vl/modeling_minimax_m3_vl.py: MiniMaxM3VLTopKRouter, MiniMaxM3VLRMSNorm, MiniMaxM3VLDenseMLP
    "minimax_m3": ModelCode(
        router=UNSCALED_SIGMOID_ROUTER, norm_weights_from_1=True, merges_gate=True, scales_experts=True
    ),
    # ministral3/modeling_ministral3.py: get_llama_4_attn_scale
    "ministral3": ModelCode(scales_queries="positions"),
    # mistral/modeling_mistral.py: Llama's layers; TensorRT-LLM has other ones for it (`sim.serve.prices.fused`)
    "mistral": ModelCode(),
    # mistral4/modeling_mistral4.py: apply_rotary_pos_emb_interleave, Mistral4TopkRouter, get_llama_4_attn_scale
    "mistral4": ModelCode(
        router=GROUPED_SOFTMAX_ROUTER, casts_router_weights=True, rope_pairs="slices", scales_queries="positions"
    ),
    "mpt": ModelCode(fused=False, alibi=True, mask="filled"),  # mpt/modeling_mpt.py: MptAttention
    "mpt_clipped": ModelCode(fused=False, alibi=True, mask="filled", clamps_qkv="merged"),  # with `clip_qkv`
    # muse_glimmer/modeling_muse_glimmer.py: MuseGlimmerTextCenteredRMSNorm, MuseGlimmerTextAttention (`gate_proj`)
    "muse_glimmer": ModelCode(norm_weights_from_1=True, gate_apart=True),
    # nemotron/modeling_nemotron.py: NemotronLayerNorm1P.forward (`self.weight + 1`)
    "nemotron": ModelCode(norm_weights_from_1=True),
    # olmo/modeling_olmo.py: apply_rotary_pos_emb by fp32 cosines; OLMo 2, 3 and Hybrid, FlexOlmo and LFM3 have the same
    "olmo": ModelCode(rope_dtype="promoted"),
    "olmo_clipped": ModelCode(rope_dtype="promoted", clamps_qkv="apart"),  # with `clip_qkv`: OlmoAttention.forward
    # olmoe/modeling_olmoe.py: OlmoeTopKRouter without norm_topk_prob; jamba/modeling_jamba.py: JambaTopKRouter
    "olmoe": ModelCode(router=AS_CHOSEN_ROUTER, casts_router_weights=True),
    "opt": ModelCode(scales_queries="number"),  # opt/modeling_opt.py: OPTAttention.forward
    # persimmon/modeling_persimmon.py: PersimmonAttention._split_heads
    "persimmon": ModelCode(split="select"),
    "phi3": ModelCode(split="select"),  # phi3/modeling_phi3.py: Phi3Attention.forward
    # phimoe/modeling_phimoe.py: sparsemixer
    "phimoe": ModelCode(router=SPARSE_MIXER_ROUTER, casts_router_weights=True),
    # qwen2_moe/modeling_qwen2_moe.py: Qwen2MoeTopKRouter with norm_topk_prob; Qwen 3 and Mellum have the same
    "qwen2_moe": ModelCode(router=CASTING_ROUTER, casts_router_weights=True),
    # qwen3_next/modeling_qwen3_next.py: Qwen3NextRMSNorm, Qwen3NextTopKRouter with norm_topk_prob and without; Qwen 3.5
    # with experts and Qwen 4 have the first
    "qwen3_next": ModelCode(norm_weights_from_1=True, router=CASTING_ROUTER, casts_router_weights=True),
    "qwen3_next_as_chosen": ModelCode(norm_weights_from_1=True, router=AS_CHOSEN_ROUTER, casts_router_weights=True),
    # step3p7/modeling_step3p7.py: Step3p7TopKRouter, Step3p7RMSNorm, Step3p7Experts (which no grouped matmul replaces)
    "step3p7": ModelCode(
        router=UNSCALED_SIGMOID_ROUTER, norm_weights_from_1=True, experts_one_by_one=True, scales_experts=True
    ),
    "stablelm": ModelCode(norms_heads_in_turn=True),  # stablelm/modeling_stablelm.py: StableLmLayerNormPerHead
    # xglm/modeling_xglm.py: XGLMAttention.forward, which knows no other attention
    "xglm": ModelCode(
        fused=False,
        scale="none",
        scales_queries="number",
        softmax_in_fp32=False,
        mask="added and raised",
        transposes_keys=False,
    ),
    "youtu": ModelCode(rope_pairs="slices"),  # youtu/modeling_youtu.py: apply_rotary_pos_emb_interleave
}


def code_of(code: str | None, framework: Framework) -> ModelCode:
    """Return the record that `model.code` names, Llama's where it names none or the framework does not run it."""
    return LLAMA if code is None or not framework.runs_model_code else MODEL_CODE[code]
