"""Tables: column recognition, formats, and every rule with its message. Inputs are written by the tests."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers import read_runs


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str, encoding: str = "utf-8"):
        path = tmp_path / name
        path.write_bytes(text.encode(encoding))
        return path

    return write


def one(path, **options):
    (run,) = read_runs(path, **options)
    return run


PLAIN = "step,gpu_hours,pass_rate\n1,10,0.4\n2,20,0.45\n3,30,0.5\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (PLAIN, "utf-8"),
        (PLAIN, "utf-8-sig"),
        (PLAIN, "utf-16"),
        (PLAIN.replace(",", ";"), "utf-8"),
        (PLAIN.replace(",", "\t"), "utf-8"),
        (PLAIN.replace("\n", "\r\n"), "utf-8"),
        (PLAIN.replace("\n", ",\n"), "utf-8"),
        (PLAIN.rstrip("\n"), "utf-8"),
        ("\n\n" + PLAIN.replace("\n", "\n\n"), "utf-8"),
        ('"step", "gpu_hours" ,"pass_rate"\n"1","10","0.4"\n"2","2e1"," .45"\n"3","+30","5e-1"\n', "utf-8"),
        (",step,gpu_hours,pass_rate,note\n0,1,10,0.4,ok\n1,2,20,0.45,\n2,3,30,0.5,\n", "utf-8"),
    ],
)
def test_csv_dialects_give_the_same_run(write, text, encoding):
    run = one(write("run.csv", text, encoding))
    assert run.name == "run"
    assert run.compute.tolist() == [10, 20, 30]
    assert run.pass_rate.tolist() == [0.4, 0.45, 0.5]
    assert run.step is not None and run.step.tolist() == [1, 2, 3]
    assert not run.messages and not run.n_dropped


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["run.csv is empty"]),
        ("\n \n", ["run.csv is empty"]),
        ("gpu_hours,pass_rate\n", ["no rows"]),
        ("gpu_hours,pass_rate\n,\n", ["no rows"]),
        ("gpu_hours,pass_rate\n1,\n2,\n", ["pass_rate is blank in every row"]),
        ("1,0.4\n2,0.5\n", ["line 1", "header"]),
        ("step,pass_rate\n1,0.4\n", ["no compute column", "--compute-per-step", "step, pass_rate"]),
        ("x,pass_rate\n1,0.4\n", ["no compute column", "--x"]),
        ("gpu_hours,reward\n1,0.4\n", ["no pass-rate column", "--y", "gpu_hours, reward"]),
        ("gpu_hours,flops,acc\n1,1,0.4\n", ["2 compute columns", "--x", "gpu_hours, flops"]),
        ("gpu_hours,math_acc,code_acc\n1,0.1,0.4\n", ["2 pass-rate columns", "--y", "math_acc, code_acc"]),
        ("gpu_hours,acc,acc\n1,0.1,0.4\n", ["2 columns are called 'acc'"]),
        ('gpu_hours,acc\n"1,500",0.4\n', ["line 2", "gpu_hours", "'1,500'", "thousands"]),
        ("gpu_hours,acc\n1,500,0.4\n", ["line 2", "3 fields", "2"]),
        ("gpu_hours;acc\n1500;0,45\n", ["line 2", "acc", "'0,45'", "decimal point"]),
        ("gpu_hours,acc,z\n1,0.4\n2,0.5,1\n", ["line 2", "2 fields", "header has 3"]),
        ('gpu_hours,acc\n1,"0.4\n2,0.5\n', ["no row with a usable gpu_hours and acc"]),
        ("gpu_hours,acc\n-5,0.4\n", ["line 2", "-5 is negative"]),
        ("gpu_hours,acc\n5,-0.4\n", ["line 2", "acc -0.4 is below 0"]),
        ("gpu_hours,acc\n5,nan\n", ["no row with a usable", "line 2", "'nan'"]),
    ],
)
def test_csv_that_cannot_be_read_in_one_way(write, text, names):
    with pytest.raises(InputError) as caught:
        read_runs(write("run.csv", text))
    message = str(caught.value)
    assert "run.csv" in message and "\n" not in message
    for name in names:
        assert name in message


def test_text_that_is_not_unicode(write):
    with pytest.raises(InputError, match=r"run\.csv: not UTF-8"):
        read_runs(write("run.csv", "gpu_hours,acc,größe\n1,0.4,2\n", "latin-1"))


@pytest.mark.parametrize(
    ("compute", "pass_rate"),
    [
        ("device_hours", "pass_rate"),
        ("perf/gpu_hours", "val-core/openai/gsm8k/acc/mean@16"),
        ("train_flops", "eval_accuracy"),
        ("GPU-hours", "Pass Rate"),
        ("compute", "mean@8"),
        ("H100_hours", "val/acc"),
    ],
)
def test_columns_are_recognised_by_name(write, compute, pass_rate):
    others = "eval_device_hours,acc_std,acc/best@16/mean,pass_rate_stderr,grad_accum,loss"
    run = one(write("run.csv", f"{compute},{pass_rate},{others}\n1,0.4,9,9,9,9,9,9\n2,0.5,9,9,9,9,9,9\n"))
    assert (run.x_name, run.y_name) == (compute, pass_rate)
    assert run.pass_rate.tolist() == [0.4, 0.5]


def test_named_columns_win(write):
    path = write("run.csv", "gpu_hours,flops,acc,reward\n1,10,0.4,0.6\n2,20,0.5,0.7\n")
    run = one(path, x="flops", y="reward")
    assert run.compute.tolist() == [10, 20] and run.pass_rate.tolist() == [0.6, 0.7]
    with pytest.raises(InputError, match=r"no column 'rewrad'.*gpu_hours, flops, acc, reward"):
        read_runs(path, x="flops", y="rewrad")


RESUMED = (
    "step,gpu_hours,pass_rate\n"
    "4,40,0.55\n5,50,0.58\n"  # lines 2-3: the end of the file, moved to its front
    "1,10,0.40\n2,20,0.45\n3,30,0.10\n"  # line 6: step 3 on the dead branch
    "3,31,0.50\n"
)


def test_steps_sort_rows_and_the_last_written_wins(write):
    run = one(write("run.csv", RESUMED))
    assert run.step is not None and run.step.tolist() == [1, 2, 3, 4, 5]
    assert run.pass_rate.tolist() == [0.40, 0.45, 0.50, 0.55, 0.58]
    order, doubled = run.messages
    assert "out of step order" in order and "run.csv line 4" in order
    assert all(part in doubled for part in ("(3;", "line 6", "line 7", "kept the last written", "1 row left out"))


def test_keep_first_and_error(write):
    path = write("run.csv", RESUMED)
    assert one(path, keep="first").pass_rate.tolist() == [0.40, 0.45, 0.10, 0.55, 0.58]
    with pytest.raises(InputError, match=r"steps 3 .*line 6 and .*line 7.*--keep last or first"):
        read_runs(path, keep="error")
    with pytest.raises(InputError, match=r"--keep newest: one of last, first, error"):
        read_runs(path, keep="newest")


def test_compute_is_checked_only_after_the_steps_are_in_order(write):
    """The dead branch went further in compute than where the resumed one starts, and that is no fall."""
    text = "step,gpu_hours,pass_rate\n1,10,0.4\n2,20,0.45\n3,30,0.5\n2,15,0.46\n3,25,0.51\n"
    assert one(write("run.csv", text)).compute.tolist() == [10, 15, 25]


def test_compute_that_falls(write):
    path = write("run.csv", "step,gpu_hours,acc\n1,10,0.4\n2,20,0.45\n3,5,0.5\n4,15,0.52\n5,2,0.53\n")
    with pytest.raises(InputError) as caught:
        read_runs(path)
    message = str(caught.value)
    for part in (
        "line 4",
        "gpu_hours 5.0 at step 3 is below 20.0 at step 2",
        "--on-compute-reset accumulate",
        "2 such",
    ):
        assert part in message
    run = one(path, on_compute_reset="accumulate")
    assert run.compute.tolist() == [10, 20, 25, 35, 37]
    assert "2 restarts" in run.messages[0]


def test_without_steps_the_order_of_the_file_counts(write):
    path = write("run.csv", "gpu_hours,acc\n20,0.45\n10,0.4\n30,0.5\n")
    with pytest.raises(InputError, match=r"line 3: gpu_hours 10.0 is below 20.0"):
        read_runs(path)


def test_percent(write):
    path = write("run.csv", "gpu_hours,acc\n1,40\n2,45\n3,0\n")
    with pytest.raises(
        InputError, match=r"2 of 3 values of acc exceed 1, the first at .*line 2 \(40\).*--scale percent"
    ):
        read_runs(path)
    assert one(path, scale="percent").pass_rate.tolist() == [0.40, 0.45, 0.0]
    with pytest.raises(InputError, match=r"line 3: acc 145 is above 100 %"):
        read_runs(write("over.csv", "gpu_hours,acc\n1,40\n2,145\n"), scale="percent")
    with pytest.raises(InputError, match="they look like fractions already"):
        read_runs(write("fraction.csv", "gpu_hours,acc\n1,0.4\n"), scale="percent")


def test_of_rows_at_compute_0_the_first_step_is_the_base(write):
    path = write("run.csv", "step,gpu_hours,acc\n0,0,0.2\n5,0,0.3\n10,0,0.35\n15,1,0.4\n")
    found = one(path)
    assert found.compute.tolist() == [0, 1] and found.pass_rate.tolist() == [0.2, 0.4] and found.n_dropped == 2
    assert [d.line for d in found.dropped] == [3, 4]
    assert any("2 rows dropped, the first" in m and "line 2, which is the base evaluation" in m for m in found.messages)
    stepless = one(write("bare.csv", "gpu_hours,acc\n0,0.2\n0,0.21\n1,0.4\n"))
    assert stepless.pass_rate.tolist() == [0.21, 0.4] and "1 row dropped" in stepless.messages[-1]


def test_a_rate_is_no_compute(write):
    rows = [{"step": 10 * i, "perf/actor_train_tflops": 312 + (-1) ** i, "acc": 0.4 + i / 100} for i in range(8)]
    path = write("slime.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="no compute column"):
        read_runs(path)
    with pytest.raises(InputError, match=r"falls 4 times in 8 rows: it looks like a rate .* --x"):
        read_runs(path, x="perf/actor_train_tflops")
    for name in ("total_flos", "total_tflops", "train/total_flops", "flops"):
        path = write("run.csv", f"{name},acc\n1,0.4\n2,0.45\n")
        assert one(path).x_name == name


def test_an_evaluation_after_a_resume_gets_the_compute_of_its_own_try(write):
    rows = [
        *({"step": s, "gpu_hours": 20.0 * s} for s in (90, 100)),
        *({"step": s, "gpu_hours": 22.0 * s} for s in (91, 100)),
        {"step": 100, "eval/pass_rate": 0.484},
    ]
    path = write("run.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert one(path).compute.tolist() == [2200.0]


def test_countdown_is_a_task_and_counts_are_none(write):
    names = "val-core/countdown/acc/mean@4,val-core/countdown/acc/count,acc_std"
    assert one(write("run.csv", f"gpu_hours,{names}\n1,0.4,9,9\n2,0.45,9,9\n")).y_name == names.partition(",")[0]


def test_a_mean_of_ones_is_one(write):
    assert one(write("run.csv", "gpu_hours,acc\n1,0.5\n2,1.0000000000000002\n")).pass_rate.tolist() == [0.5, 1.0]


def test_files_of_several_seeds_are_not_the_parts_of_one_run(write):
    files = [write(f"s{seed}.csv", f"step,gpu_hours,acc,seed\n0,1,0.4,{seed}\n1,2,0.5,{seed}\n") for seed in (0, 1)]
    with pytest.raises(InputError, match=r"arm= joins the parts of one run, .* s?.*of seed 0, .* of seed 1"):
        read_runs("arm=" + ",".join(map(str, files)))
    more = write("more.csv", "step,gpu_hours,acc,seed\n2,3,0.55,0\n")
    (found,) = read_runs(f"arm={files[0]},{more}")
    assert len(found) == 3


def test_percent_signs(write):
    path = write("run.csv", "gpu_hours,acc\n1,40.5%\n2,45 %\n")
    with pytest.raises(InputError, match=r"line 2: acc is written with a percent sign; give --scale percent"):
        read_runs(path)
    assert one(path, scale="percent").pass_rate.tolist() == [0.405, 0.45]
    low = write("low.csv", "gpu_hours,acc\n1,0.25%\n2,0.5%\n3,2%\n")
    assert one(low, scale="percent").pass_rate.tolist() == [0.0025, 0.005, 0.02]
    assert one(write("none.csv", "gpu_hours,acc\n1,0.5%\n"), scale="percent").pass_rate.tolist() == [0.005]
    with pytest.raises(InputError, match="mixture of fractions and percent"):
        read_runs(write("mixed.csv", "gpu_hours,acc\n1,0.25\n2,0.5%\n3,2%\n"), scale="percent")


@pytest.mark.parametrize("scale", [None, "fraction", "percent"])
def test_a_mixture_of_fractions_and_percent_has_no_fix(write, scale):
    path = write("run.csv", "gpu_hours,acc\n1,0.40\n2,0.45\n3,48\n4,50\n")
    with pytest.raises(InputError, match=r"2 of 4 values of acc exceed 1, the first at .*line 4 \(48\).*mixture"):
        read_runs(path, scale=scale)


def test_compute_per_step(write):
    path = write("run.csv", "step,acc\n0,0.4\n100,0.45\n200,0.5\n")
    assert one(path, compute_per_step=1.5).compute.tolist() == [0, 150, 300]
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"--compute-per-step .* must be a positive number"):
            read_runs(path, compute_per_step=bad)
    with pytest.raises(InputError, match="--compute-per-step needs a step column"):
        read_runs(write("bare.csv", "epoch,acc\n1,0.4\n"), compute_per_step=1.5)
    with pytest.raises(InputError, match="give one"):
        read_runs(path, x="step", compute_per_step=1.5)


def test_jsonl_odd_values_are_dropped_and_listed(write):
    rows = [
        '{"step": 1, "gpu_hours": 10, "val": {"acc": 0.40}}',
        '{"step": 2, "gpu_hours": 20, "val": {"acc": NaN}}',
        '{"step": 3, "gpu_hours": 30, "val": {"acc": null}}',
        '{"step": 4, "gpu_hours": 40, "val": {"acc": "N/A"}}',
        '{"step": 5, "gpu_hours": 50, "val": {"acc": "0.45"}}',
        '{"step": 6, "gpu_hours": -Infinity, "val": {"acc": 0.5}}',
        '{"step": 7, "val": {"acc": 0.5}}',
        '{"step": 8, "gpu_hours": 80, "loss": 0.1}',
        '{"step": 9, "gpu_hours": 90, "val": {"acc": [0.5]}}',
        '{"step": null, "gpu_hours": 95, "val": {"acc": 0.5}}',
        '{"step": 11, "gpu_hours": 1' + "0" * 400 + ', "val": {"acc": 0.5}}',
        '{"step": 12, "gpu_hours": 120, "val": {"acc": true}}',
        '{"step": 13, "gpu_hours": 130, "val": {"ac',
    ]
    run = one(write("run.jsonl", "\n".join(rows)))
    assert run.pass_rate.tolist() == [0.40, 0.45] and run.compute.tolist() == [10, 50]
    assert [d.line for d in run.dropped] == [2, 3, 4, 6, 7, 9, 10, 11, 12]
    reasons = " ".join(d.reason for d in run.dropped)
    for part in (
        "val.acc is nan",
        "null",
        "'N/A'",
        "gpu_hours is -inf",
        "no gpu_hours",
        "a list",
        "step is null",
        "true",
    ):
        assert part in reasons
    assert any("line 13: truncated last line" in m for m in run.messages)


def test_jsonl_that_is_broken_in_the_middle(write):
    with pytest.raises(InputError, match=r"run.jsonl line 2: not valid JSON"):
        read_runs(
            write("run.jsonl", '{"gpu_hours": 1, "acc": 0.4}\n{"gpu_hours": 2, "a\n{"gpu_hours": 3, "acc": 0.5}\n')
        )
    with pytest.raises(InputError, match=r"line 1: a JSON array where one object a line is needed"):
        read_runs(write("array.json", '[{"gpu_hours": 1, "acc": 0.4}]'))
    with pytest.raises(InputError, match=r"empty\.jsonl is empty"):
        read_runs(write("empty.jsonl", "\n"))


def test_a_resumed_csv_that_repeats_its_header_and_is_cut_short(write):
    run = one(write("run.csv", PLAIN + "step,gpu_hours,pass_rate\n4,40,0.52\n5,5"))
    assert run.compute.tolist() == [10, 20, 30, 40]
    assert "line 5: repeats the header" in run.messages[0] and "line 7: truncated last line" in run.messages[1]


def test_evaluations_take_compute_from_another_row_of_their_step(write):
    rows = [
        {"step": 1, "gpu_hours": 10, "loss": 1.0},
        {"step": 1, "val/acc": 0.4},
        {"step": 2, "gpu_hours": 20},
        {"step": 2, "val/acc": 0.1},
        {"step": 2, "gpu_hours": 21},
        {"step": 2, "val/acc": 0.45},
    ]
    run = one(write("run.jsonl", "\n".join(map(json.dumps, rows))))
    assert run.compute.tolist() == [10, 21] and run.pass_rate.tolist() == [0.4, 0.45]


def test_the_step_column_is_the_one_that_evaluations_carry(write):
    rows = [
        {"step": 1, "_step": 1, "gpu_hours": 10},
        {"_step": 2, "gpu_hours": 20, "acc": 0.4},
        {"_step": 3, "gpu_hours": 30, "acc": 0.5},
    ]
    run = one(write("run.jsonl", "\n".join(map(json.dumps, rows))))
    assert run.step is not None and run.step.tolist() == [2, 3]


def test_long_table_and_seeds(write):
    text = "run,seed,gpu_hours,acc\nb,1,1,0.4\na,1,1,0.3\nb,1,2,0.5\nb,2,1,0.41\nb,2,2,0.51\n"
    runs = read_runs(write("runs.csv", text))
    rates = {run.name: run.pass_rate.tolist() for run in runs}
    assert rates == {"b seed 1": [0.4, 0.5], "a seed 1": [0.3], "b seed 2": [0.41, 0.51]}
    assert [run.arm for run in runs] == ["b", "a", "b"]


def test_seeds_in_files_of_their_own_are_runs_of_one_arm(write):
    first = write("first.csv", "run,seed,step,gpu_hours,acc\nb,0,1,1,0.4\nb,0,2,2,0.5\n")
    second = write("second.csv", "run,seed,step,gpu_hours,acc\nb,1,1,1,0.41\nb,1,2,2,0.51\n")
    runs = read_runs([first, second])
    assert {run.name: run.pass_rate.tolist() for run in runs} == {"b seed 0": [0.4, 0.5], "b seed 1": [0.41, 0.51]}
    assert [run.arm for run in runs] == ["b", "b"]
    assert [(run.name, run.arm) for run in read_runs(first)] == [("b", None)]
    resumed = write("resumed.csv", "run,seed,step,gpu_hours,acc\nb,0,3,3,0.55\n")
    assert [len(run) for run in read_runs([first, resumed])] == [3]


def test_long_table_by_a_named_column(write):
    path = write("runs.csv", "recipe,gpu_hours,acc\nx,1,0.4\ny,1,0.3\nx,2,0.5\n")
    assert [(run.name, len(run)) for run in read_runs(path, run="recipe")] == [("x", 2), ("y", 1)]
    with pytest.raises(InputError, match=r"no column 'arm' to name runs by; columns: recipe"):
        read_runs(path, run="arm")


def test_two_columns_that_tell_runs_apart_differently(write):
    text = "run,experiment,gpu_hours,acc\na,1,1,0.4\na,1,2,0.5\na,2,1,0.4\na,2,2,0.5\n"
    with pytest.raises(InputError, match="run and experiment both tell runs apart; choose one with --run"):
        read_runs(write("runs.csv", text))


def test_a_name_that_differs_in_every_row_names_no_run(write):
    run = one(write("run.csv", "name,gpu_hours,acc\nckpt1,1,0.4\nckpt2,2,0.5\nckpt3,3,0.6\n"))
    assert len(run) == 3 and "'name' differs in every row" in run.messages[0]


def test_several_files_of_one_run(write, tmp_path):
    first = write("part1.csv", "step,gpu_hours,acc\n1,10,0.4\n2,20,0.1\n")
    second = write("part2.csv", "step,gpu_hours,acc\n2,20,0.45\n3,30,0.5\n")
    run = one(f"mine={first},{second}")
    assert run.name == "mine" and run.pass_rate.tolist() == [0.4, 0.45, 0.5]
    assert len(run.sources) == 2 and "joined from" in run.messages[0]
    assert [r.name for r in read_runs([first, second])] == ["part1", "part2"]
    stepless = write("part3.csv", "gpu_hours,acc\n40,0.55\n")
    with pytest.raises(InputError, match=r"part1.csv has steps and .*part3.csv has none"):
        read_runs(f"mine={first},{stepless}")


def test_a_run_of_a_long_table_goes_on_in_another_file(write):
    first = write("a.csv", "run,gpu_hours,acc\ns1,10,0.4\ns2,10,0.3\n")
    second = write("b.csv", "run,gpu_hours,acc\ns1,20,0.5\n")
    assert [(run.name, run.compute.tolist()) for run in read_runs([first, second])] == [("s1", [10, 20]), ("s2", [10])]


def test_equal_names_get_their_folder(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "log.csv").write_text(PLAIN)
    runs = read_runs([tmp_path / "one" / "log.csv", tmp_path / "two" / "log.csv"])
    assert [run.name for run in runs] == ["one/log", "two/log"]


def test_sets_and_splits(write):
    path = write("run.csv", "set,gpu_hours,acc\nmath,1,0.4\ncode,1,0.2\nmath,2,0.5\ncode,2,0.3\n")
    with pytest.raises(InputError, match=r"2 evaluation sets \(math, code\); choose with --set"):
        read_runs(path)
    assert one(path, eval_set="code").pass_rate.tolist() == [0.2, 0.3]
    assert [run.name for run in read_runs(path, eval_set="all")] == ["run/math", "run/code"]
    with pytest.raises(InputError, match=r"no evaluation set 'aime'; sets: math, code"):
        read_runs(path, eval_set="aime")
    run = one(write("split.csv", "gpu_hours,pass_rate,split\n1,0.4,train\n2,0.5,train\n3,0.6,extended\n"))
    assert run.held_out.tolist() == [False, False, True]


CHART = (
    '"Step","s1 - val/acc","s1 - val/acc__MIN","s1 - val/acc__MAX",'
    '"b - x - val/acc","b - x - val/acc__MIN","b - x - val/acc__MAX"\n'
    '"100","0.40","0.40","0.40","0.30","0.30","0.30"\n'
    '"200","0.45","0.45","0.45","","",""\n'
    '"300","NaN","NaN","NaN","0.35","0.35","0.35"\n'
)


def test_wandb_chart_export(write):
    first, second = read_runs(write("chart.csv", CHART), compute_per_step=1.5)
    assert (first.name, second.name) == ("s1", "b - x")
    assert first.compute.tolist() == [150, 300] and first.pass_rate.tolist() == [0.40, 0.45]
    assert second.compute.tolist() == [150, 450] and second.pass_rate.tolist() == [0.30, 0.35]
    assert [d.line for d in first.dropped] == [4] and not second.n_dropped and not second.messages
    with pytest.raises(InputError, match=r"no compute column; give --compute-per-step .*; columns: val/acc, Step$"):
        read_runs(write("chart.csv", CHART))


def test_wandb_chart_exports_of_other_shapes(write):
    axis = (
        '"gpu_hours","a - reward","a - reward__MIN","a - reward__MAX"\n"1","0.4","0.4","0.4"\n"2","0.5","0.5","0.5"\n'
    )
    run = one(write("one_metric.csv", axis))
    assert (run.name, run.y_name, run.x_name) == ("a", "reward", "gpu_hours")
    with_step = '"gpu_hours","a - _step","a - _step__MIN","a - _step__MAX","a - acc","a - acc__MIN","a - acc__MAX"\n'
    run = one(write("with_step.csv", with_step + '"1","10","10","10","0.4","0.4","0.4"\n'))
    assert run.name == "a" and run.pass_rate.tolist() == [0.4]
    bare = one(write("bare.csv", '"gpu_hours","a","a__MIN","a__MAX"\n"1","0.4","0.4","0.4"\n'))
    assert bare.name == "a" and bare.pass_rate.tolist() == [0.4]
    stripped = read_runs(write("stripped.csv", "gpu_hours,a - acc,b - acc\n1,0.4,0.3\n2,0.5,\n"))
    assert [(run.name, len(run)) for run in stripped] == [("a", 2), ("b", 1)]
    twins = read_runs(write("twins.csv", "gpu_hours,a - acc,a - acc\n1,0.4,0.3\n"))
    assert [run.name for run in twins] == ["a", "a (2)"] and "two series" in twins[0].messages[0]
    two = write("two.csv", "gpu_hours,a - acc,a - pass_rate\n1,0.4,0.3\n")
    with pytest.raises(InputError, match="2 pass-rate columns; choose one with --y: acc, pass_rate"):
        read_runs(two)
    assert one(two, y="pass_rate").pass_rate.tolist() == [0.3]
    assert one(two, y="a - acc").pass_rate.tolist() == [0.4]


def test_parquet(tmp_path):
    path = tmp_path / "run.parquet"
    table = {
        "step": pa.array([1, 2, 3, 4, 5, 6]),
        "gpu_hours": pa.array([10, 20, 30, 40, 50, 60], pa.float32()),
        "pass_rate": pa.array([0.40, None, float("nan"), 0.5, float("inf"), 0.55]),
        "texts": pa.array(["a"] * 6),
        "nested_acc": pa.array([[1.0]] * 6),
    }
    pq.write_table(pa.table(table), path)
    run = one(path)
    assert run.compute.tolist() == [10, 40, 60] and run.pass_rate.tolist() == [0.40, 0.5, 0.55]
    assert [d.line for d in run.dropped] == [3, 5] and "row 3" in run.messages[0]
    quoted = pa.table({"run": ["a", "a", "b"], "gpu_hours": ["1", "2", "1"], "acc": ["0.4", "n/a", "0.3"]})
    pq.write_table(quoted, path)
    assert [(run.name, run.pass_rate.tolist(), run.n_dropped) for run in read_runs(path)] == [
        ("a", [0.4], 1),
        ("b", [0.3], 0),
    ]
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(InputError, match=r"run.parquet: not a Parquet file"):
        read_runs(path)


def test_unknown_files(tmp_path, write):
    with pytest.raises(InputError, match="no such file or folder"):
        read_runs(tmp_path / "missing.csv")
    with pytest.raises(InputError, match=r"unknown kind of file '.xlsx'; known: .csv"):
        read_runs(write("run.xlsx", "x"))
    with pytest.raises(InputError, match=r"no eval\.jsonl, \.wandb or TensorBoard event file in it"):
        read_runs(tmp_path)
    write("run.csv", PLAIN)
    with pytest.raises(InputError, match=r"holds 1 table.*NAME=FILE,FILE"):
        read_runs(tmp_path)
    with pytest.raises(InputError, match="no runs"):
        read_runs([])


def test_the_record_names_its_input(write):
    import hashlib

    path = write("run.csv", PLAIN)
    run = one(path)
    assert [(s.path, s.sha256) for s in run.sources] == [(str(path), hashlib.sha256(path.read_bytes()).hexdigest())]
    assert run.compute.dtype == run.pass_rate.dtype == np.float64
