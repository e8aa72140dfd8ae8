"""A BERT layer's small operators, each fused with its neighbours, with their gradients."""

from memfit.fused.masks import Drop, Seeds
from memfit.fused.mlp import mlp_half
from memfit.fused.norm import dense_dropout_add_norm
from memfit.fused.qkv import (
    join_parameters,
    joined_view,
    move_joined,
    project,
    separate_parameters,
)

__all__ = [
    "Drop",
    "Seeds",
    "dense_dropout_add_norm",
    "join_parameters",
    "joined_view",
    "mlp_half",
    "move_joined",
    "project",
    "separate_parameters",
]
