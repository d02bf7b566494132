"""Warnings about legal scenarios: keys without effect, defaults that surprise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.inputs.autocast import adapter_casts, autocasts, casts_on_use, fsdp_casts, not_under_autocast
from sim.inputs.model_config import ModelConfig
from sim.inputs.parallelism import Parallelism
from sim.inputs.rules.without_effect import keys_without_effect
from sim.inputs.sections import Sections
from sim.inputs.serving_notes import serving_notes
from sim.inputs.training_config import ActivationOffload
from sim.inputs.yaml_input import one_line
from sim.variants.frameworks.records import framework_of, zero_engine
from sim.variants.model_code import MODEL_CODE, ModelCode, code_of
from sim.variants.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from sim.inputs.training_config import Training

LEAST_BUCKET_BYTES = 1024  # a number below it lacks its unit

_SHOWN_KEYS = 12  # of a config that nothing reads


def notes(sections: Sections, written: Parallelism, given: Set[str], generates: bool = False) -> Iterator[str]:
    """Return what is legal but worth saying: the padded vocabulary, keys that have no effect here; `written`: the
    section without defaults that follow from others; `given`: keys of `inference` that are not the engine's own;
    `generates`: reinforcement learning, whose engine may have GPUs, too."""
    model, p, t, i = sections.model, sections.parallelism, sections.training, sections.inference
    yield from _vocabulary_note(sections)
    yield from _left_out_note(model, t)
    yield from _idle_nodes_note(sections, generates)
    yield from _domain_note(sections)
    yield from _spine_note(sections)
    yield from _no_nvlink_note(sections)
    yield from _shared_network_note(sections)
    yield from _switch_note(sections)
    yield from _empty_stages_note(sections, written)
    yield from _expert_split_note(sections)
    yield from _experts_without_sp_note(sections)
    yield from _popularity_note(sections)
    yield from _packing_note(sections)
    if i is None or i.disaggregated is None:  # its pools have degrees of their own
        yield from keys_without_effect(sections, written)
    if t is not None:
        yield from _copies_note(t, model)
        yield from _vectors_note(t, p)
        yield from _autocast_note(t, p, model)
        yield from _attention_note(t, p, model)
        yield from _joined_norms_note(t, model)
        yield from _overlap_note(t, p, written)
        yield from _core_attention_note(t, p, model)
        yield from _bucket_note(written)
    yield from serving_notes(sections, written, given)


def _shared_network_note(sections: Sections) -> Iterator[str]:
    """Return that other draws take the place of what jobs leave of a cluster's shared network by itself."""
    jitter = None if sections.faults is None else sections.faults.network_jitter
    own = sections.cluster.inter_node.spread
    if jitter is not None and own and jitter.sigma != own:
        said = f"draws with sigma {jitter.sigma:g} take the place of what other jobs leave on this cluster by itself"
        yield f"faults.network_jitter: {said} (cluster.inter_node.spread {own:g}); sigma {own:g} draws that"


def _no_nvlink_note(sections: Sections) -> Iterator[str]:
    """Return that GPUs without NVLink are joined by it; a preset says so of its GPU where the user did not."""
    gpu, kind = sections.cluster.gpu, sections.cluster.intra_node.kind
    if not gpu.nvlink and kind != "pcie":
        told = f"GPU {gpu.name} has no NVLink (cluster.gpu.nvlink: false)"
        yield f"cluster.intra_node.kind: {kind} is simulated, although {told}; pcie describes a node without"


def _copies_note(t: Training, model: ModelConfig) -> Iterator[str]:
    """Return that the framework's optimizer keeps no copies of 16-bit parameters (`Framework.keeps_copies`)."""
    narrow = dtype_bytes(t.param_dtype) < FP32_BYTES and t.master_weights is None and t.lora is None
    if narrow and model.program is None and not framework_of(t).keeps_copies:
        also = f"or {t.param_dtype} alone (grad_dtype and optimizer_dtype, too, with master_weights: false)"
        itself = f"framework {t.framework} itself has fp32 ones without copies (param_dtype: fp32)"
        yield f"training.param_dtype: simulated with {t.param_dtype} parameters and copies in fp32; {itself}, {also}"


def _vectors_note(t: Training, p: Parallelism) -> Iterator[str]:
    """Return that an optimizer of matrices has vectors here (transformers/optimization.py, `Adafactor._get_options`:
    `factored` needs two dimensions)."""
    if OPTIMIZERS[t.optimizer].factored and p.zero in zero_engine(t, p).flat_at:
        kept = "a second moment of 4 bytes a parameter, and this memory is left out"
        yield f"training.optimizer: with parallelism.zero {p.zero} shards are vectors; {t.optimizer} keeps {kept}"


def _overlap_note(t: Training, p: Parallelism, written: Parallelism) -> Iterator[str]:
    """Return that the trainer always overlaps what waits here by default (`overlaps_weight_gradients`)."""
    always = framework_of(t).overlaps_weight_gradients
    if always and p.tp > 1 and p.tp_overlap == "none" and "tp_overlap" not in written.model_fields_set:
        does = f"framework {t.framework} computes weight gradients meanwhile, and its step is shorter"
        yield f"parallelism.tp_overlap: with none, the default, backward waits for messages of tp; {does}: set wgrad"


def _core_attention_note(t: Training, p: Parallelism, model: ModelConfig) -> Iterator[str]:
    """Return that fused attention leaves nothing for recomputation of its core to save but a number for each token and
    head: queries, keys, values and the result are kept anyway. Keys gathered over context ranks are another matter."""
    of_core = t.recompute.mode == "selective" and t.recompute.modules == ("core_attn",)
    if of_core and t.attention == "fused" and p.cp == 1 and model.program is None:
        yield (
            "training.recompute: selective computes fused attention again and saves almost no memory; "
            "selective_op, full or other modules save more"
        )


def _bucket_note(written: Parallelism) -> Iterator[str]:
    """Return that a bucket's size seems to lack its unit."""
    for key in ("bucket_bytes", "gather_bucket_bytes"):
        size = getattr(written, key)
        if size is not None and size < LEAST_BUCKET_BYTES:
            yield f"parallelism.{key}: {size} bytes, less than any tensor has; {size}MiB is {size} mebibytes"


def prediction_note(whole: ModelConfig, trained: ModelConfig) -> Iterator[str]:
    """Return that the framework does not train the model's prediction layers."""
    if whole.mtp_layers > trained.mtp_layers:
        yield "model.mtp_layers: simulated without; Hugging Face Transformers trains no multi-token prediction"


def _empty_stages_note(sections: Sections, written: Parallelism) -> Iterator[str]:
    """Return that stages beside the first (embedding) and the last (output) hold nothing, unless the scenario itself
    says how many layers each has. torchtitan refuses such a split (distributed/pipeline_parallel.py: "Number of stages
    cannot be greater than effective layers", which are the layers, embedding and output)."""
    p, counts = sections.parallelism, sections.parallelism.layers_per_stage
    if "layers_per_stage" in written.model_fields_set or not isinstance(counts, tuple):
        return
    empty = sum(not n for k, n in enumerate(counts) if k not in (0, len(counts) - 1, p.mtp_stage))
    if empty:
        yield f"parallelism.pp: {empty} of {p.stages} stages hold nothing; model.layers is {sections.model.layers}"


def _vocabulary_note(sections: Sections) -> Iterator[str]:
    """Return that the vocabulary is padded: as the framework pads it, or as the serving engine does."""
    model, i = sections.model, sections.inference
    if model.program is not None:
        return
    pools = None if i is None else i.disaggregated
    degrees = {sections.parallelism.tp} if pools is None else {pools.prefill.tp, pools.decode.tp}
    for tp in sorted(degrees):
        if i is not None:
            from sim.inputs.engine_file import engine_of  # most scenarios are training steps

            multiple = engine_of(i.engine).padding_of_vocab(tp)
            why = f"{multiple}, by engine {i.engine}" + (f" with tp {tp}" if len(degrees) > 1 else "")
        elif sections.training is not None:
            each = framework_of(sections.training).vocabulary_multiple
            multiple, why = each * tp, "tp" if each == 1 else f"{each}·tp"
        else:
            return
        if (padded := model.padded_vocab(tp, multiple)) != model.vocab:
            yield f"model.vocab: {model.vocab} is padded to {padded}, a multiple of {why}"


def _idle_nodes_note(sections: Sections, generates: bool) -> Iterator[str]:
    """Return that whole nodes idle, where several nodes are stated and no dp is, which a trainer takes from the number
    of GPUs."""
    p, cluster = sections.parallelism, sections.cluster
    gpus = cluster.nodes * cluster.gpus_per_node
    idle = sections.training is not None and p.ranks <= gpus - cluster.gpus_per_node
    if idle and p.ranks == 1:
        one = f"one of the cluster's {gpus:,} GPUs computes"
        yield f"parallelism: dp, tp, pp and cp are 1, so {one}; `stepsim search` finds layouts for all of them"
    elif idle and "dp" not in p.model_fields_set and not generates and sections.distillation is None:
        some = f"{p.ranks:,} of the cluster's {gpus:,} GPUs compute"
        yield f"parallelism.dp: 1, the default, so {some}; dp {gpus // p.ranks:,} uses as many as it can"


def _domain_note(sections: Sections) -> Iterator[str]:
    """Return that NVLink within a part of a node is not simulated, or that groups which a domain could hold lie across
    two."""
    cluster = sections.cluster
    if cluster.nvlink_domain < cluster.gpus_per_node:
        joined = f"{cluster.nvlink_domain} is simulated as {cluster.gpus_per_node}, as all GPUs of a node are joined"
        yield f"cluster.nvlink_domain: {joined}; cluster.topology describes links between some GPUs of a node"
    if cluster.nvlink_domain > cluster.gpus_per_node and (across := _across_domains(sections)):
        name, size = across
        whole = math.lcm(size, cluster.gpus_per_node)
        fewer = cluster.nvlink_domain - cluster.nvlink_domain % whole
        apart = f"with {cluster.nvlink_domain}, no multiple of {name} {size}, some groups lie in two domains"
        yield f"cluster.nvlink_domain: {apart}" + f"; {fewer} keeps each in one" * (fewer > 0)


def _across_domains(sections: Sections) -> tuple[str, int] | None:
    """Return the largest group of consecutive ranks that is no larger than an NVLink domain and does not divide it."""
    p, domain_gpus = sections.parallelism, sections.cluster.nvlink_domain
    pools = sections.inference is not None and sections.inference.disaggregated is not None
    if p.ranks <= domain_gpus or pools or not p.rank_order.startswith("tp-cp-dp"):
        return None
    of_experts = "ep" if p.expert_tp == 1 else "ep·expert_tp"  # groups of ep alone are then no consecutive ranks
    groups = {"tp": p.tp, "tp·cp": p.tp * p.cp, of_experts: p.ep * p.expert_tp}
    apart = [(size, name) for name, size in groups.items() if size <= domain_gpus and domain_gpus % size]
    size, name = max(apart, key=lambda found: found[0], default=(0, ""))
    return (name, size) if size else None


def _spine_note(sections: Sections) -> Iterator[str]:
    """Return that every message between nodes crosses the oversubscribed switches, where each node has its own leaf, or
    that there are no such switches."""
    cluster = sections.cluster
    links = cluster.inter_node
    if links.is_torus and links.oversubscription > 1:
        yield "cluster.inter_node.oversubscription: of no effect with kind torus, which has no leaf switches"
    alone = links.nodes_per_leaf == 1 and not links.is_torus and cluster.nodes > 1
    if alone and links.oversubscription > 1:
        slowed = f"{links.oversubscription:g} slows every message between nodes, as nodes_per_leaf is 1"
        yield f"cluster.inter_node.oversubscription: {slowed}; set it to the nodes whose NICs share a leaf switch"


def _switch_note(sections: Sections) -> Iterator[str]:
    """Return that what joins the GPUs of a node cannot reduce."""
    links = sections.cluster.intra_node
    if links.nvls_efficiency > 0 and not links.switched:
        yield f"cluster.intra_node.nvls_efficiency: of no effect with kind {links.kind}, only with nvswitch"


def _popularity_note(sections: Sections) -> Iterator[str]:
    """Return that it does not matter which experts are popular, where one rank holds all of them and drops nothing:
    a grouped matmul takes its tiles expert by expert, so its time goes by all rows together."""
    moe, i = sections.model.moe, sections.inference
    pools = i is not None and i.disaggregated is not None
    if moe is None or moe.imbalance == "balanced" or sections.parallelism.ep > 1 or pools:
        return
    if moe.capacity_factor is None:
        yield "model.moe.imbalance: of no effect with ep 1, where every rank computes the copies of all experts"


def _autocast_note(t: Training, p: Parallelism, model: ModelConfig) -> Iterator[str]:
    """Return that whole fp32 parameters are cast without `torch.autocast`, unless the scenario says so."""
    if t.autocast is False and not casts_on_use(t, p, model) and not adapter_casts(t, p):
        yield "training.autocast: of no effect, as no matmul casts whole fp32 parameters"
    alone = t.autocast is None and casts_on_use(t, p, model) and not fsdp_casts(t, p)
    if alone and not autocasts(t, p, model):
        bad = not_under_autocast(t, p, model)
        why = f"is not simulated with {bad}" if bad else f"is not framework {t.framework}'s default (training.autocast)"
        held = "which keeps the residual stream in fp32 and casts the input of each matmul"
        yield f"training.param_dtype: fp32 is simulated with 16-bit activations; torch.autocast, {held}, {why}"


def _left_out_note(model: ModelConfig, t: Training | None) -> Iterator[str]:
    """Return what the config has and the simulation has not; frameworks that run the model's own code clamp, too."""
    clamps = model.code is not None and MODEL_CODE[model.code].clamps_qkv
    runs_code = t is not None and framework_of(t).runs_model_code
    left_out = (*model.left_out, *(("clamp of queries, keys and values",) if clamps and not runs_code else ()))
    if left_out:
        yield f"model: simulated without the config's {', '.join(left_out)}"
    if model.unread:
        more = len(model.unread) - _SHOWN_KEYS
        words = ", ".join(map(one_line, model.unread[:_SHOWN_KEYS])) + (f" and {more} more" if more > 0 else "")
        yield f"model: keys of config.json that nothing here reads: {words}"


def _attention_note(t: Training, p: Parallelism, model: ModelConfig) -> Iterator[str]:
    """Return that the model's own code knows no fused attention, or that torch's computes what a window hides."""
    windows = {"sliding", "chunked"} & {*model.attention_pattern}
    sees_masks = framework_of(t).sees_masks(t.attention == "fused", t.attention_kernel, p.cp)
    if windows and model.window is not None and model.window <= t.seq_len and sees_masks:
        slower = f"torch's attention gets model.window {model.window} as a mask and computes all pairs of tokens"
        faster = "flash2 (attn_implementation flash_attention_2) skips the pairs that nobody sees"
        yield f"training.attention_kernel: {slower}; {faster}"
    if t.packing is not None and sees_masks:
        slower = "torch's attention gets packed documents (training.packing) as a mask and computes all pairs of tokens"
        faster = "flash2 (attn_implementation flash_attention_2) computes those within documents alone"
        yield f"training.attention_kernel: {slower}; {faster}"
    code = code_of(model.code, framework_of(t))
    if code.masks_causal and sees_masks:
        slower = (
            f"the code of {model.code} in Transformers gives torch's attention the causal mask, so that it computes"
        )
        faster = "flash2 (attn_implementation flash_attention_2) skips what the mask hides"
        yield f"training.attention_kernel: {slower} all pairs of tokens; {faster}"
    if t.attention == "fused" and not code.fused:
        does = f"which framework {t.framework} runs, computes attention in separate operators alone"
        yield f"training.attention: simulated as unfused; the code of {model.code} in Transformers, {does}"
    elif sees_masks:
        yield from _without_sdpa(model, code)


def _without_sdpa(model: ModelConfig, code: ModelCode) -> Iterator[str]:
    """Return that Transformers has no model of this kind with torch's own attention (`_supports_sdpa`)."""
    of = (("sinks", model.sinks), ("attention_softcap", model.attention_softcap), (f"code {model.code}", not code.sdpa))
    if found := [what for what, there in of if there]:
        asked = "fused needs flash-attn's or torch's flex_attention (attn_implementation); without, it is unfused"
        yield f"training.attention: Transformers gives torch's own attention no model.{found[0]}; {asked}"


def _expert_split_note(sections: Sections) -> Iterator[str]:
    """Frameworks split experts as they do all else unless told otherwise (Megatron's
    `--expert-tensor-parallel-size`, by default the tensor-parallel size)."""
    p, t = sections.parallelism, sections.training
    unsaid = p.tp > 1 and "expert_tp" not in p.model_fields_set and sections.model.moe is not None
    if unsaid and t is None and p.ep == 1:
        split = f"expert_tp: {p.tp} splits each expert (default of vLLM, SGLang, TensorRT-LLM)"
        yield f"parallelism.tp: each of {p.tp} ranks holds all experts; {split}, ep: {p.tp} distributes them"
    elif unsaid and t is not None and framework_of(t).splits_experts_over_tp:
        yield f"parallelism.expert_tp: 1, the default here; framework {t.framework}'s own default is tp, {p.tp}"


def _experts_without_sp_note(sections: Sections) -> Iterator[str]:
    """Return that the framework refuses to train this layout."""
    p, t = sections.parallelism, sections.training
    if t is None or sections.model.moe is None or p.tp == 1 or p.sp:
        return
    if framework_of(t).needs_sp_for_experts:
        refused = "itself refuses to train experts with tp above 1 without sp"
        yield f"parallelism.sp: false; framework {t.framework} {refused}"


def _joined_norms_note(t: Training, model: ModelConfig) -> Iterator[str]:
    """Return that norms are neither recomputed nor offloaded, where none is a module of its own
    (`Framework.joins_norms`)."""
    if not framework_of(t).joins_norms or model.parallel_block or model.hyper_connections > 1:
        return
    why = f"with framework {t.framework}, whose norms are part of the matmuls behind them, but before"
    latent, experts = model.mla is not None, model.may_have_experts
    if t.recompute.mode == "selective" and "layernorm" in t.recompute.modules and not (latent or experts):
        yield f"training.recompute: of no effect on layernorm {why} latent attention and experts"
    offload = t.activation_offload
    for name, apart, before in (("attn_norm", latent, "latent attention"), ("mlp_norm", experts, "experts")):
        if isinstance(offload, ActivationOffload) and name in offload.modules and not apart:
            yield f"training.activation_offload: of no effect on {name} {why} {before}"


def _packing_note(sections: Sections) -> Iterator[str]:
    """Return how full the packed sequences are, and how uneven the replicas' work is."""
    t, dp = sections.training, sections.parallelism.dp
    if t is None or t.packing is None:
        return
    from sim.inputs.packed_documents import pack  # numpy draws them, which no other reader of scenarios needs
    from sim.inputs.windows import windows_of

    batch = pack(t.packing, t.seq_len, t.global_batch_size, dp, windows_of(sections.model))
    number = sum(n for _, n in batch.all_documents)
    documents = f"{number:.1f} documents on average, which fill {batch.filled:.1%} of it"
    found = f"training.packing: each sequence holds {documents}"
    if (given := t.packing.mean_seq_len) is not None:
        mean = batch.filled * t.seq_len / number
        found += f"; a document has {mean:.0f} tokens on average, against {given:g} before lengths are clipped or cut"
    if batch.imbalance > 1.0:
        found += f"; the slowest of {dp} replicas has {batch.imbalance:.3f} times the mean number of query-key pairs"
        found += ", and each replica is simulated as this one"
    yield found
