"""No table makes the readers fail with anything but InputError, and what they return is a curve."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers import read_runs

numbers = st.one_of(
    st.floats(0, 1),
    st.integers(-3, 120),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(
        [0, 1, 0.5, 1e300, 5e-324, 10**400, "0.4", "1,500", "57%", "NaN", "N/A", "", " ", None, True, [1], {}]
    ),
)
recognised = ("step", "_step", "gpu_hours", "flops", "acc", "val/pass_rate", "mean@4", "run", "seed", "set", "entropy")
names = st.sampled_from(
    (*recognised, "split", "x", "", "a - acc", "a - acc__MIN", "b - acc", "b - acc__MAX"),
)
labels = st.sampled_from(["train", "extended", "held_out", "a", "b", "", 1])
options = st.fixed_dictionaries(
    {
        "keep": st.sampled_from(["last", "first", "error"]),
        "on_compute_reset": st.sampled_from(["error", "accumulate"]),
        "scale": st.sampled_from([None, "percent"]),
        "compute_per_step": st.sampled_from([None, None, 2.0]),
        "eval_set": st.sampled_from(["held_out", "all", "a"]),
        "y": st.sampled_from([None, None, "acc"]),
    }
)


def check(file: Path, arguments: dict) -> None:
    try:
        runs = read_runs(file, **arguments)
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert runs
    for run in runs:
        assert np.isfinite(run.compute).all() and (run.compute >= 0).all() and (np.diff(run.compute) >= 0).all()
        assert ((run.pass_rate >= 0) & (run.pass_rate <= 1)).all()
        assert len(run.pass_rate) == len(run.held_out) == len(run)
        assert run.step is None or (np.diff(run.step) > 0).all()


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(st.dictionaries(names, st.one_of(numbers, labels), max_size=6), max_size=12),
    tail=st.sampled_from(["", '{"step": 3, "gpu', "[]", "\x00\x00"]),
    arguments=options,
)
def test_odd_jsonl(rows, tail, arguments):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows) + "\n" + tail)
        check(file, arguments)


@settings(max_examples=300, deadline=None)
@given(
    header=st.lists(names, max_size=6),
    rows=st.lists(st.lists(st.one_of(numbers, labels), max_size=7), max_size=12),
    delimiter=st.sampled_from([",", ";", "\t"]),
    arguments=options,
)
def test_odd_csv(header, rows, delimiter, arguments):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.csv"
        file.write_text("\n".join(delimiter.join(map(str, row)) for row in [header, *rows]))
        check(file, arguments)


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=200), name=st.sampled_from(["a.csv", "a.jsonl", "a.parquet"]))
def test_any_bytes(content, name):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(content)
        check(file, {})


@pytest.mark.slow
def test_a_gigabyte_of_jsonl_in_bounded_memory(tmp_path):
    """A training log of 1 GB with an evaluation in every hundredth row: peak memory stays under 400 MB."""
    import subprocess
    import sys

    file = tmp_path / "log.jsonl"
    padding = {f"train/metric_{i}": 0.123456789 * i for i in range(30)}
    with file.open("w") as out:
        for start in range(0, 1_000_000, 100):
            block = [{"step": s, "gpu_hours": s / 10, **padding} for s in range(start, start + 100)]
            block[0]["val/acc"] = 0.4 + 0.2 * start / 1_000_000
            out.write("".join(json.dumps(row) + "\n" for row in block))
    assert file.stat().st_size > 1e9
    script = (
        "import re, sys\n"
        "from scalerl.fitting.readers import read_runs\n"
        "(run,) = read_runs(sys.argv[1])\n"
        # VmHWM starts anew with the program; getrusage would count the memory of the process that forked it.
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())\n"
        "print(len(run), int(peak[1]) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True)
    points, peak_mb = map(int, done.stdout.split())
    assert points == 10_000 and peak_mb < 400
