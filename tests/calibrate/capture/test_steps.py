"""What surrounds the layers of a captured step: optimizers, clipping, experts, and numbers that the host reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.core.program import Comm
from sim.inputs.program_file import CapturedProgram, read_program
from sim.models.captured.kernels import moved_bytes
from sim.models.captured.operators import compute_of, items_of, known

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")
F = torch.nn.functional
EXPERTS, WIDTH, TOKENS = 4, 16, 32
ELEMENTS = 2 * (WIDTH * WIDTH + WIDTH)


def captured(folder: Path, make: Callable[[], Any], device: str = "cuda", balanced: bool = False) -> CapturedProgram:
    """Capture a step of `make`, which returns a model, its loss and an optimizer."""
    from calibrate.capture import Step
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record

    path = folder / f"p{len(list(folder.iterdir()))}.json.gz"  # a file is read once
    write_program(path, *record(lambda: Step(*make(), 1, 1), device, balanced))
    return read_program(path)


def launched(program: CapturedProgram, phase: str = "") -> Counter[str]:
    """Count the launched operators of a phase by name."""
    return Counter(o.name.removeprefix("aten.") for o in program.operators if o.launches and phase in o.phase)


def two_layers(optimizer: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return what makes a step of two equal layers."""

    def make() -> Any:
        model, x = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))), torch.randn(8, WIDTH)
        return model, lambda: model(x).square().mean(), optimizer(model)

    return make


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "Adagrad"])
def test_an_optimizer_reads_its_count_of_steps_on_the_host(tmp_path: Path, name: str) -> None:
    """torch keeps the count there unless a fused kernel or a CUDA graph reads it, so no kernel and no wait is due."""
    program = captured(tmp_path, two_layers(lambda m: getattr(torch.optim, name)(m.parameters(), foreach=True)))
    assert "_local_scalar_dense" not in launched(program)
    counts = [s for s in program.storages if s.kind == "host"]
    assert len(counts) == 4 * (2 if name == "NAdam" else 1)  # and NAdam's product of momenta
    fused = captured(tmp_path, two_layers(lambda m: torch.optim.AdamW(m.parameters(), fused=True)))
    assert launched(fused, "optimizer") == {"_foreach_add_": 1, "_fused_adamw_": 1}


def test_lists_are_read_once_and_only_the_changed_one_is_written(tmp_path: Path) -> None:
    program = captured(tmp_path, two_layers(lambda m: torch.optim.AdamW(m.parameters())))
    moved = {o.name: moved_bytes(o) / (4 * ELEMENTS) for o in program.operators if o.launches and "foreach" in o.name}
    assert moved == {
        "aten._foreach_mul_": 2,
        "aten._foreach_lerp_": 3,
        "aten._foreach_addcmul_": 3,  # the gradient's square
        "aten._foreach_sqrt": 2,
        "aten._foreach_div_": 2,
        "aten._foreach_add_": 2,
        "aten._foreach_addcdiv_": 4,
    }


ALONE: dict[str, Callable[[Any], Any]] = {  # optimizers that change one parameter after the other by default
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "a tensor as learning rate": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-3)),
}


@pytest.mark.parametrize("case", ALONE)
def test_an_optimizer_that_takes_parameters_one_by_one_on_a_gpu_does_so(tmp_path: Path, case: str) -> None:
    """It reads neither its count nor its learning rate from the GPU.

    Adafactor reads two norms of each parameter (torch/optim/_adafactor.py, `_single_tensor_adafactor`).
    """
    found = launched(captured(tmp_path, two_layers(ALONE[case])), "optimizer")
    assert not any(name.startswith("_foreach") for name in found)
    assert found["_local_scalar_dense"] == (2 * 4 if case == "Adafactor" else 0)


def test_a_matrix_that_an_optimizer_makes_lies_on_the_gpu(tmp_path: Path) -> None:
    def make() -> Any:
        model, loss, _ = two_layers(lambda m: None)()

        class Preconditioned(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:
                for p in model.parameters():
                    sums = self.state[p].setdefault("sums", torch.eye(len(p)))
                    sums += p.view(len(p), -1) @ p.view(len(p), -1).T
                super().step()

        return model, loss, Preconditioned(model.parameters())

    program = captured(tmp_path, make)
    assert launched(program, "optimizer")["add_"] == 4
    assert [s.kind for s in program.storages].count("host") == 0


@pytest.mark.parametrize(("momentum", "times"), [(0.0, 3), (0.9, 5)])
def test_a_fused_sgd_writes_all_but_gradients(tmp_path: Path, momentum: float, times: int) -> None:
    def sgd(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, fused=True)

    program = captured(tmp_path, two_layers(sgd))
    assert [moved_bytes(o) for o in program.operators if "fused_sgd" in o.name] == [times * 4 * ELEMENTS]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_clipping_of_the_code_runs_for_many_tensors_at_once(tmp_path: Path, device: str) -> None:
    def make() -> Any:
        model, loss, _ = two_layers(lambda m: None)()

        class Clipping(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                super().step()

        return model, loss, Clipping(model.parameters())

    found = launched(captured(tmp_path, make, device), "optimizer")
    assert (found["clamp_"], found["_foreach_clamp_min_"], found["_foreach_norm"]) == (0, 1, 1)


def test_parameters_that_no_optimizer_has_begin_a_step_without_gradients(tmp_path: Path) -> None:
    program = captured(tmp_path, two_layers(lambda m: torch.optim.SGD(m[0].parameters())))
    assert not launched(program, "backward")["add_"]


class Experts(torch.nn.Module):
    """Experts in one grouped matmul; their weights are used as they are, or transposed."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
        self.transposed = transposed
        if transposed:
            self.weight = torch.nn.Parameter(self.weight.detach().mT.contiguous())

    def forward(self, x: Any) -> Any:
        """Give each expert equally many rows."""
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (TOKENS // EXPERTS)
        weight = self.weight.mT if self.transposed else self.weight
        return torch._grouped_mm(x.relu(), weight, ends)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_run_on_a_cpu_as_captured(tmp_path: Path, transposed: bool) -> None:
    """A gradient has the layout of its weight, so nothing copies it."""
    from calibrate.real_steps.measure_program import differences
    from calibrate.real_steps.operator_times import OperatorTimes

    def make() -> Any:
        model, x = Experts(transposed), torch.randn(TOKENS, WIDTH)
        return model, lambda: model(x).square().mean(), torch.optim.SGD(model.parameters())

    program = captured(tmp_path, make, "cpu")
    assert launched(program)["_grouped_mm"] == 2
    _, loss, optimizer = make()
    with OperatorTimes("cpu") as times:
        loss().backward()
        optimizer.step()
    ran = [{"operator": name, "count": count} for (name, _), count in times.counts.items()]
    assert differences(program, ran, 1) == {}


def test_a_batched_matmul_is_what_a_grouped_one_without_ends_is(tmp_path: Path) -> None:
    def make() -> Any:
        model, x = Experts(False), torch.randn(EXPERTS, 8, WIDTH)
        return model, lambda: torch._grouped_mm(x, model.weight).sum(), torch.optim.SGD(model.parameters())

    assert launched(captured(tmp_path, make), "forward")["bmm"] == 1


def routed(code: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """Return what makes a step of `code`, which gets rows and the expert of each."""

    def make() -> Any:
        model, x = torch.nn.Linear(WIDTH, EXPERTS), torch.randn(TOKENS, WIDTH)

        def loss() -> Any:
            scores = model(x)
            return code(x, scores.argmax(-1)).float().sum() + scores.sum()

        return model, loss, torch.optim.SGD(model.parameters())

    return make


WAITING: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "where": (lambda x, chosen: x[torch.where(chosen == 1)[0]], 1),
    "mask": (lambda x, chosen: x[chosen == 1], 1),
    "bincount": (lambda x, chosen: torch.bincount(chosen, minlength=EXPERTS), 2),
    "tolist": (lambda x, chosen: torch.cat(x.split([len([i]) for i in chosen.tolist()])), 1),
    "item": (lambda x, chosen: x * chosen.sum().item(), 1),
    "one hot": (lambda x, chosen: F.one_hot(chosen, EXPERTS), 0),
    "inverse": (lambda x, chosen: torch.linalg.inv(x.T @ x), 1),
    "unchecked inverse": (lambda x, chosen: torch.linalg.inv_ex(x.T @ x).inverse, 0),
    "eigenvalues": (lambda x, chosen: torch.linalg.eigvalsh(x.T @ x), 1),
    "singular values": (lambda x, chosen: torch.linalg.svdvals(x), 1),
}


@pytest.mark.parametrize("case", WAITING)
def test_the_host_waits_where_it_reads_a_number(tmp_path: Path, case: str) -> None:
    code, waits = WAITING[case]
    program = captured(tmp_path, routed(code), balanced=True)
    items = [i for o in program.operators if o.launches for i in items_of(o)]
    assert [(i.kind, i.group) for i in items if isinstance(i, Comm)] == [("offload", "host")] * waits
    assert not any(isinstance(i, Comm) for o in program.operators if o.launches for i in items_of(o, False))


def test_one_hot_writes_ones_into_zeros(tmp_path: Path) -> None:
    found = launched(captured(tmp_path, routed(lambda x, chosen: F.one_hot(chosen, EXPERTS)), balanced=True), "forward")
    assert (found["zeros"], found["scatter_"], found["eq"]) == (1, 1, 0)


def test_distances_have_a_gradient_for_each_pair(tmp_path: Path) -> None:
    def make() -> Any:
        model, x = torch.nn.Linear(WIDTH, WIDTH), torch.randn(8, WIDTH)
        return model, lambda: torch.cdist(model(x), x, p=1.0).mean(), torch.optim.SGD(model.parameters())

    program = captured(tmp_path, make)
    op = next(o for o in program.operators if o.name == "aten._cdist_backward")
    assert known(op.name)
    assert moved_bytes(op) >= 2 * 4 * 8 * 8 * WIDTH


def test_products_in_place_and_sums_of_products_have_their_flops(tmp_path: Path) -> None:
    """As hand-written optimizers use them."""

    def make() -> Any:
        model, x = torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(3, WIDTH, WIDTH)

        class Products(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                with torch.no_grad():
                    model.weight.addmm_(x[0], x[1])
                    x.baddbmm_(x, x)
                    torch.addbmm(model.weight, x, x)

        return model, lambda: model(x).square().mean(), Products(model.parameters())

    program = captured(tmp_path, make)
    products = [compute_of(o) for o in program.operators if o.launches and o.phase == "optimizer"]
    assert [(c.kind, c.flops) for c in products] == [("gemm", n * 2 * WIDTH**3) for n in (1, 3, 3)]


def test_operators_of_few_models_are_known(tmp_path: Path) -> None:
    def make() -> Any:
        model, x = torch.nn.Linear(WIDTH, WIDTH), torch.randn(8, WIDTH)
        labels = torch.ones(8, dtype=torch.long)

        def loss() -> Any:
            y = model(x)
            window = torch.hann_window(WIDTH)
            kept = torch.bernoulli(torch.full_like(y, 0.5))
            wide = torch.diag_embed(y).sum() + torch.count_nonzero(kept) + torch.isin(labels, labels).sum()
            return wide + F.multi_margin_loss(y, labels) + F.soft_margin_loss(y, kept) + (y * window).nansum()

        return model, loss, torch.optim.SGD(model.parameters())

    program = captured(tmp_path, make)
    assert [o.name for o in program.operators if o.launches and not known(o.name)] == []


COUNTED: dict[str, Callable[[Any, Any], Any]] = {  # from a count that nobody knows, and rows
    "a sum": lambda n, x: x if f"{(n + 1) / 8:.0%} {n} {n:d}" == "100% 1 1" else x / 0,
    "a tensor": lambda n, x: (x * n + n * x) / n,
}
DECIDING: dict[str, Callable[[Any, Any], Any]] = {
    "a part": lambda n, x: x[:n],
    "a size": lambda n, x: x.new_zeros(n),
    "a loop": lambda n, x: sum(x for _ in range(n)),
    "a condition": lambda n, x: x if n > 0 else 2 * x,
    "an equality": lambda n, x: x if n == 0 else 2 * x,
}


def counting(use: Callable[[Any, Any], Any]) -> Callable[[], Any]:
    """Return what makes a step that counts right answers."""
    return routed(lambda x, chosen: use((chosen == 1).sum().item(), x))


@pytest.mark.parametrize("case", COUNTED)
def test_right_answers_are_counted(tmp_path: Path, case: str) -> None:
    assert launched(captured(tmp_path, counting(COUNTED[case])))["_local_scalar_dense"] == 1


@pytest.mark.parametrize("case", DECIDING)
def test_a_count_that_decides_what_runs_is_refused(tmp_path: Path, case: str) -> None:
    from calibrate.capture.failure import failure

    with pytest.raises(Exception, match=r".") as error:
        captured(tmp_path, counting(DECIDING[case]))
    assert "--routing balanced" in str(failure(error.value, "mine:step"))


def test_a_number_in_a_text_is_the_one_that_item_gives(tmp_path: Path) -> None:
    names = []

    def code(x: Any, chosen: Any) -> Any:
        names.extend(f"expert_{i}" for i in (chosen == 1).nonzero()[:2, 0])
        return x

    captured(tmp_path, routed(code), balanced=True)
    assert names[:2] == ["expert_1", "expert_5"]
