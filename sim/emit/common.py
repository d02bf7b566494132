"""Hold what the writers of flags share: notes, reasons of refusal, and features that no trainer has."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple

from msgspec import Struct, field

from sim.inputs.scenario import Scenario
from sim.inputs.training_config import Training
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.records import FRAMEWORKS, framework_of

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
    """Write a scenario's flags, and collect reasons and notes. `TRAINER`: the trainer's name, used in every reason.
    `KERNELS`, `LOSSES`, `GRAPHS`: values of `attention_kernel`, `cross_entropy` and `cuda_graphs` that its flags can
    say. `OFFLOADS_PARTS`: they can say of which layers or parts of layers activations go to the host."""

    TRAINER: ClassVar[str]
    KERNELS: ClassVar[Collection[str]] = ()
    LOSSES: ClassVar[tuple[str, ...]] = ("unfused", "fused")
    GRAPHS: ClassVar[tuple[str, ...]] = ("none",)
    OFFLOADS_PARTS: ClassVar[bool] = False

    scenario: Scenario
    training: Training
    reasons: list[Reason] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def build(self) -> str:
        """Return the text of the flags."""
        raise NotImplementedError

    def refuse(self, key: str, does: str, shown: str = "") -> None:
        """Add a reason against the value of a key such as `training.recompute.layers`.

        `does`: what the trainer does instead; `shown`: the value in words.
        """
        found = self.value_of(key)
        words = shown or (str(found).lower() if isinstance(found, bool) else found)
        self.reasons.append(Reason(tuple(key.split(".")), f"{key}: found {words}; {self.TRAINER} {does}"))

    def has_only(self, key: str, values: tuple[object, ...], does: str, shown: str = "") -> None:
        """Refuse the key's value unless it is one of these."""
        if self.value_of(key) not in values:
            self.refuse(key, does, shown)

    def value_of(self, key: str) -> Any:
        """Return the value of a key; None below a section that is left out."""
        found: Any = self.scenario
        for name in key.split("."):
            found = getattr(found, name, None)
        return found

    def framework(self, trainer: str) -> Framework:
        """Return the framework's record; add a reason if the trainer's flags do not express it."""
        found = framework_of(self.training)
        able = " or ".join(f.name for f in FRAMEWORKS.values() if trainer in f.emitted_for)
        if trainer not in found.emitted_for:
            self.refuse("training.framework", f"runs {able} kernels")
        return found

    def common(self) -> None:
        """Add reasons against features that no trainer has."""
        p = self.scenario.parallelism
        self.has_only("distillation", (None,), "trains one model", "a teacher")
        self._activations()
        self.has_only("training.packing", (None,), "takes documents from its data", "a distribution of documents")
        self.has_only("training.lora", (None,), "trains all parameters", "adapters")
        self.has_only("training.preference", (None,), "learns next tokens", "a loss over pairs of answers")
        self.has_only("training.optimizer_offload", (False,), "keeps optimizer states on the GPU")
        self.has_only("training.optimizer_post_validation", (False,), "waits for all ranks in its optimizer")
        self.has_only("training.cross_entropy", self.LOSSES, f"has no {self.training.cross_entropy} cross-entropy")
        self.has_only("training.cuda_graphs", self.GRAPHS, "launches kernels one by one with the flags written here")
        self.has_only("training.fp8_output_proj", (False,), "multiplies the output projection in 16 bits")
        environment = "takes it from the environment of a run (CUBLAS_WORKSPACE_CONFIG)"
        self.has_only("training.cublas_workspace_config", (None,), environment)
        for key in ("fp8_dot_product_attention", "activation_func_fp8_input_store"):
            self.has_only(f"training.{key}", (False,), "works in 16 bits there with the flags written here")
        self.has_only("training.fused_experts", (False,), "runs experts' activation apart with the flags written here")
        self.has_only("parallelism.dp_sync", ("bucketed", "after_backward"), "reduces gradients in buckets")
        self.has_only("parallelism.gather_bucket_bytes", (None,), "gathers a layer in one message")
        self.has_only("parallelism.tp_overlap_except", ((),), "overlaps all layers alike with the flags written here")
        if p.cp > 1:
            self.has_only("parallelism.cp_split", ("zigzag",), "splits sequences in zigzag")
        if p.zero > 0 and p.param_gather_dtype == "fp32":
            self.refuse("parallelism.param_gather_dtype", "gathers no fp32 parameters")
        nodes, each = self.nodes
        if nodes * each != p.ranks:
            self.refuse("ranks", f"is started by torchrun with as many ranks on every node, here {each}")
        if self.scenario.faults is not None:
            self.notes.append("faults are left out")
        if self.training.tokens is not None:
            self.notes.append("tokens are left out: how long the training is decides no step")
        if self.scenario.processes is not None:
            self.notes.append("processes are left out")
        if self.training.attention_kernel not in (None, *self.KERNELS):
            self.notes.append("attention_kernel is left out: the trainer chooses its kernel")
        if left_out := self.scenario.model.left_out:
            self.notes.append(f"the decoder alone is trained, without the config's {', '.join(left_out)}")

    def _activations(self) -> None:
        offload = self.training.activation_offload
        if offload is True or (offload and not self.OFFLOADS_PARTS):
            some = "offloads activations of layers, all but the last, or of parts of layers"
            does = some if self.OFFLOADS_PARTS else "does not offload activations"
            self.refuse("training.activation_offload", does, "true" if offload is True else "a mapping")

    @property
    def nodes(self) -> tuple[int, int]:
        """Return the number of nodes, and of processes on each."""
        ranks, per_node = self.scenario.parallelism.ranks, self.scenario.cluster.gpus_per_node
        return -(-ranks // per_node), min(ranks, per_node)

    @property
    def even(self) -> bool:
        """Tell whether all stages have equally many layers."""
        return len(set(self.scenario.parallelism.stage_layers)) == 1
