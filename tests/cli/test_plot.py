"""`scalerl plot` from the command line."""

from __future__ import annotations

import json

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
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


@pytest.fixture
def arms(tmp_path):
    """Three arms of a study as run folders: two tied on A, one below."""
    for seed, (arm, a, b) in enumerate([("base", 0.61, 1.9), ("loss-dapo", 0.60, 1.4), ("lower", 0.50, 1.9)]):
        compute = np.linspace(0, 6000, 31)
        rate = 0.40 + (a - 0.40) / (1 + (2500 / np.maximum(compute, 1e-9)) ** b)
        rate += np.random.default_rng(seed).normal(0, 0.002, len(rate))
        rows = [
            {"set": "held_out", "step": i, "device_hours": c, "pass_rate": r, "truncation_rate": 0.02 + i / 1000}
            for i, (c, r) in enumerate(zip(compute.tolist(), rate.tolist(), strict=True))
        ]
        (tmp_path / "study" / arm).mkdir(parents=True)
        (tmp_path / "study" / arm / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "study"


def test_dollar_signs_in_names_are_no_formulas(arms, tmp_path):
    for kind in ("curves", "loo"):
        named = [f"a$b_c_{i}$={folder}" for i, folder in enumerate(sorted(arms.iterdir()))]
        done = run(*named, "-o", tmp_path / f"{kind}.svg", "--kind", kind, "--title", "x$y_z_w$")
        assert done.exit_code == 0, done.output
        assert (tmp_path / f"{kind}.svg").exists()


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_formats(arms, tmp_path, ending, start):
    out = tmp_path / f"curves.{ending}"
    result = run(arms, "-o", out, "--extrapolate", "2x", "--fit-max", "4000")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == str(out) and out.read_bytes().startswith(start)


@pytest.mark.parametrize("kind", ["curves", "recipes", "loo", "truncation"])
def test_kinds(arms, tmp_path, kind):
    out = tmp_path / "figure.svg"
    result = run(arms, "-o", out, "--kind", kind, "--title", "A study")
    assert result.exit_code == 0, result.stderr
    text = out.read_text()
    assert "A study" in text and all(arm in text for arm in ("base", "loss-dapo", "lower"))
    assert ("slope B" in text) == (kind == "loo")
    assert ("truncation rate" in text) == (kind == "truncation")


def test_bad_input(arms, tmp_path):
    for arguments, message in (
        (["-o", tmp_path / "x.jpg"], "figures end in .png, .svg, .pdf"),
        (["-o", tmp_path / "x.png", "--kind", "pie"], "--kind pie: one of curves"),
        (["-o", tmp_path / "no" / "x.png"], "can't be written"),
    ):
        result = run(arms, *arguments)
        assert result.exit_code == 2 and message in result.stderr
    assert run(arms).exit_code == 2
