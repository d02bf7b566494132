"""A step of DPO with TRL's fused LM head, captured, and the described one: its matmuls, and what its backward keeps."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from captured_layers import BATCH, CONFIGS, MODELS, SEQ
from model_programs import make

from sim.core.program import Block, Compute, Program
from sim.inputs.program_file import CapturedProgram, read_program
from sim.programs.stages import reference_blocks, stage_blocks
from sim.ranks.plan import make_plan

torch = pytest.importorskip("torch")
pytest.importorskip("trl", reason="the fused LM head is TRL's")
WEIGHTS, VOCAB = ("parameter", "frozen parameter"), 1024
NARROW = {"param_dtype": "bf16", "grad_dtype": "bf16", "master_weights": False, "optimizer_dtype": "bf16"}


def captured(folder: Path, rank: int = 0) -> CapturedProgram:
    """The step of `DPOTrainer._compute_loss`, without its metrics, of a frozen copy or of adapters on one model."""
    from calibrate.capture import Step
    from calibrate.capture.program_out import write_program
    from calibrate.capture.run_step import record

    def step() -> Step:
        from transformers import LlamaConfig, LlamaForCausalLM
        from trl.trainer.utils import add_fused_lm_head

        models = [LlamaForCausalLM(LlamaConfig(**CONFIGS["llama"])).to(torch.bfloat16) for _ in range(2 - bool(rank))]
        for model in models:
            add_fused_lm_head(model)
        policy = reference = models[0]
        if rank:
            from peft import LoraConfig, get_peft_model

            whole = LoraConfig(r=rank, target_modules="all-linear")
            policy = reference = get_peft_model(policy, whole)
        else:
            reference = models[1].requires_grad_(False)
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)

        def summed(model: Any) -> Any:
            out = model(input_ids=tokens, labels=tokens, fused_lm_head=True, use_cache=False)
            return out.log_probs.sum(dim=1).chunk(2)

        def loss() -> Any:
            chosen, rejected = summed(policy)
            with torch.no_grad(), policy.disable_adapter() if rank else nullcontext():
                of_chosen, of_rejected = summed(reference)
            delta = (chosen - of_chosen) - (rejected - of_rejected)
            return -torch.nn.functional.logsigmoid(0.1 * delta).mean()

        both = policy if rank else torch.nn.ModuleList([policy, reference])
        trained = [p for p in both.parameters() if p.requires_grad]
        return Step(both, loss, torch.optim.AdamW(trained), SEQ, BATCH)

    path = folder / "p.json.gz"
    write_program(path, *record(step, "cuda"))
    return read_program(path)


def described(rank: int) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """The blocks of the trained model, and of its reference."""
    adapters = {"lora": {"rank": rank}, "autocast": False} if rank else {}
    keys = {"framework": "transformers", "cross_entropy": "tiled", "preference": {"loss": "dpo"}, **adapters}
    plan = make_plan(make(MODELS["llama"], {"seq_len": SEQ, "micro_batch_size": BATCH, **NARROW, **keys}))
    return stage_blocks(plan, plan.parts[0], 0), reference_blocks(plan, plan.parts[0], 0)


def flops(programs: Iterable[Program]) -> float:
    return sum(i.flops for p in programs for i in p if isinstance(i, Compute) and i.kind == "gemm")


def captured_flops(program: CapturedProgram, phase: str) -> tuple[float, float]:
    """Flops of matmuls in the layers, and of those in the vocabulary's."""
    of_layers = of_head = 0.0
    for o in program.operators:
        if o.phase != phase or o.name not in ("aten.mm", "aten.addmm_"):
            continue
        a, b = (x.shape for x in o.inputs[o.name == "aten.addmm_" :][:2])
        mine = 2.0 * a[0] * a[1] * b[1]
        if VOCAB in (*a, *b):
            of_head += mine
        else:
            of_layers += mine
    return of_layers, of_head


@pytest.mark.parametrize("rank", [0, 8])
def test_matmuls_are_those_of_both_models(tmp_path: Path, rank: int) -> None:
    """The last token of each sequence predicts none, and TRL leaves it out of the head."""
    if rank:
        pytest.importorskip("peft", reason="the adapters are peft's")
    program, (policy, reference) = captured(tmp_path, rank), described(rank)
    layers, head = captured_flops(program, "forward")
    assert flops(b.forward for b in (*policy[:-1], *reference[:-1])) == layers
    assert flops(b.forward for b in (policy[-1], reference[-1])) * (SEQ - 1) / SEQ == pytest.approx(head, rel=1e-12)
    layers, head = captured_flops(program, "backward")
    assert flops(b.backward for b in policy[:-1]) == layers
    assert flops([policy[-1].backward]) * (SEQ - 1) / SEQ == pytest.approx(head, rel=1e-12)


@pytest.mark.parametrize("rank", [0, 8])
def test_the_backward_keeps_what_the_captured_one_keeps(tmp_path: Path, rank: int) -> None:
    """Nothing of the reference."""
    if rank:
        pytest.importorskip("peft", reason="the adapters are peft's")
    program, (policy, _) = captured(tmp_path, rank), described(rank)
    kept = sum(s.bytes for s in program.storages if s.kind == "activation")
    assert sum(s.bytes for b in policy for s in b.saved) == pytest.approx(kept, rel=0.005)


def test_weights_of_the_reference_are_held_besides(tmp_path: Path) -> None:
    program, (policy, reference) = captured(tmp_path), described(0)
    held = {kind: sum(s.bytes for s in program.storages if s.kind == kind) for kind in WEIGHTS}
    assert sum(b.params for b in policy) * 2 == held["parameter"]
    assert sum(b.held_params for b in reference) * 2 == held["frozen parameter"]
