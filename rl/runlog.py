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
import pyarrow as pa
from pydantic import ValidationError

from scalerl.rl.config import RunConfig
from scalerl.rl.errors import UserError

LOGS = ("metrics.jsonl", "eval.jsonl", "eval_prompts.parquet")


def create_run_dir(config: RunConfig, sources: Mapping[str, str]) -> Path:
    """Make the run folder with `config.json` and `environment.json`. Raises UserError if it exists or can't be made."""
    path = Path(config.run_dir)
    if path.exists():
        raise UserError(f"run folder {path} exists already; choose another run_dir, or go on with --resume {path}")
    beside = beside_of(path)
    try:
        beside.mkdir(parents=True)
        write_config(beside, config, sources)
        write_json(beside / "environment.json", environment(config))
        beside.rename(path)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise UserError(f"run folder {path} can't be made ({error.strerror}); choose another run_dir") from None
    return path


def beside_of(path: Path) -> Path:
    """Where this process makes `path` before it is renamed into place: a name that nobody else's file has."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def write_config(path: Path, config: RunConfig, sources: Mapping[str, str]) -> None:
    """Everything but where the run lies: a folder may be moved, and a study's arms differ in it."""
    content = config.model_dump(mode="json", exclude={"run_dir"})
    write_json(path / "config.json", {**content, "sources": {k: v for k, v in sources.items() if k != "run_dir"}})


def read_config(path: Path) -> RunConfig:
    """The configuration of the run in `path`. Raises UserError where there is none, or none that is valid."""
    file = path / "config.json"
    try:
        content: Any = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is no run folder: it has no config.json") from None
    except ValueError as error:  # of another encoding, too
        raise UserError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is no run's configuration: it holds no object")
    content.pop("sources", None)
    try:
        return RunConfig.model_validate({**content, "run_dir": str(path)})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def read_sources(path: Path) -> dict[str, str]:
    """Where each value of the run's configuration came from."""
    return json.loads((path / "config.json").read_text()).get("sources", {})


def read_rows(file: Path, needed: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The whole lines of a log, none where it isn't there yet; a kill may have left half a line at its end. Raises
    UserError for a broken one before it, and for one that lacks a `needed` number."""
    rows: list[dict[str, Any]] = []
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise UserError(f"{file}: line {number} is not valid JSON ({error}); mend it or take it out") from None
            break
        for name in needed:
            if not isinstance(row, dict) or not isinstance(row.get(name), int | float):
                raise UserError(f"{file}: line {number} has no number '{name}'; mend it or take it out")
        rows.append(row)
    return rows


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    with file.open("a") as f:
        f.write(_line(row))


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace a log, in one step."""
    beside = file.with_name(file.name + ".tmp")
    beside.write_text("".join(map(_line, rows)))
    beside.replace(file)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(strict(row), allow_nan=False) + "\n"


def environment(config: RunConfig) -> dict[str, Any]:
    """What the numbers depend on besides the configuration."""
    packages = ("scalerl", "torch", "transformers", "numpy", "hydra-core")
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "devices": {"trainer": config.trainer.device, "generator": config.engine.device},
        "generation": config.engine.kv,
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
        self._prompts = [_read_prompts(prompts)] if prompts.exists() else []

    def training_step(self, row: Mapping[str, Any]) -> None:
        append_row(self.path / "metrics.jsonl", row)
        self._mirror("train", row)

    def evaluation(self, row: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]) -> None:
        """One evaluation of one set, and the correct counts of its prompts."""
        self._prompts.append(pd.DataFrame(prompts))
        self._write_prompts()
        append_row(self.path / "eval.jsonl", row)
        self._mirror(f"eval/{row['set']}", row)

    def cut_after(self, step: int, evaluated: int) -> None:
        """Forget the steps after `step` and the evaluations after that of `evaluated`: a resumed run makes them anew,
        and none appears twice."""
        for name, last in (("metrics.jsonl", step), ("eval.jsonl", evaluated)):
            file = self.path / name
            write_rows(file, [row for row in read_rows(file, ("step",)) if row["step"] <= last])
        kept = [frame[frame["step"] <= evaluated] for frame in self._prompts]
        self._prompts = [frame for frame in kept if len(frame)]
        if self._prompts:
            self._write_prompts()
        else:
            (self.path / "eval_prompts.parquet").unlink(missing_ok=True)

    def sync(self) -> None:
        """Put what was logged on the disk, so that no checkpoint is ahead of it."""
        for name in LOGS:
            if (self.path / name).exists():
                with (self.path / name).open("rb") as f:
                    os.fsync(f.fileno())

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()

    def _write_prompts(self) -> None:
        beside = self.path / "eval_prompts.parquet.tmp"
        pd.concat(self._prompts, ignore_index=True).to_parquet(beside, index=False)
        beside.replace(self.path / "eval_prompts.parquet")

    def _mirror(self, prefix: str, row: Mapping[str, Any]) -> None:
        if self._wandb is not None:
            numbers = {f"{prefix}/{k}": v for k, v in row.items() if isinstance(v, (int, float))}
            self._wandb.log(numbers, step=row["step"])


def _read_prompts(file: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} can't be read ({str(error).splitlines()[0]}); put it back, or remove it") from None
    if "step" not in frame:
        raise UserError(f"{file} is no table of evaluated prompts: it has no column 'step'; put it back, or remove it")
    return frame


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
