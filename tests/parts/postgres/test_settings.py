"""The setting `storage`: what it refuses, what it hides, and what is missing without its extra."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.waiting import HANG_SECONDS
from toolbus.bus.config import Config
from toolbus.bus.serve_settings import settle
from toolbus.errors import SetupError
from toolbus.parts.postgres.settings import StorageSettings


@pytest.mark.parametrize(
    "url", ["", "sqlite:///x.db", "mysql://u:hunter2@h/d", "hunter2", "postgresql:", "http://[", "postgres//h/d"]
)
def test_what_is_no_url_of_postgres_is_refused_with_an_example_and_without_its_password(url: str) -> None:
    if url == "postgresql:":  # all defaults of libpq
        assert StorageSettings(url).store
        return
    with pytest.raises(SetupError, match="URL of a Postgres database") as caught:
        StorageSettings(url)
    assert "postgresql://toolbus@db.internal/toolbus" in str(caught.value)
    assert "hunter2@" not in str(caught.value)


@pytest.mark.parametrize("url", ["postgresql://u:hunter2@h/d", "postgres://h:1,i:2/d?sslmode=verify-full"])
def test_a_password_is_in_no_text_of_the_settings(url: str) -> None:
    config = Config(storage=url)
    assert config.part(StorageSettings).storage == url
    assert "hunter2" not in f"{config!r}{config}"


def test_it_comes_from_file_variable_and_option_in_this_order(tmp_path: Path) -> None:
    file = tmp_path / "toolbus.toml"
    file.write_text('storage = "postgresql://file/d"\n')
    variable = {"TOOLBUS_STORAGE": "postgresql://variable/d"}

    def storage(options: dict[str, str], environment: dict[str, str]) -> str | None:
        return settle(options, environment, file).config.storage

    assert storage({}, {}) == "postgresql://file/d"
    assert storage({}, variable) == "postgresql://variable/d"
    assert storage({"storage": "postgresql://option/d"}, variable) == "postgresql://option/d"


def test_without_it_nothing_of_the_part_is_loaded() -> None:
    script = (
        "import sys, asyncio\nfrom toolbus.bus import Bus, Config\n"
        "async def main():\n    async with Bus(Config(grpc=('127.0.0.1:0',), http='off')): pass\n"
        "asyncio.run(main())\n"
        "print([name for name in sys.modules if name.startswith('psycopg')])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=HANG_SECONDS)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr


def test_without_the_extra_a_bus_says_what_to_install() -> None:
    script = (
        "import sys\nsys.modules['psycopg'] = None\nfrom toolbus.bus import Bus, Config\n"
        "Bus(Config(grpc=('127.0.0.1:0',), http='off', storage='postgresql://h/d'))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=HANG_SECONDS)
    assert "run `pip install 'toolbus[postgres]'`" in ran.stderr
