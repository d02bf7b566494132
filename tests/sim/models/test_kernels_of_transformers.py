"""Kernels of norms and activations written in separate operators: as many as torch dispatches for Transformers' own
modules, forward and backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from counted_accesses import counted

from sim.core.program import Compute
from sim.inputs.huggingface import model_of_config
from sim.inputs.scenario import parse_scenario
from sim.models.dims import dims
from sim.models.layer import layer_block
from sim.models.moe.token_steps import INDEXED_IN_ONE_DTYPE
from sim.models.norm import layer_norm_in_fp32, rms_norm_eager
from sim.models.rope import rope, rope_join
from sim.variants.activations import ACTIVATIONS
from sim.variants.model_code import MODEL_CODE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

WIDTH = 64
NO_KERNELS = [
    "view",
    "_unsafe_view",
    "expand",
    "detach",
    "ones_like",
    "alias",
    "unsqueeze",
    "squeeze",
    "lift_fresh",
    "empty",
    "empty_like",
    "t",
    "transpose",
    "slice",
    "permute",
    "select",
    "randn",
    "split",
    "chunk",
]


class Kernels(TorchDispatchMode):  # type: ignore[misc]
    """Count operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self.names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name.split(".")[0] not in NO_KERNELS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def kernels_of(module: Any, dtype: Any) -> tuple[int, int]:
    module = module.to(dtype)
    x = torch.randn(2, 8, WIDTH, dtype=dtype, requires_grad=True)
    with Kernels() as forward:
        y = module(x)
    with Kernels() as backward:
        y.backward(torch.ones_like(y))
    return forward.count, backward.count


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("cohere.modeling_cohere.CohereLayerNorm", lambda e: layer_norm_in_fp32(e, True)),
        ("olmo.modeling_olmo.OlmoLayerNorm", lambda e: layer_norm_in_fp32(e, False)),
        ("llama.modeling_llama.LlamaRMSNorm", lambda e: rms_norm_eager(e)),
        ("olmo2.modeling_olmo2.Olmo2RMSNorm", lambda e: rms_norm_eager(e, "fp32")),
        ("gemma3.modeling_gemma3.Gemma3RMSNorm", lambda e: rms_norm_eager(e, "from 1")),
        ("nanochat.modeling_nanochat.NanoChatRMSNorm", lambda e: rms_norm_eager(e, "none")),
    ],
)
def test_a_norm_launches_as_many_kernels(name: str, rules: Any, dtype: str) -> None:
    module, made = name.rsplit(".", 1)
    own = getattr(__import__(f"transformers.models.{module}", fromlist=[made]), made)
    sized = own() if made == "NanoChatRMSNorm" else own(WIDTH)
    forward, backward = kernels_of(sized, getattr(torch, dtype))
    t = rules(4.0 if dtype == "float32" else 2.0)
    some = (2, 4) if "LayerNorm" in made else (0, 0)  # of a mean's and a square root's few numbers
    assert t.forward_kernels + t.forward_launches == pytest.approx(forward, abs=some[0])
    assert t.backward_kernels + t.backward_launches == pytest.approx(backward, abs=some[1])


WRITTEN_OUT = {
    "gelu_new": "NewGELUActivation",
    "gelu_fast": "FastGELUActivation",
    "quick_gelu": "QuickGELUActivation",
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_an_activation_moves_and_keeps_what_its_formula_does(name: str) -> None:
    made, kept = getattr(transformers.activations, WRITTEN_OUT[name])(), {}
    x = torch.randn(64, WIDTH, requires_grad=True)

    def pack(saved: Any) -> Any:
        kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y, forward = counted(lambda: made(x))
    gradient = torch.ones_like(y)
    _, backward = counted(lambda: y.backward(gradient))
    record = ACTIVATIONS[name]
    found = (forward.elements / x.numel(), forward.operators, backward.elements / x.numel(), backward.operators)
    assert found == record.eager
    assert len(record.kept) == len(kept)


@pytest.mark.parametrize(("name", "activation"), [("gelu_new", "NewGELUActivation"), ("xielu", "XIELUActivation")])
def test_an_activation_launches_as_many_kernels(name: str, activation: str) -> None:
    forward, backward = kernels_of(getattr(transformers.activations, activation)(), torch.float32)
    passes = ACTIVATIONS[name].eager
    ahead, back = ACTIVATIONS[name].numbers
    assert passes.forward_kernels + ahead == forward
    copies = int(name == "xielu")  # ahead of what `masked_fill` fills, within one operator
    assert passes.backward_kernels + back == backward + copies


def _turned(heads: int, share: float) -> Any:
    """Queries of one tensor, turned in `share` of a head as Transformers' models do, from a projection's output."""
    apply = transformers.models.stablelm.modeling_stablelm.apply_rotary_pos_emb
    x = torch.randn(2, 8, heads * WIDTH, requires_grad=True)
    cut = round(share * WIDTH)
    angles = torch.randn(2, 8, cut)

    q = x.view(2, 8, heads, WIDTH).transpose(1, 2)
    part = q[..., :cut] if share < 1 else q
    turned, _ = apply(part, part[:, :1].detach(), angles, angles)
    joined = torch.cat((turned, q[..., cut:]), dim=-1) if share < 1 else turned
    return joined.transpose(1, 2).reshape(2, 8, -1)


def test_an_empty_rest_of_a_head_is_joined_by_a_sum_with_zeros() -> None:
    """Phi 3 rotates whole heads and joins nothing to them: its backward then has zeros and a sum alone."""
    found = []
    for share in (0.5, 1.0):
        model = {"preset": "llama2-7b", "layers": 1, "rope_share": share, "code": "phi3"}
        training = {"framework": "transformers", "seq_len": 8, "global_batch_size": 1}
        d = dims(parse_scenario({"model": model, "training": training, "cluster": {"gpu": "h200-sxm"}}))
        (back,) = rope_join(d, 100, share).backward
        assert isinstance(back, Compute)
        found.append((back.bytes / (100 * d.act_bytes), back.kernels))
    assert found == [(7.0, 10), (4.0, 4)]
    apply = transformers.models.phi3.modeling_phi3.apply_rotary_pos_emb
    q, k = (torch.randn(2, heads, 8, WIDTH, requires_grad=True) for heads in (4, 2))
    angles = torch.randn(2, 8, WIDTH)
    turned = apply(q, k, angles, angles)
    filled = Counter[str]()

    class Slices(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc,name-defined]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.slice_backward.default:
                filled["empty" if args[0].numel() == 0 else "part"] += 1
            return function(*args, **(kwargs or {}))

    with Slices():
        torch.autograd.backward(turned, [torch.ones_like(x) for x in turned])
    assert filled == {"empty": 2, "part": 4}


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_gradient_through_rope_launches_as_many_kernels(share: float) -> None:
    scenario = parse_scenario(
        {
            "model": {"preset": "llama2-7b", "layers": 1, "rope_share": None if share == 1 else share},
            "training": {"framework": "transformers", "precision": "fp32", "seq_len": 8, "global_batch_size": 1},
            "cluster": {"gpu": "h200-sxm"},
        }
    )
    d = dims(scenario)
    described = [rope(d, 100), *([rope_join(d, 100, share)] if share < 1 else [])]
    y = _turned(4, share)
    with Kernels() as backward:
        y.backward(torch.ones_like(y))
    slices = 2 if share == 1 else 4  # zeros, and a copy into them: two kernels of one operator
    launched = sum(item.kernels for part in described for item in part.backward)
    assert launched / 2 == pytest.approx(backward.count + slices, abs=2)


class Experts:
    """What `grouped_mm_experts_forward` asks of a module of experts: weights, and a gate."""

    has_gate, has_bias, is_transposed, has_post_expert_norm, _is_expert_parallel = True, False, False, False, False
    num_experts = 4

    def __init__(self) -> None:
        self.gate_up_proj = torch.randn(4, 2 * WIDTH, WIDTH, requires_grad=True)
        self.down_proj = torch.randn(4, WIDTH, WIDTH, requires_grad=True)

    def _apply_gate(self, x: Any) -> Any:
        return x[:, :WIDTH]  # no activation: kernels of the way there and back alone


def test_experts_by_index_launch_as_many_kernels() -> None:
    """Small kernels that sort are no operators of their own: ten in a sort, eight in each accumulation."""
    forward_of = transformers.integrations.moe.grouped_mm_experts_forward
    x, weights = torch.randn(16, WIDTH, requires_grad=True), torch.rand(16, 2, requires_grad=True)
    with Kernels() as forward:
        y = forward_of(Experts(), x, torch.randint(4, (16, 2)), weights)
    with Kernels() as backward:
        y.backward(torch.ones_like(y))
    step = INDEXED_IN_ONE_DTYPE
    ahead = step["permute"].kernels + step["unpermute"].kernels
    back = step["unpermute_backward"].kernels + step["permute_backward"].kernels
    matmuls, cut = 2, 2  # the gate's gradient is zeros, and a copy into them
    assert forward.count == pytest.approx(ahead + matmuls, abs=1), forward.names
    assert backward.count == pytest.approx(back + 2 * matmuls + cut, abs=2), backward.names


ROUTERS = {
    "hy_v3": "hy_v3.HYV3TopKRouter",
    "afmoe": "afmoe.AfmoeTokenChoiceRouter",
    "minimax_m2": "minimax_m2.MiniMaxM2TopKRouter",
    "ernie4_5_moe": "ernie4_5_moe.Ernie4_5_MoeTopKRouter",
    "flint": "flint.FlintTopKRouter",
    "mistral4": "mistral4.Mistral4TopkRouter",
}
BY_INPUT_ALONE = ("ernie4_5_moe", "flint", "mistral4")  # others are given biases
MATMULS = ("mm", "addmm", "bmm")


@pytest.mark.parametrize("code", ROUTERS)
def test_a_router_launches_as_many_kernels(code: str) -> None:
    """Beside its matmuls and, of a router in fp32, the casts around them; a top-k is two kernels."""
    package, _, name = ROUTERS[code].partition(".")
    module = __import__(f"transformers.models.{package}.modeling_{package}", fromlist=[name])
    sizes = {"num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4}
    sizes |= {"moe_num_experts": 8, "moe_k": 2} if code == "ernie4_5_moe" else {"num_experts_per_tok": 2}
    sizes |= {} if code == "ernie4_5_moe" else {"num_experts": 8, "num_local_experts": 8}
    router = getattr(module, name)(transformers.CONFIG_MAPPING[code](**sizes)).to(torch.bfloat16)
    x = torch.randn(1, 16, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    given = (x,) if code in BY_INPUT_ALONE else (x, torch.zeros(8))
    with Kernels() as forward:
        weights = router(*given)[1]
    with Kernels() as backward:
        weights.backward(torch.ones_like(weights))
    record = MODEL_CODE[code].router
    assert record is not None
    copies = 2 if code in ("hy_v3", "ernie4_5_moe", "flint") else 0  # of input and weight
    ahead, back = (
        sum(name.split(".")[0] not in MATMULS for name in found.names) - copies for found in (forward, backward)
    )
    of_two = sum(name.startswith(("topk", "masked_fill.")) for name in forward.names)  # a fill is of a copy
    assert (record.forward_kernels, record.backward_kernels) == (ahead + of_two, back)


def test_a_factor_of_queries_launches_as_many_kernels() -> None:
    """Ministral 3's and Mistral 4's, of [batch, heads, seq, head_dim]."""
    scale = __import__("transformers.models.ministral3.modeling_ministral3", fromlist=["get_llama_4_attn_scale"])
    queries = torch.randn(2, 4, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(8)[None]
    with Kernels() as forward:
        y = queries * scale.get_llama_4_attn_scale(positions, 0.1, 4).to(queries.dtype)
    with Kernels() as backward:
        y.backward(torch.ones_like(y))
    keys = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 100}
    keys |= {"model_type": "ministral3", "intermediate_size": 64, "num_key_value_heads": 4}
    training = {"framework": "transformers", "seq_len": 8, "micro_batch_size": 2, "global_batch_size": 2}
    model = model_of_config(keys | {"max_position_embeddings": 64}, "config.json")
    block = layer_block(parse_scenario({"model": model, "training": training, "cluster": {"gpu": "h200-sxm"}}), 0)
    ahead, back = (
        [i for i in items if isinstance(i, Compute) and i.name.startswith("query_factor")]
        for items in (block.forward, block.backward)
    )
    assert (sum(i.kernels for i in ahead), sum(i.kernels for i in back)) == (forward.count, backward.count)
    elements = queries.numel()
    assert back[0].single_elements == elements
    assert back[0].bytes in (4 * elements, 8 * elements)  # fp32 under autocast


def test_hunyuan_3_adds_experts_results_in_fp32() -> None:
    """HYV3MoE.forward with `enable_moe_fp32_combine`."""
    routed, shared = (torch.randn(8, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with Kernels() as forward:
        y = (routed.float() + shared.float()).to(torch.bfloat16)
    with Kernels() as backward:
        y.backward(torch.ones_like(y))
    config = {"model_type": "hy_v3", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    config |= {"num_attention_heads": 8, "head_dim": 16, "vocab_size": 100, "num_experts": 8, "num_experts_per_tok": 2}
    model = model_of_config(config | {"moe_intermediate_size": 32, "first_k_dense_replace": 0}, "config.json")
    training = {"framework": "transformers", "seq_len": 8, "global_batch_size": 1, "param_dtype": "bf16"}
    scenario = parse_scenario({"model": model, "training": training, "cluster": {"gpu": "h200-sxm"}})
    block = layer_block(scenario, 0)
    ahead, back = (
        sum(i.kernels for i in items if isinstance(i, Compute) and i.name.startswith(names))
        for items, names in ((block.forward, "shared_expert_sum"), (block.backward, "shared_grad_cast"))
    )
    assert (ahead, back) == (forward.count, backward.count)


def test_gpt_oss_activation_launches_as_many_kernels() -> None:
    """GptOssExperts._apply_gate, between the matmuls of all experts: halves of alternate numbers."""
    module = __import__("transformers.models.gpt_oss.modeling_gpt_oss", fromlist=["GptOssExperts"])
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_local_experts": 2}
    experts = module.GptOssExperts(transformers.GptOssConfig(**sizes))
    x = torch.randn(8, 2 * 32, requires_grad=True)
    with Kernels() as forward:
        y = experts._apply_gate(x)
    with Kernels() as backward:
        y.backward(torch.ones_like(y))
    record = ACTIVATIONS["clamped_swiglu"]
    halves = 2  # each zeroed and filled by one operator
    assert record.eager.forward_kernels == forward.count
    assert record.eager.backward_kernels + record.numbers[1] == backward.count + halves


def test_a_gate_of_its_own_projection_has_its_own_matmuls() -> None:
    """AfmoeAttention has a `gate_proj`; Qwen3-Next's gates come out of the query's."""
    model = {"layers": 1, "hidden": 64, "heads": 4, "vocab": 100, "bias": False, "mlp": "swiglu", "norm": "rmsnorm"}
    training = {"framework": "transformers", "seq_len": 8, "global_batch_size": 1, "param_dtype": "bf16"}
    found = []
    for code in ("afmoe", None):
        own = model | {"attention_gate": True, "code": code}
        scenario = parse_scenario({"model": own, "training": training, "cluster": {"gpu": "h200-sxm"}})
        block = layer_block(scenario, 0)
        matmuls = [i.flops for i in block.forward if isinstance(i, Compute) and i.name.startswith("qkv")]
        found.append((len(matmuls), sum(matmuls), block.params))
    assert found[0] == (4, *found[1][1:])
    assert found[1][0] == 3
