"""Run folders, W&B and TensorBoard: real runs of each, made by the tests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scalerl.fitting.errors import InputError
from scalerl.fitting.readers import read_runs


def evaluation(step: int, name: str = "held_out", **cells) -> dict:
    row = {"set": name, "step": step, "version": step, "samples": step * 8, "flops": step * 1e12, "pass_rate": 0.4}
    return row | {"device_hours": step * 2.0, "stderr": 0.01, "stderr_within": None, "entropy": 0.5} | cells


def run_folder(folder, rows):
    folder.mkdir(parents=True)
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_run_folder(tmp_path):
    rows = [
        evaluation(step, name, pass_rate=0.3 + step / 100) for step in (0, 10, 20) for name in ("held_out", "longer")
    ]
    folder = run_folder(tmp_path / "my-run", rows)
    (run,) = read_runs(folder)
    assert (run.name, run.x_name, run.y_name) == ("my-run", "device_hours", "pass_rate")
    assert run.compute.tolist() == [0, 20, 40] and run.pass_rate.tolist() == pytest.approx([0.3, 0.4, 0.5])
    assert run.entropy is not None and run.entropy.tolist() == [0.5] * 3
    assert read_runs(folder / "eval.jsonl")[0].name == "my-run"
    assert read_runs(folder, x="flops")[0].compute.tolist() == [0, 1e13, 2e13]
    assert [r.name for r in read_runs(folder, eval_set="all")] == ["my-run", "my-run/longer"]
    assert read_runs(folder, eval_set="longer")[0].name == "my-run/longer"


def test_a_folder_of_run_folders(tmp_path):
    for arm in ("base", "loss-dapo"):
        run_folder(tmp_path / "study" / arm, [evaluation(0), evaluation(10)])
    assert [run.name for run in read_runs(tmp_path / "study")] == ["base", "loss-dapo"]


def log_wandb(folder, rows, **settings):
    """A real offline run. It runs in a process of its own: wandb keeps a service and global state."""
    script = (
        "import json, sys, wandb\n"
        "settings, rows = json.load(sys.stdin)\n"
        "run = wandb.init(mode='offline', settings=wandb.Settings(silent=True), **settings)\n"
        "for row in rows: run.log(row)\n"
        "run.finish()\n"
    )
    argument = json.dumps([{"project": "p", "dir": str(folder), **settings}, rows])
    command = [sys.executable, "-c", script]
    subprocess.run(command, input=argument.encode(), check=True, capture_output=True, cwd=folder, timeout=120)


def rows(first: int, last: int, **cells) -> list[dict]:
    return [
        {"step": s, "gpu_hours": s * 10.0, "val": {"pass_rate": 0.4 + s / 100}, **cells} for s in range(first, last)
    ]


def test_wandb_offline_run_and_its_resume(tmp_path):
    pytest.importorskip("wandb")
    odd = [{"step": 3, "gpu_hours": 30.0, "val": {"pass_rate": float("nan")}}, {"loss": 1.0}]
    log_wandb(tmp_path, [*rows(1, 3), *odd], id="abc", name="curve")
    (run,) = read_runs(tmp_path / "wandb")
    assert (run.name, run.y_name, run.compute.tolist()) == ("curve", "val.pass_rate", [10, 20])
    assert run.pass_rate.tolist() == pytest.approx([0.41, 0.42])
    assert run.n_dropped == 1 and "record" in run.messages[0]

    log_wandb(tmp_path, rows(3, 6), id="abc", name="curve", resume="allow")
    (resumed,) = read_runs(tmp_path / "wandb")
    assert resumed.compute.tolist() == [10, 20, 30, 40, 50]

    (first, *_) = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    whole = first.read_bytes()
    first.write_bytes(whole[: int(len(whole) * 0.75)])
    (cut,) = read_runs(first)
    assert 0 < len(cut) <= 2 and "cut short by a crash; read up to there" in cut.messages[0]
    first.write_bytes(b"not a run")
    with pytest.raises(InputError, match="not a W&B run file"):
        read_runs(first)


def test_wandb_records_longer_than_a_block(tmp_path):
    """History beside records of 100 kB and more: the log splits those over its blocks of 32 KiB."""
    pytest.importorskip("wandb")
    log_wandb(tmp_path, rows(1, 6, note="x" * 100_000), name="long")
    (run,) = read_runs(tmp_path / "wandb")
    assert run.compute.tolist() == [10, 20, 30, 40, 50] and not run.messages


def test_wandb_online_without_a_login(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {"WANDB_API_KEY": "", "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"entity/project/run: .*W&B doesn't give such a run"):
        read_runs("entity/project/run")


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_optional_dependency_names_its_extra(tmp_path, package):
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    (tmp_path / "run.wandb").write_bytes(b"")
    target = tmp_path / "run.wandb" if package == "wandb" else tmp_path
    if package == "tensorboard":
        (tmp_path / "run.wandb").unlink()
    script = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from scalerl.fitting.readers import read_runs\n"
        "from scalerl.fitting.errors import InputError\n"
        "try: read_runs(sys.argv[1])\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(target)], capture_output=True, text=True, timeout=120)
    assert f"pip install 'scalerl[{package}]'" in done.stdout


def test_tensorboard_folder(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for first, last, shift in ((0, 4, -0.1), (3, 6, 0.0)):  # the second writer is a resume from step 2
        with SummaryWriter(str(tmp_path / "tb"), filename_suffix=f".{first}") as writer:
            for step in range(first, last):
                writer.add_scalar("perf/gpu_hours", step * 8.0, step)
                writer.add_scalar("loss", 1.0, step)
                if step != 4:
                    writer.add_scalar("val/acc", 0.4 + step / 16 + (shift if step == 3 else 0), step)
                writer.add_scalar("val/entropy", 0.5, step, new_style=True)
    (run,) = read_runs(tmp_path / "tb")
    assert (run.name, run.x_name, run.y_name) == ("tb", "perf/gpu_hours", "val/acc")
    assert run.step is not None and run.step.tolist() == [0, 1, 2, 3, 5]
    assert run.compute.tolist() == [0, 8, 16, 24, 40]
    assert run.pass_rate.tolist() == pytest.approx([0.4, 0.4625, 0.525, 0.5875, 0.7125], abs=1e-6)
    assert run.entropy is not None and run.entropy.tolist() == [0.5] * 5
    assert "step 3 at" in run.messages[0]
    (first,) = read_runs(tmp_path / "tb", keep="first")
    assert first.pass_rate[3] == pytest.approx(0.4875, abs=1e-6)
    (counted,) = read_runs(tmp_path / "tb", compute_per_step=2.0)
    assert counted.compute.tolist() == [0, 2, 4, 6, 10]
    with pytest.raises(InputError, match=r"no column 'val/reward'; columns: .*perf/gpu_hours"):
        read_runs(tmp_path / "tb", y="val/reward")
    with pytest.raises(InputError, match="name the folder"):
        read_runs(next((tmp_path / "tb").iterdir()))
