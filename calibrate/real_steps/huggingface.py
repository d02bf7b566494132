"""Times and calibrates a training step of a Hugging Face Transformers model.

    python -m calibrate.measure SCENARIO.yaml --out MEASURED.json --huggingface FOLDER_OR_CONFIG
    accelerate launch -m calibrate.measure …       torchrun --nproc-per-node 2 -m calibrate.measure …

The model's code is Transformers' own. It is read from local files only; if the folder has no weights, they are random.
Adapters (`training.lora`) are peft's. Several ranks sum their gradients with torch's DDP. A layer's forward is timed
from its call to its return, its backward from the gradient of its output to the gradient of its input.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from calibrate.bundled_model.linear import gradient
from calibrate.machine_load import Window
from calibrate.parallel.memory import saved_storages
from calibrate.parallel.pipeline import Record
from calibrate.parallel.runner import CLIP_NORM, LEARNING_RATE
from calibrate.parallel.samples import draw
from calibrate.parallel.storages import storages
from calibrate.real_steps.blocks import Samples
from calibrate.real_steps.gradient_times import Timed
from calibrate.real_steps.timed_rounds import Calibration
from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.variants.frameworks.records import framework_of

TARGETS = {  # names in Transformers' models of the simulator's linear layers
    "qkv": ("q_proj", "k_proj", "v_proj", "c_attn", "query_key_value"),
    "attention_out": ("o_proj", "attn.c_proj", "attention.dense"),
    "mlp_up": ("gate_proj", "up_proj", "c_fc", "dense_h_to_4h"),
    "mlp_down": ("down_proj", "mlp.c_proj", "dense_4h_to_h"),
}
COLLECTIVE_BYTES = (1 << 16, 1 << 20, 25 << 20)
Mark = tuple[float, float]  # wall and CPU clock


def check_model(path: str, scenario: Scenario, same: Scenario) -> None:
    """Check that Transformers is installed, that the config is the scenario's model, and that it can be run.

    `same` is the scenario with its model read from the config.

    Raises:
        InputError: says what is missing, differs or cannot be run.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise InputError("--huggingface: transformers is not installed (pip install 'stepsim[huggingface]')") from None
    if same.model != scenario.model:
        file = config_file(path)
        raise InputError(f"--huggingface: {file} is not the scenario's model: write `model: {file}` there")
    p, t = scenario.parallelism, scenario.training
    assert t is not None
    for what, bad in (
        ("more than data parallelism", p.ranks != p.dp),
        ("parallelism.zero above 0", p.zero > 0),
        ("dropout", scenario.model.dropout > 0 or bool(scenario.model.attention_dropout)),
        ("training.precision other than fp32", t.precision != "fp32"),
        ("recomputation", t.recompute.mode != "none"),
        ("training.activation_offload", t.activation_offload),
        ("training.optimizer_offload", t.optimizer_offload),
        ("training.packing", t.packing is not None),
        ("training.cross_entropy other than unfused", t.cross_entropy != "unfused"),
        (f"training.framework {t.framework}", not framework_of(t).measurable),
        ("a teacher", scenario.distillation is not None),
    ):
        if bad:
            raise InputError(f"--huggingface: found {what}; a Transformers model can only be run without it")


def config_file(path: str) -> Path:
    """Return the config.json of a folder, or the file itself."""
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def load_model(path: str, scenario: Scenario, device: str) -> nn.Module:
    """Make the model in fp32, with adapters if the scenario has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    t = scenario.training
    assert t is not None
    attention = "sdpa" if t.attention == "fused" else "eager"
    config = AutoConfig.from_pretrained(config_file(path), local_files_only=True, attn_implementation=attention)
    torch.manual_seed(0)
    model: Any  # Transformers' types change with its release, and peft's wrapper is not one of its models
    if Path(path).is_dir() and any(Path(path).glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(path, config=config, local_files_only=True, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if t.lora is not None:
        from peft import LoraConfig, get_peft_model

        names = [n for target in t.lora.targets for n in TARGETS[target]]
        wanted = [n for n, m in model.named_modules() if isinstance(m, nn.Module) and n.endswith(tuple(names))]
        model = get_peft_model(
            model,
            LoraConfig(r=t.lora.rank, lora_alpha=2 * t.lora.rank, target_modules=wanted, lora_dropout=t.lora.dropout),
        )
    built: nn.Module = model.to(device).train()
    return built


class Imported:
    """A Transformers model on one rank, with the methods of `calibrate.real_steps.timed_rounds.Steps`."""

    def __init__(self, scenario: Scenario, path: str, device: str) -> None:
        t = scenario.training
        assert t is not None
        self.scenario, self.training, self.device = scenario, t, device
        self.inner = load_model(path, scenario, device)
        self.layers = find_layers(self.inner, scenario.model.layers)
        self.trained = [p for p in self.inner.parameters() if p.requires_grad]
        ranks = scenario.parallelism.dp
        bucket_mib = scenario.parallelism.bucket_bytes / 2**20
        self.model = (
            self.inner
            if ranks == 1
            else nn.parallel.DistributedDataParallel(self.inner, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
        )
        self.optimizer = torch.optim.AdamW(self.trained, lr=LEARNING_RATE, fused=True)
        self.micro_batches = t.global_batch_size // (t.micro_batch_size * ranks)
        self.total = 0.0

    def _apart(self, last: bool) -> AbstractContextManager[None]:
        """Keep DDP from reducing gradients before the last micro-batch."""
        model = self.model
        if last or not isinstance(model, nn.parallel.DistributedDataParallel):
            return nullcontext()
        apart: AbstractContextManager[None] = model.no_sync()
        return apart

    def batch(self, number: int) -> Tensor:
        """Return the sequences [m · b, s + 1] that this rank takes in a step."""
        return draw(self.scenario, number, dist.get_rank() if dist.is_initialized() else 0, self.device)

    def own(self, batch: Tensor) -> list[Tensor]:
        """Split a batch into micro-batches [b, s + 1]."""
        return list(batch.split(self.training.micro_batch_size))

    def zero_losses(self) -> None:
        """Forget the losses of the last step."""
        self.total = 0.0

    def loss(self) -> float:
        """Return this rank's share of the global batch's mean loss."""
        return self.total / self.scenario.parallelism.dp

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a micro-batch's share of the rank's mean cross-entropy, in fp32 as Transformers computes it."""
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / self.micro_batches

    def step(self, batch: Tensor) -> list[Record]:
        """Run a training step: forward and backward of every micro-batch, clipping, optimizer; zero the gradients."""
        records, pieces = [], self.own(batch)
        for i, tokens in enumerate(pieces):
            last = i == len(pieces) - 1
            with self._apart(last):
                start = self.now()
                loss = self.forward(tokens)
                middle = self.now()
                loss.backward()
            records += [Record("F", 0, i, start, middle), Record("B", 0, i, middle, self.now())]
            self.total += float(loss.detach())
        return [*records, *self.optimize()]

    def optimize(self) -> list[Record]:
        """Clip the gradients by their norm, run AdamW, and zero the gradients."""
        times = [self.now()]
        if self.training.gradient_clipping:
            grads = [gradient(p) for p in self.trained]
            norm = nn.utils.get_total_norm(grads)
            times.append(self.now())
            nn.utils.clip_grads_with_norm_(self.trained, CLIP_NORM, norm)
            times.append(self.now())
        self.optimizer.step()
        times.append(self.now())
        self.optimizer.zero_grad(set_to_none=False)
        return [Record("OPTIMIZER", -1, -1, a, b) for a, b in pairwise(times)]

    def now(self) -> int:
        """Return nanoseconds, after a GPU has finished its queue."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter_ns()

    def resident(self) -> dict[int, int]:
        """Return the storages of parameters, buffers and gradients: identity → bytes."""
        held = [*self.inner.parameters(), *self.inner.buffers()]
        return storages([*held, *(p.grad for p in self.trained if p.grad is not None)])

    def saved_bytes(self, tokens: Tensor) -> int:
        """Return the bytes that a micro-batch's forward keeps for its backward."""
        with saved_storages(self.resident()) as found:
            self.forward(tokens)
        return sum(found.values())

    def calibrate(self, keys: list[str]) -> Calibration:
        """Time a step block by block, then collectives and the optimizer; restore the training state afterwards."""
        state = [x.clone() for x in self._state()]
        window = Window.enter()
        samples: Samples = {}
        with self._apart(False):
            for tokens in self.own(self.batch(0)):
                self._time_blocks(tokens, keys, samples)
        collectives = self._collectives()
        epilogue = self.optimize()
        others = window.leave()
        with torch.no_grad():
            for x, old in zip(self._state(), state, strict=True):
                x.copy_(old)
        return Calibration(samples, [], [], collectives, None, epilogue, others)

    def _state(self) -> list[Tensor]:
        states = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [*(p.detach() for p in self.trained), *states]

    def _mark(self) -> Mark:
        return self.now() * 1e-9, time.process_time()

    def _time_blocks(self, tokens: Tensor, keys: list[str], samples: Samples) -> None:
        """Time embedding, layers and head: forward between calls of layers, backward between gradients of inputs."""
        forward: list[Mark] = []
        backward: list[Mark] = []

        def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            forward.append(self._mark())
            watch(args[0] if args else kwargs["hidden_states"])

        def left(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            forward.append(self._mark())
            watch(out[0] if isinstance(out, tuple) else out)

        def watch(x: Tensor) -> None:
            if x.requires_grad:
                x.register_hook(lambda g: backward.append(self._mark()))

        handles = [layer.register_forward_pre_hook(entered, with_kwargs=True) for layer in self.layers]
        handles.append(self.layers[-1].register_forward_hook(left))
        try:
            forward.append(self._mark())
            loss = self.forward(tokens)
            forward.append(self._mark())
            backward.append(self._mark())
            loss.backward()
            backward.append(self._mark())
        finally:
            for handle in handles:
                handle.remove()
        for phase, marks, order in (("forward", forward, keys), ("backward", backward, keys[::-1])):
            for key, a, b in zip(order, marks, marks[1:], strict=False):
                wall, cpu = b[0] - a[0], b[1] - a[1]
                samples.setdefault((key, phase, 0), []).append((wall, cpu if self.device == "cpu" else wall))

    def _collectives(self) -> list[Timed]:
        ranks = self.scenario.parallelism.dp
        found: list[Timed] = []
        total = 4 * sum(p.numel() for p in self.trained)
        for size in sorted({min(s, total) for s in COLLECTIVE_BYTES}) if ranks > 1 else ():
            x = torch.zeros(size // 4, device=self.device)
            for number in range(3):
                dist.barrier()
                start = self.now()
                dist.all_reduce(x)
                found.append(Timed("all_reduce", ranks, 0, number + size, size, start, self.now()))
        return found


def find_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """Return the decoder's layers: the outermost list of `count` modules.

    Raises:
        InputError: if there is no such list.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise InputError(f"--huggingface: the model has no list of {count} layers")
    return list(lists[0])
