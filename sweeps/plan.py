"""The plan of a study: which runs it makes, written down before the first one starts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scalerl.fitting.errors import InputError

PLAN = "plan.json"


@dataclass(frozen=True)
class Arm:
    """One configuration of a study. overrides: Hydra's, beyond the study's own. difference: dotted config key -> (the
    base's value, this arm's). identical: why it is the base by construction, or None."""

    name: str
    axis: str | None
    overrides: tuple[str, ...]
    difference: dict[str, tuple[Any, Any]]
    identical: str | None


@dataclass(frozen=True)
class Plan:
    """kind: `loo`, `forward`, `recipes`, `seeds` or `axis`. x: compute axis of the comparison. arms: the base first."""

    kind: str
    name: str
    x: str
    overrides: tuple[str, ...]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    command: str

    def run_folder(self, arm: Arm, seed: int) -> str:
        """Relative to the study."""
        slug = re.sub(r"[^A-Za-z0-9._=-]", "_", arm.name)
        return f"runs/{slug}-seed{seed}"


def read_plan(study: Path) -> Plan:
    """The plan of the study in `study`. Raises InputError where there is none, or none that can be read."""
    file = study / PLAN
    try:
        record = json.loads(file.read_text())
        arms = tuple(
            Arm(
                arm["name"],
                arm["axis"],
                tuple(arm["overrides"]),
                {key: (before, after) for key, (before, after) in arm["difference"].items()},
                arm["identical"],
            )
            for arm in record["arms"]
        )
        lists = {name: tuple(record[name]) for name in ("overrides", "seeds")}
        return Plan(**{**record, **lists, "arms": arms})
    except OSError:
        raise InputError(f"{study} is no study: it has no {PLAN}; name the folder that scalerl sweep made") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is no plan of a study ({type(error).__name__}: {error})") from None


def write_plan(study: Path, plan: Plan) -> None:
    """Write `plan.json` beside and rename it into place."""
    study.mkdir(parents=True, exist_ok=True)
    beside = study / f"{PLAN}.tmp"
    beside.write_text(json.dumps(asdict(plan), indent=2) + "\n")
    beside.replace(study / PLAN)
