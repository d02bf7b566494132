"""DeepSeek-V3's multi-token prediction module (2024, section 2.2): one more layer that predicts one token
further.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.program import Block, BlockKind, ModelPart
from sim.models.activation_memory.offload_modules import by_module
from sim.models.activation_memory.recompute import as_block, keep, keep_all, mode_of_layer, modules_of
from sim.models.dims import Dims, Shard, ceil_div, dims, prediction_dims
from sim.models.embedding import lookup
from sim.models.layer import layer_parts
from sim.models.linear import linear
from sim.models.norm import stream_norm
from sim.models.operators import F, I, Linear, Operator, collective, memory_op, of_part, workspace
from sim.models.output.head import final_norm_parts, output_parts
from sim.models.parameters import predicting_layers
from sim.models.precision.quantizing import passing_weight_bytes, quantized_weight_bytes
from sim.models.streams.hyper_connections import copied_to_streams
from sim.variants.frameworks.parts import TRANSFORMER_ENGINE

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario


def mtp_blocks(scenario: Scenario, shard: Shard) -> tuple[Block, ...]:
    """All modules, of which one is made, as they are equal. With `mtp_repeated` the first, whose gradients are the last
    to be complete, has the parameters of all (Megatron-LM, core/transformer/multi_token_prediction.py:
    `mtp_use_repeated_layer`)."""
    m = scenario.model
    first = mtp_block(scenario, shard)
    further = _without_parameters(first) if m.mtp_repeated else first
    return (first, *[further] * (m.mtp_layers - 1))[: m.mtp_layers]


def _without_parameters(block: Block) -> Block:
    """The block as it runs once more with the parameters of another."""
    numbers = dict.fromkeys(("params", "expert_params", "frozen_params", "few_bit_params", "quantized_bytes"), 0)
    tensors = dict.fromkeys(("tensors", "shared", "matrices", "expert_matrices"), ())
    moments = tuple((size, 0) for size, _ in block.backward_moments)
    return replace(block, **numbers, **tensors, backward_moments=moments)


def mtp_block(scenario: Scenario, shard: Shard | None = None) -> Block:
    """Look-up of the next token, two norms, 2h → h projection, a layer, final norm, output, loss.

    Embedding and output matrix are the main model's: their parameters are not counted again. The layer is
    recomputed as the others are. Output and loss are on the last stage (`mtp_output_block`) where the module is not
    (Megatron-LM, core/models/gpt/gpt_model.py: `_postprocess` hands the states on where there is no `post_process`).
    """
    shard = shard or Shard()
    d = prediction_dims(scenario)
    m, places = scenario.model, sorted({*predicting_layers(scenario.model)})
    project = linear(d, Linear("mtp_projection", d.tokens, 2 * d.hidden, (ceil_div(d.hidden, d.tp),), "column"))
    before = (
        *of_part(ModelPart.EMBEDDING, [replace(lookup(scenario, d), params=0)]),
        *of_part(
            ModelPart.NORM,
            [stream_norm(m, d, name) for name in ("mtp_embedding_norm", "mtp_hidden_norm")],
        ),
        *of_part(ModelPart.LAYER, [_both_states(d), project, *_whole_width(d), *copied_to_streams(d)]),
    )
    layer = by_module(scenario, tuple(chain(*(layer_parts(scenario, d, place, shard) for place in places))))
    predicted = _shared_output(scenario) if scenario.parallelism.mtp_apart is None else ()
    after = (*final_norm_parts(scenario, d), *predicted)
    kept = keep(d, layer, mode_of_layer(scenario, places[-1]), modules=modules_of(scenario))
    around = keep(d, (*before, *after), "none")
    matrices = (project, *layer)
    block = as_block("multi-token prediction", BlockKind.MTP, "", (*before, *layer, *after), kept)
    return replace(
        block,
        saved=(*around.saved, *kept.saved),
        backward_peak_bytes=max(kept.backward_peak_bytes, around.backward_peak_bytes),
        workspace_bytes=workspace(d, layer) + passing_weight_bytes(d, matrices),
        quantized_bytes=quantized_weight_bytes(d, matrices),
        in_sixteen_bits=d.in_sixteen_bits,
    )


def _both_states(d: Dims) -> Operator:
    """The normed embedding and state beside each other, a copy that the projection keeps (torch.cat;
    `_concat_embeddings`). Backward each norm gets a part of the gradient's rows, which Transformer Engine's copies
    (pytorch/ops/basic/rmsnorm.py: `grad_output.contiguous()`)."""
    elements, size = 2.0 * d.rows * d.hidden, d.act_bytes
    if d.framework.fuses_chains:
        return Operator("mtp_states")
    joined = replace(memory_op("mtp_states", F, "copy", elements, 2 * elements * size, d.act), plain_host=True)
    cut = replace(memory_op("mtp_states_backward", I, "copy", elements, 2 * elements * size, d.act, 2), plain_host=True)
    backward = (cut,) if d.framework.norm_kernel == TRANSFORMER_ENGINE else ()
    return Operator("mtp_states", (joined,), backward, forward_bytes=elements * size, backward_bytes=elements * size)


def _whole_width(d: Dims) -> tuple[Operator, ...]:
    """The projection's columns, of which each tensor-parallel rank has a part, gathered, joined (a copy) and cut by
    tokens under sequence parallelism, which gathers their gradient (Megatron-LM, `_concat_embeddings`:
    `gather_from_tensor_model_parallel_region`, `scatter_to_sequence_parallel_region`)."""
    if d.tp == 1:
        return ()
    name, elements = "mtp_projection_output", float(d.tokens * d.hidden)
    size = elements * d.act_bytes
    joined = memory_op(f"{name}_copy", F, "elementwise", elements, 2 * size, d.act)
    backward = (collective(f"{name}_gradient", "all_gather", size, I),) if d.sp else ()
    return (Operator(name, (collective(name, "all_gather", size, F), joined), backward, forward_bytes=2 * size),)


def mtp_output_block(scenario: Scenario) -> Block:
    """Output and loss of a module that stands on a stage of its own: the main model's output matrix once more
    (Megatron-LM, core/transformer/multi_token_prediction.py: `process_mtp_loss`)."""
    parts = _shared_output(scenario)
    return as_block("multi-token prediction output", BlockKind.HEAD, "", parts, keep_all(parts))


def _shared_output(scenario: Scenario) -> tuple[Operator, ...]:
    output, loss = output_parts(scenario, dims(scenario))
    return replace(output, params=0), loss
