"""torch's DDP, FSDP2, DTensor plans and pipelining beside the bundled ones: the same gradients, the same training."""

from __future__ import annotations

from typing import Any

import pytest

from calibrate.real_steps.torch_reference import check
from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from tests.real.conftest import small
from tests.real.ranks import on_ranks

LLAMA = {"kv_heads": 2, "mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rope"}


def _case(parallelism: dict[str, Any], **more: Any) -> dict[str, Any]:
    return small(parallelism, vocab=256, **({"attention": "fused"} | more))


CASES = {
    "ddp": _case({"dp": 2, "bucket_bytes": 50_000}),
    "fsdp2": _case({"dp": 2, "zero": 3}, **LLAMA),
    "fsdp2, kept after forward": _case({"dp": 2, "zero": 2}),
    "tensor parallel": _case({"tp": 2}),
    "tensor parallel, llama": _case({"tp": 2}, **LLAMA),
    "sequence parallel": _case({"tp": 2, "sp": True}),
    "sequence parallel, llama": _case({"tp": 2, "sp": True}, **LLAMA),
    "unfused attention": _case({"dp": 2}, attention="unfused", **LLAMA),
    "gpipe": _case({"pp": 2, "schedule": "gpipe"}),
    "1f1b": _case({"pp": 2, "schedule": "1f1b"}, **LLAMA),
    "interleaved": _case({"pp": 2, "schedule": "interleaved_1f1b"}),
    "zb_v": _case({"pp": 2, "schedule": "zb_v"}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return on_ranks("torch_worker", CASES, tmp_path_factory.mktemp("torch"), 2)


@pytest.mark.parametrize("name", CASES)
def test_both_have_one_devices_gradients(found: Any, name: str) -> None:
    assert found[name]["torch"] <= 1e-10
    assert found[name]["bundled"] <= 1e-10


@pytest.mark.parametrize("name", CASES)
def test_both_train_alike(found: Any, name: str) -> None:
    """The loss on a new batch after two steps of each, clipping and AdamW included."""
    assert found[name]["torch_loss"] == pytest.approx(found[name]["bundled_loss"], rel=1e-9)


@pytest.mark.parametrize(
    ("parallelism", "key"),
    [
        ({}, "parallelism"),
        ({"dp": 2, "zero": 1}, "parallelism.zero"),
        ({"dp": 2, "tp": 2}, "parallelism"),
        ({"pp": 2, "schedule": "zb_search"}, "parallelism.schedule"),
    ],
)
def test_what_torch_has_nothing_for_is_refused(parallelism: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=f"file: {key}: found"):
        check(parse_scenario(_case(parallelism)), "file")


def test_activations_are_not_offloaded_by_torch() -> None:
    check(parse_scenario(_case({"dp": 2})), "file")
    case = _case({"dp": 2})
    case["training"]["activation_offload"] = True
    with pytest.raises(InputError, match=r"file: training\.activation_offload: found True"):
        check(parse_scenario(case), "file")
