"""Where a scenario's blocks come from: the simulator's own description of a model, or a captured program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.core.dtypes import FP32_BYTES, dtype_bytes
from sim.core.program import Block, Program
from sim.inputs.autocast import autocasts
from sim.models.activation_memory.recompute import mode_of_layer
from sim.models.dims import Shard, dims, in_sixteen_bits, packed_batch
from sim.models.embedding import embedding_block
from sim.models.flops import indexer_gradient_flops_per_token, model_flops_per_token, packed_flops_per_token
from sim.models.host_waits import after_batch_sizes, after_loss_filter
from sim.models.layer import layer_block
from sim.models.layers import layer_kinds
from sim.models.optimizers.step import EndOfStep, clip_items, optimizer_items, prepared_gradients
from sim.models.output.head import copied_table_params, final_norm_block, head_block, stranded_logits_bytes, tied_params
from sim.models.output.mtp import mtp_blocks, mtp_output_block
from sim.models.output.preference import scores_rewards
from sim.models.warm_up import warm_up_flops_per_token, warms_up, without_backward

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.inputs.scenario import Scenario
    from sim.models.captured.model import CapturedModel
    from sim.models.captured.source import Captured
    from sim.models.optimizers.loops import Loops
    from sim.models.optimizers.muon import Dealt


def source_of(scenario: Scenario) -> Described | Captured:
    """Return what a scenario's step is built from. Each source has the methods of `Described`."""
    if scenario.model.program is None:
        return Described(scenario)
    from sim.models.captured.source import Captured  # what few scenarios need is loaded for them

    return Captured(scenario, scenario.model.program)


class Described:
    """A model as `sim.models` writes it down. Layers are counted from 0 over the whole model."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

    def first(self) -> Block:
        """Return what comes before the layers: the embedding."""
        return self._ends(embedding_block(self.scenario))[0]

    def before_forward(self) -> Program:
        """Return what every stage runs before the forward of a micro-batch."""
        d = dims(self.scenario)
        return (*after_loss_filter(d), *after_batch_sizes(d))

    def layer(self, number: int, shard: Shard) -> Block:
        """A layer on the rank at `shard`."""
        return layer_block(self.scenario, number, shard)

    def last(self, shard: Shard) -> tuple[Block, ...]:
        """Return what ends the last stage: the head, and modules that predict one token further, or where these have a
        stage of their own, their outputs."""
        s = self.scenario
        modules = s.model.mtp_layers
        if modules == 0:
            return self._ends(head_block(s))
        apart = s.parallelism.mtp_apart is not None
        return self._ends(head_block(s), *([mtp_output_block(s)] * modules if apart else mtp_blocks(s, shard)))

    def apart(self, shard: Shard) -> tuple[Block, ...]:
        """Return what comes between the layers and the last stage: the final norm, and the prediction modules where
        these have a stage of their own; else nothing."""
        s = self.scenario
        if s.parallelism.mtp_apart is None:
            return ()
        return self._ends(final_norm_block(s), *mtp_blocks(s, shard))

    def _ends(self, *blocks: Block) -> tuple[Block, ...]:
        return tuple(map(without_backward, blocks)) if warms_up(self.scenario) else blocks

    def layer_kind(self, number: int) -> tuple[object, ...]:
        """Everything that a layer's program depends on besides its rank; uneven experts differ from layer to layer."""
        s = self.scenario
        uneven = s.uneven_experts and s.model.is_moe_layer(number)
        first = number == 0 and s.training is not None and s.training.lora is not None
        wide = s.training is not None and in_sixteen_bits(s, number)
        method = s.parallelism.cp_method_of(number)
        return layer_kinds(s.model)[number], mode_of_layer(s, number), number if uneven else 0, first, wide, method

    def input_bytes(self, layer: int | None) -> float:
        """Bytes of a micro-batch on one rank that enter a layer (`layers`: the output); None: the least of any.

        Here of every one: [micro-batch, seq/cp, hidden] for each of the residual's streams, cut by tp under sp.
        Prediction modules on a stage of their own take the final norm's one stream.
        """
        s = self.scenario
        t, p = s.for_training, s.parallelism
        tokens = t.micro_batch_size * t.seq_len / p.cp / (p.tp if p.sp else 1)
        each = FP32_BYTES if autocasts(t, p, s.model) else compute_bytes(t.precision)
        summed = p.mtp_apart is not None and layer in (None, s.model.layers)  # behind the final norm
        return tokens * s.model.hidden * (1 if summed else s.model.hyper_connections) * each

    def parameter_bytes(self) -> float:
        """Return the bytes of a parameter as the layers use it, and as ZeRO gathers it."""
        return compute_bytes(self.scenario.for_training.precision)

    def tied_elements(self) -> int:
        """Return the number of parameters that the first and the last piece share, on one rank."""
        return tied_params(self.scenario)

    def copied_elements(self) -> int:
        """Return the number of parameters that several stages of a pipeline hold, on one rank."""
        return copied_table_params(self.scenario)

    def step_items(self, n_params: int, dealt: Dealt, loops: Loops) -> EndOfStep:
        """Clipping and optimizer step of `n_params` parameters; `dealt`: how Muon sees those of this rank."""
        t = self.scenario.for_training
        clipped = n_params if loops.clipped is None else loops.clipped
        prepared, (norm, scaling) = prepared_gradients(n_params, t), clip_items(clipped, t, loops)
        return EndOfStep(prepared, norm, scaling, optimizer_items(n_params, t, dealt, loops))

    def flops_per_token(self, causal_half: bool) -> float:
        """Model FLOPs of a token, the numerator of MFU; a frozen indexer has no gradients."""
        t = self.scenario.for_training
        if warms_up(self.scenario):
            return warm_up_flops_per_token(self.scenario.model, t.seq_len, causal_half)
        batch, frozen = packed_batch(self.scenario), t.lora is not None
        if batch is not None:
            return packed_flops_per_token(self.scenario.model, batch.all_documents, t.seq_len, causal_half, frozen)
        flops = model_flops_per_token(self.scenario.model, t.seq_len, causal_half, frozen)
        if scores_rewards(s := self.scenario):  # one output in the place of the vocabulary's
            flops -= (4.0 if frozen else 6.0) * s.model.hidden * (s.model.vocab - 1)
        if t.indexer == "frozen":
            flops -= indexer_gradient_flops_per_token(self.scenario.model, t.seq_len)
        return flops

    def stranded_bytes(self) -> float:
        """A segment that the loss frees and cannot use again."""
        return stranded_logits_bytes(self.scenario)

    def unknown(self) -> None:
        """None: a described model has no operators that are priced by their bytes for want of anything better."""


def captured_of(model: ModelConfig) -> CapturedModel | None:
    """The captured model that a model's `program` names, if there is one."""
    if model.program is None:
        return None
    from sim.models.captured.model import captured_model

    return captured_model(model.program)


def compute_bytes(precision: str) -> float:
    """Bytes of a parameter as the layers use it: 8-bit precisions compute from 16-bit parameters."""
    return max(2.0, dtype_bytes(precision))
