"""Megatron-LM's arguments of a model, as a scenario's `model`.

Names and defaults: megatron/training/arguments.py of NVIDIA/Megatron-LM at 000c4ac (November 2025), and the fields of
`TransformerConfig` (core/transformer/transformer_config.py), of which later releases make arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from sim.convert.megatron.hybrid import is_hybrid, kinds_of
from sim.convert.named_models import known_by_name
from sim.convert.settings import Settings, lacking, without_none
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_config import MAX_LAYERS
from sim.inputs.model_input import load_model

DISPATCHER = "allgather"  # where no flag names one
MSCALES = {"mscale": 1.0, "mscale-all-dim": 0.0}  # defaults of --mscale and --mscale-all-dim
DELTA_NET = "gated_delta_net"
USUAL_MULTIPLE = 128  # of --make-vocab-size-divisible-by


SIZES = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "ffn-hidden-size": "ffn",
    "num-attention-heads": "heads",
    "num-query-groups": "kv_heads",
}


def model_of(s: Settings) -> dict[str, Any]:
    """The model.

    Raises:
        InputError: for a flag whose value is not one of its own, sizes that are missing, or layers that are not
            simulated.
    """
    layers = s.integer("num-layers")
    model = {**_sizes(s), **_norms_and_biases(s), **_attention(s, layers), **_states(s, layers)}
    experts = s.take("num-experts") is not None
    if is_hybrid(s):
        model |= kinds_of(s, model)
        experts = "experts" in model["mlp_pattern"]
        model |= {"moe": _experts(s, model)} if experts else {}
    elif experts:
        model |= _expert_layers(s, layers, model)
    return without_none(model)


def note_other_sizes(s: Settings, model: str) -> None:
    """Say which sizes of the flags the model that the user names does not have: its own are simulated."""
    named = load_model(model)
    given = {flag: str(s.values.get(flag, "")) for flag in SIZES}
    other = [
        f"{s.written_as(flag)} {size}"
        for flag, size in given.items()
        if size.isdecimal() and int(size) != getattr(named, SIZES[flag])
    ]
    if other:
        s.notes.append(f"{', '.join(other)}: left out; the model that --model names is simulated with its own sizes")


def _sizes(s: Settings) -> dict[str, Any]:
    """Layers, widths, vocabulary and the activation."""
    return {
        "layers": s.integer("num-layers"),
        "hidden": s.integer("hidden-size"),
        "heads": s.integer("num-attention-heads"),
        "kv_heads": s.integer("num-query-groups", 1) if s.flag("group-query-attention") else None,
        "ffn": s.integer("ffn-hidden-size", _default_ffn(s)),
        "vocab": _vocab(s),
        "mlp": _activation(s),
        "tied_embeddings": not s.flag("untie-embeddings-and-output-weights"),
        "mtp_layers": s.integer("mtp-num-layers", 0),
        "mtp_repeated": (s.flag("mtp-use-repeated-layer") and s.integer("mtp-num-layers", 0) > 1) or None,
    }


def _vocab(s: Settings) -> int | None:
    """The vocabulary: a flag's, or that of the model whose tokenizer is named; else None, and noted as missing."""
    vocab, tokenizer = s.whole("vocab-size"), s.take("tokenizer-type")
    if (padded := s.whole("padded-vocab-size")) is not None:
        s.taken.add("make-vocab-size-divisible-by")
        return padded
    if vocab is None and (named := known_by_name(str(s.take("tokenizer-model")))):
        vocab = load_model(named).vocab
        s.notes.append(f"model.vocab: that of the model whose tokenizer --tokenizer-model names, {vocab:,}")
    if vocab is None:
        s.missing["model.vocab"] = f"{s.prefix}vocab-size, which the tokenizer would say"
        return None
    return _padded(s, int(vocab) + int(tokenizer == "NullTokenizer"))  # which adds one for the end of a document


def _padded(s: Settings, entries: int) -> int:
    """The vocabulary as Megatron-LM pads it (training/tokenizer/tokenizer.py: `_vocab_size_with_padding`), where it is
    told another multiple than the usual one, which the simulator pads to by itself."""
    each = s.size("make-vocab-size-divisible-by", USUAL_MULTIPLE)
    if each == USUAL_MULTIPLE or s.take("should-pad-vocab") is False:  # the latter of Megatron-Bridge
        return entries
    multiple = each * s.size("tensor-model-parallel-size", 1)
    return -(-entries // multiple) * multiple


def _norms_and_biases(s: Settings) -> dict[str, Any]:
    """Norms, biases and dropout."""
    norm = "rmsnorm" if str(s.take("normalization", "LayerNorm")).lower() == "rmsnorm" else "layernorm"
    bias = not s.flag("disable-bias-linear")
    s.flag("apply-layernorm-1p")  # one addition to a weight
    return {
        "norm": norm,
        "bias": bias,
        "norm_bias": True if norm == "layernorm" and not bias else None,  # of its layer norms, whatever else has any
        "qkv_bias": s.flag("add-qkv-bias"),
        "qk_norm": _head_norm(s, norm),
        "embedding_norm": s.flag("embed-layernorm") or None,  # BLOOM's
        **_dropout(s),
    }


def _dropout(s: Settings) -> dict[str, float]:
    """The shares of both places, attention's where it differs; a note where they are Megatron-LM's own, which few
    models of today are trained with."""
    places = ("attention-dropout", "hidden-dropout")
    attention, hidden = (s.number(name, 0.1) or 0.0 for name in places)
    if unsaid := [s.written_as(name) for name in places if s.values.get(name) is None]:
        s.notes.append(
            f"{', '.join(unsaid)}: not given, so 0.1 as Megatron-LM takes then; its masks take time and memory"
        )
    return {"dropout": hidden} | ({"attention_dropout": attention} if attention != hidden else {})


def _head_norm(s: Settings, norm: str) -> Any:
    """The norm of queries and keys: of the model's kind, or Llama 4's. With latent attention the flag stands for norms
    of both latents (gpt_layer_specs.py: `MLASelfAttentionSubmodules`), which are simulated in any case."""
    plain = s.flag("qk-layernorm")
    if s.values.get("multi-latent-attention"):
        if not plain:
            s.notes.append(
                "norms of queries' and keys' latents are simulated; Megatron-LM needs --qk-layernorm for them"
            )
        return False
    return "l2" if s.flag("qk-l2-norm") else "layernorm" if plain and norm == "layernorm" else plain


def _attention(s: Settings, layers: int) -> dict[str, Any]:
    """Positions, heads' widths, windows and gates."""
    positions = s.take("position-embedding-type", "learned_absolute")
    if s.take("use-rotary-position-embeddings"):
        positions = "rope"
    scaled = positions == "yarn" and not s.values.get("multi-latent-attention") and _is_scaled(s)
    positions = "rope" if positions in ("yarn", "mrope") else positions
    rope_share = s.number("rotary-percent", 1.0)
    return {
        "positions": {"learned_absolute": "learned"}.get(str(positions), positions),
        "max_positions": s.integer("max-position-embeddings", s.integer("seq-length")),
        "rope_share": rope_share if positions == "rope" and rope_share != 1.0 else None,
        "scaled_rope": scaled or None,
        "no_rope_every": _no_rope_every(s, layers),
        "sinks": s.choice("softmax-type", {"learnable": True, "vanilla": None}, "vanilla"),
        "attention_gate": s.flag("attention-output-gate") or None,
        **windows_of(s, layers),
        **_head_sizes(s),
    }


def _is_scaled(s: Settings) -> bool:
    """Whether YaRN multiplies cosines and sines (core/models/common/embeddings/yarn_rotary_pos_embedding.py:
    `_yarn_get_concentration_factor`), by a flag or by what is set beside them (training/argument_utils.py)."""
    factor = s.number("yarn-rotary-scaling-factor", s.number("rotary-scaling-factor", 1.0))
    one, all_dims = (s.number(f"yarn-{name}", s.number(name, usual)) for name, usual in MSCALES.items())
    return factor is not None and factor > 1.0 and one != all_dims


def _head_sizes(s: Settings) -> dict[str, Any]:
    """The width of a head, or those of multi-latent attention."""
    width = s.whole("kv-channels")  # of no effect with a latent
    if not s.flag("multi-latent-attention"):
        return {"head_dim": width}
    return {
        "mla": {
            "q_lora_rank": s.whole("q-lora-rank"),
            "kv_lora_rank": s.integer("kv-lora-rank", 32),
            "qk_nope_head_dim": s.integer("qk-head-dim", 128),
            "qk_rope_head_dim": s.integer("qk-pos-emb-head-dim", 64),
            "v_head_dim": s.integer("v-head-dim", 128),
        }
    }


def _expert_layers(s: Settings, layers: int, model: dict[str, Any]) -> dict[str, Any]:
    """Experts, and which layers have them: all behind the first dense ones, or a pattern."""
    moe = _experts(s, model)
    routed = _layers_with(s, "moe-layer-freq", layers, lambda layer, each: layer % each == 0, "1")
    dense = routed.index(1) if 1 in routed else len(routed)
    if 0 in routed[dense:]:
        return {"moe": moe, "mlp_pattern": ["experts" if one else "dense" for one in routed]}
    return {"moe": {**moe, "dense_layers": dense} if dense else moe}


def _activation(s: Settings) -> str:
    """The MLP's activation; `--quick-geglu` with a clamp and an offset of 1 is gpt-oss's."""
    if s.flag("quick-geglu"):
        clamped = s.take("activation-func-clamp-value") is not None
        s.choice("glu-linear-offset", {"1.0": True, "1": True, "0.0": True, "0": True}, "0.0")
        return "clamped_swiglu" if clamped else "geglu"
    if s.flag("xielu"):  # of swiss-ai's fork, which trained Apertus
        return "xielu"
    return "swiglu" if s.flag("swiglu") else "relu2" if s.flag("squared-relu") else "gelu"


def windows_of(s: Settings, layers: int) -> dict[str, Any]:
    """Windows in all layers, in all but every n-th, or in those that a list says. A query sees as many keys before
    it as the flag says, and its own."""
    size = s.take("window-size")
    if size is None:
        return {}
    left = str(size).strip("()[]\"' ").split(",")[0].strip()
    if not left.isdigit() or left == "0":
        allowed = "two whole numbers, the keys before a query and those after it, such as 128,0"
        raise InputError(f"{s.file}: --window-size: found {show(size)}; must be {allowed}")
    if s.values.get("window-attn-skip-freq") is None:
        return {"window": int(left) + 1}
    local = _layers_with(s, "window-attn-skip-freq", layers, lambda layer, each: (layer + 1) % each != 0)
    kinds = ["sliding" if one else "full" for one in local]
    return {"window": int(left) + 1, "attention_pattern": kinds} if 1 in local else {}


def _states(s: Settings, layers: int) -> dict[str, Any]:
    """The gated delta rule in all layers but every n-th (Qwen3-Next)."""
    if s.take("experimental-attention-variant") != DELTA_NET:
        s.taken.discard("experimental-attention-variant")
        return {}
    linear = _layers_with(s, "linear-attention-freq", layers, lambda layer, each: (layer + 1) % each != 0)
    states = {
        "kind": "gated_delta",
        "heads": s.integer("linear-num-value-heads", 32),
        "head_dim": s.integer("linear-value-head-dim", 128),
        "state": s.integer("linear-key-head-dim", 128),
        "groups": s.integer("linear-num-key-heads", 16),
        "conv_kernel": s.integer("linear-conv-kernel-dim", 4),
        "conv_bias": False,
        "chunk": 64,
    }
    return {"state_space": states, "attention_pattern": ["state_space" if one else "full" for one in linear]}


def _no_rope_every(s: Settings, layers: int) -> int | None:
    """The period of layers without rope.

    Raises:
        InputError: for a list in which they have none.
    """
    if s.take("no-rope-freq") is None:
        return None
    without = _layers_with(s, "no-rope-freq", layers, lambda layer, each: (layer + 1) % each == 0)
    step = without.index(1) + 1 if 1 in without else layers + 1
    if without != [int((layer + 1) % step == 0) for layer in range(layers)]:
        found = show(str(s.take("no-rope-freq")))
        raise InputError(f"{s.file}: --no-rope-freq: found {found}; can be simulated: every n-th layer without rope")
    return step if step <= layers else None


def _default_ffn(s: Settings) -> int:
    """Four times the hidden size; with SwiGLU two thirds of that, down to a multiple of 64 (`validate_args`)."""
    hidden = s.integer("hidden-size")
    return int((4 * hidden * 2 / 3) / 64) * 64 if s.flag("swiglu") else 4 * hidden


def _experts(s: Settings, model: dict[str, Any]) -> dict[str, Any]:
    ffn = s.size("moe-ffn-hidden-size", model["ffn"])
    return without_none(
        {
            "experts": s.integer("num-experts"),
            "top_k": s.integer("moe-router-topk", 2),
            "ffn": ffn,
            "latent": s.whole("moe-latent-size"),
            **_shared(s, ffn),
            "capacity_factor": s.number("moe-expert-capacity-factor"),
            "pad_to_capacity": s.flag("moe-pad-expert-input-to-capacity") or None,
            "router_fp32": s.choice("moe-router-dtype", {"fp32": True}, ""),
            **_groups(s),
        }
    )


def _shared(s: Settings, ffn: int) -> dict[str, Any]:
    """Shared experts of the routed ones' size, or one of the width that is no multiple of it."""
    width, gate = s.whole("moe-shared-expert-intermediate-size"), s.flag("moe-shared-expert-gate") or None
    if not width:
        return {}
    own = {"shared_ffn": width} if width % ffn else {"shared_experts": width // ffn}
    return {**own, "shared_gate": gate}


def _layers_with(
    s: Settings, name: str, layers: int, numbered: Callable[[int, int], bool], default: str = ""
) -> list[int]:
    """1 for each layer that has something, 0 for the others: by `numbered` (of a layer's number and N) where the flag
    is a number N, or as its list says.

    Raises:
        InputError: for what is neither, such as `([0]*3+[1]*58)`.
    """
    given = str(s.take(name, default)).strip("\"' ")
    if given.isdigit() and given != "0":
        return [int(numbered(layer, int(given))) for layer in range(layers)]
    try:
        found = _evaluated(ast.parse(given, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = None
    if not isinstance(found, list) or len(found) != layers or not {*found} <= {0, 1}:
        allowed = f"a whole number, or a list of 0 and 1 for {layers} layers, such as [0]*1+[1]*{layers - 1}"
        raise InputError(f"{s.file}: --{name}: found {show(given)}{lacking(given) or f'; must be {allowed}'}")
    return found


def _evaluated(node: ast.expr) -> Any:
    """The value of lists of whole numbers, their sums and multiples; ValueError for all else, or for long ones."""
    match node:
        case ast.Constant(value=int()):
            return node.value
        case ast.List(elts=items):
            return [_evaluated(item) for item in items]
        case ast.BinOp(left, ast.Add(), right):
            one, other = _evaluated(left), _evaluated(right)
            if isinstance(one, list) and isinstance(other, list):
                return one + other
        case ast.BinOp(left, ast.Mult(), right):
            one, times = _evaluated(left), _evaluated(right)
            if isinstance(one, list) and isinstance(times, int) and len(one) * times <= MAX_LAYERS:
                return one * times
    raise ValueError


def _groups(s: Settings) -> dict[str, Any]:
    """A choice limited to groups; of nodes, where DeepEP and HybridEP (`flex`) send a token once to each."""
    if s.take("moe-router-group-topk") is None:
        return {}
    top = s.integer("moe-router-group-topk")
    if s.choice("moe-token-dispatcher-type", {"flex": True}, DISPATCHER):
        s.take("moe-router-num-groups")
        return {"max_nodes_per_token": top}
    return {"groups": s.integer("moe-router-num-groups"), "top_groups": top}
