"""The servers of one machine, for a trainer on another."""

from __future__ import annotations

import time

from scalerl.rl.config import RunConfig, SGLangEngineConfig
from scalerl.rl.engines.sglang.server import server_processes
from scalerl.rl.errors import RunEnded, UserError
from scalerl.rl.preemption import Stop
from scalerl.rl.run import model_folder
from scalerl.rl.tasks import build_task

_CHECK_EVERY = 0.5  # seconds


def serve_until_stopped(config: RunConfig) -> None:
    """Start the configuration's servers, print their URLs, and keep them until a signal comes.

    Raises UserError where they can't be started, RunEnded where one ends by itself; either way none is left."""
    engine = config.engine
    if not isinstance(engine, SGLangEngineConfig) or engine.urls:
        raise UserError(
            "scalerl serve starts servers: it needs engine=sglang, and no engine.urls, which are the trainer's"
        )
    processes = server_processes(config, engine, model_folder(config, build_task(config.task)))
    with Stop() as stop:
        try:
            for process in processes:
                process.start()
                print(f"http://{engine.host}:{process.port}  log {process.log}", flush=True)
            while not stop.requested:
                if ended := [process for process in processes if not process.alive]:
                    raise RunEnded(f"the server at port {ended[0].port} has ended: {ended[0].last_words()}")
                time.sleep(_CHECK_EVERY)
        finally:
            for process in processes:
                process.stop()
