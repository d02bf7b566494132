"""The weights of a linear layer: how many, and how tensor parallelism splits them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from sim.models.operators import Linear

if TYPE_CHECKING:
    from sim.inputs.training_config import LoraTarget, OffloadModule


class Matrix(Struct, frozen=True):
    """Weights `[inputs, sum(outputs)]` as one rank holds them, and a bias of the outputs' width where `bias`.

    `outputs` has several numbers where several products share the input: query, key and value; gate and up. `split`
    says what tensor parallelism divides: the outputs (column), the inputs (row) or nothing (plain). `target`: its key
    among `training.lora.targets`; None where it has none. `module`: as an operator's. `sixteen_bit`: serving keeps it
    in 16 bits beside others in fewer.
    """

    name: str
    inputs: int
    outputs: tuple[int, ...]
    split: str
    bias: bool = False
    target: LoraTarget | None = None
    module: OffloadModule | None = None
    sixteen_bit: bool = False

    @property
    def width(self) -> int:
        """Number of outputs in all."""
        return sum(self.outputs)

    @property
    def elements(self) -> int:
        """Weights without the bias: a token takes 2 flops for each."""
        return self.inputs * self.width

    @property
    def parameters(self) -> int:
        """Weights and bias."""
        return self.elements + (self.width if self.bias else 0)

    def linear(self, rows: int, save_input: bool = True, merged: bool = True) -> Linear:
        """The layer over `rows` tokens in training; `merged`: products that share the input are one matmul."""
        outs = (self.width,) if merged else self.outputs
        return Linear(self.name, rows, self.inputs, outs, self.split, self.bias, save_input, self.target, self.module)
