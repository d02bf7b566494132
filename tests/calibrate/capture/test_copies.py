"""Copies between the host's memory and a GPU in captured steps: which there are, their bytes, and who waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.program_file import CapturedOperator, CapturedProgram, HostCopy, read_program
from sim.inputs.script_program import RankProgram
from tests.calibrate.capture.captured_scripts import captures_of_scripts

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

HEAD = """
import torch, torch.nn as nn, torch.distributed as dist
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = run()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
ON_GPU = 'model = nn.Linear(64, 32).to("cuda")\n'
X_BYTES = 4 * 4 * 64  # a batch of fp32
SYNC, LATER, PINNED = HostCopy(True, False, False), HostCopy(True, False, True), HostCopy(True, True, True)
OUT = HostCopy(False, False, False)

Captured = Callable[..., RankProgram]


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    """A rank of a script whose step calls `run`, captured in this process."""
    with captures_of_scripts(monkeypatch) as capture:

        def of_source(source: str, world_size: int = 1, loop: str = LOOP) -> RankProgram:
            script = tmp_path / "train.py"
            script.write_text(HEAD + source + loop, encoding="utf-8")
            return capture(script, world_size, 0)

        yield of_source


def copies(program: CapturedProgram) -> list[tuple[HostCopy, int]]:
    """The copies of a program with their bytes."""
    return [(o.host_copy, moved(o)) for o in program.operators if o.host_copy is not None]


def moved(op: CapturedOperator) -> int:
    return sum(x.bytes for x in op.outputs)


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ('torch.randn(4, 64).to("cuda")', [(SYNC, X_BYTES)]),
        ("torch.randn(4, 64).cuda()", [(SYNC, X_BYTES)]),
        ('torch.randn(4, 64).to(torch.device("cuda", 0), non_blocking=True)', [(LATER, X_BYTES)]),
        ('torch.randn(4, 64).pin_memory().to("cuda", non_blocking=True)', [(PINNED, X_BYTES)]),
        ('torch.zeros(4, 64, pin_memory=True).add(1).to("cuda")', [(SYNC, X_BYTES)]),
        ('torch.from_numpy(numbers).to("cuda").float()', [(SYNC, X_BYTES // 4)]),
        ("torch.stack([torch.randn(64)] * 4).to(model.weight)", [(SYNC, X_BYTES)]),
        ('torch.empty(4, 64, device="cuda").copy_(torch.randn(4, 64))', [(SYNC, X_BYTES)]),
        ('torch.tensor([[1.0] * 64] * 4, device="cuda")', [(SYNC, X_BYTES)]),
        ('torch.as_tensor(numbers, device="cuda").float()', [(SYNC, X_BYTES // 4)]),
        ('torch.as_tensor(torch.randn(4, 64, device="cuda"), device="cuda")', []),
        ('torch.randn(4, 64, device="cuda").to("cuda")', []),
        ('torch.randn(4, 64, device="cuda").cuda().mul(2).to(model.weight)', []),
        ("torch.randn(4, 64)", []),
    ],
)
def test_a_batch_that_goes_to_the_gpu_is_copied_once(
    captured: Captured, made: str, found: list[tuple[HostCopy, int]]
) -> None:
    source = "import numpy\nnumbers = numpy.zeros((4, 64), dtype=numpy.uint8)\n"
    program = captured(f"{source}{ON_GPU}run = lambda: model({made}).square().mean()\n").program
    assert copies(program) == found


@pytest.mark.parametrize(
    ("to", "crossing", "casts"),
    [('"cuda", torch.bfloat16', 2, 0), ('"cuda", torch.bfloat16, non_blocking=True', 4, 1)],
)
def test_a_cast_runs_on_the_host_unless_the_copy_is_non_blocking(
    captured: Captured, to: str, crossing: int, casts: int
) -> None:
    """The bytes that cross are those of the dtype before or after the cast."""
    source = f"{ON_GPU}run = lambda: model.bfloat16()(torch.randn(4, 64).to({to})).square().mean()\n"
    program = captured(source).program
    assert [size for _, size in copies(program)] == [4 * 64 * crossing]
    after = [o.name for o in program.operators if o.launches and o.host_copy is None and o.phase == "forward"]
    assert after[: after.index("aten.addmm")].count("aten._to_copy") == casts


@pytest.mark.parametrize("default", ['"cuda"', 'torch.device("cuda", 0)', "0"])
def test_tensors_lie_where_the_script_says_that_those_without_a_device_do(captured: Captured, default: str) -> None:
    """A tensor of Python's numbers is still made on the host and copied."""
    source = f"""torch.set_default_device({default})
assert torch.get_default_device().type == "cuda"
model, x, y = nn.Linear(64, 32), torch.randn(4, 64), torch.zeros(4, 64, device="cpu")
run = lambda: model(x + y.to("cuda") + torch.tensor(1.0)).square().mean()
"""
    program = captured(source)
    assert program.on_gpu
    assert copies(program.program) == [(SYNC, X_BYTES), (SYNC, 4)]


def test_the_same_batch_is_copied_in_each_step(captured: Captured) -> None:
    program = captured(f'{ON_GPU}x = torch.randn(4, 64)\nrun = lambda: model(x.to("cuda")).sum()\n').program
    assert copies(program) == [(SYNC, X_BYTES)]


@pytest.mark.parametrize("out", ["out.detach().cpu()", 'out.detach().to("cpu")', "held.copy_(out.detach())"])
def test_a_result_that_is_read_on_the_host_is_copied(captured: Captured, out: str) -> None:
    source = f"""{ON_GPU}
held = torch.empty(4, 32)
def run():
    out = model(torch.randn(4, 64, device="cuda"))
    here = {out}
    here.cpu(), here.to("cpu"), here.mul(2).cpu()
    return out.sum()
"""
    assert copies(captured(source).program) == [(OUT, 4 * 4 * 32)]


def test_a_script_of_the_cpu_has_no_copies(captured: Captured) -> None:
    source = 'model = nn.Linear(64, 32)\nrun = lambda: model(torch.randn(4, 64).to("cpu").cpu()).sum().cpu()\n'
    assert copies(captured(source).program) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_loader_with_pinned_memory_are_pinned(captured: Captured, workers: int) -> None:
    """Token ids are real numbers in the capture, and are copied all the same."""
    source = f"""
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8)).to("cuda")
loader = DataLoader(TensorDataset(torch.randint(0, 100, (64, 17))), 4, pin_memory=True, num_workers={workers})
batches = iter(loader)
run = lambda: model(next(batches)[0].to("cuda", non_blocking=True)[:, :-1]).sum()
"""
    assert copies(captured(source).program) == [(PINNED, 8 * 4 * 17)]


def test_a_copy_is_issued_on_the_current_stream(captured: Captured) -> None:
    source = f"""{ON_GPU}
side = torch.cuda.Stream()
def run():
    with torch.cuda.stream(side):
        x = torch.randn(4, 64).pin_memory().to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    return model(x).sum()
"""
    program = captured(source)
    streams = {s for o, s in zip(program.program.operators, program.streams, strict=True) if o.host_copy is not None}
    assert len(streams) == 1
    assert 0 not in streams


def test_optimizer_states_that_are_offloaded_go_out_and_come_back(captured: Captured) -> None:
    """Momentum of 64 * 32 weights and 32 biases; the model itself goes out and comes back too."""
    loop = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(4):
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to("cuda", non_blocking=True)
    optimizer.step(); optimizer.zero_grad()
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to("cpu", non_blocking=True)
    model.cpu(); model.cuda()
"""
    program = captured(ON_GPU, loop=loop).program
    sizes = [4 * 64 * 32, 4 * 32]
    back, out = HostCopy(True, True, True), HostCopy(False, True, True)
    both = [*((out, n) for n in sizes), *((OUT, n) for n in sizes), *((SYNC, n) for n in sizes)]
    assert sorted(copies(program)) == sorted([*both, *((back, n) for n in sizes)])


@pytest.mark.parametrize("pinned", [True, False])
def test_fsdp2_with_parameters_on_the_host_copies_shards_in_and_gradients_out(captured: Captured, pinned: bool) -> None:
    """Each of two ranks holds half of each tensor; a layer is gathered for its forward and for its backward."""
    source = f"""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
dist.init_process_group("nccl")
model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
for layer in model: fully_shard(layer, mesh=init_device_mesh("cuda", (2,)), offload_policy=CPUOffloadPolicy({pinned}))
fully_shard(model, mesh=init_device_mesh("cuda", (2,)), offload_policy=CPUOffloadPolicy({pinned}))
run = lambda: model(torch.randn(4, 64, device="cuda")).sum()
"""
    program = captured(source, 2).program
    shards = 4 * (64 * 256 + 256 + 256 * 64 + 64) // 2
    found = copies(program)
    assert {copy for copy, _ in found} == {HostCopy(True, pinned, True), HostCopy(False, pinned, pinned)}
    assert sum(size for copy, size in found if copy.to_device) == 2 * shards
    assert sum(size for copy, size in found if not copy.to_device) == shards


def test_fsdp2_without_offload_has_no_copies(captured: Captured) -> None:
    source = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
fully_shard(model, mesh=init_device_mesh("cuda", (2,)))
run = lambda: model(torch.randn(4, 64, device="cuda")).sum()
"""
    assert copies(captured(source, 2).program) == []


SAVING = """
def run():
    with torch.autograd.graph.save_on_cpu({pinned}):
        return model(torch.randn(4, 64, device="cuda")).tanh().sum()
"""


@pytest.mark.parametrize("pinned", [True, False])
def test_saved_tensors_go_to_the_host_and_come_back(captured: Captured, pinned: bool) -> None:
    """A linear layer without a gradient of its input saves that; tanh its result."""
    program = captured(ON_GPU + SAVING.format(pinned=pinned)).program
    sizes = [X_BYTES, 4 * 4 * 32]
    out, back = (HostCopy(to_device, pinned, pinned) for to_device in (False, True))
    assert copies(program) == [*((out, n) for n in sizes), *((back, n) for n in sizes[::-1])]
    assert [o.phase for o in program.operators if o.host_copy is not None] == ["forward"] * 2 + ["backward"] * 2


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_function_may_save_tensors_on_the_host(tmp_path: Path, device: str) -> None:
    """They are not among the saved activations of the GPU."""
    from calibrate.capture import Step
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record

    def make() -> Step:
        model = torch.nn.Linear(64, 32)
        x = torch.zeros(4, 64)

        def loss() -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
                return model(x).tanh().sum()

        return Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), 4, 1)

    path = tmp_path / "p.json.gz"
    write_program(path, *record(make, device))
    program = read_program(path)
    sizes = [X_BYTES, 4 * 4 * 32]
    assert [size for _, size in copies(program)] == (sizes + sizes[::-1] if device == "cuda" else [])
    held = sum(s.bytes for s in program.storages if s.kind == "host")
    assert held == (sum(sizes) if device == "cuda" else 0)
