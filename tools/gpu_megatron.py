"""Train a few layers under Megatron-Core on one GPU, and record steps, memory and kernels.

    torchrun is not needed: python tools/gpu_megatron.py TABLE.json --out DIRECTORY [--rows NAME …] [--kernels]

Needs an NVIDIA GPU, torch, megatron-core and Transformer Engine. TABLE.json is a table of measurements
(`scenarios/measured/gpu_megatron/table.json`). Each row's scenario becomes Megatron-Core's configuration. Its step is
the one of Megatron-LM's `pretrain_gpt.py`: copy of the batch, forward and backward of each micro-batch, check of the
loss, clipping, the distributed optimizer. DIRECTORY receives, for each row, one line of `steps.jsonl` (times of all
steps, peaks) and, with `--kernels`, one file of all kernels of a step of at most two micro-batches, in the order of
their starts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

WARM_UP, STEPS = 4, 10
JSON = dict[str, Any]


def stand_in_for_apex() -> None:
    """Give Megatron's own linear layer (the output layer) the matmul that adds to fp32 gradients; Apex has the same."""
    module: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")

    def accumulate(inputs: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(
            inputs, gradient, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True
        )

    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate
    sys.modules[module.__name__] = module


def start() -> None:
    """Initialize one rank with Megatron's groups."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": "0", "WORLD_SIZE": "1"}
    stand_in_for_apex()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def experts(model: JSON, training: JSON) -> JSON:
    """Return Megatron's settings for the experts of a model; none for a dense one."""
    moe = model.get("moe")
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe["experts"],
        "moe_router_topk": moe["top_k"],
        "moe_ffn_hidden_size": moe["ffn"],
        "moe_layer_freq": [0] * moe["dense_layers"] + [1] * (model["layers"] - moe["dense_layers"]),
        "moe_shared_expert_intermediate_size": (moe.get("shared_experts", 0) * moe["ffn"]) or None,
        "moe_expert_capacity_factor": moe.get("capacity_factor"),
        "moe_pad_expert_input_to_capacity": moe.get("pad_to_capacity", False),
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_force_load_balancing": moe.get("capacity_factor") is None,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_router_fusion": training.get("moe_router_fusion", False),
    }


def numbers(training: JSON) -> JSON:
    """Return Megatron's settings for dtypes, recomputation and the loss."""
    recompute, loss = training.get("recompute", "none"), training.get("cross_entropy", "unfused")
    settings: JSON = {
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "cross_entropy_loss_fusion": loss != "unfused",
        "cross_entropy_fusion_impl": "te" if loss == "fused" else "native",
    }
    if training["precision"] == "fp8":
        settings |= {"fp8": "hybrid", "fp8_recipe": training["fp8_recipe"]}
    if recompute == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return settings


def config_of(model: JSON, training: JSON) -> Any:
    """Return Megatron's configuration of a row."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    swiglu = model["mlp"] == "swiglu"
    settings: JSON = {
        "num_layers": model["layers"],
        "hidden_size": model["hidden"],
        "num_attention_heads": model["heads"],
        "ffn_hidden_size": model.get("ffn") or model["moe"]["ffn"],
        "gated_linear_unit": swiglu,
        "activation_func": F.silu if swiglu else F.gelu,
        "add_bias_linear": model["bias"],
        "normalization": "RMSNorm" if model["norm"] == "rmsnorm" else "LayerNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "gradient_accumulation_fusion": True,
        "deallocate_pipeline_outputs": True,
    }
    settings |= experts(model, training) | numbers(training)
    mla = model.get("mla")
    if mla is None:
        kind = TransformerConfig
        settings |= {
            "num_query_groups": model.get("kv_heads", model["heads"]),
            "kv_channels": model.get("head_dim", model["hidden"] // model["heads"]),
            "qk_layernorm": model.get("qk_norm", False),
            "apply_rope_fusion": model["positions"] == "rope",
        }
    else:
        kind = MLATransformerConfig
        settings |= {
            "q_lora_rank": mla["q_lora_rank"],
            "kv_lora_rank": mla["kv_lora_rank"],
            "qk_head_dim": mla["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": mla["qk_rope_head_dim"],
            "v_head_dim": mla["v_head_dim"],
            "qk_layernorm": True,
            "rope_type": "rope",
        }
    return kind(**settings)


def build(row: JSON) -> tuple[Any, Any]:
    """Return the wrapped model and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    model, training = row["model"], row["training"]
    config = config_of(model, training)
    gpt = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=-(-model["vocab"] // 128) * 128,
        max_sequence_length=training["seq_len"],
        share_embeddings_and_output_weights=model["tied_embeddings"],
        position_embedding_type="rope" if model["positions"] == "rope" else "learned_absolute",
    ).cuda()
    copies = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=True
    )
    wrapped = DistributedDataParallel(config, copies, Float16Module(config, gpt))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-5,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=1.0,
        ),
        [wrapped],
    )
    # megatron/training/training.py: train() sets these on the configuration.
    from megatron.core.distributed import finalize_model_grads

    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped, optimizer


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, JSON]:
    """Return a micro-batch's loss as `loss_func` of Megatron-LM's pretrain_gpt.py, with its checks."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    losses, mask = output.view(-1).float(), mask.view(-1).float()
    loss = torch.sum(losses * mask)
    for refused in (torch.isnan, torch.isinf):
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=refused, message="loss", tolerance=0.0, fatal=True
        )
    count = mask.sum().clone().detach().to(torch.int)
    return loss, count, {"lm loss": torch.cat([loss.clone().detach().view(1), count.view(1)])}


def forward(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Run one forward as `forward_step` of pretrain_gpt.py."""
    batch = {name: value.cuda(non_blocking=True) for name, value in next(batches).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, partial(loss_of, batch["loss_mask"])


def batches_of(training: JSON, vocab: int) -> Any:
    """Yield micro-batches of random tokens in pinned host memory, without end."""
    shape = (training["micro_batch_size"], training["seq_len"])
    pool = []
    for _ in range(4):
        tokens = torch.randint(0, vocab, (shape[0], shape[1] + 1))
        batch = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(shape),
            "position_ids": torch.arange(shape[1]).expand(shape).contiguous(),
        }
        pool.append({name: value.pin_memory() for name, value in batch.items()})
    while True:
        yield from pool


class Run:
    """One row: `step()` trains one step."""

    def __init__(self, row: JSON) -> None:
        self.model, self.optimizer = build(row)
        self.training = row["training"]
        self.batches = batches_of(self.training, row["model"]["vocab"])
        self.micro_batches = self.training["global_batch_size"] // self.training["micro_batch_size"]

    def step(self) -> None:
        """Train one step as `train_step` of megatron/training/training.py."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=self.batches,
            model=[self.model],
            num_microbatches=self.micro_batches,
            seq_length=self.training["seq_len"],
            micro_batch_size=self.training["micro_batch_size"],
            forward_only=False,
        )
        ok, norm, _ = self.optimizer.step()
        losses = torch.vstack([loss["lm loss"] for loss in self.losses]).sum(dim=0)
        self.loss = float(losses[0] / losses[1])  # `training_log` with --log-interval 1
        self.ok = (ok, float(norm) if norm is not None else None)


def measure(run: Run) -> JSON:
    """Return times of steps, the host's time to issue one, and peaks."""
    for index in range(WARM_UP):
        run.step()
        if index == 0:
            torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    steps_s: list[float] = []
    began = time.perf_counter()
    while len(steps_s) < STEPS and time.perf_counter() - began < 12:
        before = time.perf_counter()
        run.step()
        torch.cuda.synchronize()
        steps_s.append(time.perf_counter() - before)
    return {
        "step_time_s": statistics.median(steps_s),
        "steps_s": [round(value, 6) for value in steps_s],
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "loss": run.loss,
        "update": run.ok,
    }


def kernels_of(run: Run) -> JSON:
    """Profile one step. Each kernel: [name, stream, start, duration, launch, operator], times in microseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    operators = sorted(
        (event for event in events if event.get("cat") in ("cpu_op", "user_annotation")), key=lambda e: e["ts"]
    )
    by_id = {event["args"].get("External id"): event["name"] for event in operators if "args" in event}
    found = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    origin = min(event["ts"] for event in found)
    names: dict[str, int] = {}
    rows = []
    for event in sorted(found, key=lambda e: e["ts"]):
        args = event["args"]
        launch = launches.get(args.get("correlation"))
        operator = by_id.get(args.get("External id"), "")
        rows.append(
            [
                names.setdefault(event["name"][:160], len(names)),
                args.get("stream", -1),
                round(event["ts"] - origin, 2),
                round(event["dur"], 2),
                round(launch["ts"] - origin, 2) if launch else None,
                names.setdefault(operator[:80], len(names)),
            ]
        )
    waits = [
        [event["name"], round(event["ts"] - origin, 1), round(event["dur"], 1)]
        for event in events
        if event.get("cat") == "cuda_runtime" and "ynchronize" in event["name"] and event.get("dur", 0) > 20
    ]
    return {"names": list(names), "kernels": rows, "waits": waits}


def run_row(name: str, row: JSON, args: argparse.Namespace) -> None:
    """Measure one row, and write what was found."""
    result: JSON = {"id": name}
    try:
        start()
        run = Run(row)
        result |= measure(run)
        if args.kernels:
            run.micro_batches = min(run.micro_batches, 2)
            with gzip.open(args.out / f"kernels_{name}.json.gz", "wt") as file:
                json.dump(kernels_of(run), file)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:600]
        traceback.print_exc(limit=-6)
    print(json.dumps({key: value for key, value in result.items() if key != "steps_s"}), flush=True)
    with (args.out / "steps.jsonl").open("a") as lines:
        lines.write(json.dumps(result) + "\n")


def main() -> None:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="*", help="names of rows; left out: all of them")
    parser.add_argument("--kernels", action="store_true", help="record the kernels of each row")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after so many seconds")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    table = json.loads(args.table.read_text())
    rows = {row["id"]: row["scenario"] for row in table["rows"]}
    if args.rows and len(args.rows) == 1:
        scenario = rows[args.rows[0]]
        training = table["scenario"]["training"] | scenario["training"]
        run_row(args.rows[0], {"model": scenario["model"], "training": training}, args)
        return
    began = time.perf_counter()
    # Hooks of Megatron's gradients keep a model alive, so that each row has a process of its own.
    for name in args.rows or rows:
        if time.perf_counter() - began > args.seconds:
            print("out of time before", name, flush=True)
            break
        command = [sys.executable, __file__, str(args.table), "--out", str(args.out), "--rows", name]
        subprocess.run([*command, *(["--kernels"] if args.kernels else [])], check=False)


if __name__ == "__main__":
    main()
