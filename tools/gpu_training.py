"""Runs training steps of Hugging Face models on a GPU, for `tools/gpu_programs.py`: seconds, peak memory, kernels."""

from __future__ import annotations

import gc
import gzip
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

TABLE, OPERATORS = "table.json", "operators.json.gz"  # in the folder of a measured table
REST_S, FIRST_S = 0.5, 1.0
WARM_UP, AWAITED, PROFILED = 3, 8, 2  # steps


class Training:
    """A model of a table's row on the GPU."""

    def __init__(self, row: dict[str, Any], where: str) -> None:
        import torch
        from msgspec.structs import replace

        from calibrate.capture.huggingface.step import huggingface_maker
        from calibrate.capture.table_row import options_of_row

        config, options = options_of_row(row, where)
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.wanted = huggingface_maker(config, replace(options, random_values=True))()
        if recipe := row["program"].get("float8"):
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(
                self.wanted.model,
                config=Float8LinearConfig.from_recipe_name(recipe),
                module_filter_fn=lambda _, name: "lm_head" not in name,
            )
        if options.compiled:
            self.wanted.model.compile()
        training = row["scenario"]["training"]
        self.micro_batches = training["global_batch_size"] // training.get("micro_batch_size", 1)

    def step(self) -> None:
        """Issue one step."""
        import torch

        from calibrate.capture.run_step import autocast_of, gradients_of

        step = self.wanted
        step.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.micro_batches):
            with torch.device("cuda"), autocast_of(step, "cuda"), gradients_of(step):
                loss = step.loss()
            loss.backward()
        if step.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(step.model.parameters(), step.clip_grad_norm)
        step.optimizer.step()


def measured(training: Training, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run steps and return what was measured, and the conditions."""
    import torch
    from gpu_watch import Watch

    for _ in range(WARM_UP):
        training.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step_s = statistics.median(_awaited_step_s(training) for _ in range(AWAITED))
    time.sleep(REST_S)
    watch = Watch()
    begin = time.perf_counter()
    ends: list[float] = []
    waiting: list[torch.cuda.Event] = []
    while time.perf_counter() - begin < seconds or len(ends) < 4:
        training.step()
        waiting.append(torch.cuda.Event())
        waiting[-1].record()
        if len(waiting) > 1:  # the host is at most one step ahead
            waiting.pop(0).synchronize()
            ends.append(time.perf_counter())
    # The last step is left out: nothing was issued behind it, so it ends sooner after its predecessor.
    half = len(ends) // 2
    power_w, clock_mhz = watch.stop(ends[half])
    torch.cuda.synchronize()
    first = [b - a for a, b in zip([begin, *ends], ends, strict=False) if b - begin <= FIRST_S] or [ends[0] - begin]
    running_s = (ends[-1] - ends[half]) / (len(ends) - 1 - half)
    found = {"step_time_s": step_s, "peak_memory_bytes": torch.cuda.max_memory_allocated()}
    conditions = {"power_w": round(power_w, 1), "clock_mhz": round(clock_mhz, 1)}
    times = {"free_running_s": running_s, "first_steps_s": statistics.fmean(first)}
    return found, {"steps": len(ends) + 1, **times, **conditions}


def _awaited_step_s(training: Training) -> float:
    """Return the seconds of one step by the GPU's events; the host waits for its end."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    training.step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def profiled(training: Training) -> dict[str, Any]:
    """Return device seconds of a step by operator and by kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(PROFILED):
            training.step()
        torch.cuda.synchronize()
    on_host, on_device = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    operators = [
        {
            "name": e.key,
            "shapes": e.input_shapes,
            "count": e.count / PROFILED,
            "seconds": e.self_device_time_total * 1e-6 / PROFILED,
        }
        for e in profiler.key_averages(group_by_input_shape=True)
        if e.self_device_time_total > 0 and e.device_type == on_host
    ]
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for e in profiler.events():
        if e.device_type == on_device:
            kernels[e.name][0] += 1 / PROFILED
            kernels[e.name][1] += e.self_device_time_total * 1e-6 / PROFILED
    named = [{"name": k[:160], "count": n, "seconds": s} for k, (n, s) in kernels.items() if s > 0]
    longest = [sorted(rows, key=lambda r: -r["seconds"]) for rows in (operators, named)]
    return {"operators": longest[0][:400], "kernels": longest[1][:200]}


def measure(table: Path, folder: Path, seconds: float, only: list[str]) -> int:
    """Measure all rows; write after each, so that an interruption loses one row."""
    import torch
    import transformers

    if not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} sees no CUDA GPU here; nothing was measured", file=sys.stderr)
        return 2
    data = json.loads(table.read_text())
    data["hardware"] = {"gpu": torch.cuda.get_device_name(), "gpus_per_node": 1}
    data["software"] = f"torch {torch.__version__}, transformers {transformers.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    operators: dict[str, Any] = {}
    for row in [r for r in data["rows"] if not only or r["id"] in only]:
        try:
            training = Training(row, f"{table}: {row['id']}")
            row["measured"], row["conditions"] = measured(training, row["program"].get("seconds", seconds))
            operators[row["id"]] = profiled(training)
            print(f"{row['id']:24} {row['measured']} {row['conditions']}", flush=True)
        except Exception as error:  # the other rows still run
            row["failed"] = f"{type(error).__name__}: {error}"[:400]
            print(f"{row['id']:24} {row['failed']}", flush=True)
        done.append(row)
        (folder / TABLE).write_text(json.dumps({**data, "rows": done}, indent=1) + "\n")
        (folder / OPERATORS).write_bytes(gzip.compress(json.dumps(operators).encode(), mtime=0))
        training = None
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return 0
