"""The arms of a study: what each axis is reverted to, and the order in which a recipe is built up."""

from __future__ import annotations

from collections.abc import Mapping

# Axis -> overrides that revert it (leave-one-out) from ScaleRL's value; Khatri et al., arXiv 2510.13786, section 4.
# `ppo` keeps the base's k, ScaleRL's 8, so that the two schedules differ in nothing else.
LEAVE_ONE_OUT: Mapping[str, str] = {
    "off_policy": "ppo",
    "loss": "dapo",
    "loss_aggregation": "sample",
    "advantage_norm": "prompt",
    "logits_precision": "model",
    "zero_variance": "keep",
    "resample_positive": "true",
    "length_control": "penalty",
}

# Axis -> ScaleRL's value, in the order in which section 3 of the paper adds them to its base.
FORWARD: Mapping[str, str] = {
    "off_policy": "pipeline",
    "loss": "cispo",
    "logits_precision": "fp32",
    "loss_aggregation": "prompt",
    "advantage_norm": "batch",
    "zero_variance": "drop",
    "resample_positive": "false",
}

# What figure 2 of the paper compares.
RECIPES = ("scalerl", "deepseek_grpo", "qwen_dapo", "magistral", "minimax")
