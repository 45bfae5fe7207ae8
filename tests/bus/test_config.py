"""Settings: what is refused and in which words, and who wins where several places say something."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import HANG_SECONDS
from toolbus.bus.config import Config
from toolbus.bus.serve_settings import settle
from toolbus.common.setting import TEXT, check_settings, one_of, setting
from toolbus.errors import SetupError
from toolbus.parts.dropin.settings import DropinSettings
from toolbus.protocol.tool import Limits


def test_a_config_without_arguments_is_what_serve_listens_on() -> None:
    config = Config()
    assert config.grpc == ("127.0.0.1:48930",)
    assert config.http == "127.0.0.1:48911"
    assert config.roles == ("default",)
    assert config.data_dir is None


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:0", "127.9.9.9:65535", "localhost:1", "[::1]:48930", "unix:/tmp/bus.sock", "unix:bus.sock"],
)
def test_loopback_and_unix_addresses_are_taken(address: str) -> None:
    assert Config(grpc=(address,)).grpc == (address,)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"grpc": ()}, "has no address"),
        ({"grpc": ("0.0.0.0:1",)}, "is not on loopback"),
        ({"grpc": ("[::]:1",)}, "is not on loopback"),
        ({"grpc": ("192.168.1.2:1",)}, "after `toolbus keys init`"),
        ({"grpc": ("example.org:1",)}, "is not on loopback"),
        ({"grpc": ("127.0.0.1",)}, "is not HOST:PORT or unix:PATH"),
        ({"grpc": ("::1:80",)}, "in brackets"),
        ({"grpc": (":80",)}, "is not HOST:PORT or unix:PATH"),
        ({"grpc": ("127.0.0.1:65536",)}, "0 to 65535"),
        ({"grpc": ("127.0.0.1:-1",)}, "0 to 65535"),
        ({"grpc": ("127.0.0.1:²",)}, "0 to 65535"),
        ({"grpc": ("127.0.0.1:1", "127.0.0.1:1")}, "twice"),
        ({"grpc": ("unix:",)}, "has no path"),
        ({"grpc": ("unix://host/path",)}, "has no path"),
        ({"grpc": ("unix:/" + "x" * 107,)}, "108 bytes"),
        ({"http": "unix:/tmp/x"}, "HOST:PORT or off"),
        ({"http": "0.0.0.0:80"}, "is not on loopback"),
        ({"http": ""}, "HOST:PORT or off"),
        ({"roles": ("a", "a")}, "'a' twice"),
        ({"roles": ("",)}, "empty item"),
        ({"silenced": ("a b",)}, "'a b'"),
        ({"grace_seconds": -1.0}, "grace_seconds is -1"),
        ({"drain_seconds": float("nan")}, "drain_seconds is nan"),
        ({"heartbeat_seconds": 0.0}, "heartbeat_seconds is 0, it must be from 0.1 to 3600 seconds"),
        ({"idle_heartbeat_seconds": float("nan")}, "idle_heartbeat_seconds is nan"),
        ({"missed_heartbeats": 0}, "missed_heartbeats is 0, it must be at least 1"),
        ({"missed_heartbeats": 9, "missed_heartbeats_gone": 8}, "less than missed_heartbeats = 9: a session"),
        ({"limits": Limits(result_bytes=0)}, "limits.result_bytes is 0"),
        ({"council": Path("/nowhere/council.toml")}, "council '/nowhere/council.toml' is not a file: create it"),
        ({"upstream": "http://127.0.0.1:1", "http": "off"}, "upstream needs http"),
        ({"upstream": "http://192.168.1.2:1"}, "not http://HOST:PORT"),
        ({"upstream": "http://main.example:1"}, "not http://HOST:PORT"),
        ({"upstream": "https://127.0.0.1:1"}, "upstream 'https://127.0.0.1:1' is not http://HOST:PORT"),
        ({"upstream": "http://127.0.0.1:1/api"}, "upstream 'http://127.0.0.1:1/api' is not http://HOST:PORT"),
        ({"upstream": "http://127.0.0.1:1?a=b"}, "is not http://HOST:PORT"),
        ({"upstream": "http://ann:secret@127.0.0.1:1"}, "upstream 'http://ann:***@127.0.0.1:1"),
        ({"upstream": "127.0.0.1:1"}, "not http://HOST:PORT"),
        ({"upstream": ""}, "not http://HOST:PORT"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_value_and_rule(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError) as refusal:
        Config(**fields)
    assert words in str(refusal.value)


@dataclass(frozen=True)
class _ToySettings:
    """The settings of a part that is not in the list."""

    colour: str = setting("red", TEXT, check=one_of("red", "blue"))

    def __post_init__(self) -> None:
        check_settings(self)


def test_a_part_brings_its_settings_and_their_rules() -> None:
    config = Config(parts=(_ToySettings("blue"),))
    assert config.part(_ToySettings).colour == "blue"
    assert config == replace(config, http="127.0.0.1:48911")
    assert config != Config()
    assert Config().part(_ToySettings).colour == "red"
    with pytest.raises(SetupError, match="colour is 'green', it must be one of red, blue"):
        _ToySettings("green")


def test_a_setting_of_a_part_is_a_keyword_and_an_attribute(tmp_path: Path) -> None:
    config = Config(tools_dir=tmp_path, require_manifest=True)
    assert config.part(DropinSettings) == DropinSettings(tmp_path, True)
    assert config.tools_dir == tmp_path
    assert replace(config, require_manifest=False) == Config(tools_dir=tmp_path)
    with pytest.raises(TypeError, match=r"no setting is named 'tool_dir' \(did you mean tools_dir\?\)"):
        Config(tool_dir=tmp_path)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="no setting 'tool_dir'"):
        _ = config.tool_dir  # type: ignore[attr-defined]


def test_settings_of_a_part_that_was_removed_are_refused_with_its_name(tmp_path: Path) -> None:
    file = _file(tmp_path, f'council = "{tmp_path}"\n')
    script = f"""
import sys
sys.modules["toolbus.parts.council"] = None  # as if its folder was removed
from pathlib import Path
from toolbus.bus.serve_settings import Config, settle
settle({{}}, {{}})
for read in (lambda: settle({{}}, {{}}, Path({str(file)!r})), lambda: Config(council=Path("."))):
    try:
        read()
    except Exception as error:
        print(type(error).__name__, error)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS)
    in_file, keyword = ran.stdout.splitlines()
    lacks = "this installation of toolbus lacks its part council, and does not know those settings: install"
    assert in_file.startswith(f"SetupError {file}: unknown key council; {lacks}")
    assert keyword.startswith(f"TypeError no setting is named 'council'; {lacks}")


def _file(folder: Path, text: str) -> Path:
    file = folder / "toolbus.toml"
    file.write_text(text)
    return file


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path, 'http = "127.0.0.1:1"\ngrace_seconds = 1\nroles = ["file"]\nephemeral = true\n')
    environ = {"TOOLBUS_HTTP": "127.0.0.1:2", "TOOLBUS_GRACE_SECONDS": "2"}
    config = settle({"http": "127.0.0.1:3"}, environ, file).config
    assert (config.http, config.grace_seconds, config.roles) == ("127.0.0.1:3", 2.0, ("file",))
    assert config.data_dir is None


def test_every_key_of_the_file_is_read(tmp_path: Path) -> None:
    settings = settle(
        {},
        {},
        _file(
            tmp_path,
            """
            grpc = ["127.0.0.1:0", "unix:bus.sock"]
            http = "off"
            no_roles = true
            data_dir = "/var/lib/toolbus"
            grace_seconds = 1.5
            drain_seconds = 2
            silenced = ["guest"]
            grpc_reflection = false
            log_level = "debug"
            log_json = true
            [limits]
            result_bytes = 1000
            """,
        ),
    )
    assert settings.config == Config(
        grpc=("127.0.0.1:0", "unix:bus.sock"),
        http="off",
        roles=(),
        data_dir=Path("/var/lib/toolbus"),
        limits=Limits(result_bytes=1000),
        grace_seconds=1.5,
        drain_seconds=2.0,
        silenced=("guest",),
        grpc_reflection=False,
    )
    assert (settings.log_level, settings.log_json) == ("debug", True)


def test_every_variable_is_read() -> None:
    environ = {
        "TOOLBUS_GRPC": "127.0.0.1:0, unix:bus.sock",
        "TOOLBUS_HTTP": "off",
        "TOOLBUS_ROLES": "a,b",
        "TOOLBUS_EPHEMERAL": "1",
        "TOOLBUS_DRAIN_SECONDS": "0",
        "TOOLBUS_SILENCED": "guest",
        "TOOLBUS_GRPC_REFLECTION": "off",
        "TOOLBUS_LOG_LEVEL": "error",
        "TOOLBUS_LOG_JSON": "yes",
    }
    settings = settle({}, environ)
    assert settings.config == Config(
        grpc=("127.0.0.1:0", "unix:bus.sock"),
        http="off",
        roles=("a", "b"),
        drain_seconds=0.0,
        silenced=("guest",),
        grpc_reflection=False,
    )
    assert (settings.log_level, settings.log_json) == ("error", True)


@pytest.mark.parametrize(
    ("environ", "http"),
    [
        ({}, "127.0.0.1:48911"),
        ({"MAIN_SERVER_PORT": "1"}, "127.0.0.1:1"),
        ({"MAIN_SERVER_PORT": "1", "NEKO_MAIN_SERVER_PORT": "2"}, "127.0.0.1:2"),
        ({"MAIN_SERVER_PORT": "1", "NEKO_MAIN_SERVER_PORT": ""}, "127.0.0.1:1"),
        ({"NEKO_MAIN_SERVER_PORT": "2", "TOOLBUS_HTTP": "off"}, "off"),
    ],
)
def test_the_http_port_follows_the_hosts_variables(environ: dict[str, str], http: str) -> None:
    config = settle({}, environ).config
    assert (config.http, config.http_fallback) == (http, False)


UP = "http://127.0.0.1:48911"


@pytest.mark.parametrize(
    ("environ", "http"),
    [
        ({}, "127.0.0.1:48916"),
        ({"MAIN_SERVER_PORT": "1", "NEKO_MAIN_SERVER_PORT": "2"}, "127.0.0.1:48916"),
        ({"MAIN_SERVER_PORT": "1", "NEKO_USER_PLUGIN_SERVER_PORT": "3"}, "127.0.0.1:3"),
        ({"NEKO_USER_PLUGIN_SERVER_PORT": ""}, "127.0.0.1:48916"),
        ({"NEKO_USER_PLUGIN_SERVER_PORT": "3", "TOOLBUS_HTTP": "127.0.0.1:4"}, "127.0.0.1:4"),
    ],
)
def test_beside_a_main_server_the_http_port_is_the_plugin_hosts(environ: dict[str, str], http: str) -> None:
    """REST-51."""
    config = settle({"upstream": UP}, environ).config
    assert (config.http, config.http_fallback) == (http, "TOOLBUS_HTTP" not in environ)
    said_by_variable = settle({}, {**environ, "TOOLBUS_UPSTREAM": UP}).config
    assert (said_by_variable.http, said_by_variable.upstream) == (http, UP)


def test_an_http_address_that_was_given_wins_beside_a_main_server_too(tmp_path: Path) -> None:
    environ = {"NEKO_USER_PLUGIN_SERVER_PORT": "3"}
    config = settle({"upstream": UP, "http": "127.0.0.1:5"}, environ).config
    assert (config.http, config.http_fallback) == ("127.0.0.1:5", False)
    file = _file(tmp_path, f'upstream = "{UP}"\nhttp = "127.0.0.1:6"\n')
    config = settle({}, {}, file).config
    assert (config.http, config.http_fallback, config.upstream) == ("127.0.0.1:6", False, UP)
    assert settle({}, {"NEKO_USER_PLUGIN_SERVER_PORT": "3"}, file).config.http == "127.0.0.1:3"
    with pytest.raises(SetupError, match="upstream needs http"):
        settle({"upstream": UP, "http": "off"}, environ)


@pytest.mark.parametrize("url", [UP, f"{UP}/", "http://LOCALHOST:1", "http://[::1]:1", "http://127.9.9.9"])
def test_a_main_server_may_be_anywhere_on_loopback(url: str) -> None:
    assert Config(upstream=url).upstream == url


def test_the_variable_names_the_file_and_the_data_directory_is_the_platforms(tmp_path: Path) -> None:
    config = settle({}, {"TOOLBUS_CONFIG": str(_file(tmp_path, 'http = "off"'))}).config
    assert config.http == "off"
    assert config.data_dir is not None
    assert config.data_dir.name == "toolbus"


def test_a_council_file_is_named_by_flag_variable_or_file(tmp_path: Path) -> None:
    named, other = tmp_path / "named.toml", tmp_path / "other.toml"
    named.touch()
    other.touch()
    file = _file(tmp_path, f'council = "{named}"\nephemeral = true\n')
    assert settle({}, {}, file).config.council == named
    assert settle({}, {"TOOLBUS_COUNCIL": str(other)}, file).config.council == other
    assert settle({"council": named}, {"TOOLBUS_COUNCIL": str(other)}, file).config.council == named


def test_a_switch_on_a_higher_level_empties_what_a_lower_one_set(tmp_path: Path) -> None:
    file = _file(tmp_path, 'roles = ["a"]\ndata_dir = "/d"\n')
    config = settle({}, {"TOOLBUS_NO_ROLES": "1", "TOOLBUS_EPHEMERAL": "true"}, file).config
    assert (config.roles, config.data_dir) == ((), None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("htpp = 1", "unknown key htpp (did you mean http?); known are adopt_roles, approvals, audit, audit_calls"),
        ("[limits]\nspeed = 1", "unknown key limits.speed; known are arguments_bytes"),
        ("limits = 1", "limits is 1, it must be an object"),
        ("[limits]\ntools = 1.5", "limits.tools is 1.5, it must be a whole number"),
        ("http = 1", "http is 1, it must be text: put it in quotes"),
        ("grpc = [1]", "grpc[0] is 1, it must be text"),
        ("ephemeral = 'yes'", "must be true or false"),
        ("grace_seconds = true", "grace_seconds is True, it must be a number"),
        ("log_level = 'loud'", "must be one of debug, info, warning, error"),
        ("roles = ['a']\nno_roles = true", "no_roles and"),
        ("=", "is not TOML"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_with_its_name_and_the_rule(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SetupError) as refusal:
        settle({}, {}, _file(tmp_path, text))
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"NEKO_MAIN_SERVER_PORT": "x"}, "NEKO_MAIN_SERVER_PORT: port 'x'"),
        ({"TOOLBUS_GRACE_SECONDS": "soon"}, "TOOLBUS_GRACE_SECONDS is 'soon'"),
        ({"TOOLBUS_LOG_JSON": "maybe"}, "TOOLBUS_LOG_JSON is 'maybe'"),
        ({"TOOLBUS_NO_ROLES": "1", "TOOLBUS_ROLES": "a"}, "TOOLBUS_NO_ROLES and TOOLBUS_ROLES contradict"),
        ({"TOOLBUS_CONFIG": "/nowhere/at/all.toml"}, "cannot read the configuration /nowhere/at/all.toml"),
    ],
)
def test_a_variable_that_breaks_a_rule_is_refused_with_its_name(environ: dict[str, str], words: str) -> None:
    with pytest.raises(SetupError) as refusal:
        settle({}, environ)
    assert words in str(refusal.value)
