"""The image: what is copied into it, as whom it runs, and that its commands are those of toolbus."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

from tests.deploy.files import DEPLOY, ROOT, SETTINGS, argument, check_command, instructions, own_copy
from toolbus.bus.keys.doorman import split_secure
from toolbus.bus.loopback import is_loopback_host
from toolbus.bus.serve_settings import settle

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def _copied() -> list[str]:
    """Returns what is copied from the repository."""
    copies = [rest.split() for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    return [source for *sources, _ in copies for source in sources]


def _is_sent(path: str) -> bool:
    """Tells whether a path is sent to the builder, by the last line that fits it or what it is in."""
    sent = True
    for line in (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines():
        pattern = line.removeprefix("!")
        parts = path.split("/")
        if (
            line
            and line[0] != "#"
            and any(fnmatch.fnmatch("/".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))
        ):
            sent = line.startswith("!")
    return sent


def test_what_is_copied_is_there_and_is_sent_to_the_builder() -> None:
    for source in _copied():
        assert (ROOT / source).exists()
        assert _is_sent(source), source
    assert not _is_sent(".venv/bin/python")
    assert not _is_sent(".git/config")
    assert not _is_sent("chat.toolbus")


def test_the_image_has_everything_that_the_package_is_built_from() -> None:
    target = _PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*target["packages"], *target["force-include"], _PROJECT["project"]["readme"], "LICENSE", "pyproject.toml"]
    copied = _copied()
    for path in needed:
        assert any(path == source or path.startswith(f"{source}/") for source in copied), path


def test_it_installs_extras_that_the_package_has() -> None:
    (install,) = (rest for name, rest in instructions() if name == "RUN" and "pip install" in rest)
    (extras,) = re.findall(r"/src\[([\w,]+)\]", install)
    assert set(extras.split(",")) <= set(_PROJECT["project"]["optional-dependencies"])


def test_it_runs_as_a_user_that_owns_the_data_directory_alone() -> None:
    users = [rest for name, rest in instructions() if name == "USER"]
    assert users == ["10001:10001"]
    (made,) = (rest for name, rest in instructions() if name == "RUN" and "useradd" in rest)
    (volume,) = (rest for name, rest in instructions() if name == "VOLUME")
    assert f"install --directory --mode 0700 --owner 10001 --group 10001 {volume}" in made
    (variables,) = (rest for name, rest in instructions() if name == "ENV")
    assert f"TOOLBUS_DATA_DIR={volume}" in variables.split()
    assert f"TOOLBUS_CONFIG=/etc/toolbus/{SETTINGS.name}" in variables.split()


def test_its_command_and_its_health_check_are_commands_of_toolbus() -> None:
    check_command([*argument("ENTRYPOINT"), *argument("CMD")][1:])
    program, *words = argument("HEALTHCHECK")
    assert program == "toolbus"
    check_command(words)


def test_it_exposes_the_ports_of_its_settings_that_other_machines_can_reach(tmp_path: Path) -> None:
    config = settle({}, {}, own_copy(SETTINGS, tmp_path)).config
    addresses = [split_secure(address)[1] for address in (*config.grpc, config.http, str(config.https))]
    hosts_ports = [address.rpartition(":") for address in addresses]
    reachable = {port for host, _, port in hosts_ports if not is_loopback_host(host)}
    (exposed,) = (rest for name, rest in instructions() if name == "EXPOSE")
    assert set(exposed.split()) == reachable
