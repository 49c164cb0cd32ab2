"""`scalerl sweep`: whole studies, from one command to verdicts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from scalerl.cli.errors import user_errors
from scalerl.cli.sweep_report import report

if TYPE_CHECKING:
    from scalerl.sweeps.launch import Launcher
    from scalerl.sweeps.plan import Plan

app = typer.Typer(
    help="Whole studies: many runs from one command, and what they say about a recipe's choices.\n\n"
    "`scalerl sweep loo --jobs 2 steps=160` reverts each axis of the recipe in a run of its own, fits all curves and "
    "says which choices raise the ceiling, which the efficiency, and which can't be told apart.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

# typer reads these at run time, where it knows Optional and not `X | None`.
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(help="Hydra overrides of every run, as for `scalerl train`.", show_default=False),
]
Study = Annotated[Optional[str], typer.Option(help="Folder of the study; it must not exist yet.")]  # noqa: UP045
Axes = Annotated[Optional[str], typer.Option(help="Only these axes, with commas: `loss,zero_variance`.")]  # noqa: UP045
Seeds = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="How many seeds each arm gets (default: 1; for `seeds` 3), or their numbers with commas."),
]
LauncherName = Annotated[str, typer.Option("--launcher", help="`local`, or `slurm` through submitit.")]
Jobs = Annotated[int, typer.Option(min=1, help="Runs at a time; `local` pins each to its share of cores and GPUs.")]
Gpus = Annotated[Optional[str], typer.Option(help="GPU indices that local runs share, with commas.")]  # noqa: UP045
SlurmOptions = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--slurm", help="A parameter of submitit, `slurm_partition=gpu` or `timeout_min=720`; repeatable."),
]
X = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--x", help="Axis of compute for the report. Default: `flops` where runs share a machine, else `device_hours`."
    ),
]
PlanOnly = Annotated[bool, typer.Option("--plan-only", help="Show the plan and run nothing.")]
Resume = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Go on with this study under its own plan: skip what is done, resume what is not."),
]
Stop = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        "--early-stop",
        min=0.5,
        max=1.0,
        help="End an arm that is below the base in ceiling and at the target with more than this probability.",
    ),
]


@app.command()
def loo(
    overrides: Overrides = None,
    study: Study = None,
    axes: Axes = None,
    seeds: Seeds = None,
    launcher: LauncherName = "local",
    jobs: Jobs = 1,
    gpus: Gpus = None,
    slurm: SlurmOptions = None,
    x: X = None,
    plan_only: PlanOnly = False,
    resume: Resume = None,
    early_stop: Stop = None,
) -> None:
    """Leave one out: the recipe, and the recipe with each axis reverted in turn (ScaleRL, figure 7)."""
    with user_errors():
        where = _Where(launcher, jobs, gpus, slurm, early_stop)
        _sweep("loo", overrides, study, seeds, where, x, plan_only, resume, axes=_commas(axes))


@app.command()
def forward(
    overrides: Overrides = None,
    study: Study = None,
    axes: Axes = None,
    seeds: Seeds = None,
    launcher: LauncherName = "local",
    jobs: Jobs = 1,
    gpus: Gpus = None,
    slurm: SlurmOptions = None,
    x: X = None,
    plan_only: PlanOnly = False,
    resume: Resume = None,
    early_stop: Stop = None,
) -> None:
    """Forward: from `recipe=base`, add ScaleRL's choices one by one, each arm keeping those before it."""
    with user_errors():
        where = _Where(launcher, jobs, gpus, slurm, early_stop)
        _sweep("forward", overrides, study, seeds, where, x, plan_only, resume, axes=_commas(axes))


@app.command()
def recipes(
    overrides: Overrides = None,
    names: Annotated[Optional[str], typer.Option(help="Recipes to compare, with commas.")] = None,  # noqa: UP045
    study: Study = None,
    seeds: Seeds = None,
    launcher: LauncherName = "local",
    jobs: Jobs = 1,
    gpus: Gpus = None,
    slurm: SlurmOptions = None,
    x: X = None,
    plan_only: PlanOnly = False,
    resume: Resume = None,
    early_stop: Stop = None,
) -> None:
    """The shipped recipes that ScaleRL's figure 2 compares, or those named."""
    with user_errors():
        from scalerl.sweeps.axes import RECIPES

        where = _Where(launcher, jobs, gpus, slurm, early_stop)
        chosen = _commas(names) or (RECIPES if resume is None else None)
        _sweep("recipes", overrides, study, seeds, where, x, plan_only, resume, recipes=chosen)


@app.command()
def seeds(
    overrides: Overrides = None,
    study: Study = None,
    seeds: Seeds = None,
    launcher: LauncherName = "local",
    jobs: Jobs = 1,
    gpus: Gpus = None,
    slurm: SlurmOptions = None,
    x: X = None,
    plan_only: PlanOnly = False,
    resume: Resume = None,
) -> None:
    """One recipe under several seeds: the error margin of its ceiling."""
    with user_errors():
        where = _Where(launcher, jobs, gpus, slurm, None)
        _sweep("seeds", overrides, study, seeds, where, x, plan_only, resume)


@app.command()
def axis(
    swept: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="KEY=V1,V2,...", help="The number to sweep and its values.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    fixed_total_batch: Annotated[
        bool, typer.Option(help="Of group size or prompts a batch, move the other so that their product stays.")
    ] = False,
    study: Study = None,
    seeds: Seeds = None,
    launcher: LauncherName = "local",
    jobs: Jobs = 1,
    gpus: Gpus = None,
    slurm: SlurmOptions = None,
    x: X = None,
    plan_only: PlanOnly = False,
    resume: Resume = None,
    early_stop: Stop = None,
) -> None:
    """Sweep one key: batch, group size, generation budget, model (ScaleRL, section 5)."""
    with user_errors():
        where = _Where(launcher, jobs, gpus, slurm, early_stop)
        both = _swept(swept) if swept is not None or resume is None else None
        _sweep(
            "axis",
            overrides,
            study,
            seeds,
            where,
            x,
            plan_only,
            resume,
            swept=both,
            fixed_total_batch=fixed_total_batch,
        )


app.command("report")(report)


class _Where:
    """The options that say how runs are started."""

    def __init__(
        self, launcher: str, jobs: int, gpus: str | None, slurm: list[str] | None, early_stop: float | None
    ) -> None:
        from scalerl.rl.errors import UserError

        if launcher not in ("local", "slurm"):
            raise UserError(f"--launcher {launcher}: local or slurm")
        self.launcher, self.jobs, self.gpus, self.early_stop = launcher, jobs, tuple(_commas(gpus) or ()), early_stop
        self.parameters: dict[str, Any] = {}
        for text in slurm or ():
            key, equals, value = text.partition("=")
            if not equals:
                raise UserError(f"--slurm {text}: write KEY=VALUE, for example slurm_partition=gpu")
            self.parameters[key] = int(value) if value.isdigit() else value

    def default_x(self) -> str:
        """Runs that share a machine share its cores, and their clocks with them."""
        return "flops" if self.launcher == "local" and self.jobs > 1 else "device_hours"

    def build(self, study: Path) -> Launcher:
        from scalerl.sweeps.launch import Local, Slurm

        if self.launcher == "local":
            return Local(self.jobs, self.gpus)
        launcher = Slurm(study / "slurm", self.parameters, self.jobs)
        launcher.executor()  # refuses what it doesn't know, before anything runs
        return launcher


def _sweep(
    kind: str,
    overrides: list[str] | None,
    study: str | None,
    seeds: str | None,
    where: _Where,
    x: str | None,
    plan_only: bool,
    resume: str | None,
    **choices: Any,
) -> None:
    from scalerl.cli.compose import compose
    from scalerl.cli.study_display import StudyDisplay, print_plan
    from scalerl.rl.errors import UserError
    from scalerl.sweeps.early_stop import EarlyStop
    from scalerl.sweeps.plan import make_plan, read_plan, write_plan
    from scalerl.sweeps.study import run_study

    if resume is not None:
        folder, plan = Path(resume), read_plan(Path(resume))
        if plan.kind != kind:
            raise UserError(f"study {folder} is of kind {plan.kind}: scalerl sweep {plan.kind} --resume {folder}")
        if overrides or study or x or seeds or any(choices.values()):
            raise UserError(
                "--resume goes on under the study's own plan: it takes no overrides, no --study, --seeds or --x, and "
                "nothing that says what is swept"
            )
    else:
        if own := [text for text in overrides or () if text.lstrip("+").startswith(("seed=", "run_dir="))]:
            raise UserError(f"{own[0]}: a study gives its runs their seeds (--seeds 3,4) and their folders (--study)")
        folder = Path(study or f"studies/{kind}-{datetime.now():%Y%m%d-%H%M%S}")
        plan = make_plan(
            kind,
            folder.name,
            _grouped(overrides or [], folder.name),
            lambda texts: compose(texts, run_dir="unused").config,
            x=x or where.default_x(),
            seeds=_seeds(seeds or ("3" if kind == "seeds" else "1")),
            command=shlex.join(["scalerl", *sys.argv[1:]]),
            **choices,
        )
    print_plan(plan)
    if plan_only:
        return
    launcher = where.build(folder)
    if resume is None:
        write_plan(folder, plan)
    early_stop = None if where.early_stop is None else EarlyStop(where.early_stop, plan.x)
    try:
        with StudyDisplay(plan) as display:
            members = run_study(folder, plan, launcher, early_stop=early_stop, on_change=display.update)
    except KeyboardInterrupt:
        print(f"interrupted; go on with: scalerl sweep {kind} --resume {folder}", file=sys.stderr)
        raise typer.Exit(130) from None
    _finish(folder, plan, members)


def _finish(folder: Path, plan: Plan, members: Sequence[Any]) -> None:
    """The report, and the runs that did not come to their end."""
    for member in members:
        if member.status in ("failed", "stopped"):
            print(f"{member.name}: {member.status}: {' | '.join(member.words)}", file=sys.stderr)
    if any(member.pass_rate is not None for member in members):
        report(str(folder))
    if any(member.status == "failed" for member in members):
        print(f"go on with: scalerl sweep {plan.kind} --resume {folder}", file=sys.stderr)
        raise typer.Exit(1)


def _grouped(overrides: list[str], name: str) -> list[str]:
    """One W&B group a study, unless the user names another."""
    return overrides if any(text.startswith("log.group=") for text in overrides) else [*overrides, f"log.group={name}"]


def _swept(text: str | None) -> tuple[str, list[str]]:
    from scalerl.rl.errors import UserError

    key, _, values = (text or "").partition("=")
    found = _full_key(key), [v for v in values.split(",") if v]
    if not key or not found[1]:
        raise UserError(f"'{text or ''}': write KEY=V1,V2,..., for example recipe.group_size=8,16,32")
    return found


def _full_key(key: str) -> str:
    """`group_size` for `recipe.group_size`."""
    from scalerl.rl.recipe import Recipe

    return f"recipe.{key}" if key in Recipe.model_fields and key != "name" else key


def _commas(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _seeds(text: str) -> list[int]:
    from scalerl.rl.errors import UserError

    parts = _commas(text) or []
    numbers = [int(part) for part in parts if part.isdecimal()]
    if not parts or len(set(numbers)) < len(parts) or numbers == [0]:
        raise UserError(f"--seeds {text}: how many, or different seeds with commas such as 0,1,2")
    return numbers if len(numbers) > 1 else list(range(numbers[0]))
