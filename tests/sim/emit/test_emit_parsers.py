"""What `--emit` and `search --for` write, given to the trainers' own parsers where these are installed.

To install one without what it trains with: `pip install --no-deps megatron-core==0.19.2` (Python 3.12),
`pip install --no-deps torchtitan==0.2.2 tyro tensorboard …` (TOML), `pip install torchtitan==0.3.0` (Python configs).
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import types
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.model_input import load_model


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def written(trainer: str) -> list[tuple[str, str]]:
    """Shipped scenarios that can be written for the trainer, and the text."""
    from tests.sim.convert.test_emitted import WRITTEN

    return [(name, text) for name, of, text in WRITTEN if of == trainer]


MEGATRON = pytest.mark.skipif(not installed("megatron.training.arguments"), reason="no megatron-core 0.19")
TITAN_TOML = pytest.mark.skipif(not installed("torchtitan.config.job_config"), reason="no torchtitan 0.2")
TITAN_PYTHON = pytest.mark.skipif(not installed("torchtitan.config.configs"), reason="no torchtitan 0.3")


def megatron_arguments(text: str, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Parsed and validated by Megatron-LM, for the ranks and with the variables that the command names."""
    from megatron.training.arguments import parse_args, validate_args

    command = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    words = shlex.split(command)
    script = words.index("pretrain_gpt.py")
    ranks = int(words[words.index("--nnodes") + 1]) * int(words[words.index("--nproc-per-node") + 1])
    given = {"WORLD_SIZE": str(ranks), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    for name, value in {**given, **dict(w.split("=") for w in words[: words.index("torchrun")])}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", words[script:])
    args = parse_args()
    validate_args(args)
    return args


@MEGATRON
def test_megatron_takes_the_flags_and_makes_a_transformer_s_config(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from megatron.training.arguments import core_transformer_config_from_args

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(major=9, minor=0))
    texts = written("megatron")
    assert len(texts) > 20
    for name, text in texts:
        args = megatron_arguments(text, monkeypatch)
        found = {key: int(value) for key, value in re.findall(r"--(\S+-parallel-size) (\d+)", text)}
        assert {key: getattr(args, key.replace("-", "_")) for key in found} == found, name
        # its fused rotation needs TransformerEngine, which needs a GPU to install
        if "--no-rope-fusion" in text:
            assert core_transformer_config_from_args(args).num_layers == args.num_layers


@TITAN_TOML
def test_torchtitan_takes_the_toml(tmp_path: Path) -> None:
    from torchtitan.config import ConfigManager

    texts = written("torchtitan")
    assert len(texts) > 5
    for name, text in texts:
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        config = ConfigManager().parse_args(["--job.config_file", str(file)])
        assert config.training.steps == 20


@TITAN_PYTHON
def test_torchtitan_makes_its_config_and_the_model_has_the_scenario_s_parameters() -> None:
    """On the `meta` device; the names of a stage's modules are the model's."""
    import torch

    texts = written("torchtitan-python")
    assert len(texts) > 5
    built: dict[str, Any] = {}
    for name, text in texts:
        scope: dict[str, Any] = {}
        exec(text, scope)
        config = scope["train"]()
        flavor = config.model_spec.flavor
        if flavor not in built:
            with torch.device("meta"):
                built[flavor] = config.model_spec.model.build()
            of = load_model({"8B": "llama3-8b", "70B": "llama3-70b", "405B": "llama3.1-405b"}[flavor])
            assert sum(p.numel() for p in built[flavor].parameters()) == of.parameters, name
        stages = config.parallelism.module_fqns_per_model_part or []
        named = [module for stage in stages for module in stage]
        layers = [f"layers.{n}" for n in range(len(built[flavor].layers))]
        assert named in ([], ["tok_embeddings", *layers, "norm", "lm_head"]), name
