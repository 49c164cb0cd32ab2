"""Checkpoints on disk: a kill leaves the whole of one, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

KEEP = 2  # the last checkpoints that stay on disk


def save_checkpoint(run_dir: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write `checkpoints/step_<n>` beside and rename it into place; older ones but the last few are removed."""
    folder = run_dir / "checkpoints"
    final, beside = folder / f"step_{step}", folder / f"step_{step}.tmp"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    torch.save(dict(state), beside / "state.pt")
    shutil.rmtree(final, ignore_errors=True)
    beside.rename(final)
    for old in _checkpoints(run_dir)[:-KEEP]:
        shutil.rmtree(old)
    return final


def load_last_checkpoint(run_dir: Path) -> dict[str, Any] | None:
    """The state of the run's last checkpoint; None where there is none yet."""
    found = _checkpoints(run_dir)
    if not found:
        return None
    # The file holds NumPy arrays and our own records beside tensors; it is as trusted as the run folder itself.
    return torch.load(found[-1] / "state.pt", weights_only=False, map_location="cpu")


def _checkpoints(run_dir: Path) -> list[Path]:
    found = (p for p in (run_dir / "checkpoints").glob("step_*") if p.name.removeprefix("step_").isdigit())
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))
