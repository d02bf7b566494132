"""The `parallelism` section of a scenario, and the layers of each pipeline stage."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from sim.core.dtypes import GatherDtype, TransportDtype
from sim.inputs.input_source import OneOf, UserInput, as_tuple
from sim.inputs.synonyms import value_synonym
from sim.inputs.units import BYTES
from sim.schedules import FORMS, ONE_RANK, ScheduleForm
from sim.variants.dispatchers import DISPATCHERS
from sim.variants.frameworks.zero import DDP_BUCKET_BYTES

CpMethod = Literal["ring", "all_gather", "all_to_all", "all_to_all_ring"]
_RANK_ORDERS = "the mesh's dimensions, the fastest-varying first: tp-cp-dp-pp or a permutation of it"


def _rank_order(value: Any) -> Any:
    if isinstance(value, str) and sorted(value.split("-")) != ["cp", "dp", "pp", "tp"]:
        raise ValueError("must hold each of tp, cp, dp, pp once, joined by '-', fastest-varying first")
    return value


def _zero(value: Any) -> Any:
    if type(value) is not int:  # true and 1.0 equal 1, and yet are no stage
        raise ValueError(f"must be 0, 1, 2 or 3{value_synonym(('zero',), value)}")
    return value


MAX_RANKS = 10_000_000
AT_THE_END = ("after_backward", "reduce_broadcast")  # values of dp_sync: gradients wait for the last backward
Degree = Annotated[int, Field(ge=1, le=MAX_RANKS)]
ByteSize = Annotated[
    int,
    BeforeValidator(BYTES.parse),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^[0-9.]+ *[A-Za-z]*$"}]}
    ),
]


_LayerCounts = Annotated[
    tuple[Annotated[int, Field(ge=0, le=10_000)], ...], BeforeValidator(as_tuple), Field(max_length=1_000_000)
]


def _counts_form(value: Any) -> str:
    return "<name>" if isinstance(value, str) else "<list>"


def all_replicas(dp: int, cp: int) -> int:
    """`shard_size` where a scenario leaves it out."""
    return dp * cp


def overlaps_messages(schedule: str) -> bool:
    """`p2p_overlap` where a scenario leaves it out."""
    return not FORMS[schedule].blocking_sends


def form_of(schedule: str, pp: int, paired: bool) -> ScheduleForm:
    """The record of a schedule; with pp 1, that of a model that is not cut. `paired`: exchanges are hidden (`ep`)."""
    form = ONE_RANK if pp == 1 else FORMS[schedule]
    return form.paired if paired else form


class Parallelism(UserInput):
    """The split of a model and its batch over ranks; see docs/scenario.md for each key.

    In a loaded scenario no null is left. `layers_per_stage` has one entry per stage in model order:
    pp·virtual_stages of them, but pp with dualpipe (each held by ranks i and p-1-i), and one where pp is 1; or it says
    `balanced`, which `sim.models.balance.with_balanced_stages` turns into numbers.
    """

    dp: Degree = 1
    tp: Degree = 1
    sp: bool = False
    cp: Degree = 1
    pp: Degree = 1
    ep: Degree = 1
    expert_tp: Degree = 1
    zero: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_zero)] = 0
    shard_size: Degree = Field(
        default_factory=lambda data: all_replicas(data["dp"], data["cp"]), description="null: dp * cp"
    )
    reshard_after_forward: bool = True
    fsdp_version: Literal[1, 2] | None = Field(
        default=None, description="zero 2 and 3: of torch's FSDP; null: 1 with framework composer, else 2"
    )
    backward_prefetch: bool = Field(
        default=True,
        description="zero 3 with torch's first FSDP: a layer is gathered during the backward of the layer that runs "
        "before it; false: when its own backward begins",
    )
    fsdp_double_buffer: bool = Field(
        default=False,
        description="zero 2 and 3 with Megatron's FSDP: buffers of two layers, so that one is gathered ahead, and one "
        "bucket of gradients waits",
    )
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = Field(
        default="no_shard",
        description="zero 3 with Megatron's FSDP and replicas of shards (shard_size): optim: these share the optimizer",
    )
    zero_hpz_partition_size: int | None = Field(
        default=None,
        ge=2,
        le=MAX_RANKS,
        description="zero 3 of DeepSpeed: consecutive ranks that share a second copy of parameters, over which all but "
        "the step's first forward gather; null: none",
    )
    zero_quantized_gradients: bool = Field(
        default=False,
        description="zero 3 of DeepSpeed on several nodes: gradients are exchanged in 4 bits, within nodes first",
    )
    accumulate_unsharded: bool = False
    all_reduce_once: bool = Field(
        default=False,
        description="zero 2 and 3 with replicas of shards (shard_size): reduced shards of micro-batches add up, and "
        "replicas all-reduce their sum once a step",
    )
    accumulate_in_a_row: bool | None = Field(
        default=None,
        description="zero 2 and 3: gradients of the micro-batches that a stage takes in a row are added up whole and "
        "reduced once; null: the framework's own",
    )
    schedule: Annotated[str, OneOf(FORMS)] = "1f1b"
    schedule_memory: float = Field(default=1.0, gt=0, le=1_000)
    virtual_stages: int = Field(
        default_factory=lambda data: FORMS[data["schedule"]].stages_per_rank if data["pp"] > 1 else 1,
        ge=1,
        le=10_000,
        description="stages of each rank; null: the fewest that the schedule has",
    )
    micro_batch_group: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        description="interleaved_1f1b: micro-batches in a row on a stage; null: pp",
    )
    layers_per_stage: Annotated[
        Annotated[Literal["balanced"], Tag("<name>")] | Annotated[_LayerCounts, Tag("<list>")],
        Discriminator(_counts_form),
    ] = Field(default=(), json_schema_extra={"default": None})
    mtp_stage: int | None = Field(
        default=None,
        ge=0,
        le=1_000_000,
        description="the stage, from 0 in model order, that holds the modules of multi-token prediction; null: the "
        "last, beside the output layer",
    )
    dp_sync: Literal["bucketed", "after_backward", "per_parameter", "reduce_broadcast"] = "bucketed"
    bucket_bytes: ByteSize = Field(
        default=DDP_BUCKET_BYTES, ge=1, le=10**15, json_schema_extra={"default": f"{DDP_BUCKET_BYTES >> 20}MiB"}
    )
    gather_bucket_bytes: ByteSize | None = Field(
        default=None,
        ge=1,
        le=10**15,
        description="zero 3: the least bytes of each message of whole tensors that gathers a layer; null: one message "
        "for a layer, or as the framework does",
    )
    param_gather_overlap: bool = Field(
        default_factory=lambda data: data["dp_sync"] != "after_backward",
        description="null: true unless dp_sync is after_backward",
    )
    overlap_param_gather_with_optimizer_step: bool = Field(
        default=False,
        description="zero 1 with virtual stages: a rank gathers the parameters of its first stage while it updates "
        "those of its others",
    )
    param_gather_dtype: GatherDtype | None = Field(
        default=None,
        description="zero: the dtype of gathered parameters; null: precision's 16-bit dtype, but fp8 with "
        "zero 3 and torchao's tensorwise recipe, for layers' matrices; int8: ZeRO++'s quantized weights",
    )
    cp_method: CpMethod = "ring"
    cp_method_by_layer: Annotated[tuple[CpMethod, ...], BeforeValidator(as_tuple)] | None = Field(
        default=None, max_length=10_000, description="one for each layer; null: cp_method in all"
    )
    hierarchical_context_parallel_sizes: (
        Annotated[tuple[Degree, ...], BeforeValidator(as_tuple), Field(min_length=2, max_length=2)] | None
    ) = Field(default=None, description="all_to_all_ring: consecutive ranks that exchange heads, and rings of these")
    cp_split: Literal["zigzag", "contiguous", "striped"] = "zigzag"
    tp_overlap: Literal["none", "wgrad", "full"] = "none"
    tp_overlap_except: Annotated[tuple[Literal["qkv", "fc1"], ...], BeforeValidator(as_tuple)] = Field(
        default=(),
        description="tp_overlap full: column layers whose forward waits for its whole input",
        json_schema_extra={"default": None},
    )
    ep_overlap: bool = False
    delay_wgrad_compute: bool = Field(
        default=True, description="ep_overlap: gradients of weights are computed behind the start of an exchange"
    )
    wgrad_deferral_limit: int | None = Field(
        default=None,
        ge=0,
        le=1_000_000_000,
        description="the output matrix's weight gradients of so many first micro-batches, or (0) of all, are computed "
        "behind the last stage's backwards; null: in these",
    )
    ep_dispatch_dtype: TransportDtype | None = None
    ep_dispatcher: Annotated[str, OneOf(DISPATCHERS)] | None = Field(
        default=None, description="null: deepep with model.moe.max_nodes_per_token, else all_to_all"
    )
    p2p_overlap: bool = Field(
        default_factory=lambda data: overlaps_messages(data["schedule"]),
        description=f"null: false for {', '.join(f.name for f in FORMS.values() if f.blocking_sends)}, else true",
    )
    p2p_scatter: bool = Field(default=False, description="left out: true where the framework does so")
    rank_order: Annotated[
        str, BeforeValidator(_rank_order), WithJsonSchema({"type": "string", "description": _RANK_ORDERS})
    ] = "tp-cp-dp-pp"

    @property
    def ranks(self) -> int:
        """The number of ranks: tp·cp·dp·pp."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def sharing_replicas(self) -> int:
        """Replicas of a served model that share experts."""
        return max(1, self.ep * self.expert_tp // self.tp)

    @property
    def cp_methods(self) -> frozenset[str]:
        """The ways of context parallelism that layers have."""
        return frozenset(self.cp_method_by_layer or (self.cp_method,))

    def cp_method_of(self, layer: int) -> str:
        """The way of context parallelism of a layer, from 0 over the whole model."""
        return self.cp_method_by_layer[layer] if self.cp_method_by_layer and self.cp > 1 else self.cp_method

    @property
    def cp_exchanged(self) -> int:
        """Consecutive ranks that exchange heads where groups of them form rings (`all_to_all_ring`); else 1."""
        sizes = self.hierarchical_context_parallel_sizes
        return sizes[0] if sizes and "all_to_all_ring" in self.cp_methods else 1

    @property
    def reduces_rows(self) -> bool:
        """Gradients are reduced once for the micro-batches that a stage takes in a row."""
        return self.zero >= 2 and bool(self.accumulate_in_a_row) and not self.accumulate_unsharded

    @property
    def holds_back_replicas(self) -> bool:
        """Shards of the gradients of micro-batches add up before replicas all-reduce their sum."""
        return self.all_reduce_once and self.zero >= 2 and not self.accumulate_unsharded

    @property
    def keeps_gathered(self) -> bool:
        """Parameters that ZeRO-3 keeps for the backward may stay until the step's end; otherwise that backward frees
        them.

        A pipeline's stage asks for it (torch/distributed/pipelining/stage.py: `backward_maybe_with_nosync`). Without
        one the framework decides where gradients are not reduced (`ZeroEngine.keeps_unreduced`).
        """
        once = self.accumulate_unsharded or self.reduces_rows
        return self.zero == 3 and not self.reshard_after_forward and (once or self.pp > 1)

    @property
    def expert_replicas(self) -> int:
        """Return how many ranks of a pipeline rank hold the same expert parameters."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    def replicates(self, experts: bool) -> bool:
        """Tell whether several ranks hold the same parameters; `experts`: with experts, which may have replicas where
        dense layers have none."""
        return max(self.dp * self.cp, self.expert_replicas if experts else 1) > 1

    def shards(self, experts: bool) -> bool:
        """Tell whether ZeRO has several shards of anything; `experts`: as in `replicates`."""
        return max(self.sharded_over[: 1 + experts]) > 1

    @property
    def sharded_over(self) -> tuple[int, int]:
        """Return the ranks over which ZeRO shards dense layers, and experts, which have fewer replicas.

        Experts have as many replicas of their shards as dense layers have (megatron/core/parallel_state.py:
        `intra_partial_expert_data_parallel_size`; torchtitan/distributed/parallel_dims.py: `dp_replicate` of the expert
        mesh, too); where these do not divide them, their shards are the largest that divide both sizes.
        """
        ranks, expert_replicas = self.dp * self.cp, self.expert_replicas
        shard = min(self.shard_size or ranks, ranks)
        expert_shard, rest = divmod(expert_replicas, ranks // shard)
        return shard, math.gcd(shard, expert_replicas) if rest else expert_shard

    @property
    def shares_optimizer(self) -> bool:
        """Replicas of shards share the optimizer's states (`outer_dp_sharding_strategy`)."""
        return self.outer_dp_sharding_strategy == "optim" and self.zero == 3

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage.

        Raises:
            ValueError: where `balanced` has not been turned into numbers.
        """
        if self.layers_per_stage == "balanced":
            raise ValueError("layers_per_stage is `balanced`; sim.models.balance.with_balanced_stages counts them")
        return self.layers_per_stage

    @property
    def mtp_apart(self) -> int | None:
        """`mtp_stage` where it is not the stage of the output layer; else None."""
        k = self.mtp_stage
        return k if k is not None and k < self.stages - 1 else None

    @property
    def form(self) -> ScheduleForm:
        """The schedule's record; see `form_of`."""
        group = self.micro_batch_group
        if group is not None and self.pp > 1 and FORMS[self.schedule].in_groups_of is not None:
            return FORMS[self.schedule].grouped(group)
        return form_of(self.schedule, self.pp, self.overlaps_exchanges)

    @property
    def overlaps_exchanges(self) -> bool:
        """Tell whether tokens are on their way to experts while another micro-batch computes (`ep_overlap`)."""
        return self.ep_overlap and self.ep > 1

    @property
    def stages(self) -> int:
        """Parts that the layers are dealt out to, in model order."""
        return self.form.model_stages(self.pp, self.virtual_stages) if self.pp > 1 else 1


def split_layers(layers: int, stages: int, mtp_stage: int | None = None) -> tuple[int, ...]:
    """Layers per stage, as even as possible, the larger ones first; none behind `mtp_stage`.

    Where stages outnumber layers every stage has one layer or none: none has the last stage, with two or more
    to spare the first as well, and any others without stand at the end too.

    >>> split_layers(10, 4), split_layers(2, 4), split_layers(3, 4), split_layers(2, 5), split_layers(10, 4, 2)
    ((3, 3, 2, 2), (0, 1, 1, 0), (1, 1, 1, 0), (0, 1, 1, 0, 0), (4, 3, 3, 0))
    """
    if mtp_stage is not None and mtp_stage < stages - 1:
        return (*split_layers(layers, mtp_stage + 1), *[0] * (stages - 1 - mtp_stage))
    empty = stages - layers
    if empty >= 2:
        return (0, *([1] * layers), *([0] * (empty - 1)))
    least, extra = divmod(layers, stages)
    return tuple(least + (stage < extra) for stage in range(stages))
