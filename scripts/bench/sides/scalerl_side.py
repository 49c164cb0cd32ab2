"""scalerl's side of against_trl.py: a run that makes a step for each line on its standard input, and answers with JSON.

The argument is the run's configuration, a JSON file."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

from scalerl.rl.config import RunConfig
from scalerl.rl.run import Run
from scalerl.rl.runlog import create_run_dir


class Turns:
    """Stands where the run logs: after each step it answers, and waits for the next line."""

    def __init__(self, run: Run) -> None:
        self._run, self._log = run, run.log.training_step
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer
        self._evaluations: list[dict[str, Any]] = []
        self._before = self._totals()

    def wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit()
        self._start, self._before = time.perf_counter(), self._totals()

    def step(self, row: dict[str, Any]) -> None:
        seconds = time.perf_counter() - self._start
        self._log(row)
        spent = {name: total - self._before[name] for name, total in self._totals().items()}
        seconds -= spent.pop("evaluation")
        self.answer({"seconds": seconds, **spent, "reward_pass_rate": row["pass_rate"]})
        self.wait()

    def evaluation(self, row: dict[str, Any], prompts: Any) -> None:
        self._evaluations.append({"step": row["step"], "pass_rate": row["pass_rate"]})

    def answer(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps({**message, "evaluations": self._evaluations}) + "\n")
        self._answers.flush()
        self._evaluations = []

    def _totals(self) -> dict[str, float]:
        ledger = self._run.ledger
        return {
            "generation": 3600 * ledger.generator_busy_hours,
            "training": 3600 * ledger.trainer_busy_hours,
            "evaluation": 3600 * ledger.eval_device_hours / ledger.devices,
            "generated_tokens": ledger.generated_tokens,
            "trained_tokens": ledger.train_tokens,
        }


def main() -> None:
    config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
    run = Run(config, create_run_dir(config, {}))
    turns, log = Turns(run), cast(Any, run.log)
    log.training_step, log.evaluation = turns.step, turns.evaluation
    turns.answer({})
    turns.wait()
    run.train()


if __name__ == "__main__":
    main()
