"""`scalerl sweep report` as its function: what it prints, writes and refuses."""

from __future__ import annotations

import pytest
import typer

from scalerl.cli.sweep_report import report
from tests.sweeps.synthetic import Simulated, write_study

ARMS = {"base": Simulated(), "loss=dapo": Simulated((0.40, 0.560, 1.92, 2542.0))}


def test_table_verdicts_and_files(tmp_path, capsys):
    write_study(tmp_path / "study", ARMS, seeds=(0,))
    report(str(tmp_path / "study"))
    out = capsys.readouterr().out
    assert "half predicts rest" in out and "loss=dapo: lower ceiling: A 0.5" in out
    assert "Arms are compared on flops" in out and "at the target 32k" in out
    assert (tmp_path / "study" / "report" / "index.html").exists()
    report(str(tmp_path / "study"), target=64_000.0, output=str(tmp_path / "elsewhere"))
    assert "at the target 64k" in capsys.readouterr().out and (tmp_path / "elsewhere" / "table.csv").exists()


def test_no_usable_fit_exits_1(tmp_path, capsys):
    write_study(tmp_path / "study", {"base": Simulated(budget=1600.0)}, seeds=(0,))
    with pytest.raises(typer.Exit) as ended:
        report(str(tmp_path / "study"))
    assert ended.value.exit_code == 1
    out = capsys.readouterr().out
    assert (
        "base: no fit: too-few-points" in out and "not whole: base seed 0: unfinished: evaluated up to step 40" in out
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [({"study": "nowhere"}, "nowhere is no study"), ({"fraction": 0.0}, "fraction=0"), ({"r0": "x"}, "--r0 x")],
)
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, options, message):
    write_study(tmp_path / "study", {"base": Simulated(budget=1600.0)}, seeds=(0,))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        report(**{"study": "study", **options})
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
