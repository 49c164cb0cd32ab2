"""Verdicts on studies whose truth is known.

20 studies of 7 arms, evaluated every 400 up to 16,000, noise of sd 0.0035 and AR(1) rho 0.5, seeds that differ in A by
an sd of 0.004 and in B and C_mid by 3 % each; what was found is in docs/studies.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from scalerl.fitting.curves import Settings
from scalerl.sweeps.comparison import compare_arms
from scalerl.sweeps.gather import gather
from scalerl.sweeps.verdicts import Verdict, verdict
from tests.sweeps.synthetic import ARMS, RIGHT, write_study

SILENT = {"tie", "open"}  # says of no arm that it is better or worse


def verdicts(folder: Path, draw: int, seeds: int) -> dict[str, Verdict]:
    plan = write_study(folder, ARMS, seeds=tuple(range(seeds)), draw=draw)
    comparison = compare_arms(gather(folder, plan), Settings())
    return {arm.arm.name: verdict(arm, comparison) for arm in comparison.arms[1:]}


def counted(folder: Path, seeds: int, studies: int) -> dict[str, Counter[str]]:
    """Arm -> how often its verdict was right, wrong, or silent (no claim, or one with `perhaps`)."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for draw in range(studies):
        for name, found in verdicts(folder / str(draw), draw, seeds).items():
            if found.sure and found.kind in RIGHT[name]:
                counts[name]["right"] += 1
            elif not found.sure or found.kind in SILENT:
                counts[name]["silent"] += 1
            else:
                counts[name]["wrong"] += 1
    return counts


def test_one_study_of_three_seeds(tmp_path):
    found = verdicts(tmp_path, draw=1, seeds=3)
    for name, given in found.items():
        assert given.sure and given.kind in RIGHT[name] | SILENT, given
    assert found["loss=dapo"].text.startswith("lower ceiling: A 0.5")
    assert "beyond the margin and both intervals; at the target" in found["loss=dapo"].text
    assert "probability above 0.99 that the base leads" in found["loss=dapo"].text
    assert found["advantage_norm=prompt"].text.startswith("same ceiling, slower: ")
    assert "beyond noise" in found["advantage_norm=prompt"].text
    assert found["zero_variance=keep"].text.startswith("tie within noise: A 0.6")
    collapsed = found["length_control=penalty"].text
    assert collapsed.startswith("no fit: collapsed") and "truncation reached 14%" in collapsed
    assert found["logits_precision=model"].text.startswith("identical to the base by construction: an fp32 model")


def test_one_seed_never_claims_a_difference_in_efficiency(tmp_path):
    found = verdicts(tmp_path, draw=0, seeds=1)
    slower = found["advantage_norm=prompt"]
    assert slower.kind == "slower" and not slower.sure
    assert "perhaps slower" in slower.text and "one seed each" in slower.text
    assert found["loss=dapo"].kind == "lower" and found["loss=dapo"].sure


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_wrong_verdicts_are_rare_and_right_ones_common(tmp_path, seeds):
    counts = counted(tmp_path, seeds, studies=20)
    print({name: dict(count) for name, count in counts.items()})
    assert sum(count["wrong"] for count in counts.values()) <= 1
    assert counts["loss=dapo"]["right"] >= (16 if seeds == 1 else 19)
    assert counts["zero_variance=keep"]["wrong"] == 0
    assert counts["length_control=penalty"]["right"] == counts["logits_precision=model"]["right"] == 20
    if seeds > 1:
        assert counts["advantage_norm=prompt"]["right"] >= 12
        assert counts["zero_variance=keep"]["right"] >= 18
    if seeds > 2:
        assert counts["loss_aggregation=sample"]["right"] >= 10
