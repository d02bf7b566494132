"""Write torchtitan's Python config.

Source: its release 0.3.0 (September 2026): config/configs.py, `Trainer.Config` of trainer.py,
distributed/activation_checkpoint.py, and models/llama3/config_registry.py, whose configs are functions.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sim.emit.torchtitan import Titan
from sim.models.recompute import stops_early

CLASSES = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}
POLICIES = {"selective": "SelectiveAC", "full": "FullAC"}  # of recomputation


class TitanPython(Titan):
    """Write a module with a function `train` that trains twenty steps."""

    SEQUENCE_PARALLEL_IS_A_FLAG: ClassVar = True
    HEAD: ClassVar = "lm_head"

    def build(self) -> str:
        """Return the module, with the command that runs it in a comment."""
        tables = self._fields()
        flavor, policy = tables.pop("model")["flavor"], POLICIES.get(tables.pop("activation_checkpoint")["mode"], "")
        nodes, each = self.nodes
        lines = [
            "# torchtitan 0.3.0 (September 2026); save it as titan_config.py, in torchtitan's folder: the text and the",
            "# tokenizer are those of its tests",
            f"# torchrun --nnodes {nodes} --nproc-per-node {each} -m torchtitan.train --module titan_config "
            "--config train",
            *(f"# {note}" for note in self.notes),
            "from torchtitan.components.loss import CrossEntropyLoss",
            "from torchtitan.components.optimizer import default_adamw",
            f"from torchtitan.config import {', '.join(sorted(CLASSES.values()))}",
            *([f"from torchtitan.distributed.activation_checkpoint import {policy}"] if policy else []),
            "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
            "from torchtitan.models.common.config_utils import decoder_vocab_size",
            "from torchtitan.models.llama3 import model_registry",
            "from torchtitan.trainer import Trainer",
            "",
            "",
            "def train() -> Trainer.Config:",
            f"    model_spec = model_registry({flavor!r})",
            "    return Trainer.Config(",
            "        model_spec=model_spec,",
            "        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),",
            "        optimizer=default_adamw(lr=1e-4),",
            '        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),',
            f"        activation_checkpoint={f'{policy}.Config()' if policy else None},",
        ]
        for name, fields in tables.items():
            lines += [
                f"        {name}={CLASSES[name]}(",
                *(f"            {k}={v!r}," for k, v in fields.items()),
                "        ),",
            ]
        return "\n".join([*lines, "    )"])

    def _fields(self) -> dict[str, dict[str, Any]]:
        """Return the TOML's tables with the names of release 0.3.0; refuse what that release no longer has."""
        tables, p = self.tables(), self.scenario.parallelism
        training, layout = tables["training"], tables["parallelism"]
        if tables["model"]["converters"]:
            does = "configurations in Python are not written for 8 bits; --emit torchtitan writes TOML"
            self.refuse("training.precision", self.training.precision, does)
        tables.pop("quantize", None)
        if p.cp > 1 and p.cp_method == "ring":
            self.refuse("parallelism.cp_method", p.cp_method, "gathers keys and values (cp_method: all_gather)")
        training["disable_cuda_graphs"] = True  # otherwise torchtitan captures the whole step as a CUDA graph
        del layout["context_parallel_rotate_method"]
        layout["enable_sequence_parallel"] = p.sp or p.tp == 1
        tables["compile"]["enable_async_tensor_parallel"] = layout.pop("enable_async_tensor_parallel")
        if self.training.recompute.mode == "full" and stops_early(self.scenario):
            self.notes.append("recompute full: it runs a block again to its end, also what no gradient needs")
        return tables

    def _recompute(self) -> dict[str, Any]:
        """Refuse recomputation of every n-th layer, which release 0.3.0 does not have."""
        if (every := self.training.recompute.every) is not None:
            self.refuse("training.recompute.every", every, "recomputes by operator (selective_op) or all layers (full)")
        return super()._recompute()
