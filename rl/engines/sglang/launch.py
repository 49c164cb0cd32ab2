"""Starts one SGLang server: `PYTHON launch.py SERVER_ARGUMENTS...`, with the Python of the server's own environment.

Not imported by scalerl, and imports nothing of it. The server is the unmodified one; on a CPU four things that the
published wheels lack are supplied here, none of which computes anything. It ends, with all its children, when its
standard input does: so none outlives the process that started it, however that one ended.
"""

from __future__ import annotations

import importlib.machinery
import os
import signal
import sys
import threading
import types
from typing import Any


def end_with_parent() -> None:
    """Wait for the end of standard input, then kill this process group."""
    while os.read(0, 4096):  # not sys.stdin, whose lock would stand in the way of an ordinary exit
        pass
    os.killpg(0, signal.SIGKILL)


def prepare_cpu() -> None:
    """Make sglang importable beside a CPU build of torch."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import torch

    # The published torchvision is a CUDA build: its own operators are not registered, and its import asks for two.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    prepare_cpu.library = library  # pyright: ignore[reportFunctionMemberAccess] (definitions go with their library)
    # The server's checksums of weights wait for CUDA first.
    torch.cuda.synchronize = lambda device=None: None
    sys.modules["sgl_kernel"] = _absent_kernels("sgl_kernel")
    try:
        # The buffer of recorded experts is pinned through CUDA.
        host: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
        host._cuda_host_register = lambda *args, **kwargs: None
    except ModuleNotFoundError as error:  # an older version, which also imports kernels from a submodule
        if error.name != "sglang.srt.mem_cache.pool_host":
            raise
        sys.modules["sgl_kernel.kvcacheio"] = _absent_kernels("sgl_kernel.kvcacheio")


def _absent_kernels(full_name: str) -> types.ModuleType:
    """`sgl_kernel` has no CPU wheel; names are imported from it for features that a CPU server does not use."""

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{full_name}.{name} has no CPU build")

        return absent

    module: Any = types.ModuleType(full_name)
    module.__spec__ = importlib.machinery.ModuleSpec(full_name, None)
    module.__getattr__ = lookup
    return module


def main(arguments: list[str]) -> None:
    run_server: Any = importlib.import_module("sglang.launch_server").run_server
    prepare: Any = importlib.import_module("sglang.srt.server_args").prepare_server_args
    run_server(prepare(arguments))


if __name__ == "__main__":  # first, since what follows may take a minute to import
    threading.Thread(target=end_with_parent, daemon=True).start()
if "cpu" in sys.argv:  # in the server's spawned children too, which import this file again
    prepare_cpu()
if __name__ == "__main__":
    main(sys.argv[1:])
