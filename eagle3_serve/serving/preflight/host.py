"""What this machine must offer the launcher itself: keys, ports, directories."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from eagle3_serve.config.keyfiles import GatewayKeys
from eagle3_serve.config.schema import Config
from eagle3_serve.core.errors import EagleServeError, PortInUseError
from eagle3_serve.core.process import require_free_port
from eagle3_serve.serving.preflight.findings import Finding


def check_exposure(config: Config, keys: GatewayKeys) -> Iterator[Finding]:
    """Nobody serves to a network by accident."""
    if not _is_loopback(config.gateway.host) and keys.api_key is None:
        yield Finding(
            "warning",
            "exposure",
            f"gateway.host is {config.gateway.host or 'every address'} and there is no API key: whoever reaches the "
            "port can use the model",
            "set gateway.api_key_file, or EAGLE3_SERVE__GATEWAY__API_KEY",
        )
    if not _is_loopback(config.engine.host):
        yield Finding(
            "warning",
            "exposure",
            f"engine.host is {config.engine.host or 'every address'}: SGLang's own routes ask for no key",
            "leave it at 127.0.0.1; applications need only the gateway",
        )
    if keys.api_key and keys.admin_key and keys.api_key.get_secret_value() == keys.admin_key.get_secret_value():
        yield Finding("warning", "exposure", "gateway.api_key and gateway.admin_key are the same", "use two keys")


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def check_ports(config: Config) -> Iterator[Finding]:
    """Both ports can be bound."""
    wanted = (
        ("gateway.port", config.gateway.host, config.gateway.port),
        ("engine.port", config.engine.host, config.engine.port),
    )
    if config.gateway.port and config.gateway.port == config.engine.port:
        yield Finding(
            "error",
            "ports",
            f"gateway.port and engine.port are both {config.engine.port}",
            "set engine.port: 0 to take a free one",
            PortInUseError,
        )
    for key, host, port in wanted:
        try:
            require_free_port(host, port, key=key)
        except EagleServeError as error:
            yield Finding("error", "ports", error.message, error.remedy, type(error))


def check_directories(config: Config) -> Iterator[Finding]:
    """Run and cache directories, or the nearest one above them that is there, can be written; none is made here."""
    for key, directory in (("paths.run_dir", config.paths.run_dir), ("paths.cache_dir", config.paths.cache_dir)):
        existing = next((each for each in (directory, *directory.parents) if each.exists()), directory)
        try:
            with tempfile.NamedTemporaryFile(dir=existing):
                pass
        except OSError as error:
            yield Finding(
                "error", "directories", f"{key} {directory} cannot be written: {error.strerror}", f"set {key}"
            )
