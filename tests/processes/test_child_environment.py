"""Tests which variables a plugin gets, and which ones its file mentions."""

import sys
from pathlib import Path

import psutil
import pytest

from toolbus.errors import SetupError
from toolbus.processes.child_environment import (
    EVERY_PROCESS,
    MCP_SERVER,
    NEVER_PASSED_ON,
    PLUGIN,
    AllowedVariables,
    mentioned_variables,
    requested_variables,
    token_of,
)
from toolbus.processes.lifeline import Lifeline

SECRETS = {
    *("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "HF_TOKEN", "DATABASE_URL", "SSH_AUTH_SOCK"),
    *("NVIDIA_API_KEY", "PYTHONANYWHERE_API_TOKEN", "XDG_SECRET", "GRPC_AUTH", "TOOLBUS_CONFIG", *NEVER_PASSED_ON),
}
USUAL = {
    *("PATH", "HOME", "USER", "LANG", "LC_TIME", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONWARNINGS", "VIRTUAL_ENV"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTPS_PROXY", "https_proxy", "no_proxy", "XDG_CONFIG_HOME", "TERM"),
    "TOOLBUS_LANE",
    *("TOOLBUS_ADDRESS", "TOOLBUS_GRPC_EXPERIMENTS", "GRPC_VERBOSITY", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
}
EVERYTHING = dict.fromkeys(SECRETS | USUAL, "x")


def test_a_plugin_gets_what_programs_need_and_no_key_of_a_service() -> None:
    assert PLUGIN.choose(EVERYTHING).keys() == USUAL


@pytest.mark.parametrize("allowed", [PLUGIN, MCP_SERVER])
@pytest.mark.parametrize("name", ["HTTPS_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize(
    ("value", "passed_on"),
    [
        ("http://ann:secret@proxy.example:3128", "http://proxy.example:3128"),
        ("http://ann:se/cr@et@proxy.example:3128", "http://proxy.example:3128"),
        ("ann:secret@proxy.example:3128", "proxy.example:3128"),
        ("socks5h://secret@[::1]:1080", "socks5h://[::1]:1080"),
        ("http://proxy.example:3128/", "http://proxy.example:3128/"),
        ("", ""),
    ],
)
def test_the_password_of_a_proxy_is_passed_on_only_where_an_operator_names_the_variable(
    allowed: AllowedVariables, name: str, value: str, passed_on: str
) -> None:
    assert allowed.choose({name: value}) == {name: passed_on}
    assert requested_variables([name], {name: value}) == {name: value}


def test_what_every_process_gets_a_plugin_gets_too_and_neither_gets_what_is_never_passed_on() -> None:
    assert EVERY_PROCESS.names <= PLUGIN.names
    assert set(EVERY_PROCESS.prefixes) <= set(PLUGIN.prefixes)
    assert not EVERY_PROCESS.choose(EVERYTHING).keys() & (SECRETS | {"HOME", "PYTHONPATH", "HTTPS_PROXY"})
    assert not PLUGIN.names & NEVER_PASSED_ON


@pytest.mark.parametrize(
    ("requests", "chosen"),
    [
        (["OPENAI_API_KEY"], {"OPENAI_API_KEY": "o"}),
        (["AWS_*"], {"AWS_A": "1", "AWS_B": "2"}),
        (["LEVEL=3", "EMPTY=", "A=b=c"], {"LEVEL": "3", "EMPTY": "", "A": "b=c"}),
        (["*"], {"OPENAI_API_KEY": "o", "AWS_A": "1", "AWS_B": "2"}),
        (["OPENAI_API_KEY", "OPENAI_API_KEY=p"], {"OPENAI_API_KEY": "p"}),
    ],
)
def test_an_operator_names_further_variables(requests: list[str], chosen: dict[str, str]) -> None:
    environment = {"OPENAI_API_KEY": "o", "AWS_A": "1", "AWS_B": "2", "TOOLBUS_SIDECAR_API_KEY": "s"}
    assert requested_variables(requests, environment) == chosen


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("OPENAI_API_KEY", "no variable 'OPENAI_API_KEY' is set: export it, or give its value as OPENAI_API_KEY=VALUE"),
        ("AWS_*", r"no variable 'AWS_\*' is set"),
        ("a b=s3cret", "'a b' is not a valid variable name: use letters, digits and _"),
        ("=s3cret", "'' is not a valid variable name"),
        ("TOOLBUS_SIDECAR_API_KEY", "TOOLBUS_SIDECAR_API_KEY is not passed on.*--secrets"),
        ("TOOLBUS_TOKEN=s3cret", "TOOLBUS_TOKEN is not passed on"),
        ("TOOLBUS_CREDENTIAL", "TOOLBUS_CREDENTIAL is not passed on"),
    ],
)
def test_a_variable_that_cannot_be_handed_on_is_refused_without_its_value(request_: str, words: str) -> None:
    with pytest.raises(SetupError, match=words) as refused:
        requested_variables([request_], {"TOOLBUS_SIDECAR_API_KEY": "s", "TOOLBUS_CREDENTIAL": "c"})
    assert "s3cret" not in str(refused.value)


def test_variables_that_a_file_reads_by_name_are_found(tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    file.write_text(
        "import os\nfrom os import environ, getenv\n"
        "a = os.environ['A']\nb = os.environ.get('B', '')\nc = os.getenv('C')\nd = environ['D']\ne = getenv('E', 1)\n"
        "f = 'F' in os.environ\ng = os.environ.setdefault('G', '')\nh = environ.pop('H', None)\n"
        "os.environ[a]\nother['NOT']\nother.get('NOT')\nos.environ.keys()\n'NOT' in other\nos.getenv(b)\ngetenv()\n"
    )
    assert mentioned_variables(file) == set("ABCDEFGH")


@pytest.mark.parametrize("content", [b"def broken(:", b"\xff\xfe", b"\0", b"(" * 5000])
def test_a_file_that_cannot_be_parsed_mentions_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "plugin.py"
    file.write_bytes(content)
    assert mentioned_variables(file) == mentioned_variables(tmp_path / "missing.py") == set()


def test_tokens_differ_by_owner_and_by_secret() -> None:
    assert token_of("s", "/a.py") == token_of("s", "/a.py")
    assert len({token_of("s", "/a.py"), token_of("s", "/b.py"), token_of("t", "/a.py"), "s"}) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_helper_that_ends_process_groups_has_an_empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    with Lifeline() as lifeline:
        assert psutil.Process(int(repr(lifeline).partition("pid=")[2].strip(">"))).environ() == {}
