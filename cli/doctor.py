"""`scalerl doctor`: what stands between a configuration and its run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from scalerl.cli.errors import user_errors

if TYPE_CHECKING:
    from scalerl.rl.align import Agreement, Alignment
    from scalerl.rl.config import RunConfig


def doctor(
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads the annotation at run time)
        typer.Argument(help="Hydra overrides, as of `scalerl train`: the run that is to be examined."),
    ] = None,
    run_dir: Annotated[Optional[str], typer.Option(help="Folder that the run is to have.")] = None,  # noqa: UP045
    align: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="MODEL",
            help="Then measure trainer against engine on this Hugging Face folder; `config` takes the model of the "
            "overrides.",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="With --align: prompts, the task's first ones.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="With --align: completions a prompt.")] = 4,
) -> None:
    """Examine this machine for a run: packages, devices, SGLang, ports, disk, W&B, model, task.

    One line a part: `ok`, `warn` (the run starts, and something is likely amiss) or `fail` (it can't start), with the
    way out. Exit 1 where anything fails. It takes the arguments of the run:

    `scalerl doctor engine=sglang model=hf model.path=PATH task=math task.data.train=FILE`

    `--align` starts the engine on the model (or uses the servers in `engine.urls`), samples short completions, and
    holds the engine's log-probabilities against the trainer's, as decoded and again by prefill: the largest and the
    mean difference, k3 KL, F(2) (the share of tokens whose probabilities differ by more than 2 times), and the worst
    tokens. Both sides should compute the same function; where k3 exceeds `trainer.alarms.mismatch_k3` it fails.

    `scalerl doctor engine=sglang --align PATH`
    """
    with user_errors():
        from scalerl.cli.compose import compose
        from scalerl.rl.doctor import examine

        chosen = [] if align in (None, "config") else ["model=hf", f"model.path={align}"]
        config = compose([*(overrides or []), *chosen], run_dir=run_dir).config
        failed = False
        for check in examine(config):
            print(f"{check.status:5} {check.name:11} {check.words}")
            failed |= check.status == "fail"
        if align is not None:
            failed = _report_alignment(config, prompts, samples) if not failed else _skip_alignment()
    raise SystemExit(int(failed))


def _skip_alignment() -> bool:
    print("fail  align       not measured: mend the above first")
    return True


def _report_alignment(config: RunConfig, n_prompts: int, n_samples: int) -> bool:
    """Measure and print; True where trainer and engine are too far apart."""
    import tempfile

    from scalerl.rl.align import align

    with tempfile.TemporaryDirectory() as folder:
        elsewhere = config.model_copy(update={"run_dir": folder})
        found = align(elsewhere, n_prompts=n_prompts, n_samples=n_samples)
    for line in alignment_lines(found):
        print(line)
    limit, k3 = config.trainer.alarms.mismatch_k3, max(found.decode.k3, found.prefill.k3)
    apart = limit is not None and k3 > limit
    verdict = "above" if apart else "within"
    print(f"{'fail' if apart else 'ok':5} align       k3 KL {k3:.2e} is {verdict} trainer.alarms.mismatch_k3={limit}")
    return apart


def alignment_lines(found: Alignment) -> list[str]:
    """The measurement in words."""

    def line(name: str, part: Agreement) -> str:
        return (
            f"      {name:11} {part.n} tokens: |difference| at most {part.largest:.2e}, mean {part.mean:.2e}; "
            f"k3 KL {part.k3:.2e}; F(2) {part.extreme:.2%}"
        )

    worst = [
        f"        {token.text!r} at {token.position}: engine {token.engine:.4f}, trainer {token.trainer:.4f}"
        for token in found.worst
    ]
    return [
        f"      {found.completions} completions; log-probabilities, trainer against engine:",
        line("as decoded", found.decode),
        line("by prefill", found.prefill),
        "      worst tokens, as decoded:",
        *worst,
    ]
