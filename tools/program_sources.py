"""The models and scripts that `tools/measure_programs.py` captures and runs, all small enough for a CPU core."""

from __future__ import annotations

from typing import Any, NamedTuple

SEQ_LEN, MICRO_BATCH_SIZE = 256, 2
SMALL = {"num_hidden_layers": 4, "hidden_size": 256, "vocab_size": 5120}
GROUPED_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}


class Model(NamedTuple):
    """A Hugging Face config and the implementation of attention with which Transformers runs it."""

    config: dict[str, Any]
    attention: str = "sdpa"


MODELS = {
    "gpt2": Model({"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 8, "vocab_size": 5120}),
    "llama": Model({"model_type": "llama", **SMALL, "intermediate_size": 704, **GROUPED_HEADS}),
    "gemma2": Model(
        {
            "model_type": "gemma2",
            **SMALL,
            "intermediate_size": 1024,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 128,
        },
        "eager",
    ),
    "gpt_oss": Model(
        {
            "model_type": "gpt_oss",
            **SMALL,
            "intermediate_size": 256,
            **GROUPED_HEADS,
            "head_dim": 32,
            "sliding_window": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        "eager",
    ),
    "mamba2": Model(
        {"model_type": "mamba2", **SMALL, "state_size": 64, "num_heads": 8, "head_dim": 64, "n_groups": 1}
        | {"chunk_size": 64},
        "eager",
    ),
    "bert": Model({"model_type": "bert", **SMALL, "intermediate_size": 1024, "num_attention_heads": 4}),
    "deepseek_v3": Model(
        {
            "model_type": "deepseek_v3",
            **SMALL,
            **EXPERTS,
            "intermediate_size": 704,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        }
    ),
    "qwen3_moe": Model(
        {
            "model_type": "qwen3_moe",
            **SMALL,
            **EXPERTS,
            "intermediate_size": 704,
            **GROUPED_HEADS,
            "head_dim": 32,
            "num_experts": 8,
        }
    ),
}

# Functions without arguments that return a `calibrate.capture.Step`, and the sequences of their batch.
FUNCTIONS = {"resnet18": 8}


def resnet18() -> Any:
    """Return a step of torchvision's ResNet-18 on 8 images of 64 x 64 pixels."""
    import torch
    from torchvision.models import resnet18 as make

    from calibrate.capture import Step

    model = make(num_classes=1000)
    images, labels = torch.randn(8, 3, 64, 64), torch.zeros(8, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Step(model, lambda: torch.nn.functional.cross_entropy(model(images), labels), optimizer, 1, 8)


# Each script trains the same model; `{parallel}` is one of PARALLEL.
SCRIPT = """
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

class Block(nn.Module):
    def __init__(self, h=256):
        super().__init__()
        self.norm, self.query, self.key = nn.LayerNorm(h), nn.Linear(h, h), nn.Linear(h, h)
        self.value, self.out = nn.Linear(h, h), nn.Linear(h, h)
        self.norm2, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
    def forward(self, x):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 32)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

model = nn.Sequential(nn.Embedding(5120, 256), *[Block() for _ in range(4)], nn.Linear(256, 5120))
{parallel}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(26):
    ids = torch.randint(0, 5120, (2, 256))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
PARALLEL = {
    "ddp": "model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=4)",
    "fsdp2": """
from torch.distributed.fsdp import fully_shard
for layer in model[1:5]: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
""",
    "tensor_parallel": """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
plan = {"query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(), "out": RowwiseParallel(),
        "up": ColwiseParallel(), "down": RowwiseParallel()}
for layer in model[1:5]: parallelize_module(layer, mesh, plan)
""",
}
