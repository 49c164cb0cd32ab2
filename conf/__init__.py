"""Hydra YAML: the only place where defaults live."""
