"""The gateway's keys, wherever they are kept."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from eagle3_serve.config.schema import GatewayConfig
from eagle3_serve.core.errors import ConfigError

_LARGEST_KEY = 4096
NAMES = ("api_key", "admin_key")


@dataclass(frozen=True)
class GatewayKeys:
    """None: none is set. `warnings`: what is not safe about where they are kept."""

    api_key: SecretStr | None = None
    admin_key: SecretStr | None = None
    warnings: tuple[str, ...] = ()


def gateway_keys(gateway: GatewayConfig, origins: Mapping[str, object]) -> GatewayKeys:
    """The keys themselves: as configured, or read from their files. `origins`: by dotted key, for messages.

    Raises ConfigError.
    """
    warnings: list[str] = []
    found: dict[str, SecretStr | None] = {}
    for name in NAMES:
        path: Path | None = getattr(gateway, f"{name}_file")
        if path is None:
            found[name] = getattr(gateway, name)
        else:
            key = f"gateway.{name}_file"
            found[name] = _from_file(f"{key} {path} ({origins[key]})", path, warnings)
    return GatewayKeys(**found, warnings=tuple(warnings))


def fault_in_key(text: str) -> str | None:
    """Why `text` cannot be sent as `Authorization: Bearer <text>`, or None."""
    if not text:
        return "is empty"
    if not text.isascii() or not text.isprintable() or " " in text:
        return "holds a space, a line break or another character that no Authorization header can carry"
    return None


def _from_file(name: str, path: Path, warnings: list[str]) -> SecretStr:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_KEY + 1)
            mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(
            f"cannot read {name}: {error.strerror}", remedy="write the key into it, one line, mode 0600"
        ) from None
    text = data.decode("utf-8", errors="replace").removesuffix("\n").removesuffix("\r")
    fault = "is longer than 4096 bytes" if len(data) > _LARGEST_KEY else fault_in_key(text)
    if fault:
        raise ConfigError(f"the key in {name} {fault}", remedy="write the key into it, one line, mode 0600")
    if mode & 0o077:
        warnings.append(f"{name} can be read by other users (mode {mode:04o}): chmod 600 {path}")
    return SecretStr(text)
