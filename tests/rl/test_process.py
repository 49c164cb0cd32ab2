"""What a process sets up: threads, and an allocator that keeps what was freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# The pages that a process faults in while it allocates and frees 40 MB again and again. Without the set-up most of them
# are, but where a small block happens to lie above them none: that side is no measure.
STEPS, PAGES = 10, 5 * 2**21 * 4 // 4096
FAULTS = f"""
import resource, torch
from scalerl.rl.process import set_up_process
set_up_process(1)
assert torch.get_num_threads() == 1
def step():
    blocks = [torch.ones(2**21) for _ in range(5)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({STEPS}):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    found = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(found.stdout) < STEPS * PAGES / 10
