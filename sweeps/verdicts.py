"""One line an arm: what the study says of it against the base, never more than the noise permits."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import norm

from scalerl.sweeps.comparison import ArmFit, Comparison, Estimate
from scalerl.sweeps.gather import StudyRun

UNSTABLE_TRUNCATION = 0.10  # ScaleRL (arXiv 2510.13786), A.15: 10-15 % truncated completions destabilise training
_SMOOTHED = 10  # steps over which a truncation rate is averaged


@dataclass(frozen=True)
class Verdict:
    """kind: `base`; `lower` or `higher` ceiling; at the same ceiling `slower` or `faster` (by C80), `less-steep` or
    `steeper` (by B alone) or `tie`; `open` (a ceiling not seen); `identical`; `no-fit`; `no-base` (the base gives no
    fit); `no-data`. sure: False where the text says `perhaps`."""

    kind: str
    text: str
    sure: bool = True


def verdict(arm: ArmFit, comparison: Comparison) -> Verdict:
    """The verdict on one arm of the comparison, with what was unstable about it."""
    found = _verdict(arm, comparison)
    return replace(found, text="; ".join([found.text, *instabilities(arm)]))


def instabilities(arm: ArmFit) -> list[str]:
    """Seeds that gave no fit beside others that did, and truncation above 10 %."""
    lines = []
    lost = [curve.result.status for curve in arm.curves if curve.result.A is None]
    if lost and arm.usable:
        why = ", ".join(dict.fromkeys(lost))
        lines.append(
            f"unstable: {len(lost)} of {len(arm.curves)} seeds gave no fit ({why}); the numbers are of the rest"
        )
    worst = max((truncation_peak(run) for run in arm.runs), default=0.0)
    if worst > UNSTABLE_TRUNCATION:
        lines.append(f"unstable: truncation reached {worst:.0%} (mean of {_SMOOTHED} steps; above 10 % is too much)")
    return lines


def truncation_peak(run: StudyRun) -> float:
    """The highest mean truncation rate over consecutive steps; 0 where training logged none."""
    rates = run.training.truncation[np.isfinite(run.training.truncation)]
    n = min(_SMOOTHED, len(rates))
    return float(np.convolve(rates, np.ones(n) / n, mode="valid").max()) if n else 0.0


def compute(value: float) -> str:
    """5600 -> 5.6k; from a billion on 1.2e15."""
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if size <= value < 1e9:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}".replace("e+", "e")


def _verdict(arm: ArmFit, comparison: Comparison) -> Verdict:
    base = comparison.arms[0]
    if arm.arm.identical is not None:
        return Verdict("identical", f"identical to the base by construction: {arm.arm.identical}")
    if not arm.curves:
        return Verdict("no-data", "no data: " + _counted([run.trouble or "no evaluation" for run in arm.runs]))
    if arm.A is None or arm.value is None:
        return Verdict("no-fit", "no fit: " + _reasons(arm))
    if arm is base:
        return Verdict("base", _base(arm, comparison))
    if base.A is None or base.value is None:
        return Verdict("no-base", f"A {_ceiling(arm)}; no verdict: the base gives no fit")
    if arm.is_open or base.is_open:
        whose = "ceilings" if arm.is_open and base.is_open else "ceiling" if arm.is_open else "the base's ceiling"
        return Verdict("open", f"{whose} not yet seen: no verdict on A; {_at_target(arm, base, comparison)}")
    found = _closed(arm, arm.A, base.A, comparison)
    return replace(found, text=f"{found.text}; {_at_target(arm, base, comparison)}")


def _closed(arm: ArmFit, mine: Estimate, bases: Estimate, comparison: Comparison) -> Verdict:
    """Both ceilings are seen."""
    difference, noise = abs(mine.value - bases.value), mine.noise(bases)
    pair = f"A {mine.value:.3f} against {bases.value:.3f}"
    if difference <= comparison.margin:
        same = "same ceiling" if noise <= comparison.margin else f"ceilings not told apart ({pair}, noise {noise:.3f})"
        return _efficiency(arm, same, pair)
    word = "lower" if mine.value < bases.value else "higher"
    if not mine.disjoint(bases):
        why = "beyond the margin, but the intervals overlap"
        return Verdict(word, f"perhaps a {word} ceiling: {pair}, {why}", sure=False)
    if comparison.spread_A is None and difference <= (reach := _another_seed(noise, comparison)):
        why = f"beyond the margin and both intervals, but not what another seed may change ({reach:.3f})"
        return Verdict(word, f"perhaps a {word} ceiling: {pair}, {why}", sure=False)
    return Verdict(word, f"{word} ceiling: {pair}, beyond the margin and both intervals")


def _another_seed(noise: float, comparison: Comparison) -> float:
    """Half-width of a difference between two runs with the assumed run-to-run sd, where no seeds tell; at a level that
    allows for all arms (Bonferroni): the base's own luck turns up in every one of them."""
    arms = sum(arm.arm.identical is None for arm in comparison.arms[1:])
    z = float(norm.ppf(1 - (1 - comparison.level) / 2 / arms))
    return math.hypot(noise, z * math.sqrt(2) * comparison.run_sd)


def _efficiency(arm: ArmFit, same: str, pair: str) -> Verdict:
    """Two arms tied on A."""
    if arm.against is None:
        return Verdict("tie", f"{same}, {pair}; no fit with one A: no verdict on efficiency", sure=False)
    mine, bases = arm.against
    b = f"B {mine.B.value:.2f} against {bases.B.value:.2f}"
    c80 = f"C80 {compute(mine.C80.value)} against {compute(bases.C80.value)}"
    log_mine, log_base = mine.C80.log(), bases.C80.log()
    b_noise, c80_noise = mine.B.noise(bases.B), log_mine.noise(log_base)
    b_beyond = abs(mine.B.value - bases.B.value) > b_noise
    c80_beyond = abs(log_mine.value - log_base.value) > c80_noise
    if not c80_beyond and not b_beyond:
        least = (
            f"differences below {b_noise:.2f} in B and a factor {math.exp(min(c80_noise, 700)):.3g} in C80 are noise"
        )
        return Verdict("tie", f"tie within noise: {pair}, {b}, {c80} ({least})")
    kind = "slower" if mine.C80.value > bases.C80.value else "faster"
    if not c80_beyond:
        kind = "less-steep" if mine.B.value < bases.B.value else "steeper"
    beyond = ", ".join([b] * b_beyond + [c80] * c80_beyond)
    within = ", ".join([b] * (not b_beyond) + [c80] * (not c80_beyond))
    noise = "beyond noise"
    if not mine.seeds:
        noise = "beyond the noise of the evaluations, but one seed each: another may differ"
    words = f"{'' if mine.seeds else 'perhaps '}{kind.replace('-', ' ')}: {beyond}, {noise}"
    return Verdict(kind, f"{same}, {words}" + (f"; {within}, within it" if within else ""), sure=mine.seeds)


def _at_target(arm: ArmFit, base: ArmFit, comparison: Comparison) -> str:
    assert arm.value is not None and base.value is not None and arm.ahead is not None
    values = f"{arm.value.value:.3f} against {base.value.value:.3f}"
    ahead = arm.ahead >= 0.5
    share = max(arm.ahead, 1 - arm.ahead)
    probability = f"{share:.2f}" if share < 0.995 else "above 0.99"
    who = arm.arm.name if ahead else "the base"
    return f"at the target {values}, probability {probability} that {who} leads"


def _base(arm: ArmFit, comparison: Comparison) -> str:
    assert arm.B is not None and arm.C_mid is not None and arm.value is not None
    leads = "" if arm.leads is None or len(comparison.arms) < 2 else f", highest of all in {arm.leads:.0%} of draws"
    numbers = f"A {_ceiling(arm)}, B {arm.B.value:.2f}, C_mid {compute(arm.C_mid.value)}"
    return f"{numbers}; at the target {arm.value.value:.3f}{leads}"


def _ceiling(arm: ArmFit) -> str:
    assert arm.A is not None
    if arm.is_open:
        return f"at least {arm.A.low:.3f} (ceiling not yet seen)"
    return f"{arm.A.value:.3f} [{arm.A.low:.3f}, {arm.A.high:.3f}]"


def _reasons(arm: ArmFit) -> str:
    statuses = [curve.result.status for curve in arm.curves]
    first = arm.curves[0].result.message.partition(";")[0]
    return f"{_counted(statuses)} ({first})"


def _counted(reasons: list[str]) -> str:
    """`collapsed` where all runs agree, else `2 collapsed, 1 flat`."""
    counts = Counter(reasons)
    return reasons[0] if len(counts) == 1 else ", ".join(f"{n} {reason}" for reason, n in counts.items())
