"""Ranks of distributed scripts under a fake process group: the collectives that torch's own code makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sim.inputs.script_program import RankProgram, What
from tests.calibrate.capture.captured_scripts import captures_of_scripts
from tests.calibrate.capture.script_parts import HEAD

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(4, 64)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    seen = loss.item()
"""
ATTENTION = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
    def forward(self, x):
        q, k, v = self.qkv(x).view(1, 4, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)
model = Attention()
"""
SCRIPTS_OF_EITHER = {
    "cpu": 'model.double().float().to(torch.device("cpu", 0))',
    "cuda": 'model.to("cuda")',
    "accelerator": """
model.to(torch.accelerator.current_accelerator())
torch.accelerator.synchronize(), torch.accelerator.current_stream().synchronize()
""",
    "matmuls": """
from torch.nn.attention import SDPBackend, sdpa_kernel
forward = model.to("cuda").forward
def plain(x):
    with sdpa_kernel(SDPBackend.MATH): return forward(x)
model.forward = plain
""",
}
LAYERS = "nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)])"
SCRIPTS = {
    "ddp": f"model = nn.parallel.DistributedDataParallel({LAYERS}, bucket_cap_mb=0.1)",
    "fsdp2": f"""
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (n,))
model = {LAYERS}
for layer in model: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
""",
    "tp": f"""
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("dp", "tp"))
model = {LAYERS}
for layer in model: parallelize_module(layer, mesh["tp"], {{"0": ColwiseParallel(), "2": RowwiseParallel()}})
""",
    "pipeline": """
model = nn.Linear(64, 64)
forward = model.forward
def stage(x):
    if dist.get_rank() == 0:
        x = forward(x)
        dist.send(x.detach(), 1)
    else:
        dist.recv(x, 0)
        x = forward(x)
    return x
model.forward = stage
""",
}
SCRIPTS |= {f"attention_{k}": ATTENTION + v for k, v in SCRIPTS_OF_EITHER.items()}
SCRIPTS["cuda"] = """
import os
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
device = torch.device("cuda", local)
model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100)).to(device)
model = nn.parallel.DistributedDataParallel(model, device_ids=[local])
data = TensorDataset(torch.randint(0, 100, (64, 17)))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), pin_memory=True)
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
for (ids,) in [*loader, *loader]:
    ids = ids.to(device, non_blocking=True)
    ids.record_stream(torch.cuda.current_stream())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()
"""
SCRIPTS["images"] = """
import io
model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).to("cpu", memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if torch.rand(()) < 0.5: raise ValueError("chance leaves a layer out")
    loss = model(torch.randn(4, 4, 8, 8).to(memory_format=torch.channels_last)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); optimizer.zero_grad()
    assert loss.detach().cpu().numpy().mean() == 1.0
    torch.save(model.state_dict(), io.BytesIO())
"""
SCRIPTS["workers"] = """
class Drawn(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, i):
        scale = (0.5, 1.0)[int(torch.multinomial(torch.tensor([0.5, 0.5]), 1))]
        side = (32, 64)[int(torch.empty(1).uniform_(0.0, 2.0).item())]
        return torch.randn(side).mul(scale).sinh(), i
model = nn.Linear(64, 64)
batches = torch.utils.data.DataLoader(Drawn(), batch_size=4, num_workers=1, pin_memory=True, prefetch_factor=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, _ in batches:
    model(x.to("cuda", non_blocking=True)).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""
SCRIPTS["asks"] = f"""
model = {LAYERS}
for p in model.parameters(): nn.init.trunc_normal_(p, std=0.02)
with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
    before = model(torch.randn(4, 64, device="cuda")).square().mean()
if before < 10.0 and torch.isfinite(before) and not torch.isnan(before): print(f"{{before:.3f}}")
model = nn.parallel.DistributedDataParallel(model)
forward = model.forward
def cast(x):
    with torch.autocast("cuda", dtype=torch.bfloat16): return forward(x)
model.forward = cast
"""
SCRIPTS["hook"] = (
    SCRIPTS["ddp"]
    + """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
model.register_comm_hook(None, default_hooks.bf16_compress_hook)
"""
)
SCRIPTS["fsdp1"] = f"""
from torch.distributed.fsdp import FullyShardedDataParallel
model = {LAYERS}
for i in range(3): model[i] = FullyShardedDataParallel(model[i].to("cuda"))
model = FullyShardedDataParallel(model)
"""
SCRIPTS["fsdp1_accumulates"] = f"""
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
how = dict(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True)
model = {LAYERS}
for i in range(3): model[i] = FullyShardedDataParallel(model[i].to("cuda"), **how)
model = FullyShardedDataParallel(model, **how)
class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        with self.inner.no_sync(): self.inner(x).mean().backward()
        return self.inner(x)
model = Twice(model)
"""
SCRIPTS["goes_on"] = """
import copy
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
model[1].weight = model[0].weight
model = copy.deepcopy(model)
assert model[1].weight is model[0].weight
step = torch.optim.SGD.step
def guarded(self, *words):
    try: step(self, *words)
    except BaseException: print("goes on")
torch.optim.SGD.step = guarded
"""
SCRIPTS["memory"] = """
model = nn.Linear(64, 64).to("cuda")
assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
assert isinstance(torch.cuda.memory_summary(), str)
"""
SCRIPTS["by_address"] = (
    SCRIPTS["fsdp2"].replace(
        "for layer in model:", "old = {name: p.data_ptr() for name, p in model.named_parameters()}\nfor layer in model:"
    )
    + """
assert len(set(old.values())) == len(old)
model.found = {address: name for name, address in old.items()}
assert sorted(model.found.values()) == sorted(name for name, _ in model.named_parameters())
"""
)
LAYER_BYTES = 4 * (64 * 256 + 256 + 256 * 64 + 64)

Captured = Callable[..., RankProgram]


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    """A rank of a script, captured in this process."""
    with captures_of_scripts(monkeypatch) as capture:

        def of_name(name: str, world_size: int, rank: int = 0) -> RankProgram:
            script = tmp_path / f"{name}.py"
            script.write_text(HEAD + SCRIPTS[name] + LOOP, encoding="utf-8")
            return capture(script, world_size, rank)

        yield of_name


def test_a_script_may_compare_and_print_losses_and_cast_outside_of_training(captured: Captured) -> None:
    """Weights that were cast without gradients, before the training, are cast again within it."""
    assert sum(sizes(captured("asks", 4), "all_reduce")) == 3 * LAYER_BYTES


def test_batches_of_drawn_samples_may_come_from_workers_into_pinned_memory(captured: Captured) -> None:
    program = captured("workers", 1)
    assert program.on_gpu
    operators = program.program.operators
    assert {op.inputs[1].shape for op in operators if op.name == "aten.addmm"} == {(4, 64)}
    assert not [op.name for op in operators if op.name in ("aten.sinh", "aten.stack")]  # workers run them


def test_a_script_may_print_what_its_gpu_holds(captured: Captured) -> None:
    assert captured("memory", 1).on_gpu


def test_a_communication_hook_reduces_its_own_tensors(captured: Captured) -> None:
    program = captured("hook", 4)
    assert sum(sizes(program, "all_reduce")) == 3 * LAYER_BYTES // 2  # in bf16
    assert whats(program)[What.WAIT] == len(program.collectives)


def test_fsdp1_gathers_twice_and_reduces_once(captured: Captured) -> None:
    program = captured("fsdp1", 4)
    assert sizes(program, "all_gather") == [LAYER_BYTES] * 6
    assert sizes(program, "reduce_scatter") == [LAYER_BYTES] * 3


def test_fsdp1_keeps_gathered_parameters_while_it_accumulates(captured: Captured) -> None:
    """ZeRO-2 frees them after the backward that reduces (torch/distributed/fsdp/_flat_param.py)."""
    program = captured("fsdp1_accumulates", 4)
    assert sizes(program, "all_gather") == [LAYER_BYTES] * 3
    assert sizes(program, "reduce_scatter") == [LAYER_BYTES] * 3


def python_calls(program: RankProgram) -> Counter[str]:
    return Counter(program.host_work[e.value] for e in program.entries if e.what is What.HOST_WORK)


def test_python_of_fsdp2_and_dtensor_is_noted_call_by_call(captured: Captured) -> None:
    """SGD updates each of the 12 parameters by one operator of DTensors."""
    sharded = python_calls(captured("fsdp2", 2))
    assert sharded == {
        "fsdp2_group": 3,
        "fsdp2_parameter": 12,
        "fsdp2_group_backward": 3,
        "fsdp2_parameter_backward": 12,
        "dtensor_operator_optimizer": 12,
    }
    split = python_calls(captured("tp", 2))
    assert split["dtensor_redistribute"] == 5  # as many as all-reduces
    assert split["dtensor_operator_optimizer"] == 12
    assert not python_calls(captured("ddp", 2))


def test_a_script_that_catches_everything_is_captured(captured: Captured) -> None:
    assert captured("goes_on", 1).program.operators


def sizes(program: RankProgram, kind: str) -> list[int]:
    return [c.bytes for c in program.collectives if c.kind == kind]


def whats(program: RankProgram) -> Counter[What]:
    return Counter(e.what for e in program.entries)


def test_ddp_reduces_each_gradient_once_in_buckets(captured: Captured) -> None:
    program = captured("ddp", 16)
    reduced = sizes(program, "all_reduce")
    assert sum(reduced) == 3 * LAYER_BYTES
    assert len(program.collectives) == len(reduced) > 1
    assert whats(program)[What.WAIT] == len(reduced)
    starts = [e.before for e in program.entries if e.what is What.START]
    ends = [e.before for e in program.entries if e.what is What.WAIT]
    assert starts[0] < starts[-1] <= ends[0]  # launched under the backward, waited for after it
    assert all(program.program.operators[i - 1].phase == "backward" for i in starts)
    assert all(set(c.ranks) == set(range(16)) for c in program.collectives)


def test_fsdp2_gathers_twice_and_reduces_once_on_streams_of_its_own(captured: Captured) -> None:
    program = captured("fsdp2", 16)
    assert sizes(program, "all_gather") == [LAYER_BYTES] * 6  # each layer for its forward and for its backward
    assert sizes(program, "reduce_scatter") == [LAYER_BYTES] * 3
    assert len(set(program.streams)) > 1
    starts = {e.stream for e in program.entries if e.what is What.START}
    assert 0 not in starts
    shards = sum(s.bytes for s in program.program.storages if s.kind == "parameter")
    assert shards == 3 * LAYER_BYTES // 16


def test_parameters_are_told_apart_by_their_addresses(captured: Captured) -> None:
    """As Accelerate does, which gives its optimizer FSDP2's parameters by the addresses of those before them."""
    program = captured("by_address", 4)
    steps = [o for o in program.program.operators if o.phase == "optimizer"]
    assert sum(t.bytes for o in steps for t in o.outputs) == 3 * LAYER_BYTES // 4


def test_fsdp2_on_many_ranks_is_as_large_as_on_few(captured: Captured) -> None:
    few, many = captured("fsdp2", 4), captured("fsdp2", 256)
    assert len(few.program.operators) == len(many.program.operators)
    assert len(few.collectives) == len(many.collectives)


def test_tensor_parallelism_reduces_within_its_own_group(captured: Captured) -> None:
    program = captured("tp", 8, rank=5)
    assert sizes(program, "all_reduce") == [4 * 64 * 4] * 5  # the first layer's input needs no gradient
    assert {c.ranks for c in program.collectives} == {(4, 5)}
    assert whats(program)[What.WAIT] == 5


def test_a_script_for_cuda_runs_as_on_a_gpu(captured: Captured) -> None:
    program = captured("cuda", 8, rank=3)
    operators = program.program.operators
    assert program.on_gpu
    assert {x.dtype for op in operators if op.name in ("aten.mm", "aten.addmm") for x in op.inputs} == {"bf16"}
    launched = Counter(op.name for op in operators if op.launches and op.phase == "optimizer")
    assert launched["aten._foreach_addcdiv_"] == 1  # for all tensors at once
    assert not launched["aten.addcdiv_"]
    assert sum(sizes(program, "all_reduce")) == 4 * (100 * 64 + 64 * 100 + 100)
    assert whats(program)[What.HOST_WAIT] == 2  # for the scaler's news, and to synchronize


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "flash_attention_for_cpu"),
        ("cuda", "efficient_attention"),
        ("accelerator", "efficient_attention"),
    ],
)
def test_attention_is_that_of_the_device_that_the_script_chose(captured: Captured, device: str, name: str) -> None:
    operators = captured(f"attention_{device}", 2).program.operators
    assert f"aten._scaled_dot_product_{name}" in {op.name for op in operators}


def test_forbidden_kernels_of_attention_do_not_run(captured: Captured) -> None:
    names = {op.name for op in captured("attention_matmuls", 2).program.operators}
    assert "aten.bmm" in names
    assert not any("scaled_dot_product" in name for name in names)


def test_weights_keep_their_memory_format_and_clipping_is_one_kernel_for_many_tensors(captured: Captured) -> None:
    """A gradient of another layout than its weight would be copied. The script also draws, saves and reads numbers."""
    operators = captured("images", 1).program.operators
    assert "aten.copy_" not in {op.name for op in operators if op.phase == "backward"}
    clips = Counter(op.name for op in operators if op.phase == "clip")
    assert clips["aten._foreach_norm"] == clips["aten._foreach_mul_"] == 1


def test_read_loss_makes_the_host_wait(captured: Captured) -> None:
    assert whats(captured("ddp", 2))[What.HOST_WAIT] == 1


def test_stages_of_a_pipeline_meet_in_their_message(captured: Captured) -> None:
    first, last = captured("pipeline", 2), captured("pipeline", 2, rank=1)
    assert [(c.kind, c.ranks, c.bytes) for c in first.collectives] == [("send", (0, 1), 1024)]
    assert [(c.kind, c.ranks, c.bytes) for c in last.collectives] == [("recv", (0, 1), 1024)]
