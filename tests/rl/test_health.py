"""Alarms: at their thresholds, warned about once, named every time."""

from __future__ import annotations

import pytest
import yaml

from scalerl.rl.config import Alarms
from scalerl.rl.health import SIGNS, Health

CALM = {
    "truncation_rate": 0.05,
    "entropy": 0.01,
    "mismatch_k3_current": 1.5e-3,
    "extreme_share": 0.05,
    "grad_norm": 10.0,
}


@pytest.fixture
def shipped():
    from importlib.resources import files

    return yaml.safe_load((files("scalerl.conf") / "trainer" / "default.yaml").read_text())["alarms"]


@pytest.fixture
def warned():
    return []


def health(thresholds, warned):
    return Health(Alarms(**thresholds), warned.append)


@pytest.mark.parametrize(
    "column,value,names",
    [
        ("truncation_rate", 0.051, ["truncation"]),
        ("truncation_rate", 0.101, ["truncation", "truncation_unstable"]),
        ("entropy", 0.009, ["entropy"]),
        ("mismatch_k3_current", 1.6e-3, ["mismatch_k3"]),
        ("extreme_share", 0.06, ["extreme_share"]),
        ("grad_norm", 10.1, ["grad_norm"]),
    ],
)
def test_each_alarm_is_named_at_every_step_and_warned_about_once(column, value, names, shipped, warned):
    checker = health(shipped, warned)
    assert checker.check({"step": 1, **CALM}) == []
    assert warned == []
    for step in (2, 3):
        assert checker.check({"step": step, **CALM, column: value}) == names
    assert [line.split(":")[0] for line in warned] == ["step 2"] * len(names)
    assert all(f"(trainer.alarms.{name})" in line for name, line in zip(names, warned, strict=True))


def test_what_was_not_measured_sets_nothing_off(shipped, warned):
    assert health(shipped, warned).check({"step": 1, "mismatch_k3_current": None}) == []


def test_null_turns_an_alarm_off(shipped, warned):
    never = dict.fromkeys(shipped)
    assert health(never, warned).check({"step": 1, **{sign.column: 1e9 for sign in SIGNS}}) == []
