"""Hold what the writers of flags share: notes, reasons of refusal, and features that no trainer has."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from msgspec import Struct, field

from sim.inputs.scenario import Scenario
from sim.inputs.training_config import Training
from sim.models.framework_facts import Framework
from sim.models.frameworks import FRAMEWORKS, framework_of

OF_EVERY_LAYOUT = ("model", "training", "distillation")  # sections that no layout changes
LAID_OUT = (("training", "micro_batch_size"), ("training", "recompute"))  # except these keys of them


class Reason(NamedTuple):
    """Hold why a scenario's key cannot be written for a trainer; `text`: the whole message."""

    path: tuple[str, ...]
    text: str

    @property
    def of_every_layout(self) -> bool:
        """Tell whether the key belongs to the model or the training, so that no other layout helps."""
        return self.path[0] in OF_EVERY_LAYOUT and self.path[:2] not in LAID_OUT


class Emission(Struct, dict=True):
    """Write a scenario's flags, and collect reasons and notes. `TRAINER`: the trainer's name, used in every reason."""

    TRAINER: ClassVar[str]

    scenario: Scenario
    training: Training
    reasons: list[Reason] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def build(self) -> str:
        """Return the text of the flags."""
        raise NotImplementedError

    def refuse(self, key: str, value: Any, does: str) -> None:
        """Add a reason against the key's value; `does`: what the trainer does instead."""
        self.reasons.append(Reason(tuple(key.split(".")), f"{key}: found {value}; {self.TRAINER} {does}"))

    def framework(self, trainer: str) -> Framework:
        """Return the framework's record; add a reason if the trainer's flags do not express it."""
        found = framework_of(self.training)
        able = " or ".join(f.name for f in FRAMEWORKS.values() if trainer in f.emitted_for)
        if trainer not in found.emitted_for:
            self.refuse("training.framework", found.name, f"runs {able} kernels")
        return found

    def common(self) -> None:
        """Add reasons against features that no trainer has."""
        t, p = self.training, self.scenario.parallelism
        if self.scenario.distillation is not None:
            self.refuse("distillation", "a teacher", "trains one model")
        if t.activation_offload:
            self.refuse("training.activation_offload", "true", "does not offload activations")
        if t.packing is not None:
            self.refuse("training.packing", "a distribution of documents", "takes documents from its data")
        if t.lora is not None:
            self.refuse("training.lora", "adapters", "trains all parameters")
        if t.optimizer_offload:
            self.refuse("training.optimizer_offload", "true", "keeps optimizer states on the GPU")
        if t.optimizer_post_validation:
            self.refuse("training.optimizer_post_validation", "true", "waits for all ranks in its optimizer")
        if t.cross_entropy == "chunked":
            self.refuse("training.cross_entropy", "chunked", "has no chunked cross-entropy")
        if p.cp > 1 and p.cp_split != "zigzag":
            self.refuse("parallelism.cp_split", p.cp_split, "splits sequences in zigzag")
        if p.dp_sync in ("per_parameter", "reduce_broadcast"):
            self.refuse("parallelism.dp_sync", p.dp_sync, "reduces gradients in buckets")
        if p.zero > 0 and p.param_gather_dtype == "fp32":
            self.refuse("parallelism.param_gather_dtype", p.param_gather_dtype, "gathers no fp32 parameters")
        nodes, each = self.nodes
        if nodes * each != p.ranks:
            self.refuse("ranks", p.ranks, f"is started by torchrun with as many ranks on every node, here {each}")
        if self.scenario.faults is not None:
            self.notes.append("faults are left out")

    @property
    def nodes(self) -> tuple[int, int]:
        """Return the number of nodes, and of processes on each."""
        ranks, per_node = self.scenario.parallelism.ranks, self.scenario.cluster.gpus_per_node
        return -(-ranks // per_node), min(ranks, per_node)

    @property
    def even(self) -> bool:
        """Tell whether all stages have equally many layers."""
        return len(set(self.scenario.parallelism.stage_layers)) == 1
