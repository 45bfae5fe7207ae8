"""Tests what a sandboxed process finds in its environment."""

from __future__ import annotations

import pytest

from toolbus.errors import SetupError
from toolbus.parts.dropin.sandbox import clean_environment, granted_secrets

VARIABLES = {
    "PATH": "/bin",
    "LANG": "C.UTF-8",
    "LC_TIME": "de_DE",
    "TZ": "Asia/Tokyo",
    "TOOLBUS_ADDRESS": "127.0.0.1:1",
    "HOME": "/home/me",
    "AWS_SECRET_ACCESS_KEY": "x",
    "TOOLBUS_TOKEN": "t",
    "LD_PRELOAD": "x.so",
    "API_KEY": "k",
    "PYTHONSTARTUP": "x.py",
    "PYTHONPATH": "/x",
}


def test_only_what_python_and_the_sdk_need_is_kept() -> None:
    environment = clean_environment(VARIABLES)
    assert environment.keys() & VARIABLES.keys() == {"PATH", "LANG", "LC_TIME", "TZ", "TOOLBUS_ADDRESS"}
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert environment["PYTHONSAFEPATH"] == "1"


def test_a_granted_secret_is_passed_on_and_one_that_is_not_set_stays_unset() -> None:
    assert granted_secrets(["API_KEY", "OTHER_KEY"], VARIABLES) == {"API_KEY": "k"}


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "TOOLBUS_TOKEN", "PATH", "GCONV_PATH"])
def test_a_variable_that_decides_which_code_runs_cannot_be_granted(name: str) -> None:
    with pytest.raises(SetupError, match=f"{name}.*cannot be granted"):
        granted_secrets([name], VARIABLES)


@pytest.mark.parametrize("name", ["", "A=B", "A B", "1A", "É"])
def test_a_secret_with_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(SetupError, match="not a valid variable name"):
        granted_secrets([name], VARIABLES)
