"""Write torchtitan's Python config.

Source: its release 0.3.0 (September 2026): config/configs.py, `Trainer.Config` of trainer.py, components/loss.py,
distributed/activation_checkpoint.py, and models/llama3/config_registry.py, whose configs are functions.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, ClassVar

from sim.emit.torchtitan import Titan
from sim.inputs.trainer_names import TITAN_POLICIES
from sim.models.activation_memory.recompute import stops_early

if TYPE_CHECKING:
    from jinja2 import Template

CLASSES = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}
CHUNKS = 8  # torchtitan's `num_chunks`
POLICIES = {mode: name for name, mode in TITAN_POLICIES.items()}


@cache
def _template() -> Template:
    from jinja2 import StrictUndefined, Template

    text = (files("sim.emit") / "titan_config.py.jinja").read_text("utf-8")
    found: Template = Template(text, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return found


RERUNS_ALL = (
    "torchtitan reruns each block to its end; the simulated rerun stops at the last tensor that a gradient needs"
)
NO_ZERO_GRAD = (
    "training.zero_grad is not set, so the simulated step frees gradients; torchtitan keeps them beside its CUDA graph "
    "(zero_grad: keep)"
)


class TitanPython(Titan):
    """Write a module with a function `train` that trains twenty steps."""

    SEQUENCE_PARALLEL_IS_A_FLAG: ClassVar = True
    SHARDS_OVER_ONE: ClassVar = True  # models/llama3/parallelize.py; distributed/parallel_dims.py: `_mesh_exist`
    HEAD: ClassVar = "lm_head"
    LOSSES: ClassVar = ("unfused", "fused", "chunked")
    GRAPHS: ClassVar = ("none", "step")

    def build(self) -> str:
        """Return the module, with the command that runs it in a comment."""
        tables = self._fields()
        flavor, policy = tables.pop("model")["flavor"], POLICIES.get(tables.pop("activation_checkpoint")["mode"], "")
        nodes, each = self.nodes
        chunked = self.training.cross_entropy == "chunked"
        if chunked and self.training.loss_chunks is None:
            self.notes.append(f"loss_chunks is {CHUNKS}, torchtitan's default; Liger's chunks are simulated")
        return _template().render(
            nodes=nodes,
            each=each,
            notes=self.notes,
            classes=CLASSES,
            policy=policy,
            chunks=self.training.loss_chunks or CHUNKS,
            losses=("ChunkedLossWrapper", "CrossEntropyLoss")[not chunked :],
            flavor=flavor,
            tables=tables,
            repr=repr,
        )

    def _fields(self) -> dict[str, dict[str, Any]]:
        """Return the TOML's tables with the names of release 0.3.0; refuse what that release no longer has."""
        tables, p = self.tables(), self.scenario.parallelism
        training, layout = tables["training"], tables["parallelism"]
        if tables["model"]["converters"]:
            does = "configurations in Python are not written for 8 bits; --emit torchtitan writes TOML"
            self.refuse("training.precision", does)
        tables.pop("quantize", None)
        tables.pop("optimizer", None)
        self.has_only("training.adamw_kernels", (None, "fused"), "is written with its fused AdamW")
        if p.cp > 1 and p.cp_method == "ring":
            self.refuse("parallelism.cp_method", "gathers keys and values (cp_method: all_gather)")
        training["disable_cuda_graphs"] = self.training.cuda_graphs == "none"  # else it captures the whole step
        if self.training.cuda_graphs != "none":
            self.has_only("training.zero_grad", ("keep", None), "keeps gradients where a CUDA graph adds to them")
            if self.training.zero_grad is None:
                self.notes.append(NO_ZERO_GRAD)
        if p.pp > 1:  # trainer.py: `_validate_cuda_graphs`
            self.has_only("training.cuda_graphs", ("none",), "captures no step of a pipeline")
        del layout["context_parallel_rotate_method"]
        layout["enable_sequence_parallel"] = p.sp or p.tp == 1
        tables["compile"]["enable_async_tensor_parallel"] = layout.pop("enable_async_tensor_parallel")
        if (mode := self.training.recompute.mode) in ("full", "selective_op") and stops_early(self.scenario):
            self.notes.append(f"recompute {mode}: {RERUNS_ALL}")
        return tables

    def _data_parallel(self) -> tuple[int, int]:
        """Refuse what is not under FSDP, which release 0.3.0 has on one shard, too, for its casts to 16 bits."""
        one = " with shard_size: 1" if self.scenario.parallelism.dp > 1 else ""
        self.has_only("parallelism.zero", (3,), f"has FSDP on one shard, too (zero: 3{one})")
        return super()._data_parallel()

    def _recompute(self) -> dict[str, Any]:
        """Refuse recomputation of every n-th layer, which release 0.3.0 does not have."""
        does = "recomputes by operator (selective_op) or all layers (full)"
        self.has_only("training.recompute.every", (None,), does)
        return super()._recompute()
