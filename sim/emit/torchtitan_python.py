"""torchtitan's Python config. Classes and fields: torchtitan/config/configs.py of pytorch/torchtitan at 0014ac2, and
models/llama3/config_registry.py at 00d1c0e (2026), whose configs are functions that return a `Trainer.Config`.
"""

from __future__ import annotations

from typing import Any

from sim.emit.torchtitan import Titan

CLASSES = {
    "training": "TrainingConfig",
    "parallelism": "ParallelismConfig",
    "activation_checkpoint": "ActivationCheckpointConfig",
    "compile": "CompileConfig",
}


class TitanPython(Titan):
    """A module with a function `train`, which trains twenty steps."""

    def build(self) -> str:
        """The module, with the command that takes it in a comment."""
        tables = self.tables()
        model, training = tables.pop("model"), tables["training"]
        self.refuse(
            "training.precision",
            self.training.precision,
            "is written as TOML alone (torchtitan)",
            bool(model["converters"]),
        )
        tables["compile"] = {"enable": training.pop("compile")}
        nodes, each = self.nodes
        lines = [
            "# torchtitan's Python configs of 2026 (0014ac2); save it as titan_config.py",
            f"# torchrun --nnodes {nodes} --nproc-per-node {each} -m torchtitan.train --module titan_config "
            "--config train",
            *(f"# {note}" for note in self.notes),
            f"from torchtitan.config import {', '.join(sorted(CLASSES.values()))}",
            "from torchtitan.models.llama3 import model_registry",
            "from torchtitan.trainer import Trainer",
            "",
            "",
            "def train() -> Trainer.Config:",
            "    return Trainer.Config(",
            f"        model_spec=model_registry({model['flavor']!r}),",
        ]
        for name, fields in tables.items():
            lines += [
                f"        {name}={CLASSES[name]}(",
                *(f"            {k}={v!r}," for k, v in fields.items()),
                "        ),",
            ]
        return "\n".join([*lines, "    )"])

    def _pipeline(self) -> dict[str, Any]:
        """Stages by the names of their modules, in place of the layers at which they begin."""
        pipeline = super()._pipeline()
        if pipeline.pop("pipeline_parallel_split_points", None) is None:
            return pipeline
        stages: list[list[str]] = []
        first = 0
        for count in self.scenario.parallelism.stage_layers:
            stages.append([f"layers.{n}" for n in range(first, first + count)])
            first += count
        stages[0].insert(0, "tok_embeddings")
        stages[-1] += ["norm", "output"]
        return {**pipeline, "module_fqns_per_model_part": stages}

    def _recompute(self) -> dict[str, Any]:
        """Selective is by operator here; every n-th layer it no longer has."""
        every = self.training.recompute.every
        self.refuse(
            "training.recompute.every", every, "recomputes by operator (selective_op) or all layers", every is not None
        )
        return {"mode": super()._recompute()["mode"]}
