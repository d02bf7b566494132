"""The `training` section of a scenario."""

import re
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from sim.core.dtypes import MomentDtype, Precision, StorageDtype, sixteen_bit
from sim.inputs.input_source import OneOf, UserInput, as_tuple
from sim.inputs.model_config import MAX_LAYERS
from sim.inputs.units import TOKENS
from sim.variants.frameworks.parts import AttentionKernel
from sim.variants.frameworks.records import FRAMEWORKS, framework_at
from sim.variants.optimizers import OPTIMIZERS
from sim.variants.recipes import RecipeName

RecomputeMode = Literal["none", "selective", "selective_op", "full"]


RecomputeModule = Literal["core_attn", "mlp", "moe", "shared_experts", "moe_act", "layernorm", "mla_up_proj"]
LOSES_OUTPUT: tuple[RecomputeModule, ...] = ("moe_act", "layernorm", "mla_up_proj")  # see `recompute_modules.py`


class Recompute(UserInput):
    """Activations that are computed again before the backward. Mode full may set `layers` (the first n of each stage)
    and `every` (each n-th layer); it and selective_op may set `early_stop` (recompute no further than the last tensor
    that the backward needs; None: as the framework does). Mode selective may set `modules`: the parts of a layer, under
    Megatron-Core's names."""

    mode: RecomputeMode
    layers: int | None = Field(default=None, ge=0, le=MAX_LAYERS)
    every: int | None = Field(default=None, ge=1, le=MAX_LAYERS)
    early_stop: bool | None = None
    modules: Annotated[tuple[RecomputeModule, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=7)] = (
        "core_attn",
    )


def _recompute(value: Any) -> Any:
    if not isinstance(value, (str, dict, Recompute)):
        raise ValueError(f"must be one of {', '.join(get_args(RecomputeMode))}, or a mapping with mode")
    return {"mode": value} if isinstance(value, str) else value


def _recompute_schema() -> WithJsonSchema:
    modes = {"enum": list(get_args(RecomputeMode))}
    fields = {
        "mode": modes,
        "layers": {"type": ["integer", "null"]},
        "every": {"type": ["integer", "null"]},
        "early_stop": {"type": ["boolean", "null"]},
        "modules": {"type": "array", "items": {"enum": list(get_args(RecomputeModule))}},
    }
    mapping = {"type": "object", "properties": fields, "required": ["mode"], "additionalProperties": False}
    return WithJsonSchema({"anyOf": [modes, mapping], "default": "none"})


def _param_dtype(data: dict[str, Any]) -> Any:
    return sixteen_bit(data["precision"])


def _grad_dtype(data: dict[str, Any]) -> Any:
    own = framework_at(data["framework"], data["software_date"])
    return "fp32" if own.sums_in_fp32 else sixteen_bit(data["precision"])


def _of_framework(key: str) -> Callable[[dict[str, Any]], Any]:
    """Return what the framework sets a key to where the scenario leaves it out."""
    return lambda data: getattr(framework_at(data["framework"], data["software_date"]), key)


USUAL_FRAMEWORK = "eager"  # the published defaults of keys that a framework decides are this one's
OptimizerName = Annotated[str, OneOf(OPTIMIZERS)]
FrameworkName = Annotated[str, OneOf(FRAMEWORKS)]
SOFTWARE_DATE = r"^20\d\d-(0[1-9]|1[0-2])(-([0-2]\d|3[01]))?$"
SoftwareDate = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, date) else value),
    Field(pattern=SOFTWARE_DATE),
]
LoraTarget = Literal["qkv", "attention_out", "mlp_up", "mlp_down"]
LoraTargets = Annotated[tuple[LoraTarget, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=4)]
ALL_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


class Lora(UserInput):
    """Low-rank adapters on frozen weights. `targets`: the linear layers that have one for each of their matrices.
    `dropout`: of the adapters' inputs. `weights`: layers' frozen matrices are kept in NF4, 4 bits, and made 16-bit for
    every matmul (QLoRA), or in 8 bits (LLM.int8). `quantized_experts`: so are the routed experts'."""

    rank: int = Field(default=16, ge=1, le=1_000_000)
    targets: LoraTargets = ALL_TARGETS
    dropout: float = Field(default=0.0, ge=0, lt=1)
    weights: Literal["nf4", "int8"] | None = Field(default=None, description="null: as param_dtype; nf4: QLoRA")
    quantized_experts: bool = False


PreferenceLoss = Literal["dpo", "kto", "orpo", "reward"]
WITH_REFERENCE: tuple[PreferenceLoss, ...] = ("dpo", "kto")
Reference = Literal["model", "adapters_off", "precomputed", "none"]


class Preference(UserInput):
    """Training on pairs of sequences, a chosen answer and a rejected one; with kto on single answers, each good or bad.
    `reference`: where a frozen model's log-probabilities of the same tokens come from: a second model beside the
    trained one, the trained one with its adapters off, an earlier run over the texts, or nowhere.
    """

    loss: PreferenceLoss = "dpo"
    reference: Reference | None = Field(
        default=None, description="null: of dpo and kto adapters_off beside lora, else model; of other losses none"
    )


GraphPart = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]
OffloadModule = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "layer_input"
]


class ActivationOffload(UserInput):
    """Which saved activations go to host memory: those of the first `layers` layers of each stage (Transformer Engine),
    or those of the `modules` of every layer, under Megatron-Core's names."""

    layers: int | None = Field(default=None, ge=1, le=MAX_LAYERS)
    modules: Annotated[tuple[OffloadModule, ...], BeforeValidator(as_tuple), Field(max_length=8)] = ()


def _offload_form(value: object) -> str:
    return "<mapping>" if isinstance(value, (dict, ActivationOffload)) else "<name>"


OffloadChoice = Annotated[
    Annotated[bool, Tag("<name>")] | Annotated[ActivationOffload, Tag("<mapping>")], Discriminator(_offload_form)
]


class Packing(UserInput):
    """Documents of uneven lengths in each sequence: `lengths` of all sequences, or lognormal of `mean_seq_len`, packed
    by `strategy`. Names as in Megatron's `--sft-mock-dataset-config-json` and TRL's `packing_strategy`."""

    lengths: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(as_tuple), Field(max_length=100_000)
    ] = ()
    mean_seq_len: float | None = Field(default=None, ge=1, le=1e8)
    lognormal_sigma: float = Field(default=1.1, ge=0, le=10)
    min_seq_len: int = Field(default=1, ge=1, le=100_000_000)
    max_seq_len: int | None = Field(default=None, ge=1, le=100_000_000, description="null: seq_len")
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    strategy: Literal["bfd", "wrapped"] = "bfd"


TokenCount = Annotated[
    float,
    BeforeValidator(TOKENS.parse),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": "^[0-9.e]+ *[KMBT]?$"}]}),
]


class BatchPhase(UserInput):
    """The batch size of a training from its `from_tokens`-th token on."""

    from_tokens: TokenCount = Field(ge=0, le=1e18)
    global_batch_size: int = Field(ge=1, le=1_000_000_000)


WORKSPACES = re.compile(r"(:\d{1,9}:\d{1,9}){1,9}")  # of CUBLAS_WORKSPACE_CONFIG


def _workspaces(value: str) -> str:
    if not WORKSPACES.fullmatch(value):
        raise ValueError("must be pairs of a size in KiB and a number, such as :4096:8")
    return value


class Training(UserInput):
    """One training step. Sizes: tokens and sequences, global unless said otherwise."""

    seq_len: int = Field(ge=1, le=100_000_000)
    global_batch_size: int = Field(ge=1, le=1_000_000_000)
    micro_batch_size: int = Field(default=1, ge=1, le=1_000_000)
    precision: Precision = "bf16"
    fp8_recipe: RecipeName | None = Field(
        default=None, description="how 8- and 4-bit matmuls are scaled; null: the framework's own"
    )
    param_dtype: StorageDtype = Field(default_factory=_param_dtype, description="null: precision's 16-bit dtype")
    autocast: bool | None = Field(
        default=None,
        description="forwards run under torch.autocast, which casts fp32 parameters and inputs of matmuls and leaves "
        "the residual stream in fp32; null: where FSDP does not cast parameters, as the framework does",
    )
    framework: FrameworkName = USUAL_FRAMEWORK
    software_date: SoftwareDate | None = Field(
        default=None, description="month of the framework's release; null: as frameworks are today"
    )
    grad_dtype: StorageDtype = Field(
        default_factory=_grad_dtype, description="null: the framework's own", json_schema_extra={"default": "fp32"}
    )
    grad_reduce_dtype: StorageDtype = Field(
        default_factory=lambda data: data["grad_dtype"], description="null: grad_dtype"
    )
    optimizer: OptimizerName = "adamw"
    adamw_kernels: Literal["fused", "foreach"] | None = Field(
        default=None,
        description="fused: one for an update; foreach: one for each operator; null: as the framework does",
    )
    optimizer_dtype: MomentDtype = Field(default="fp32", description="the dtype of Adam's two moments")
    master_weights: Literal[False, "remainders"] | None = Field(
        default=None,
        description="null: an fp32 copy where parameters are kept in 16 bits; false: none; remainders: of each fp32 "
        "number the 16 bits that the bf16 parameter lacks",
    )
    zero_grad: Literal["keep", "set_to_none"] | None = Field(
        default=None,
        description="keep: one buffer for the run; set_to_none: freed until the first backward; null: the framework's",
    )
    gradient_clipping: bool = Field(
        default=True, description="the norm of all gradients is computed, and gradients are scaled by it"
    )
    recompute: Annotated[Recompute, BeforeValidator(_recompute), _recompute_schema()] = Field(
        default=Recompute.model_construct(mode="none"), json_schema_extra={"default": "none"}
    )
    attention: Literal["fused", "unfused"] = "fused"
    attention_kernel: AttentionKernel | None = Field(
        default=None, description="the fused kernel; null: the framework's choice, or the profile's default"
    )
    indexer: Literal["trained", "warm_up", "frozen"] = Field(
        default="trained",
        description="how model.indexer learns: trained beside the rest; warm_up: alone, under dense attention; frozen",
    )
    packing: Packing | None = Field(default=None, description="null: a sequence is one document")
    cross_entropy: Literal["unfused", "native", "fused", "chunked", "tiled"] = Field(
        default_factory=_of_framework("cross_entropy"),
        description="null: the framework's own",
        json_schema_extra={"default": FRAMEWORKS[USUAL_FRAMEWORK].cross_entropy},
    )
    loss_chunks: int | None = Field(
        default=None,
        ge=1,
        description="cross_entropy chunked: chunks of a micro-batch's tokens in a loop of plain torch; null: Liger's",
    )
    fp8_output_proj: bool = Field(default=False, description="the output projection is multiplied in MXFP8, too")
    fp8_param_gather: bool = Field(
        default=False, description="layers' matrices are parameters in the matmuls' 8 bits, with no 16-bit ones beside"
    )
    gradient_accumulation_fusion: Literal[False] | None = Field(
        default=None, description="false: kernels of their own add weight gradients; null: as the framework does"
    )
    cublas_workspace_config: Annotated[str, AfterValidator(_workspaces)] | None = Field(
        default=None, description="CUBLAS_WORKSPACE_CONFIG, pairs of KiB and numbers; null: torch's own workspace"
    )
    fp8_dot_product_attention: bool = Field(
        default=False, description="fused attention multiplies 8-bit numbers, and its inputs and result are cast"
    )
    num_layers_at_start_in_bf16: int = Field(
        default=0, ge=0, le=MAX_LAYERS, description="8- and 4-bit precision: the number of first layers in 16 bits"
    )
    num_layers_at_end_in_bf16: int = Field(
        default=0, ge=0, le=MAX_LAYERS, description="8- and 4-bit precision: the number of last layers in 16 bits"
    )
    activation_func_fp8_input_store: bool = Field(
        default=False, description="the input of an MLP's activation is kept for the backward in 8 bits"
    )
    moe_grouped_gemm: Literal[False] | None = Field(
        default=None, description="false: each expert's layers run by themselves; null: grouped, as the framework does"
    )
    moe_shared_expert_overlap: bool = Field(
        default=False, description="shared experts run beside the exchanges of routed ones"
    )
    moe_router_fusion: bool | None = Field(
        default=None, description="Transformer Engine's kernels of the router; null: as the framework does"
    )
    apply_rope_fusion: Literal[False] | None = Field(
        default=None, description="false: torch's operators rotate queries and keys; null: as the framework does"
    )
    fused_single_qkv_rope: bool = Field(
        default=False, description="one kernel rotates queries and keys and takes the projection's result apart"
    )
    calculate_per_token_loss: bool = Field(
        default=False, description="gradients are divided by the number of all tokens behind their reduction"
    )
    bias_activation_fusion: Literal[False] | None = Field(
        default=None, description="false: torch's operators are an MLP's activation; null: as the framework does"
    )
    bias_dropout_fusion: Literal[False] | None = Field(
        default=None, description="false: bias, dropout and residual sum are apart; null: as the framework does"
    )
    moe_router_padding_for_quantization: bool = Field(
        default=False, description="the router's map is filled up to the tile of 8-bit matmuls, in place of copies"
    )
    fused_experts: bool = Field(
        default=False, description="experts' matmuls also compute the activation and quantize its result"
    )
    moe_expert_rank_capacity_factor: float | None = Field(
        default=None,
        ge=1,
        le=1e3,
        description="buffers of a rank's experts hold so many times the mean number of copies; null: what comes",
    )
    moe_paged_stash_buffer_size_factor_cuda: float | None = Field(
        default=None,
        gt=0,
        le=1e3,
        description="what experts keep waits in pages, so many times what the mean number of copies keeps; null: none",
    )
    cuda_graphs: Literal["none", "layers", "step"] = Field(
        default="none", description="what CUDA graphs replay: the host issues none of its kernels"
    )
    cuda_graph_scope: Annotated[tuple[GraphPart, ...], BeforeValidator(as_tuple), Field(max_length=6)] = Field(
        default=(),
        description="with cuda_graphs layers: the parts of each layer that are captured; null: whole layers",
        json_schema_extra={"default": None},
    )
    activation_offload: OffloadChoice = Field(
        default=False, description="saved activations go to host memory: all, those of layers, or of parts of layers"
    )
    optimizer_offload: Literal[False, True, "cpu"] = Field(
        default=False,
        description="optimizer states in host memory: true: the GPU updates parameters, cpu: the host's CPUs do",
    )
    parameter_offload: bool = Field(
        default=False, description="ZeRO-3's parameters and reduced gradients in host memory, beside the optimizer"
    )
    optimizer_post_validation: bool = Field(
        default=False, description="ranks of a pipeline begin the next step without waiting for all others"
    )
    tokens: TokenCount | None = Field(
        default=None, gt=0, le=1e18, description="tokens of the whole training, for its steps, days and GPU hours"
    )
    batch_schedule: Annotated[tuple[BatchPhase, ...], BeforeValidator(as_tuple), Field(max_length=1000)] = Field(
        default=(), json_schema_extra={"default": None}
    )
    lora: Lora | None = Field(default=None, description="null: all parameters are trained")
    preference: Preference | None = Field(default=None, description="null: next tokens of texts are learned")

    @property
    def graphs_layers(self) -> bool:
        """Tell whether CUDA graphs hold layers or parts of them, and nothing beside: the host issues embedding, head,
        loss and messages between replicas (Megatron-Core, transformer/cuda_graphs.py: TECudaGraphHelper captures
        layers)."""
        return self.cuda_graphs == "layers"

    @property
    def pair_loss(self) -> PreferenceLoss | None:
        """The loss over pairs of sequences; None where next tokens are learned."""
        return None if self.preference is None else self.preference.loss

    @property
    def reference(self) -> Reference:
        """Where the reference's log-probabilities come from, as the section says or leaves it to the loss."""
        if self.preference is None:
            return "none"
        if self.preference.reference is not None:
            return self.preference.reference
        usual: Reference = "model" if self.lora is None else "adapters_off"
        return usual if self.preference.loss in WITH_REFERENCE else "none"

    @property
    def runs_reference(self) -> bool:
        """Tell whether a frozen model runs forward on every micro-batch, too."""
        return self.reference in ("model", "adapters_off")

    @property
    def reads_others(self) -> bool:
        """Tell whether the trained model, and its reference, read as many other answers for an estimate alone."""
        return self.pair_loss == "kto"

    @property
    def runs_beside(self) -> bool:
        """Tell whether forwards without gradients run beside those of the training."""
        return self.runs_reference or self.reads_others
