"""Starting and stopping an SGLang server on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import weakref
from collections.abc import Sequence
from pathlib import Path

from scalerl.rl.config import RunConfig, SGLangEngineConfig
from scalerl.rl.engines.sglang.needs import largest_kept_set
from scalerl.rl.errors import UserError

_LAUNCHER = Path(__file__).with_name("launch.py")
_TAIL = 15  # lines of the log in which a server's own error is looked for
# Variables that are this environment's, or this rank's under torchrun, and not the server's.
_OURS = re.compile(r"(PYTHON(PATH|HOME)|MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|TORCHELASTIC_.*)$")
_STOP_LIMIT = 10.0  # seconds that the kernel gets to take a killed process away


class ServerProcess:
    """One server and its children, in a process group of their own that ends with this process.

    All that it prints goes to `log`; a restart appends. `ports`: the one that it serves at, and what else is kept for
    it, as of `reserve`, for as long as this object lives."""

    def __init__(
        self, command: list[str], environment: dict[str, str], ports: Sequence[socket.socket], log: Path
    ) -> None:
        self.port: int = ports[0].getsockname()[1]
        self.log = log
        self._command, self._environment = command, environment
        self._process: subprocess.Popen[bytes] | None = None
        for reserved in ports:
            weakref.finalize(self, reserved.close)

    def start(self) -> None:
        """Launch it; `Client.wait_until_ready` waits until it answers."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._finalizer = weakref.finalize(self, _kill_group, self._process)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Kill it with all its children; they hold nothing that is worth a farewell."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def last_words(self) -> str:
        """The last line of the log that names an error, or its last line."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-_TAIL:]
        except OSError:
            return "(no log)"
        named = [line for line in lines if "Error" in line or "error:" in line]
        return (named or lines or ["(an empty log)"])[-1].strip()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_LIMIT)


def server_processes(config: RunConfig, engine: SGLangEngineConfig, model_path: Path) -> list[ServerProcess]:
    """The servers that a run starts, not yet started. Raises UserError where their environment is missing."""
    if not Path(engine.python).is_file():
        raise UserError(
            f"engine.python={engine.python} is not there; scripts/setup_sglang makes it for the CPU, and on GPUs it is "
            "the Python beside your own sglang"
        )
    processes = []
    for number in range(engine.servers):
        ports = [_port_of(engine, number), _any_port()]
        processes.append(
            ServerProcess(
                command=[engine.python, str(_LAUNCHER), *_arguments(config, engine, model_path, number, ports)],
                environment=_environment(engine),
                ports=ports,
                log=Path(config.run_dir) / "servers" / f"server_{number}.log",
            )
        )
    return processes


def _arguments(
    config: RunConfig, engine: SGLangEngineConfig, model_path: Path, number: int, ports: Sequence[socket.socket]
) -> list[str]:
    serving, rendezvous = (str(port.getsockname()[1]) for port in ports)
    arguments = ["--model-path", str(model_path), "--device", engine.device]
    arguments += ["--host", engine.host, "--port", serving]
    if not any(given.startswith(("--dp", "--data-parallel")) for given in engine.arguments):
        arguments += ["--nccl-port", rendezvous]  # each of several replicas would need its own
    arguments += ["--dtype", config.model.dtype, "--weight-version", "0", "--skip-server-warmup"]
    arguments += ["--tensor-parallel-size", str(engine.tensor_parallel)]
    arguments += ["--max-running-requests", str(engine.concurrency)]
    if engine.kv_tokens is not None:
        arguments += ["--max-total-tokens", str(engine.kv_tokens)]
    if engine.device == "cpu":
        arguments += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--sleep-on-idle"]
    else:
        arguments += ["--base-gpu-id", str(engine.first_gpu + number * engine.tensor_parallel)]
    if config.recipe.logits_precision == "fp32":
        arguments.append("--enable-fp32-lm-head")
    if config.recipe.router_replay == "r3":
        arguments.append("--enable-return-routed-experts")
    if kept := largest_kept_set(config, model_path):
        arguments += ["--sampling-mask-max-tokens", str(2 * kept)]  # on GPUs equals of the last one are kept too
    return arguments + list(engine.arguments)


def _environment(engine: SGLangEngineConfig) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _OURS.match(name)}
    set_here = {"HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    if engine.device == "cpu":
        set_here["OMP_NUM_THREADS"] = str(engine.threads)
    return kept | set_here


def reserve(port: int) -> socket.socket:
    """Keeps a port (0: any free one) until it is closed: nobody who asks for any port gets it, nor a connection from
    here. Raises OSError where a server listens there already.

    A server that asks for this very port still gets it, since of sockets with SO_REUSEADDR only one can listen, but
    several can have the address. Without it, what starts beside a server can be given the server's port in the seconds
    before it listens."""
    reserved = socket.socket()
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", port))
    except OSError:
        reserved.close()
        raise
    return reserved


def _port_of(engine: SGLangEngineConfig, number: int) -> socket.socket:
    if not engine.port:
        return _any_port()
    try:
        return reserve(engine.port + number)
    except OSError:
        raise UserError(
            f"engine.port={engine.port}: port {engine.port + number} is in use; choose another, or 0 for any free one"
        ) from None


def _any_port() -> socket.socket:
    """One that leaves room: older servers open another port 10000 above theirs."""
    while (reserved := reserve(0)).getsockname()[1] > 55535:
        reserved.close()
    return reserved


def is_free(port: int) -> bool:
    """Whether a server could listen there."""
    try:
        reserve(port).close()
    except OSError:
        return False
    return True
