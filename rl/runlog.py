"""The files of a run. They are the truth; Weights & Biases mirrors them when asked."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from scalerl.rl.config import RunConfig
from scalerl.rl.errors import UserError


def create_run_dir(config: RunConfig, sources: Mapping[str, str]) -> Path:
    """Make the run folder with `config.json` and `environment.json`. Raises UserError if it exists or can't be made."""
    path = Path(config.run_dir)
    if path.exists():
        raise UserError(f"run folder {path} exists already; choose another run_dir, or go on with --resume {path}")
    beside = path.with_name(path.name + ".tmp")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        content = config.model_dump(mode="json", exclude={"run_dir"})  # the folder may move, and arms differ in it
        write_json(beside / "config.json", {**content, "sources": {k: v for k, v in sources.items() if k != "run_dir"}})
        write_json(beside / "environment.json", environment(config))
        beside.rename(path)
    except OSError as error:
        raise UserError(f"run folder {path} can't be made ({error.strerror}); choose another run_dir") from None
    return path


def read_config(path: Path) -> RunConfig:
    """The configuration of the run in `path`. Raises UserError where there is none."""
    file = path / "config.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is no run folder: it has no config.json") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None
    content.pop("sources", None)
    return RunConfig.model_validate({**content, "run_dir": str(path)})


def last_device_hours(path: Path) -> float:
    """The training clock at the last whole line of `metrics.jsonl`."""
    hours, file = 0.0, path / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            hours = json.loads(line)["device_hours"]
        except (json.JSONDecodeError, KeyError):
            break  # the half line of a killed run
    return hours


def environment(config: RunConfig) -> dict[str, Any]:
    """What the numbers depend on besides the configuration."""
    packages = ("scalerl", "torch", "transformers", "numpy", "hydra-core")
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "devices": {"trainer": config.trainer.device, "generator": config.engine.device},
        "git_commit": _git_commit(),
        "command": sys.argv,
    }


def _git_commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write_json(path: Path, content: Any) -> None:
    """Write beside and rename into place, so that a reader never sees half a file."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(strict(content), indent=2, allow_nan=False) + "\n")
    beside.replace(path)


def strict(value: Any) -> Any:
    """The same value as strictly valid JSON has it: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class RunLog:
    """Appends to `metrics.jsonl`, `eval.jsonl` and `eval_prompts.parquet` of a run folder, and mirrors to W&B."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self._wandb = _start_wandb(path, config) if config.log.wandb != "off" else None
        prompts = path / "eval_prompts.parquet"
        self._prompts = [pd.read_parquet(prompts)] if prompts.exists() else []

    def training_step(self, row: Mapping[str, Any]) -> None:
        self._append("metrics.jsonl", row)
        self._mirror("train", row)

    def evaluation(self, row: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]) -> None:
        """One evaluation of one set, and the correct counts of its prompts."""
        self._prompts.append(pd.DataFrame(prompts))
        beside = self.path / "eval_prompts.parquet.tmp"
        pd.concat(self._prompts, ignore_index=True).to_parquet(beside, index=False)
        beside.replace(self.path / "eval_prompts.parquet")
        self._append("eval.jsonl", row)
        self._mirror(f"eval/{row['set']}", row)

    def cut_after(self, step: int) -> None:
        """Forget what was logged after `step`: a resumed run writes those steps anew, and none appears twice."""
        for name in ("metrics.jsonl", "eval.jsonl"):
            path = self.path / name
            if not path.exists():
                continue
            kept = [line for line in path.read_text().splitlines() if _step(line) <= step]
            beside = path.with_name(name + ".tmp")
            beside.write_text("".join(line + "\n" for line in kept))
            beside.replace(path)
        self._prompts = [frame[frame["step"] <= step] for frame in self._prompts]

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self.path / name).open("a") as f:
            f.write(json.dumps(strict(row), allow_nan=False) + "\n")

    def _mirror(self, prefix: str, row: Mapping[str, Any]) -> None:
        if self._wandb is not None:
            numbers = {f"{prefix}/{k}": v for k, v in row.items() if isinstance(v, (int, float))}
            self._wandb.log(numbers, step=row["step"])


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):
        return math.inf  # the half line of a killed run


def _start_wandb(path: Path, config: RunConfig) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError("log.wandb needs Weights & Biases: pip install 'scalerl[wandb]', or log.wandb=off") from None
    return wandb.init(
        project=config.log.project,
        name=config.log.name or path.name,
        group=config.log.group,
        mode=config.log.wandb,  # pyright: ignore[reportArgumentType] ("off" is excluded by the caller)
        dir=str(path),
        config=config.model_dump(mode="json"),
        settings=wandb.Settings(silent=True),
    )
