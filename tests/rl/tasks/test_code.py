"""The code task: what a solution may do, and what it is scored for trying, attack by attack."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from scalerl.rl.config import Asking, CodeTask, Data, Reward
from scalerl.rl.errors import UserError
from scalerl.rl.tasks import sandbox
from scalerl.rl.tasks.code import Code, last_block, read_tests, same_output
from scalerl.rl.tasks.sandbox import Ran, Sandbox
from scalerl.rl.types import Prompt, Verdict

DOUBLE = {"inputs": ["2\n", "21\n"], "outputs": ["4\n", "42\n"]}
CALLS = {"fn_name": "double", "inputs": [[2], [21]], "outputs": [4, 42]}


def make(tmp_path: Path, rows: list[dict] | None = None, *, time_limit: float = 20.0, **reward) -> Code:
    file = tmp_path / "train.jsonl"
    rows = rows or [{"prompt": f"Double {i}.", "tests": DOUBLE} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(
        train=str(file),
        held_out=None,
        n_held_out=1,
        seed=0,
        prompt_column=None,
        answer_column=None,
        exclude=None,
        extra={},
    )
    return Code(
        CodeTask(
            kind="code",
            data=data,
            asking=Asking(template="{prompt}", chat=True, system=None, prefill=""),
            reward=Reward(**{"unparsed": "score", "format_penalty": 0.0, **reward}),
            workers=2,
            time_limit=time_limit,
            memory=512,
            max_tests=20,
        ),
        "code",
    )


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Code:
    return make(tmp_path_factory.mktemp("code"))


def judge(task: Code, source: str, tests: object = DOUBLE) -> bool:
    (verdict,) = task.verify_batch([(Prompt("id", "", json.dumps(tests), "code"), f"```python\n{source}\n```")])
    assert not verdict.error
    return verdict.correct


@pytest.mark.parametrize(
    "source,tests,right",
    [
        ("print(2 * int(input()))", DOUBLE, True),
        ("import sys, collections, math, re, heapq\nprint(2 * int(sys.stdin.read()))", DOUBLE, True),
        ("print(2 + int(input()))", DOUBLE, False),
        ("def double(x): return 2 * x", CALLS, True),
        ("print('noise')\ndef double(x): print(x); return 2 * x", CALLS, True),
        ("def double(x): return 2 + x", CALLS, False),
        ("def triple(x): return 3 * x", CALLS, False),
        ("def double(x): return 2 * x", ["assert double(2) == 4", "assert double([1]) == [1, 1]"], True),
        ("def double(x): return 2 * x", ["assert double(2) == 5"], False),
        ("def double(x): return (x, x)", ["assert double(2) == (2, 2)"], True),
        ("print(2 * int(input())", DOUBLE, False),  # a syntax error
        ("print(2 * int(input())); raise SystemExit(1)", DOUBLE, False),
        ("with open('x', 'w') as f: f.write(str(2 * int(input())))\nprint(open('x').read())", DOUBLE, True),
        ("import threading\nt = threading.Thread(target=lambda: print(2 * int(input())))\nt.start()", DOUBLE, True),
    ],
)
def test_solutions_are_judged_by_their_tests(task, source, tests, right):
    assert judge(task, source, tests) is right


# Each attack, let through, would put out the right answers or leave a trace.
RIGHT = "print(2 * int(input()))"


def test_a_fork_bomb_makes_no_process(task):
    assert not judge(task, f"import os\nwhile True: os.fork()\n{RIGHT}")
    ran = Sandbox(seconds=20, memory=512).program(
        "import os, subprocess, sys\n"
        "run = lambda: subprocess.run([sys.executable, '-c', ''])\n"
        "become, spawn = lambda: os.execv('/bin/true', ['x']), lambda: os.posix_spawn('/bin/true', ['x'], {})\n"
        "for attempt in (os.fork, run, become, spawn):\n"
        "    try: print('made', attempt())\n"
        "    except OSError as error: print(error.errno)\n",
        "",
    )
    assert ran == Ran("done", "1\n1\n1\n1\n")


def test_a_memory_bomb_ends_at_its_limit(task):
    assert not judge(task, f"x = bytearray(600 << 20)\n{RIGHT}")
    assert judge(task, f"x = bytearray(100 << 20)\n{RIGHT}")


def test_an_endless_loop_ends_at_its_limit_and_the_next_is_judged(tmp_path):
    short = make(tmp_path, time_limit=3.0)
    start = time.monotonic()
    assert not judge(short, "while True: pass")
    assert not judge(short, f"import time\ntime.sleep(1e6)\n{RIGHT}")
    assert time.monotonic() - start >= 6.0
    ran = Sandbox(seconds=3.0, memory=512).program(
        "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass", ""
    )
    assert ran.status in ("late", "failed"), "ignored signals don't help: the last two can't be"
    assert judge(task=make(tmp_path), source=RIGHT)


def test_the_network_is_out_of_reach(task):
    assert not judge(task, f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')\n{RIGHT}")
    ran = Sandbox(seconds=20, memory=512).program(
        "import socket\n"
        "for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):\n"
        "    try: socket.socket(family); print('made')\n"
        "    except OSError as error: print(error.errno)\n",
        "",
    )
    assert ran == Ran("done", "1\n1\n1\n1\n")


def test_nothing_is_written_outside_its_directory(task, tmp_path):
    target = tmp_path / "mine.txt"
    target.write_text("kept")
    for source in (
        f"open({str(target)!r}, 'w').write('gone')",
        f"import os\nos.remove({str(target)!r})",
        f"import os\nos.rename({str(target)!r}, 'stolen')",
        f"import os\nos.symlink({str(target)!r}, 'link')\nopen('link', 'a').write('more')",
        f"import os\nos.truncate({str(target)!r}, 0)",
        f"import os\nos.link({str(target)!r}, 'hard')",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
    ):
        assert not judge(task, f"{source}\n{RIGHT}"), source
    assert target.read_text() == "kept"


def test_the_checker_can_not_be_deleted_or_changed(task):
    import scalerl.rl.tasks.code as checker

    path = Path(checker.__file__ or "")
    before = path.read_bytes()
    assert not judge(task, f"import os\nos.remove({str(path)!r})\n{RIGHT}")
    assert not judge(task, f"open({str(path)!r}, 'w').write('')\n{RIGHT}")
    assert path.read_bytes() == before


def test_expected_outputs_can_not_be_found_to_be_printed(tmp_path):
    task = make(tmp_path)
    data = str(tmp_path / "train.jsonl")
    assert not judge(task, f"import json\nprint(json.loads(open({data!r}).readline())['tests']['outputs'][0])")
    looks = [f"open('/proc/{os.getpid()}/mem', 'rb')", "open(f'/proc/{__import__(\"os\").getppid()}/cmdline')"]
    looks += ["__import__('os').listdir('/proc')", "__import__('os').listdir('..')", "open('/etc/passwd')"]
    for look in looks:
        ran = Sandbox(seconds=20, memory=512).program(f"try: print({look})\nexcept OSError as e: print('no')", "")
        assert ran == Ran("done", "no\n"), look
    for printed in ("4", "4\\n42", "4\\n4\\n42"):
        assert not judge(task, f"print('{printed}')"), "one output does not serve for two tests"


@pytest.mark.parametrize(
    "exit", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "quit()", "import os; os.abort()"]
)
def test_leaving_early_passes_nothing(task, exit):
    assert not judge(task, exit)
    assert not judge(task, exit, CALLS)
    assert not judge(task, f"def double(x):\n    {exit}", CALLS)


def test_comparison_is_out_of_reach(task):
    equal = "class Equal:\n    def __eq__(self, other): return True\n    def __repr__(self): return 'Equal()'\n"
    assert not judge(task, f"{equal}def double(x): return Equal()", CALLS)
    assert not judge(task, f"{equal}def double(x): return Equal()", ["assert double(2) == 4"])
    patched = "import builtins, json, ast\nbuiltins.repr = lambda x: '4'\njson.dumps = lambda x: '[\"4\", \"42\"]x'\n"
    assert not judge(task, f"{patched}def double(x): return 0", CALLS)
    assert not judge(task, "class int(int):\n    def __eq__(s, o): return True\ndef double(x): return int(0)", CALLS)


def test_output_without_end_is_cut(task):
    assert not judge(task, "while True: print('4' * 1000000)")


def test_other_processes_get_no_signal(task):
    assert not judge(task, f"import os\nos.kill(os.getppid(), 0)\n{RIGHT}")
    assert not judge(task, f"import os\nos.kill({os.getpid()}, 0)\n{RIGHT}")
    assert not judge(task, f"import os\nos.kill(-1, 0)\n{RIGHT}")


def test_limits_can_not_be_raised(task):
    raise_them = "import resource\nfor n in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):\n"
    assert not judge(task, f"{raise_them}    resource.setrlimit(n, (1 << 40, 1 << 40))\n{RIGHT}")


def test_the_locks_hold_for_native_calls_too():
    source = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for call in ((56, 17), (57,), (435, 0, 0), (41, 2, 1, 0), (425, 8, 0), (101, 16, 1), (317, 0)):\n"
        "    print(libc.syscall(*call) < 0)\n"
    )
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of x86-64")
    assert Sandbox(seconds=20, memory=512).program(source, "") == Ran("done", "True\n" * 7)


def test_time_begins_when_the_locks_are_in_place(monkeypatch):
    slow = f"import time\ntime.sleep(1.5)\n{sandbox._CHILD}"
    monkeypatch.setattr(sandbox, "_CHILD", slow)
    assert Sandbox(seconds=1, memory=512).program("print(1)", "") == Ran("done", "1\n")
    monkeypatch.setattr(sandbox, "_CHILD", "raise OSError('no locks here')")
    assert Sandbox(seconds=1, memory=512).program("print(1)", "") == Ran("unlocked", "OSError: no locks here")
    monkeypatch.setattr(sandbox, "_CHILD", slow)
    monkeypatch.setattr(sandbox, "_START", 0.5)
    assert Sandbox(seconds=1, memory=512).program("print(1)", "") == Ran("unlocked", "no start within 0 s")


def test_completions_without_a_program(tmp_path):
    prompt = Prompt("id", "", json.dumps(DOUBLE), "code")
    pairs = [(prompt, "print(4)"), (prompt, f"```\n{RIGHT}\n```")]
    assert make(tmp_path).verify_batch(pairs) == [Verdict(False, unparsed=True), Verdict(True)]
    assert make(tmp_path, unparsed="mask").verify_batch(pairs)[0] == Verdict(False, unparsed=True, masked=True)


def test_the_last_block_counts():
    assert last_block("```python\na\n```\nor\n```py\nb\n```") == "b\n"
    assert last_block("```\na\n```") == "a\n"
    assert last_block("```python\nunfinished") is None


@pytest.mark.parametrize(
    "tests,message",
    [
        ("x", "tests are no JSON"),
        ({"inputs": ["1"], "outputs": []}, "as many outputs"),
        ({"inputs": [], "outputs": []}, "as many outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "need text"),
        ({"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}, "lists of arguments"),
        ({"fn_name": "f; import os", "inputs": [[1]], "outputs": ["1"]}, "lists of arguments"),
        ({"inputs": 3, "outputs": 3}, "a list of inputs"),
        ({"inputs": ["1"], "outputs": None}, "a list of inputs"),
        ({"inputs": "12", "outputs": "34"}, "a list of inputs"),
        ([], "a list of inputs"),
        (3, "a list of inputs"),
        (["assert f(1) == {[]: 1}"], "not of the form"),
        (["assert f(1)"], "not of the form"),
        (["assert f(1) == g(1)"], "not of the form"),
        (["import os"], "not of the form"),
    ],
)
def test_tests_that_can_not_be_used_are_refused_with_their_row(tmp_path, tests, message):
    with pytest.raises(UserError, match=rf"train\.jsonl, line 2: .*{message}"):
        make(tmp_path, [{"prompt": "a", "tests": DOUBLE}, {"prompt": "b", "tests": tests}])


def test_layouts_of_tests():
    listed = [{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "6\n"}]
    assert read_tests(json.dumps(listed)).pairs == (("2\n", "4\n"), ("3\n", "6\n"))
    assert read_tests(json.dumps(CALLS)).calls == (("double(2)", 4), ("double(21)", 42))
    assert read_tests('["assert set(f(1)) == {1, 2}"]').calls == (("set(f(1))", {1, 2}),)


@pytest.mark.parametrize(
    "output,expected,same",
    [
        ("1 2\n", "1  2", True),
        ("0.3333333", "0.33333333", True),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("1 2", "1 2 3", False),
        ("YES", "yes", False),
        ("nan", "1.0", False),
    ],
)
def test_same_output(output, expected, same):
    assert same_output(output, expected) is same
