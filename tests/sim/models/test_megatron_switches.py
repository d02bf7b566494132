"""Switches of Megatron-LM that change kernels and memory: the loss in compiled parts, gradients that kernels of their
own add up, experts one after another, workspaces of cuBLAS."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Comm, Compute
from sim.inputs.scenario import Scenario
from sim.models.dims import Shard, dims
from sim.models.layers import attention_spec
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.moe.matmuls import expert_matmuls
from sim.models.moe.routing import routing
from sim.models.operators import Operator, accumulation, weight_gradient_bytes
from sim.models.output.head import cross_entropy
from sim.results.states import chosen_workspace_bytes
from sim.simulation import simulate
from sim.validation.stated import with_stated
from tests.sim.cases import scenario_with

TOKENS, VOCAB = 4096, 32000
MIB = 2**20


def scenario(
    layout: dict[str, Any] | None = None, *, model: str = "llama3-8b", cluster: str = "dgx-h100", **training: Any
) -> Scenario:
    keys = {"seq_len": TOKENS, "global_batch_size": 8, "framework": "megatron", **training}
    return scenario_with(keys, layout or {"dp": 8}, model=model, cluster=cluster)


def loss(kernel: str, **layout: Any) -> Operator:
    return cross_entropy(dims(scenario(layout or {"dp": 8}, cross_entropy=kernel)), VOCAB, kernel)


def over_logits(part: Operator) -> tuple[list[float], list[float]]:
    """Bytes a logit of the kernels over all logits, forward and backward."""
    n = TOKENS * VOCAB
    return tuple(  # type: ignore[return-value]
        [i.bytes / n for i in items if isinstance(i, Compute) and i.shape == (n,)]
        for items in (part.forward, part.backward)
    )


def test_bytes_of_the_native_loss() -> None:
    assert over_logits(loss("unfused")) == ([6 + 32], [8 + 6])
    assert over_logits(loss("native")) == ([6 + 8 + 8], [8 + 4 + 2 + 4])
    held = {kernel: loss(kernel) for kernel in ("unfused", "native")}
    kept = [[s.bytes for s in part.saved] for part in held.values()]
    assert kept[0] == kept[1] == [4.0 * TOKENS * VOCAB]
    more = held["native"].backward_bytes - held["unfused"].backward_bytes
    assert more == 4.0 * TOKENS * VOCAB
    assert held["native"].forward_bytes == held["unfused"].forward_bytes


def test_the_native_loss_joins_two_messages() -> None:
    sent = {
        kernel: [i.bytes for i in loss(kernel, dp=4, tp=2).forward if isinstance(i, Comm)]
        for kernel in ("unfused", "native")
    }
    assert sent["unfused"] == [4.0 * TOKENS] * 3
    assert sent["native"] == [4.0 * TOKENS, 8.0 * TOKENS]


@pytest.mark.slow
def test_torch_s_compiler_copies_the_softmax_once() -> None:
    """The compiled parts of core/fusions/fused_cross_entropy.py: buffers as large as all logits in each."""
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("torch._inductor.utils")
    rows, words = 16, 2048  # of 8 tokens and 2 sequences

    def widened(x: Any) -> Any:
        x = x.float()
        return x, torch.max(x, dim=-1)[0]

    def exponentials(x: Any, most: Any, target: Any) -> Any:
        x -= most.unsqueeze(dim=-1)
        chosen = x.view(-1, words)[torch.arange(rows), target].clone()
        torch.exp(x, out=x)
        return chosen, x.sum(dim=-1), x

    def gradient(softmax: Any, given: Any, target: Any) -> Any:
        softmax.view(-1, words)[torch.arange(rows), target] -= 1.0
        softmax.mul_(given.unsqueeze(dim=-1))
        return softmax.to(torch.bfloat16)

    logits, target = torch.randn(8, 2, words, dtype=torch.bfloat16), torch.randint(words, (rows,))
    whole = (f"empty_strided_cpu(({rows}, {words})", f"empty_strided_cpu((8, 2, {words})")

    def buffers(function: Any, *inputs: Any) -> tuple[Any, list[str]]:
        found, (code, *_) = utils.run_and_get_code(torch.compile(function, dynamic=False), *inputs)
        return found, [
            line.rsplit("torch.", 1)[1].rstrip(")") for line in code.splitlines() if any(x in line for x in whole)
        ]

    (wide, most), made = buffers(widened, logits)
    assert made == ["float32"]
    (_, total, softmax), made = buffers(exponentials, wide, most, target)
    assert made == []
    _, made = buffers(gradient, softmax / total.unsqueeze(-1), torch.ones(8, 2), target)
    assert sorted(made) == ["bfloat16", "float32"]


def test_gradients_added_by_kernels_of_their_own() -> None:
    fused, apart = (scenario(gradient_accumulation_fusion=on, global_batch_size=32) for on in (None, False))
    names = []
    for s in (fused, apart):
        spec = attention_spec(s.model)
        assert isinstance(spec, GroupedQueryAttention)
        backward = spec.train(s, dims(s), Shard())[0].backward
        names.append([i.name for i in backward if isinstance(i, Compute) and "accumulate" in i.name])
    assert (len(names[0]), len(names[1])) == (0, 1)
    steps = [simulate(s, engine="static") for s in (fused, apart)]
    assert steps[0].step_time_s < steps[1].step_time_s


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("layout", "training", "fused"),
    [
        ({}, {}, True),
        ({}, {"framework": "megatron_bridge"}, True),
        ({}, {"software_date": "2026-03"}, False),
        ({}, {"framework": "nemo"}, False),
        ({"fsdp_version": 2}, {}, False),
    ],
)
def test_which_fsdp_adds_gradients_up_in_their_matmuls(
    zero: int, layout: dict[str, Any], training: dict[str, Any], fused: bool
) -> None:
    """Megatron's own does since Megatron-Core 0.17 and Megatron-Bridge 0.4."""
    if layout and zero < 2:
        return  # no FSDP
    s = scenario({"dp": 8, "zero": zero, **layout}, global_batch_size=32, **training)
    assert dims(s).framework.accumulates_in_matmul is (zero < 2 or fused)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("sent", ["bf16", "fp32"])
@pytest.mark.parametrize("kept", ["bf16", "fp32"])
def test_bytes_that_fill_a_bucket_of_megatrons_fsdp(zero: int, sent: str, kept: str) -> None:
    """megatron_fsdp.py, `_grad_acc`: `param.main_grad.copy_(param.grad)` unless the matmul wrote it; then
    param_and_grad_buffer.py: `local_grad += reduced_grad`."""
    size, e = 1000, {"bf16": 2.0, "fp32": 4.0}
    given = {"grad_dtype": kept, "grad_reduce_dtype": sent, "global_batch_size": 32}
    shard = (e[sent] + 2 * e[kept]) * size / 8
    for fusion, written, moved in ((None, e[sent], shard), (False, 2.0, (2.0 + e[sent]) * size + shard)):
        d = dims(scenario({"dp": 8, "zero": zero}, gradient_accumulation_fusion=fusion, **given))
        out, added = accumulation(d, "x", size)
        assert (out, [i.bytes for i in added if isinstance(i, Compute)]) == (written * size, [moved])
        assert weight_gradient_bytes(d, size) == (2.0 * size if fusion is False else 0.0)


def test_experts_one_after_another() -> None:
    layout, model = {"dp": 8, "ep": 8}, "mixtral-8x7b"
    found = []
    for grouped in (None, False):
        s = scenario({**layout, "ep": 2}, model=model, moe_grouped_gemm=grouped)
        d = dims(s)
        r = routing(s, d, 0, Shard())
        found.append((r, {p.name: p for p in expert_matmuls(s, d.of_experts, r)}))
    (r, together), (_, apart) = found
    assert r.experts == 4
    matmul = next(i for i in apart["experts_up"].forward if isinstance(i, Compute) and i.kind == "grouped_gemm")
    assert (matmul.kernels, matmul.looped) == (r.experts, False)
    activations = [sum(i.kernels for i in p["swiglu"].forward if isinstance(i, Compute)) for p in (together, apart)]
    assert activations[1] == r.experts * activations[0]
    (joined,) = apart["experts_join"].forward
    assert isinstance(joined, Compute)
    assert joined.bytes == pytest.approx(2 * 2 * r.fullest * 4096)
    assert "experts_join" not in together


def test_workspaces() -> None:
    """32 MiB each on an H100, of which torch takes two."""

    def buffers(layout: dict[str, Any], **training: Any) -> float:
        return simulate(scenario(layout, **training), engine="static").outcome.peak_memory_bytes

    alone = buffers({"dp": 8})
    assert chosen_workspace_bytes(":4096:8") == 32 * MIB
    assert chosen_workspace_bytes(":4096:2:16:8") == (8192 + 128) * 1024
    assert buffers({"dp": 8}, cublas_workspace_config=":16:8") - alone == 2 * (0.125 - 32) * MIB
    assert buffers({"dp": 8}, cublas_workspace_config=":4096:8") == alone
    tp = {"dp": 4, "tp": 2, "sp": True}
    assert buffers({**tp, "tp_overlap": "full"}) - buffers(tp) > 2 * 31 * MIB


@pytest.mark.parametrize(
    ("key", "value", "changes", "needed"),
    [
        ("cross_entropy", "native", {"framework": "eager"}, "needs framework megatron, "),
        ("gradient_accumulation_fusion", False, {"framework": "eager"}, "needs framework megatron, "),
        ("moe_grouped_gemm", False, {}, "needs model.moe"),
        ("cublas_workspace_config", "4096", {}, "such as :4096:8"),
    ],
)
def test_where_there_is_none(key: str, value: object, changes: dict[str, Any], needed: str) -> None:
    with pytest.raises(InputError, match=f"training.{key}: .*({needed})"):
        scenario(**{key: value, **changes})


def test_tables_say_them_beside_their_scenarios() -> None:
    reading = {"deterministic": True, "grouped_gemm": False, "cross_entropy": "native"}
    found = with_stated({"cross_entropy": "unfused"}, "", {"reading": reading})
    assert found == {
        "cross_entropy": "native",
        "cublas_workspace_config": ":4096:8",
        "moe_grouped_gemm": False,
    }
    assert with_stated({"cross_entropy": "fused"}, "", {"reading": {"cross_entropy": "native"}}) == {
        "cross_entropy": "fused"
    }
