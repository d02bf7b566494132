"""Parameters, gradients, optimizer states and saved activations of a step, by torch's own accounting on fake tensors.

torch/distributed/_tools: mem_tracker.py and fsdp2_mem_tracker.py, whose trackers sort each storage that is alive;
torch/autograd/graph.py: saved_tensors_hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LAYERS, HIDDEN, HEADS, FFN, VOCAB, SEQ, BATCH, RANKS = 2, 512, 4, 1408, 4096, 256, 2, 8
SIZES = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "ffn": FFN, "vocab": VOCAB, "mlp": "swiglu"}
MODEL = {**SIZES, "norm": "rmsnorm", "bias": False, "positions": "rope"}
ALL_IN_BF16 = {"param_dtype": "bf16", "master_weights": False, "grad_dtype": "bf16", "optimizer_dtype": "bf16"}
ROPE_BYTES = 2 * SEQ * HIDDEN // HEADS * 2  # cosines and sines, which the simulator leaves out


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Ranks that exist in name alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    torch.distributed.destroy_process_group()


def _model(dtype: Any, recomputes: bool) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        intermediate_size=FFN, vocab_size=VOCAB, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _sharded(model: Any, mesh: Any) -> None:
    """The units of Accelerate 1.15 (utils/fsdp_utils.py: fsdp2_prepare_model)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for unit in (model.model.embed_tokens, *model.model.layers):
        fully_shard(unit, **policy)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **policy)
    fully_shard(model, **policy)


def _tracked(mesh: Any, recomputes: bool) -> dict[str, int]:
    """Bytes by kind behind the second step's backward, and, without FSDP, what its forward saves."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker

    without_mask = mock.patch("transformers.models.llama.modeling_llama.create_causal_mask", return_value=None)
    with FakeTensorMode(), without_mask:
        model = _model(torch.bfloat16 if mesh is None else torch.float32, recomputes)
        ids = torch.randint(0, VOCAB, (BATCH, SEQ))
        found = {} if mesh else {"ACT": _saved_bytes(model, ids)}
        if mesh is not None:
            _sharded(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = MemTracker() if mesh is None else FSDPMemTracker(model, optimizer)
        if mesh is None:
            tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                model(input_ids=ids, labels=ids).loss.backward()
                kept = _by_kind(tracker, ("PARAM", "GRAD", "OPT"))
                optimizer.step()
                optimizer.zero_grad()
    return found | kept


def _saved_bytes(model: Any, ids: Any) -> int:
    """Bytes of all storages that a forward saves, each counted once, without parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved = dict[int, Any]()

    def pack(tensor: Any) -> Any:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(input_ids=ids, labels=ids)
    del out
    return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in own)


def _by_kind(tracker: Any, kinds: tuple[str, ...]) -> dict[str, int]:
    (snapshot,) = tracker.get_tracker_snapshot().values()
    sizes = {getattr(key, "value", str(key)).lower(): size for key, size in snapshot.items()}
    return {kind: sum(size for key, size in sizes.items() if _is(kind, key)) for kind in kinds}


def _is(kind: str, name: str) -> bool:
    names: dict[str, tuple[str, ...]] = {"PARAM": ("parameter", "sharded param"), "GRAD": ("gradient", "sharded grad")}
    names["OPT"] = ("optstate",)
    return name.replace("_", " ") in names[kind]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("shards", [False, True])
def test_a_step_of_transformers_holds_what_torch_counts(shards: bool, recomputes: bool, request: Any) -> None:
    found = _tracked(request.getfixturevalue("mesh") if shards else None, recomputes)
    dp = RANKS if shards else 1
    training = {"seq_len": SEQ, "micro_batch_size": BATCH, "global_batch_size": BATCH * dp, "framework": "transformers"}
    training |= {"recompute": "full" if recomputes else "none"}
    training |= {"param_dtype": "fp32", "grad_reduce_dtype": "fp32"} if shards else ALL_IN_BF16
    layout = {"dp": dp, "zero": 3 if shards else 0}
    scenario = {"model": MODEL, "training": training, "parallelism": layout, "cluster": "dgx-h100"}
    (memory,) = simulate(parse_scenario(scenario)).result["memory"]
    for kind, name in {"PARAM": "parameters", "GRAD": "gradients", "OPT": "optimizer"}.items():
        assert memory[name] == pytest.approx(found[kind], rel=1e-3)
    if not shards:  # what FSDP gathered is saved, too
        rope = 0 if recomputes else ROPE_BYTES
        assert memory["activations"] == pytest.approx(found["ACT"] - rope, rel=1e-3)
