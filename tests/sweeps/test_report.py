"""The report of a study on disk: numbers against the fits they come from, words, files, and what is not whole."""

from __future__ import annotations

import base64
import csv
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as t_distribution

from scalerl.fitting import backtest, fit, read_runs
from scalerl.sweeps.comparison import Estimate, Spread, between_seeds, pooled
from scalerl.sweeps.plan import write_plan
from scalerl.sweeps.report import Report, report
from scalerl.sweeps.verdicts import compute, truncation_peak
from scalerl.sweeps.write import write
from tests.sweeps.synthetic import BASE, Simulated, plan_of, write_study

LOWER = Simulated((0.40, 0.560, 1.92, 2542.0))
FILES = {"table.csv", "report.md", "curves.png", "slopes.png", "truncation.png", "entropy.png", "index.html"}


def kinds(found: Report) -> dict[str, str]:
    return {row.name: row.verdict.kind for row in found.rows}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("studies") / "loo"
    write_study(folder, {"base": Simulated(), "loss=dapo": LOWER, "zero_variance=keep": Simulated()}, seeds=(0, 1))
    return folder


@pytest.fixture(scope="module")
def found(study) -> Report:
    return report(study)


def test_the_numbers_are_those_of_the_fits(study, found):
    for row, slug in zip(found.rows, ("base", "loss=dapo", "zero_variance=keep"), strict=True):
        (one,), (two,) = (read_runs([study / "runs" / f"{slug}-seed{seed}"], x="flops") for seed in (0, 1))
        fits = [fit(run.compute, run.pass_rate) for run in (one, two)]
        tests = [backtest(run.compute, run.pass_rate) for run in (one, two)]
        assert row.fit.A is not None and row.fit.C_mid is not None and row.fit.value is not None
        assert pytest.approx(np.mean([f.A for f in fits])) == row.fit.A.value  # pyright: ignore
        assert pytest.approx(np.sqrt(np.prod([f.C_mid for f in fits]))) == row.fit.C_mid.value  # pyright: ignore
        assert pytest.approx(np.mean([f.predict(32_000.0)[0] for f in fits])) == row.fit.value.value
        assert row.mae == pytest.approx(np.mean([t.mae for t in tests]))  # pyright: ignore
        assert row.coverage == pytest.approx(np.mean([t.coverage for t in tests]))  # pyright: ignore
    assert found.comparison.target == 32_000.0
    shares = [row.fit.leads for row in found.rows]
    assert sum(share or 0.0 for share in shares) == pytest.approx(1)


def test_b_and_c80_are_those_at_the_tied_arms_mean_ceiling(study, found):
    base, dapo, keep = (row.fit for row in found.rows)
    assert (base.tied, dapo.tied, keep.tied) == (True, False, True) and dapo.common is None
    assert base.A and keep.A and base.common and keep.common
    common = (base.A.value + keep.A.value) / 2
    assert found.comparison.common_A == pytest.approx(common)
    refits = []
    for seed in (0, 1):
        (run,) = read_runs([study / "runs" / f"base-seed{seed}"], x="flops")
        refits.append(fit(run.compute, run.pass_rate, fixed_A=common))
    assert base.common.B.value == pytest.approx(np.mean([r.B for r in refits]))  # pyright: ignore
    assert base.common.C80.value == pytest.approx(np.sqrt(np.prod([r.C80 for r in refits])))  # pyright: ignore
    assert found.comparison.common_level == pytest.approx(1 - 0.05 / 2)  # one arm is compared, in two numbers


def test_pooled_by_hand():
    seeds = [Estimate(0.60, 0.58, 0.63), Estimate(0.62, 0.61, 0.63)]
    alone = pooled(seeds, None, 0.95)
    assert alone.value == pytest.approx(0.61)
    assert alone.low == pytest.approx(0.61 - 0.015 / math.sqrt(2))  # mean distances 0.015 and 0.02
    assert alone.high == pytest.approx(0.61 + 0.02 / math.sqrt(2))
    half = t_distribution.ppf(0.975, 4) * 0.01 / math.sqrt(2)  # 2.776 x 0.00707 = 0.0196, wider than both
    wide = pooled(seeds, Spread(0.01, 4), 0.95)
    assert (wide.low, wide.high) == pytest.approx((0.61 - half, 0.61 + half))


def test_between_seeds_by_hand():
    spread = between_seeds([[1.0, 2.0, 3.0], [4.0, 6.0], [9.0]])
    assert spread is not None and (spread.sd, spread.df) == (pytest.approx(math.sqrt(4 / 3)), 3)
    assert between_seeds([[1.0], [2.0]]) is None


def test_noise_is_of_the_sides_that_face_each_other():
    low, high = Estimate(1.0, 0.0, 1.3), Estimate(2.0, 1.6, 9.0)
    assert low.noise(high) == high.noise(low) == pytest.approx(0.5)
    assert low.disjoint(high) and not low.disjoint(Estimate(1.2, 1.1, 2.0))


@pytest.mark.parametrize(
    ("value", "text"), [(5634.0, "5.63k"), (32_000, "32k"), (1.25e15, "1.25e15"), (0.012, "0.012"), (2.5e6, "2.5M")]
)
def test_compute_in_words(value, text):
    assert compute(value) == text


def test_files_and_the_page(found, tmp_path):
    assert {path.name for path in write(found, tmp_path / "new" / "report")} == FILES
    page = (tmp_path / "new" / "report" / "index.html").read_text()
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(images) == 4 and all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
    assert "<script" not in page and not re.search(r'(src|href)="(?!data:)', page) and "http" not in page
    for row in found.rows:
        assert row.verdict.text in page
    markdown = (tmp_path / "new" / "report" / "report.md").read_text()
    assert "- **loss=dapo**: lower ceiling" in markdown and "| loss=dapo | recipe.loss | 8 | dapo |" in markdown
    rows = list(csv.DictReader((tmp_path / "new" / "report" / "table.csv").open()))
    assert [row["arm"] for row in rows] == ["base", "loss=dapo", "zero_variance=keep"]
    assert float(rows[1]["A"]) == pytest.approx(found.rows[1].fit.A and found.rows[1].fit.A.value)
    assert rows[1]["verdict_kind"] == "lower" and rows[0]["ahead_of_base"] == "" and rows[1]["common_A_B"] == ""


def test_names_are_escaped_on_the_page(study, tmp_path):
    copy = shutil.copytree(study, tmp_path / "copy")
    content = json.loads((copy / "plan.json").read_text())
    (copy / "plan.json").write_text(json.dumps({**content, "name": "<b>&", "command": "scalerl <i>"}))
    write(report(copy), tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page and "scalerl &lt;i&gt;" in page


def test_a_folder_that_can_not_be_written(found, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: the report can't be written"):
        write(found, tmp_path / "file")


def test_what_is_not_whole_is_named_and_the_rest_reported(study, tmp_path):
    copy = shutil.copytree(study, tmp_path / "copy")
    runs = copy / "runs"
    shutil.rmtree(runs / "loss=dapo-seed1")
    (runs / "zero_variance=keep-seed0" / "eval.jsonl").unlink()
    half = runs / "zero_variance=keep-seed1" / "eval.jsonl"
    half.write_text("".join(half.read_text().splitlines(keepends=True)[:21]) + '{"set": "held_out", "st')
    broken = runs / "base-seed1" / "eval.jsonl"
    broken.write_text(broken.read_text().replace('"pass_rate": 0.', '"pass_rate": 7.', 1))
    (copy / "logs").mkdir()
    (copy / "logs" / "zero_variance=keep-seed0.log").write_text("step 1\nerror: No space left on device\n\n")
    (copy / "stopped.json").write_text(json.dumps({"zero_variance=keep-seed1": "ended early: below the base"}))
    found = report(copy)
    lines = "\n".join(found.troubles)
    assert "loss=dapo seed 1: missing: not started" in lines
    assert "zero_variance=keep seed 0: missing: no evaluation yet; its log ends: error: No space left" in lines
    assert "zero_variance=keep seed 1: ended early: below the base" in lines
    assert "base seed 1: can't be read (" in lines and "exceed" in lines
    assert len(found.troubles) == 4
    assert kinds(found)["loss=dapo"] == "lower" and len(found.rows[2].fit.usable) == 1
    (copy / "stopped.json").unlink()
    assert "zero_variance=keep seed 1: unfinished: evaluated up to step 200 of 400" in report(copy).troubles


def test_arms_without_data_or_fit(study, tmp_path):
    copy = shutil.copytree(study, tmp_path / "copy")
    for seed in (0, 1):
        shutil.rmtree(copy / "runs" / f"loss=dapo-seed{seed}")
        few = copy / "runs" / f"zero_variance=keep-seed{seed}" / "eval.jsonl"
        few.write_text("".join(few.read_text().splitlines(keepends=True)[:3]))
    found = report(copy)
    assert kinds(found) == {"base": "base", "loss=dapo": "no-data", "zero_variance=keep": "no-fit"}
    assert found.rows[1].verdict.text == "no data: missing: not started"
    assert found.rows[2].verdict.text.startswith(
        "no fit: too-few-points (need at least 6 points in the window (have 2)"
    )
    assert {path.name for path in write(found, tmp_path / "out")} == FILES


def test_no_verdict_where_the_base_gives_no_fit(study, tmp_path):
    copy = shutil.copytree(study, tmp_path / "copy")
    for seed in (0, 1):
        few = copy / "runs" / f"base-seed{seed}" / "eval.jsonl"
        few.write_text("".join(few.read_text().splitlines(keepends=True)[:3]))
    found = report(copy)
    assert kinds(found) == {"base": "no-fit", "loss=dapo": "no-base", "zero_variance=keep": "no-base"}
    assert found.rows[1].verdict.text.endswith("no verdict: the base gives no fit") and found.usable


def test_nothing_to_report(tmp_path):
    with pytest.raises(ValueError, match="is no study: it has no plan"):
        report(tmp_path)
    write_plan(tmp_path / "new", plan_of({"base": Simulated()}, (0,)))
    with pytest.raises(ValueError, match="no run of the study has an evaluation yet"):
        report(tmp_path / "new")
    with pytest.raises(ValueError, match="fraction=1"):
        report(tmp_path / "new", fraction=1.0)
    write_study(tmp_path / "whole", {"base": Simulated()}, seeds=(0,))
    with pytest.raises(ValueError, match="target=-1"):
        report(tmp_path / "whole", target=-1.0)


def test_a_ceiling_that_is_not_seen_gets_no_verdict(tmp_path):
    early = Simulated((0.40, 0.560, 1.92, 2542.0), budget=2400.0)
    write_study(tmp_path / "study", {"base": Simulated(), "loss=dapo": early}, seeds=(0,))
    row = report(tmp_path / "study", target=16_000.0).rows[1]
    assert row.verdict.kind == "open"
    assert row.verdict.text.startswith("ceiling not yet seen: no verdict on A; at the target 0.")
    assert re.search(r"probability 0\.\d\d that (the base|loss=dapo) leads$", row.verdict.text)


def test_a_higher_ceiling(tmp_path):
    better = Simulated((0.40, 0.660, 1.92, 2542.0))
    write_study(tmp_path / "study", {"base": Simulated(), "loss=gspo": better}, seeds=(0,))
    found = report(tmp_path / "study")
    assert kinds(found)["loss=gspo"] == "higher"
    assert found.rows[1].verdict.text.endswith("probability above 0.99 that loss=gspo leads")
    assert found.comparison.common_A is None and not found.rows[0].fit.tied


def test_arms_below_the_best_are_compared_with_the_base_all_the_same(tmp_path):
    """A better arm lifts the group of the tied; the base and its like then share a ceiling of their own."""
    arms = {"base": Simulated(), "loss=gspo": Simulated((0.40, 0.66, 1.92, 2542.0)), "zero_variance=keep": Simulated()}
    write_study(tmp_path / "study", arms, seeds=(0, 1))
    base, _, keep = report(tmp_path / "study").rows
    assert not base.fit.tied and not keep.fit.tied and keep.fit.common is None
    assert keep.verdict.kind == "tie" and keep.fit.against is not None and base.fit.A and keep.fit.A
    assert pytest.approx((base.fit.A.value + keep.fit.A.value) / 2) == keep.fit.against[0].A


def test_one_collapsed_seed_of_two_is_said(tmp_path):
    write_study(tmp_path / "study", {"base": Simulated(), "loss=dapo": LOWER}, seeds=(0, 1))
    write_study(
        tmp_path / "fallen", {"base": Simulated(), "loss=dapo": replace(LOWER, collapse_at=7000.0)}, seeds=(0, 1)
    )
    slug = "runs/loss=dapo-seed1"
    shutil.rmtree(tmp_path / "study" / slug)
    shutil.copytree(tmp_path / "fallen" / slug, tmp_path / "study" / slug)
    row = report(tmp_path / "study").rows[1]
    assert row.verdict.kind == "lower"
    assert row.verdict.text.endswith("unstable: 1 of 2 seeds gave no fit (collapsed); the numbers are of the rest")


def test_seeds_that_differ_widen_the_margin(tmp_path):
    arms = {"base": Simulated(), "loss=dapo": LOWER}
    write_study(tmp_path / "study", arms, seeds=(0, 1))
    high = {"base": Simulated((0.40, 0.70, *BASE[2:])), "loss=dapo": LOWER}
    write_study(tmp_path / "high", high, seeds=(0, 1))
    shutil.rmtree(tmp_path / "study/runs/base-seed1")
    shutil.copytree(tmp_path / "high/runs/base-seed1", tmp_path / "study/runs/base-seed1")
    found = report(tmp_path / "study")
    spread = found.comparison.spread_A
    assert spread is not None and spread.df == 2
    assert found.comparison.margin == pytest.approx(2 * spread.sd) and found.comparison.margin > 0.05
    row = found.rows[1]
    assert row.verdict.kind != "lower" or not row.verdict.sure
    assert any("(2 sd)" in note for note in found.notes)


def test_a_sweep_of_a_number_is_in_its_order(tmp_path):
    arms = {"base": Simulated(), "group_size=16": Simulated(), "group_size=4": Simulated()}
    write_study(tmp_path / "study", arms, seeds=(0,), kind="axis")
    found = report(tmp_path / "study")
    assert [row.name for row in found.rows] == ["group_size=4", "base", "group_size=16"]  # the base's is 8
    assert kinds(found)["base"] == "base"
    assert {path.name for path in write(found, tmp_path / "out")} == FILES


def test_the_axis_of_compute_is_said(tmp_path, found):
    assert any("no idle time" in note for note in found.notes) and "compared on flops" in found.notes[0]
    write_study(tmp_path / "study", {"base": Simulated()}, seeds=(0, 1), kind="seeds", x="device_hours")
    alone = report(tmp_path / "study")
    assert "compared on device_hours (device-hours)" in alone.notes[0]
    assert not any("no idle time" in note for note in alone.notes)
    assert kinds(alone) == {"base": "base"} and alone.comparison.spread_A is not None


def test_truncation_peak_is_a_mean_over_ten_steps(found):
    run = found.rows[0].fit.runs[0]
    rates = np.zeros(40)
    rates[5], rates[20:30] = 0.9, 0.2  # one bad step is none, ten are
    assert truncation_peak(replace(run, training=replace(run.training, truncation=rates))) == pytest.approx(0.2)
    assert truncation_peak(replace(run, training=replace(run.training, truncation=np.array([np.nan])))) == 0.0
