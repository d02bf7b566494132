"""The model as programs: what one rank computes, communicates and keeps for one micro-batch."""

from sim.models.dims import Shard
from sim.models.embedding import embedding_block
from sim.models.flops import model_flops_per_token
from sim.models.head import head_block, tied_params
from sim.models.layer import layer_block
from sim.models.mtp import mtp_block
from sim.models.optimizer import optimizer_items

__all__ = [
    "Shard",
    "embedding_block",
    "head_block",
    "layer_block",
    "model_flops_per_token",
    "mtp_block",
    "optimizer_items",
    "tied_params",
]
