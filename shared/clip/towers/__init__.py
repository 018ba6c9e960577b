"""Prompted text and image encoding in open_clip's towers."""

BLOCK_KINDS = (
    "ln_1_weight",
    "ln_1_bias",
    "in_proj_weight",
    "in_proj_bias",
    "out_proj_weight",
    "out_proj_bias",
    "ln_2_weight",
    "ln_2_bias",
    "c_fc_weight",
    "c_fc_bias",
    "c_proj_weight",
    "c_proj_bias",
)
"""The weights of a transformer block, by the names that methods and states give them."""
