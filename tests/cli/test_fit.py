"""`scalerl fit` from the command line: output, exit codes, files."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from scalerl.cli.fit import fit
from scalerl.cli.plot import plot

app = typer.Typer(pretty_exceptions_enable=False)
app.command("fit")(fit)
app.command("plot")(plot)


def run(*arguments: object):
    return CliRunner().invoke(app, ["fit", *map(str, arguments)])


def curve(compute, a=0.61, b=1.92, c_mid=2542.0, r0=0.40, sd=0.0024, seed=0):
    """Eq. (1) with the noise of an evaluation; ScaleRL's own A, B and C_mid by default."""
    compute = np.asarray(compute, dtype=float)
    clean = r0 + (a - r0) / (1 + (c_mid / np.maximum(compute, 1e-9)) ** b)
    return clean + np.random.default_rng(seed).normal(0, sd, len(compute))


def table(path, compute, rate, header="gpu_hours,pass_rate"):
    path.write_text(header + "\n" + "".join(f"{c:g},{r:.4f}\n" for c, r in zip(compute, rate, strict=True)))
    return path


@pytest.fixture
def good(tmp_path):
    compute = np.linspace(0, 6000, 41)
    return table(tmp_path / "good.csv", compute, curve(compute))


@pytest.fixture
def flat(tmp_path):
    return table(tmp_path / "flat.csv", np.linspace(1000, 9000, 16), np.full(16, 0.412))


def strict_json(text: str):
    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_table_for_people(good):
    result = run(good, "--extrapolate", "2x", "--extrapolate", "20000")
    assert result.exit_code == 0, result.stderr
    for part in ("pass_rate against gpu_hours", "good", "ok", "base", "40 + base", "at 12,000", "at 20,000"):
        assert part in result.stdout


def test_json_alone_on_stdout(good):
    result = run(good, "--extrapolate", "2x", "--json", "-")
    (record,) = strict_json(result.stdout)["runs"]
    assert record["status"] == "ok" and record["n"] == 40 and record["n_base"] == 1
    assert record["A"] == pytest.approx(0.61, abs=0.02)
    assert record["A_interval"][0] < record["A"] < record["A_interval"][1]
    low, high = record["A_at_R0"]
    assert low > record["A"] > high
    (prediction,) = record["predictions"]
    assert prediction["C"] == 12000 and prediction["low"] < prediction["value"] < prediction["high"]
    assert len(record["sources"][0]["sha256"]) == 64 and record["dropped"] == []


def test_dropped_rows_and_notes(tmp_path):
    compute = np.linspace(150, 6000, 40)
    rows = [{"step": i, "gpu_hours": c, "acc": r} for i, (c, r) in enumerate(zip(compute, curve(compute), strict=True))]
    rows[3]["acc"], rows[5]["acc"] = float("nan"), "N/A"
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 41, "gp')
    result = run(path, "--json", "-")
    (record,) = strict_json(result.stdout)["runs"]
    assert [entry["line"] for entry in record["dropped"]] == [4, 6]
    assert record["n"] == 38 and record["n_base"] == 0
    assert "line 41: truncated last line" in result.stderr and "2 rows dropped" in result.stderr


def test_no_usable_result_is_exit_1(flat, tmp_path):
    few = table(tmp_path / "few.csv", [1500, 3000, 4500], [0.4553, 0.5201, 0.5557])
    for path, status in ((flat, "flat"), (few, "too-few-points")):
        result = run(path, "--extrapolate", "2x", "--json", "-")
        assert result.exit_code == 1
        (record,) = strict_json(result.stdout)["runs"]
        assert record["status"] == status and record["A"] is None and record["predictions"] == []
        assert run(path).exit_code == 1


def test_one_usable_run_is_enough(good, flat):
    result = run(good, flat)
    assert result.exit_code == 0 and "flat" in result.stdout


def test_a_collapsed_run_shows_no_numbers(tmp_path):
    compute = np.linspace(500, 10_000, 39)
    rate = np.where(compute <= 6000, curve(compute, c_mid=2290.0), 0.18)
    path = table(tmp_path / "run.csv", compute, rate)
    whole = run(path, "--json", "-")
    (record,) = strict_json(whole.stdout)["runs"]
    assert whole.exit_code == 1 and record["status"] == "collapsed" and record["A"] is None
    assert any("--fit-max" in warning for warning in record["warnings"])
    part = run(path, "--fit-max", "6000", "--r0", "0.40", "--json", "-")
    (record,) = strict_json(part.stdout)["runs"]
    assert part.exit_code == 0 and record["A"] == pytest.approx(0.61, abs=0.02)


def test_an_open_asymptote_is_a_lower_bound(tmp_path):
    compute = np.linspace(200, 1300, 23)
    path = table(tmp_path / "run.csv", compute, curve(compute))
    result = run(path, "--r0", "0.40", "--json", "-")
    (record,) = strict_json(result.stdout)["runs"]
    assert record["status"] == "asymptote-open" and record["A_open"][1]
    assert f"at least {record['A_interval'][0]:.3f}" in run(path, "--r0", "0.40").stdout


def test_csv(good, flat, tmp_path):
    out = tmp_path / "out.csv"
    assert run(good, flat, "--extrapolate", "2x", "--csv", out).exit_code == 0
    first, second = csv.DictReader(io.StringIO(out.read_text()))
    assert (first["name"], second["name"]) == ("good", "flat")
    assert float(first["prediction_C"]) == 12000 and second["A"] == "" and second["prediction_value"] == ""
    assert len(first["sha256"]) == 64 and first["version"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--extrapolate", "soon"], "--extrapolate soon"),
        (["--extrapolate", "-2x"], "--extrapolate -2x"),
        (["--r0", "1.4"], "--r0 1.4"),
        (["--level", "95"], "--level 95"),
        (["--method", "lbfgs"], "--method lbfgs: one of continuous, grid, paper"),
        (["--form", "logistic"], "--form logistic: one of sigmoid"),
        (["--fit-min", "10", "--fit-max", "5"], "--fit-min 10 is not below --fit-max 5"),
        (["--a-grid", "0.4:0.8:0.01"], "--a-grid and --cmid-grid go with --method grid"),
        (["--method", "grid", "--cmid-grid", "0:1"], "--cmid-grid 0:1: LO:HI:STEP or LO:HI:N"),
        (["--form", "entropy"], "needs one entropy column"),
        (["--x", "hours"], "no column 'hours'"),
        (["--plot", "curve.gif"], "curve.gif: figures end in .png, .svg, .pdf"),
        (["--json", "no/such/folder.json"], "no/such/folder.json: can't be written"),
        (["--json", "-", "--csv", "-"], "both want stdout"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(good, arguments, message):
    result = run(good, *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_missing_input():
    result = run("nowhere.csv")
    assert result.exit_code == 2 and "nowhere.csv: no such file or folder" in result.stderr


def test_a_file_that_cannot_be_written(good, tmp_path):
    result = run(good, "--csv", tmp_path)
    assert result.exit_code == 2 and "it is a folder" in result.stderr


def test_grid_methods_give_no_intervals(good):
    (record,) = strict_json(run(good, "--method", "grid", "--extrapolate", "2x", "--json", "-").stdout)["runs"]
    assert record["A"] == pytest.approx(0.61, abs=0.02) and record["A_interval"] is None
    assert record["predictions"][0]["low"] is None
    finer = ("--a-grid", "0.5:0.7:0.001", "--cmid-grid", "1000:5000:401")
    (record,) = strict_json(run(good, "--method", "grid", *finer, "--json", "-").stdout)["runs"]
    assert record["C_mid"] % 10 == pytest.approx(0, abs=1e-6)


def test_plot_beside_the_table(good, tmp_path):
    out = tmp_path / "curve.svg"
    assert run(good, "--extrapolate", "2x", "--plot", out).exit_code == 0
    assert out.read_text().startswith("<?xml")


@pytest.fixture
def two(tmp_path):
    """Two arms of one ceiling, the second slower, under two seeds each."""
    compute = np.linspace(0, 6000, 31)
    lines = ["run,seed,gpu_hours,pass_rate"]
    for arm, c_mid in (("fast", 1500.0), ("slow", 3500.0)):
        for seed in (1, 2):
            rate = curve(compute, c_mid=c_mid, seed=seed)
            lines += [f"{arm},{seed},{c:g},{r:.4f}" for c, r in zip(compute, rate, strict=True)]
    path = tmp_path / "arms.csv"
    path.write_text("\n".join(lines))
    return path


def test_compare(two, good):
    result = run(two, "--compare", "--extrapolate", "6000")
    assert result.exit_code == 0, result.stderr
    for part in ("at 6,000: tied within", "highest in", "C80", "run-to-run sd", "(seeds)", "fast: 2 seeds, A 0.6"):
        assert part in result.stdout
    comparison = strict_json(run(two, "--compare", "--extrapolate", "6000", "--json", "-").stdout)["comparison"]
    probability = {entry["name"]: entry["probability"] for entry in comparison["runs"]}
    assert probability["fast seed 1"] + probability["fast seed 2"] > 0.95
    assert sum(probability.values()) == pytest.approx(1)
    assert run(good, "--compare").exit_code == 2


def test_backtest_and_held_out_points(good, tmp_path):
    result = run(good, "--backtest", "--fit-max", "4000", "--json", "-", "--csv", tmp_path / "out.csv")
    (record,) = strict_json(result.stdout)["runs"]
    assert record["held_out"]["n"] == 14 and 0 < record["held_out"]["mae"] < 0.02
    assert record["backtest"]["cut"] == 1950 and record["backtest"]["mae"] < 0.05
    (row,) = csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text()))
    assert float(row["held_out_mae"]) == record["held_out"]["mae"]
    table = run(good, "--backtest", "--fit-max", "4000").stdout
    assert "14 held-out points, MAE" in table and "backtest: fitted up to 1950" in table


def test_a_run_too_short_for_a_backtest_leaves_the_others_theirs(good, tmp_path):
    short = table(tmp_path / "short.csv", [0], [0.4])
    result = run(good, short, "--backtest", "--json", "-")
    assert result.exit_code == 0 and "note: run 'short': a backtest needs points beyond" in result.stderr
    assert [record["backtest"] is None for record in strict_json(result.stdout)["runs"]] == [False, True]


def test_what_is_read_is_never_overwritten(good, tmp_path):
    other = table(tmp_path / "other.csv", [1, 2], [0.4, 0.5])
    before = good.read_bytes(), other.read_bytes()
    for arguments, words in (
        ((good, "--csv", good), "good.csv would be overwritten: it is read too"),
        ((f"arm={other},{good}", "--json", good), "good.csv would be overwritten"),
        (("--csv", other, good), "holds something else than fits"),
        ((good, "--json", tmp_path / "o", "--csv", tmp_path / "o"), "it is written too"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1
    assert before == (good.read_bytes(), other.read_bytes()) and not (tmp_path / "o").exists()
    for _ in range(2):  # its own result may be written again
        assert run(good, "--csv", tmp_path / "fits.csv").exit_code == 0


def test_runs_of_different_axes_are_not_compared(good, tmp_path):
    flops = table(tmp_path / "flops.csv", np.linspace(0, 6e23, 41), curve(np.linspace(0, 6000, 41)), "flops,pass_rate")
    result = run(good, flops, "--compare")
    assert result.exit_code == 2 and "good by gpu_hours, flops by flops; name one with --x" in result.stderr
    assert "pass_rate against gpu_hours, flops;" in run(good, flops).stdout
    same = table(tmp_path / "same.csv", np.linspace(0, 6000, 41), curve(np.linspace(0, 6000, 41)), "perf/gpu_hours,acc")
    assert run(good, same, "--compare").exit_code == 0


def test_a_ceiling_next_to_1_is_told_so(tmp_path):
    compute = np.linspace(0, 6000, 41)
    rate = np.minimum(curve(compute, a=0.9999, b=2.5, c_mid=700, r0=0.2, sd=0.0003), 1)
    ninety = table(tmp_path / "ninety.csv", compute, curve(compute, a=0.9, b=2.5, c_mid=700, r0=0.2, sd=0.0003))
    result = run(table(tmp_path / "one.csv", compute, rate))
    both = run(tmp_path / "one.csv", ninety, "--compare").stdout
    assert "highest ceiling: one, A at least" in both and "one's is open" not in both
    assert "and can't be told from 1" in result.stdout and "train to" not in result.stdout


@pytest.mark.parametrize("extrapolate", ["1e308x", "inf", "-1", "x"])
def test_a_target_without_bound_is_refused(good, extrapolate):
    result = run(good, "--extrapolate", extrapolate)
    assert result.exit_code == 2 and "a compute above 0" in result.stderr


def test_a_grid_stays_below_its_end(good):
    result = run(good, "--method", "grid", "--a-grid", "0.55:1:0.3")
    assert "1.150" not in result.stdout and result.exit_code == 0


def test_settings_that_a_run_can_not_meet_are_told_with_its_name(good, tmp_path):
    compute = np.linspace(500, 6000, 20)
    without = table(tmp_path / "without.csv", compute, curve(compute))
    result = run(good, without, "--r0", "base")
    assert result.exit_code == 2 and "run 'without': r0=base needs a base evaluation" in result.stderr


@pytest.mark.parametrize("form", ["power", "exponential"])
def test_other_forms(good, form):
    result = run(good, "--form", form, "--extrapolate", "2x", "--json", "-")
    (record,) = strict_json(result.stdout)["runs"]
    assert result.exit_code == 0 and record["form"] == form and record["C_mid"] is None
    assert 0 < record["predictions"][0]["value"] <= record["A"] <= 1 and record["A_at_R0"] is None


def test_entropy_law(tmp_path):
    entropy = np.linspace(1.2, 0.1, 20)
    rate = 0.75 - 0.10 * np.exp(entropy)
    rows = [
        {"gpu_hours": 100.0 * i, "pass_rate": r, "entropy": h}
        for i, (r, h) in enumerate(zip(rate.tolist(), entropy.tolist(), strict=True))
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    (record,) = strict_json(run(path, "--form", "entropy", "--json", "-").stdout)["runs"]
    assert record["A"] == pytest.approx(0.65) and record["a"] == pytest.approx(0.10)
    refused = run(path, "--form", "entropy", "--extrapolate", "2x")
    assert refused.exit_code == 2 and "compute" in refused.stderr


def test_progress_of_many_runs(tmp_path):
    compute = np.linspace(150, 6000, 20)
    lines = ["run,gpu_hours,pass_rate"]
    for name in range(12):
        lines += [f"r{name},{c:g},{r:.4f}" for c, r in zip(compute, curve(compute, seed=name), strict=True)]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines))
    result = run(path, "--json", "-")
    assert result.exit_code == 0 and "fitted 12 of 12 runs" in result.stderr
    assert [record["name"] for record in strict_json(result.stdout)["runs"]] == [f"r{i}" for i in range(12)]


def test_the_installed_command(good):
    command = [sys.executable, "-c", "from scalerl.cli.main import main; main()", "fit", str(good), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and strict_json(done.stdout)["runs"][0]["status"] == "ok"
    # Nothing heavy is imported before a command runs.
    heavy = ("torch", "scipy", "pandas", "numpy", "matplotlib")
    light = f"import sys, scalerl.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
