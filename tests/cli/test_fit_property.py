"""Whatever the points, the command prints strict JSON, no B <= 0, no A < R0, and no warning of a library."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path

import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from scalerl.cli.fit import fit

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(fit)

rates = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5]))
steps = st.one_of(st.floats(0, 1e4), st.sampled_from([0.0, 1e-12, 1e25]))


@settings(max_examples=60, deadline=None)
@given(
    points=st.lists(st.tuples(steps, rates), min_size=1, max_size=25),
    rising=st.booleans(),
    options=st.sampled_from(["", "--r0 0.3", "--r0 first", "--method grid", "--iid", "--form power"]).map(str.split),
)
def test_odd_curves(points, rising, options):
    if rising:
        points = [(c, r) for (c, _), r in zip(points, sorted(r for _, r in points), strict=True)]
    total, lines = 0.0, ["compute,pass_rate"]
    for gap, rate in points:
        total += gap
        lines.append(f"{total!r},{rate!r}")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        path = Path(folder) / "run.csv"
        path.write_text("\n".join(lines))
        result = CliRunner().invoke(app, [str(path), "--extrapolate", "2x", "--json", "-", *options])
    if result.exit_code == 2:
        assert result.stdout == "" and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        return
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    for word in ("NaN", "Infinity"):
        assert word not in result.stdout
    (record,) = json.loads(result.stdout)["runs"]
    if record["A"] is None:
        assert result.exit_code == 1 and record["predictions"] == [] and record["A_interval"] is None
        return
    assert result.exit_code == 0 and 0 <= record["A"] <= 1
    if record["form"] == "sigmoid":
        assert record["B"] > 0 and record["A"] >= record["R0"]
        for prediction in record["predictions"]:
            assert prediction["low"] is None or prediction["low"] <= prediction["value"] <= prediction["high"]
