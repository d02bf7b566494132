"""A captured program as a model: its blocks, what passes between them, and what ends a step.

Everything behind it (data parallelism, ZeRO, pipelines, search) sees the same `Block`s that `sim.models.layer` makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from sim.core.operator_kinds import ATTENTION, COUNTED, MEMORY_BOUND
from sim.core.program import (
    ALIGNED,
    DEPTHWISE,
    PART_OF_BLOCK,
    Block,
    BlockKind,
    Comm,
    Compute,
    ModelPart,
    Phase,
    Program,
    Role,
)
from sim.inputs.program_blocks import INPUT, PARAMETERS, Pieces, owners, pieces_of, tied_elements
from sim.inputs.program_file import CapturedOperator, CapturedProgram, read_program
from sim.models.captured.memory import PieceMemory, ProgramLives
from sim.models.captured.operators import items_of, known, masked_flops
from sim.models.optimizers.step import EndOfStep

COMPILED = "inductor."  # kernels that torch.compile generates
PART_OF_KIND = {
    **dict.fromkeys(ATTENTION, ModelPart.ATTENTION),
    "grouped_gemm": ModelPart.EXPERTS,
    "norm": ModelPart.NORM,
}


class CapturedModel(Struct, frozen=True, eq=False):
    """`pieces`: input, blocks and output; `kinds`: of each block, equal ones have one number. `input_bytes`: by block,
    what a stage that begins with it gets from the one before, and last of one that has the output alone.

    `clip`, `update`: what ends a step of all parameters; `optimizer_peak_bytes` is transient there. `flops`: of forward
    and backward of a micro-batch, and with whole attention in place of a causal one. `unknown`: launches of operators
    that are priced by their bytes alone.
    """

    pieces: tuple[Block, ...]
    kinds: tuple[int, ...]
    input_bytes: tuple[float, ...]
    tied_elements: int
    trained: int
    clip: Program
    update: Program
    optimizer_peak_bytes: float
    flops: tuple[float, float]
    unknown: dict[str, int]

    def step_items(self, n_params: int) -> EndOfStep:
        """Clipping and optimizer step of `n_params` parameters: their share of the recorded step."""
        part = min(1.0, n_params / max(1, self.trained))
        clip = _part(self.clip, part)  # its last kernel scales the gradients
        return EndOfStep((), clip[:-1], clip[-1:], _part(self.update, part))


def captured_model(path: str) -> CapturedModel:
    """The model that a program file holds."""
    return _model(read_program(Path(path)))


@lru_cache(maxsize=32)
def _model(program: CapturedProgram) -> CapturedModel:
    pieces, items = (
        pieces_of(program),
        _Items(program.device != "cpu", any(op.name.startswith(COMPILED) for op in program.operators)),
    )
    owner = owners(program)[0]
    memory = ProgramLives(program, pieces, owner, lambda o: _is_weight_gradient(items, o)).memory()
    trained, frozen = _elements(program, pieces, owner)
    parts: list[dict[str, list[Compute | Comm]]] = [
        {"forward": [], "recomputed": [], "backward": []} for _ in range(pieces.output + 1)
    ]
    end: dict[str, list[Compute | Comm]] = {"clip": [], "optimizer": []}
    for piece, op in zip(pieces.of_operator, program.operators, strict=True):
        if op.launches:
            part = ModelPart.OPTIMIZER if piece < 0 else PART_OF_BLOCK[_kind(piece, pieces)]
            (end if piece < 0 else parts[piece])[op.phase].extend(items.of(op, part))
    blocks = [_block(k, pieces, parts[k], memory.pieces[k], trained[k], frozen[k]) for k in range(pieces.output + 1)]
    seen: dict[Block, int] = {}
    kinds = tuple([seen.setdefault(replace(b, name=""), len(seen)) for b in blocks[1:-1]])
    ran = (i for part in parts for i in (*part["forward"], *part["backward"]) if isinstance(i, Compute))
    flops = sum(c.flops for c in ran if c.kind in COUNTED or c.kernel == DEPTHWISE)
    return CapturedModel(
        tuple(blocks),
        kinds,
        _input_bytes(program, pieces),
        tied_elements(program),
        sum(map(sum, trained)),
        tuple(end["clip"]),
        tuple(end["optimizer"]),
        memory.optimizer_peak_bytes,
        (flops, flops + _masked_flops(program, pieces)),
        dict(Counter(o.name for o in program.operators if o.launches and not known(o.name))),
    )


class _Items:
    """Operators as computations of a part of the model, and copies; equal ones are one object."""

    def __init__(self, on_gpu: bool, compiled: bool) -> None:
        self._on_gpu = on_gpu
        self._compiled = compiled
        self._known: dict[tuple[CapturedOperator, ModelPart], tuple[Compute | Comm, ...]] = {}

    def of(self, op: CapturedOperator, part: ModelPart) -> tuple[Compute | Comm, ...]:
        """`part`: of its piece; of a block's operators some tell by their kind what they are."""
        key = (op._replace(module="", reads=(), writes=()), part)
        found = self._known.get(key)
        if found is None:
            named = PART_OF_KIND if part is ModelPart.LAYER else {}
            found = self._known[key] = tuple(
                self._padded(replace(i, part=named.get(i.kind, part))) if isinstance(i, Compute) else i
                for i in items_of(op, self._on_gpu)
            )
        return found

    def _padded(self, op: Compute) -> Compute:
        """The operator with aligned rows, if inductor pads its matrices (torch/_inductor/fx_passes/pad_mm.py)."""
        return replace(op, alignment=ALIGNED) if self._compiled and op.alignment != ALIGNED else op


def _masked_flops(program: CapturedProgram, pieces: Pieces) -> float:
    """FLOPs of a micro-batch that causal masks save."""
    ran = (
        op
        for piece, op in zip(pieces.of_operator, program.operators, strict=True)
        if op.launches and piece >= 0 and op.phase in ("forward", "backward")
    )
    return sum(map(masked_flops, ran))


def _is_weight_gradient(items: _Items, op: CapturedOperator) -> bool:
    if not op.launches or op.phase != "backward":
        return False
    first = items.of(op, ModelPart.LAYER)[0]
    return isinstance(first, Compute) and first.role is Role.WEIGHT_GRADIENT


def _kind(piece: int, pieces: Pieces) -> BlockKind:
    return {INPUT: BlockKind.EMBEDDING, pieces.output: BlockKind.HEAD}.get(piece, BlockKind.LAYER)


def _block(
    number: int,
    pieces: Pieces,
    items: dict[str, list[Compute | Comm]],
    memory: PieceMemory,
    trained: Sequence[int],
    frozen: int,
) -> Block:
    kind = _kind(number, pieces)
    return Block(
        name=f"layer {number - 1}" if kind is BlockKind.LAYER else kind.value,
        kind=kind,
        forward=tuple(items["forward"]),
        backward=tuple(items["backward"]),
        recompute=tuple(items["recomputed"]),
        saved=memory.saved,
        params=sum(trained),
        tensors=tuple(trained),
        forward_peak_bytes=memory.forward_peak_bytes,
        backward_peak_bytes=memory.backward_peak_bytes,
        frozen_params=frozen,
        own=memory.own,
    )


def _elements(program: CapturedProgram, pieces: Pieces, owner: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Elements of the trained parameter tensors of each piece, and of its frozen ones together."""
    piece_of = {s.name: piece for s, piece in zip(program.storages, owner, strict=True) if s.kind in PARAMETERS}
    trained: list[list[int]] = [[] for _ in range(pieces.output + 1)]
    frozen = [0] * (pieces.output + 1)
    for p in program.parameters:
        piece = piece_of.get(p.name, INPUT)
        if p.trained:
            trained[piece].append(p.elements)
        else:
            frozen[piece] += p.elements
    return trained, frozen


def _input_bytes(program: CapturedProgram, pieces: Pieces) -> tuple[float, ...]:
    """Bytes that the forward carries into each block and the output.

    They depend on parameters and on the step's input. What depends on one alone (a cast weight, rotary angles, a mask)
    every stage makes for itself.
    """
    kinds = [s.kind for s in program.storages]
    weights = {i for i, kind in enumerate(kinds) if kind in PARAMETERS}
    given = {i for i, kind in enumerate(kinds) if kind not in (*PARAMETERS, "buffer", "optimizer state")}
    made: dict[int, int] = {}  # a storage's piece
    until: dict[int, int] = {}  # the last piece that reads it
    of_weights, of_input = set(weights), set[int]()
    for piece, op in zip(pieces.of_operator, program.operators, strict=True):
        if op.phase != "forward":
            continue
        for n in op.reads:
            if n in given and n not in made:
                of_input.add(n)  # the step's own input: nothing made it
            until[n] = piece
        mixed = not op.reads or not of_input.isdisjoint(op.reads)
        weighed = not of_weights.isdisjoint(op.reads)
        for n in op.writes:
            made.setdefault(n, piece)
            if weighed:
                of_weights.add(n)
            if mixed:
                of_input.add(n)
    total = [0.0] * pieces.output
    for n in (of_weights & of_input) - weights:
        for cut in range(made[n] + 1, until.get(n, 0) + 1):
            total[cut - 1] += program.storages[n].bytes
    return tuple(total)


def _part(items: Program, part: float) -> Program:
    """The share of a rank that holds this part of the parameters."""
    if part >= 1.0 or not items:
        return items if part > 0 else ()
    out: list[Compute | Comm] = []
    counted = 0.0
    for c in items:
        if isinstance(c, Comm):
            out.append(replace(c, bytes=c.bytes * part))
        elif not isinstance(c, Compute):
            continue
        elif c.kind in MEMORY_BOUND:
            shape = (max(1, round(c.shape[0] * part)),)
            out.append(replace(c, shape=shape, flops=c.flops * part, bytes=c.bytes * part))
        else:  # a matmul stays whole: so many of them
            counted += part
            if counted >= 0.5:
                counted -= 1.0
                out.append(c)
    return tuple(out)


@lru_cache(maxsize=512)
def with_accumulation(block: Block, micro_batches: int) -> Block:
    """The block with what adds a micro-batch's gradients to those there: read both, write one.

    The first micro-batch has nothing to add to; each of the others' part of it is spread over all.
    """
    own = block.own
    if micro_batches < 2 or not block.params or own is None:
        return block
    size = own.gradients * (micro_batches - 1) / micro_batches
    add = Compute(
        "accumulate",
        "elementwise",
        (block.params,),
        "fp32",
        float(block.params),
        3.0 * size,
        Phase.WEIGHT_GRAD,
        len(block.tensors),
        part=PART_OF_BLOCK[block.kind],
    )
    return replace(block, backward=(*block.backward, add))
