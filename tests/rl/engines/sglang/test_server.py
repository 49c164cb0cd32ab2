"""The port that a server will listen at stays its own while it starts."""

import errno
import socket

import pytest

from scalerl.rl.engines.sglang.server import is_free, reserve, server_processes

from .conftest import make_config

IP_LOCAL_PORT_RANGE = 51  # Linux 6.3; Python has no name for it yet


def listener(port):
    """As a server does it: asyncio sets SO_REUSEADDR on what it listens at."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    made.listen()
    return made


def only_from(port):
    """A socket that the kernel can give no other port than this, where it is to choose one."""
    made = socket.socket()
    try:
        made.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, (port << 16 | port).to_bytes(4, "little"))
    except OSError:
        made.close()
        pytest.skip("this kernel can't be told which ports to choose from")
    return made


def test_a_reserved_port_is_its_servers_and_nobody_elses():
    with reserve(0) as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):  # a server that is started again gets it again
            with listener(port) as server, socket.create_connection(("127.0.0.1", port)) as client:
                accepted, address = server.accept()
                accepted.close()
                assert address == client.getsockname()
                assert not is_free(port)
                with pytest.raises(OSError, match="in use"):
                    reserve(port)
    assert is_free(port)


def test_the_kernel_chooses_no_reserved_port():
    with reserve(0) as reserved:
        port = reserved.getsockname()[1]
        with only_from(port) as anybody, pytest.raises(OSError, match="in use"):
            anybody.bind(("127.0.0.1", 0))
        with listener(0) as server, only_from(port) as client:
            with pytest.raises(OSError) as refused:
                client.connect(server.getsockname())
            assert refused.value.errno == errno.EADDRNOTAVAIL
    with only_from(port) as anybody:
        anybody.bind(("127.0.0.1", 0))
        assert anybody.getsockname()[1] == port


def test_servers_keep_their_ports_as_long_as_they_are_there(models, tmp_path):
    (tmp_path / "python").touch()
    config = make_config(tmp_path, models["first"], f"engine.python={tmp_path / 'python'}", "engine.servers=2")
    assert config.engine.kind == "sglang"
    processes = server_processes(config, config.engine, models["first"])
    ports = [process.port for process in processes]
    ports += [int(process._command[process._command.index("--nccl-port") + 1]) for process in processes]
    assert len(set(ports)) == 4
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
    del processes
    for port in ports:
        with socket.socket() as other:
            other.bind(("", port))
