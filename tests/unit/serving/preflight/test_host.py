from __future__ import annotations

import socket
from pathlib import Path

from pydantic import SecretStr

from eagle3_serve.config.keyfiles import GatewayKeys
from eagle3_serve.config.schema import Config
from eagle3_serve.core.errors import PortInUseError
from eagle3_serve.serving import preflight
from tests.unit.serving.conftest import changed
from tests.unit.serving.preflight.conftest import errors


def test_a_server_that_is_open_to_a_network_without_a_key_is_a_warning(config: Config) -> None:
    exposed = changed(config, gateway={"host": "0.0.0.0"}, engine={"host": ""})
    assert len(list(preflight.check_exposure(exposed, GatewayKeys()))) == 2
    key = SecretStr("same")
    (same,) = preflight.check_exposure(config, GatewayKeys(key, key))
    assert "are the same" in same.message
    assert list(preflight.check_exposure(config, GatewayKeys())) == []


def test_a_taken_gateway_port_is_found_before_anything_starts(config: Config) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (error,) = errors(preflight.check_ports(changed(config, gateway={"port": port})))
    assert error.error is PortInUseError
    assert str(port) in error.message


def test_one_port_for_both_servers_is_refused(config: Config) -> None:
    found = errors(preflight.check_ports(changed(config, gateway={"port": 39999}, engine={"port": 39999})))
    assert "both 39999" in found[0].message


def test_a_directory_that_cannot_be_made_is_an_error(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert errors(preflight.check_directories(config)) == []
    assert not config.paths.run_dir.exists()  # checking makes nothing
    blocked = changed(config, paths={"cache_dir": tmp_path / "file" / "cache"})
    (error,) = errors(preflight.check_directories(blocked))
    assert "paths.cache_dir" in error.message
