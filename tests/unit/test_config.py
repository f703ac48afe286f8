"""The server's settings and the places where its socket may live."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from hma_triton.config import (
    ServerConfig,
    default_socket_directory,
    default_url,
    prepare_socket_directory,
)
from hma_triton.curve_keys import make_key_file, read_key_file
from hma_triton.errors import ConfigError

URL = "ipc:///tmp/x/s.sock"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"verify": "sometimes"}, "verify 'sometimes'"),
        ({"touch": "now"}, "touch 'now' is unknown"),
        ({"socket_limit_bytes": 1}, "socket_limit_bytes 1 is outside"),
        ({"host_bytes": 10}, "host_bytes 10 is outside"),
        ({"copy_threads": 0}, "copy_threads 0"),
        ({"queue_limit": 0}, "queue_limit 0"),
        ({"max_registrations": 0}, "max_registrations 0"),
        ({"lease_s": 0.0}, "lease_s 0.0"),
        ({"pin_share": 1.5}, "pin_share 1.5"),
        ({"shutdown_s": 0.0}, "shutdown_s 0.0"),
        ({"copier_threads": 0}, "copier_threads 0"),
        ({"metrics_port": 70000}, "metrics_port 70000"),
        ({"numa_node": -1}, "numa_node -1"),
        ({"program_cap": 0}, "program_cap 0"),
    ],
)
def test_settings_out_of_range_are_named(settings, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ServerConfig(url=URL, **settings)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ipc://relative/s.sock", "absolute path"),
        ("tcp://[::1", "Invalid IPv6 URL"),
        ("ipc:///tmp/a\0b", "no zero byte"),
        (f"ipc:///{'é' * 60}", "this one has 121"),
        (f"ipc:///{'x' * 120}", "at most 107 bytes and no zero byte, this one has 121"),
        ("udp://127.0.0.1:1", "use ipc:///path/to/socket or tcp"),
        ("tcp://localhost:5000", "numeric address"),
        ("tcp://127.0.0.1", "needs a port"),
        ("tcp://0.0.0.0:5000", "open to the network"),
        ("tcp://10.1.2.3:5000", "open to the network"),
        ("tcp://[::]:5000", "open to the network"),
        ("tcp://127.0.0.1:99999", "port"),
    ],
)
def test_urls_that_cannot_or_may_not_be_served(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ServerConfig(url=url)


def test_loopback_needs_no_key_and_the_network_does(tmp_path: Path) -> None:
    for url in ("tcp://127.0.0.1:5000", "tcp://[::1]:5000", URL):
        ServerConfig(url=url)
    ServerConfig(url="tcp://0.0.0.0:5000", curve_key_file=str(tmp_path / "key"))


def test_settings_travel_as_json() -> None:
    config = ServerConfig(url=URL, curve_key_file="/k", copier_threads=2)
    assert msgspec.json.decode(msgspec.json.encode(config), type=ServerConfig) == config


def test_the_socket_directory_is_made_private(tmp_path: Path) -> None:
    prepare_socket_directory(f"ipc://{tmp_path / 'a' / 'b' / 's.sock'}")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"mode 0755.*chmod 700"):
        prepare_socket_directory(f"ipc://{tmp_path / 's.sock'}")


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="not a directory of this user"):
        prepare_socket_directory(f"ipc://{tmp_path / 's.sock'}")


def test_a_link_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="not a directory of this user"):
        prepare_socket_directory(f"ipc://{tmp_path / 'link' / 's.sock'}")


def test_the_default_is_a_directory_of_the_user(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert default_socket_directory() == Path(f"/tmp/hma-triton-{os.getuid()}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_url() == f"ipc://{tmp_path}/hma-triton/server.sock"


def test_key_files_are_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = read_key_file(path)
    assert len({getattr(keys, name) for name in keys.__struct_fields__}) == 4
    with pytest.raises(ConfigError, match="exists"):
        make_key_file(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644; chmod 600"):
        read_key_file(path)
    path.chmod(0o600)
    path.write_text('{"server_public": "short"}')
    with pytest.raises(ConfigError, match="is no key file"):
        read_key_file(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_key_file(tmp_path / "none")
