"""Fused numerics, each with a plain-torch reference."""
