"""Prompt files: layouts, malformed rows, duplicates, and sets that share no prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scalerl.rl.config import Data
from scalerl.rl.errors import UserError
from scalerl.rl.sampler import PromptSampler
from scalerl.rl.tasks.boxes import last_box
from scalerl.rl.tasks.dataset import Dataset, load_dataset
from scalerl.rl.tasks.prompt_files import read_prompt_file
from scalerl.rl.types import Prompt


def jsonl(path: Path, rows) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, **columns) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def numbered(n: int, start: int = 0) -> list[dict]:
    return [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(start, start + n)]


def load(train: str, **changed) -> Dataset:
    values = {"held_out": None, "n_held_out": 1, "seed": 0, "prompt_column": None, "answer_column": None}
    data = Data(**{"train": train, "exclude": None, "extra": {}, **values, **changed})
    return load_dataset(data, lambda id, text, answer: Prompt(id, text, answer, "t"))


def texts(prompts) -> set[str]:
    return {p.text for p in prompts}


@pytest.mark.parametrize(
    "row,expected",
    [
        ({"problem": "p", "answer": "7", "difficulty": "3/8"}, "7"),  # Polaris
        ({"question": "p", "answer": "She has 4.\n#### 1,204"}, "1204"),  # GSM8K
        ({"problem": "p", "level": "1", "solution": r"So \boxed{1} or $\boxed{\frac{1}{2}}$."}, r"\frac{1}{2}"),  # MATH
        ({"problem": "p", "solution": r"So \boxed{1}.", "answer": "2"}, "2"),  # MATH-500
        ({"prompt": "p", "answer": 12}, "12"),
        ({"prompt": "p", "answer": {"inputs": ["1"]}}, '{"inputs": ["1"]}'),
    ],
)
def test_layouts_are_recognised_by_their_columns(tmp_path, row, expected):
    file = read_prompt_file(Path(jsonl(tmp_path / "a.jsonl", [row])), None, None)
    assert (file.prompts.to_pylist(), file.answers.to_pylist()) == (["p"], [expected])
    columns = {name: [value] for name, value in row.items()}
    file = read_prompt_file(Path(parquet(tmp_path / "a.parquet", **columns)), None, None)
    assert (file.prompts.to_pylist(), file.answers.to_pylist()) == (["p"], [expected])


def test_columns_that_are_named_are_taken(tmp_path):
    path = Path(jsonl(tmp_path / "a.jsonl", [{"prompt": "no", "ask": "yes", "answer": "no", "gold": "1"}]))
    file = read_prompt_file(path, "ask", "gold")
    assert (file.prompts.to_pylist(), file.answers.to_pylist()) == (["yes"], ["1"])
    with pytest.raises(UserError, match=r"a\.jsonl has no column 'gould' \(task\.data\.answer_column\); it has prompt"):
        read_prompt_file(path, "ask", "gould")


GOOD = {"problem": "p", "answer": "1"}


@pytest.mark.parametrize(
    "second,message",
    [
        ("{\n", "line 2 is not valid JSON"),
        ("[1]\n", "line 2 is no JSON object"),
        ({"answer": "1"}, "line 2: 'problem' is missing"),
        ({"problem": " ", "answer": "1"}, "line 2: 'problem' is empty"),
        ({"problem": ["p"], "answer": "1"}, "line 2: 'problem' is a list, not text"),
        ({"problem": "p"}, "line 2: 'answer' is missing"),
        ({"problem": "p", "answer": ""}, "line 2: 'answer' is empty"),
        ({"problem": "p", "answer": True}, "line 2: 'answer' is a bool"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, second, message):
    with pytest.raises(UserError, match=r"a\.jsonl, " + message) as caught:
        load(jsonl(tmp_path / "a.jsonl", [GOOD, second, GOOD]))
    assert "\n" not in str(caught.value)


def test_a_malformed_parquet_row_is_named(tmp_path):
    path = parquet(tmp_path / "a.parquet", problem=["p", "q", None], answer=["1", "2", "3"])
    with pytest.raises(UserError, match=r"a\.parquet, row 3: 'problem' is missing"):
        load(path)


def test_answers_that_the_layout_lacks_are_named(tmp_path):
    rows = [{"question": "p", "answer": "#### 1"}, {"question": "q", "answer": "2"}]
    with pytest.raises(UserError, match=r"line 2: 'answer' has no answer after ####"):
        load(jsonl(tmp_path / "a.jsonl", rows))
    rows = [{"problem": "p", "solution": r"\boxed{1}"}, {"problem": "q", "solution": r"\boxed{2"}]
    with pytest.raises(UserError, match=r"line 2: 'solution' has no whole \\boxed"):
        load(jsonl(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("none.jsonl", None, r"none\.jsonl can't be read \(No such file"),
        ("none.parquet", None, r"none\.parquet can't be read \(No such file"),
        ("a.parquet", b"not parquet", r"a\.parquet can't be read as Parquet"),
        ("a.jsonl", b"", r"a\.jsonl has no rows"),
        ("a.csv", b"problem,answer\n", r"rows are read from \.parquet and \.jsonl files"),
        ("a.jsonl", b'{"problem": "\xff"}\n', r"a\.jsonl, line 1 is not UTF-8 text"),
        (
            "a.jsonl",
            rb'{"problem": "a \ud83d b", "answer": "1"}',
            r"line 1: 'problem' has \\ud83d, half of a character",
        ),
        ("a.jsonl", rb'{"problem": "a", "answer": "\ud83d"}', r"line 1: 'answer' has \\ud83d, half of a character"),
        ("a.jsonl", b'{"content": "p"}\n', r"no prompt column that is known .* set task\.data\.prompt_column"),
    ],
)
def test_a_file_that_is_no_prompt_file_is_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(str(tmp_path / name))


def test_equal_prompts_are_dropped_and_told(tmp_path, capsys):
    rows = [*numbered(4), {"problem": "What  is 1 +\n1?", "answer": "3"}, numbered(1)[0]]
    data = load(jsonl(tmp_path / "a.jsonl", rows))
    prompts = [*data.train, *data.held_out()]
    assert len(prompts) == 4 and {p.answer for p in prompts} == {"0", "2", "4", "6"}, "the first one stays"
    assert "a.jsonl: 2 prompts left out, which repeat an earlier prompt (the first: " in (
        told := capsys.readouterr().err
    )
    assert "a.jsonl, line 5)" in told


def test_the_split_is_disjoint_and_a_function_of_seed_and_prompts(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", numbered(200))
    data = load(path, n_held_out=50)
    assert (len(data.train), len(data.held_out())) == (150, 50)
    assert texts(data.train) | texts(data.held_out()) == {row["problem"] for row in numbered(200)}
    assert texts(load(path, n_held_out=50, seed=1).held_out()) != texts(data.held_out())
    turned = jsonl(tmp_path / "b.jsonl", numbered(200)[::-1])
    assert texts(load(turned, n_held_out=50).held_out()) == texts(data.held_out())
    assert {p.id for p in load(turned, n_held_out=50).train} == {p.id for p in data.train}
    with pytest.raises(UserError, match=r"n_held_out=200 leaves nothing to train on: .* has 200 different prompts"):
        load(path, n_held_out=200)


def test_overlap_with_evaluated_files_leaves_training_and_is_told(tmp_path, capsys):
    train = jsonl(tmp_path / "train.jsonl", numbered(10))
    held_out = jsonl(tmp_path / "held.jsonl", numbered(4, start=8))
    extra = parquet(tmp_path / "aime.parquet", prompt=["What is 3 + 3?", "other"], answer=["6", "7"])
    data = load(train, held_out=held_out, extra={"aime": extra})
    assert len(data.train) == 7 and len(data.held_out()) == 4 and len(data.extra("t", "aime")) == 2
    assert not texts(data.train) & (texts(data.held_out()) | texts(data.extra("t", "aime")))
    told = capsys.readouterr().err
    assert "2 prompts left out, which stand in" in told and "train.jsonl, line 9)" in told
    assert "1 prompts left out, which stand in" in told
    with pytest.raises(UserError, match="the task t has no set 'amc'; it has aime"):
        data.extra("t", "amc")


@pytest.mark.parametrize("name", ["list.txt", "list.jsonl"])
def test_listed_prompts_are_never_trained_on_nor_held_out(tmp_path, capsys, name):
    unwanted = [row["problem"] for row in numbered(5)]
    if name.endswith("txt"):
        (tmp_path / name).write_text("\n\n".join(unwanted))
    else:
        jsonl(tmp_path / name, [{"problem": text} for text in unwanted])
    data = load(jsonl(tmp_path / "a.jsonl", numbered(20)), exclude=str(tmp_path / name), n_held_out=10)
    assert not (texts(data.train) | texts(data.held_out())) & set(unwanted)
    assert (len(data.train), len(data.held_out())) == (5, 10)
    assert "5 prompts left out, which are listed in" in capsys.readouterr().err


def test_nothing_left_to_train_on(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", numbered(3))
    with pytest.raises(UserError, match=r"no prompt of .*a\.jsonl is left to train on"):
        load(path, held_out=path)


def test_prompts_are_lazy_and_know_their_content(tmp_path):
    data = load(jsonl(tmp_path / "a.jsonl", numbered(20)))
    part = data.train[3:5]
    assert [p.text for p in part] == [data.train[3].text, data.train[4].text]
    assert data.train[-1] == list(data.train)[-1]
    with pytest.raises(IndexError):
        data.train[19]
    assert data.train.fingerprint != part.fingerprint
    sampler = PromptSampler(data.train, seed=0, resample_positive=True, threshold=0.9, lag=0)
    with pytest.raises(UserError, match="not those of the checkpoint"):
        sampler.load_state_dict({**sampler.state_dict(), "prompts": load(data_of(tmp_path)).train.fingerprint})


def data_of(tmp_path: Path) -> str:
    return jsonl(tmp_path / "b.jsonl", numbered(20, start=1))


@pytest.mark.parametrize(
    "text,box",
    [
        (r"\boxed{1} then \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}} and \boxed{3", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{", None),
        ("5", None),
        ("", None),
    ],
)
def test_last_box(text, box):
    assert last_box(text) == box


MILLION = """
import sys, time
from scalerl.rl.config import Data
from scalerl.rl.sampler import PromptSampler
from scalerl.rl.tasks.dataset import load_dataset
from scalerl.rl.types import Prompt
def peak():  # ru_maxrss would count the parent's memory at the fork
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))) / 1024
before, start = peak(), time.process_time()
data = Data(train=sys.argv[1], held_out=None, n_held_out=1000, seed=0, prompt_column=None, answer_column=None,
            exclude=None, extra={})
dataset = load_dataset(data, lambda id, text, answer: Prompt(id, text, answer, "t"))
sampler = PromptSampler(dataset.train, seed=0, resample_positive=False, threshold=0.9, lag=0)
assert len(dataset.train) + len(dataset.held_out()) == 1_000_000 and sampler.next()[2].text.startswith("Problem")
print(time.process_time() - start, peak() - before)
"""


@pytest.mark.slow
def test_a_million_prompts_stay_in_arrow_buffers(tmp_path):
    """The text alone is 228 MB; as Python objects the prompts would take about 700 MB more."""
    filler = "Find the value of the sum of all the things that one may think of. " * 3
    text = [f"Problem {i}: x + y = {i}. {filler}" for i in range(1_000_000)]
    path = parquet(tmp_path / "a.parquet", problem=text, answer=[str(i) for i in range(1_000_000)])
    size = sum(map(len, text)) / 2**20
    del text
    done = subprocess.run([sys.executable, "-P", "-c", MILLION, path], capture_output=True, text=True, check=True)
    seconds, megabytes = map(float, done.stdout.split())
    print(f"1M prompts: {seconds:.1f} s of CPU, {megabytes:.0f} MiB for {size:.0f} MiB of text")
    assert megabytes < size + 300
    assert np.isfinite(seconds)
