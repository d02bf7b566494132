"""Rules of context parallelism: how sequences are cut, and heads exchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.inputs.rules.sizes import Problem, Sizes
    from sim.inputs.training_config import Training
    from sim.inputs.yaml_input import KeyPath


def found_at(key: str, value: object, why: str) -> Problem:
    """A problem of a key of `parallelism`: what was found, and why it is wrong."""
    shown = str(value).lower() if isinstance(value, bool) else value
    return ("parallelism", key), f"found {shown}; {why}"


def _served_context(s: Sizes) -> Problem | None:
    """Return what a served prompt split over cp ranks needs: attention to every key, by ring or all_gather, in
    zigzag."""
    m = s.model
    kinds = (
        ("mla", m.mla),
        ("state_space", m.state_space),
        ("compressed_attention", m.compressed_attention),
        ("indexer", m.indexer),
        ("block_indexer", m.block_indexer),
        ("shared_kv_layers", m.shared_kv_layers or None),
        ("window", m.window),
    )
    if other := next((key for key, value in kinds if value is not None), None):
        return found_at("cp", s.cp, f"with model.{other} served prompts are not split over ranks; allowed: 1")
    if s.cp_method not in ("ring", "all_gather"):
        return ("parallelism", "cp_method"), f"found '{s.cp_method}'; served prompts are split by ring or all_gather"
    if s.cp_method_by_layer is not None:
        return ("parallelism", "cp_method_by_layer"), "all layers split served prompts by cp_method; allowed: null"
    if s.cp_split != "zigzag":
        return ("parallelism", "cp_split"), f"found '{s.cp_split}'; served prompts are split in zigzag"
    if s.ep * s.expert_tp > s.tp:
        return found_at(
            "ep", s.ep, "ranks that share a served prompt do not share experts; ep·expert_tp must be at most tp"
        )
    return None


def context_parallel(s: Sizes) -> Problem | None:
    """Sequences are cut into equal pieces, and heads exchanged whole."""
    if s.training is None:
        return _served_context(s) if s.cp > 1 else None
    if s.cp > 1 and s.model.state_space is not None:
        return found_at("cp", s.cp, "layers with a state (model.state_space) are simulated on whole sequences: 1")
    if s.cp > 1 and s.model.compressed_attention is not None:
        return found_at("cp", s.cp, "compressed attention is simulated on whole sequences: 1")
    if s.cp > 1 and s.model.shared_kv_layers:
        return found_at(
            "cp", s.cp, "layers that share keys (model.shared_kv_layers) are simulated on whole sequences: 1"
        )
    if s.cp > 1 and s.model.block_indexer is not None:
        return found_at("cp", s.cp, "blocks of keys (model.block_indexer) are selected on whole sequences: 1")
    if s.cp == 1:
        return None
    methods = s.cp_method_by_layer or (s.cp_method,)
    if s.cp_method_by_layer is not None and len(methods) != s.model.layers:
        why = f"needs one for each of model.layers ({s.model.layers})"
        return ("parallelism", "cp_method_by_layer"), f"found {len(methods)}; {why}"
    return next(filter(None, (_of_method(s, s.training, method) for method in sorted({*methods}))), None)


def _of_method(s: Sizes, t: Training, method: str) -> Problem | None:
    """Return what one way of context parallelism needs."""
    path: KeyPath = ("parallelism", "cp_method" if s.cp_method_by_layer is None else "cp_method_by_layer")
    window = s.model.window
    if s.model.indexer is not None and method != "all_gather":
        return path, f"found '{method}'; with model.indexer only all_gather is simulated: any key may be selected"
    whole = method == "all_to_all" or (method == "all_gather" and s.cp_split != "striped")
    if window is not None and window < t.seq_len and not whole:
        why = "only all_to_all, and all_gather with split contiguous or zigzag, are simulated"
        return path, f"found '{method}' with split {s.cp_split}; with model.window {window} {why}"
    if method == "all_to_all_ring" and (problem := _of_rings(s)) is not None:
        return problem
    zigzag = s.cp_split == "zigzag" and method != "all_to_all"
    pieces = 2 * s.cp if zigzag else s.cp
    if t.seq_len % pieces:
        reason = f"2·cp = {pieces} (zigzag split)" if zigzag else f"cp = {pieces}"
        return found_at("cp", s.cp, f"{reason} must divide training.seq_len ({t.seq_len})")
    return _of_heads(s, method)


def _of_heads(s: Sizes, method: str) -> Problem | None:
    """Heads are exchanged whole."""
    sizes = s.hierarchical_context_parallel_sizes
    by_method = {
        "all_to_all": (s.cp, "cp", s.cp, "cp_method all_to_all exchanges heads, so cp must divide"),
        "all_to_all_ring": (
            1 if sizes is None else sizes[0],
            "hierarchical_context_parallel_sizes",
            sizes and list(sizes),
            "the first number is that of ranks that exchange heads, and must divide",
        ),
    }
    exchanging, key, found, why = by_method.get(method, (1, "", 0, ""))
    own = None if s.model.full_attention is None else s.model.full_attention.heads
    for heads in (s.model.heads, own or s.model.heads):
        if (heads // s.tp) % exchanging:
            return found_at(key, found, f"{why} heads/tp ({heads // s.tp})")
    return None


def _of_rings(s: Sizes) -> Problem | None:
    """Rings of ranks that exchange heads (Megatron-LM, training/arguments.py, `validate_args`)."""
    sizes, key = s.hierarchical_context_parallel_sizes, "hierarchical_context_parallel_sizes"
    if sizes is None or sizes[0] * sizes[1] != s.cp:
        found = "not given" if sizes is None else f"found {list(sizes)}"
        return (
            "parallelism",
            key,
        ), f"{found}; cp_method all_to_all_ring needs two numbers whose product is cp ({s.cp})"
    if s.cp_split == "striped":
        return ("parallelism", "cp_split"), "found 'striped'; cp_method all_to_all_ring needs zigzag or contiguous"
    return None
