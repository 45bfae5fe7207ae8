"""Several buses that share a database: the manifests, the compose file and the unit, and buses started as they say."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.files import DEPLOY, SETTINGS, UNIT, argument, check_command, manifest, manifests, own_copy, unit
from tests.support.postgres import Server, postgres
from tests.support.processes import toolbus
from tests.support.waiting import HANG_SECONDS, until
from toolbus.bus import Bus
from toolbus.bus.config import Config
from toolbus.bus.serve_settings import settle
from toolbus.common.setting import part_records, settings_of

__all__ = ["postgres"]

FILE = "buses.yaml"
SET = manifest(FILE, "StatefulSet")["spec"]
POD = SET["template"]["spec"]
CONTAINERS = [*POD["initContainers"], *POD["containers"]]
(BUS,) = POD["containers"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
PAIR = UNIT.with_name("toolbus@.service")
VARIABLES = {each.variable for kind in (Config, *part_records()) for each in settings_of(kind).values()}


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_every_object_fits_the_published_schema(version: str) -> None:
    for each in manifests(FILE):
        kubernetes_validate.validate(each, version, strict=True)


def test_three_buses_are_found_by_name_and_leave_one_after_the_other() -> None:
    assert SET["replicas"] == 3
    service = manifest(FILE, "Service")
    assert service["spec"]["clusterIP"] == "None", "so that DNS has the address of each"
    assert not service["spec"].get("publishNotReadyAddresses")
    assert SET["serviceName"] == service["metadata"]["name"]
    labels = SET["template"]["metadata"]["labels"]
    budget = manifest(FILE, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    for selector in (service["spec"]["selector"], budget["selector"]["matchLabels"], SET["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    assert BUS["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_a_pod_is_restricted_as_that_of_one_bus_is_and_drains_before_it_ends(tmp_path: Path) -> None:
    single = manifest("bus.yaml", "StatefulSet")["spec"]["template"]["spec"]
    assert POD["securityContext"] == single["securityContext"]
    for container in CONTAINERS:
        assert container["securityContext"] == single["containers"][0]["securityContext"]
    program, *words = BUS["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "toolbus"
    check_command(words)
    assert POD["terminationGracePeriodSeconds"] > configuration(tmp_path, {}).drain_seconds


def test_every_volume_that_is_mounted_is_declared() -> None:
    declared = {each["name"] for each in POD["volumes"]}
    declared |= {claim["metadata"]["name"] for claim in SET["volumeClaimTemplates"]}
    assert {mount["name"] for each in CONTAINERS for mount in each["volumeMounts"]} == declared


def test_the_variables_of_the_pods_and_of_compose_are_settings_and_the_password_is_in_none_of_them() -> None:
    names = {each["name"]: each for each in BUS["env"]}
    assert set(names) <= VARIABLES
    assert "value" not in names["TOOLBUS_STORAGE"]
    assert names["TOOLBUS_STORAGE"]["valueFrom"]["secretKeyRef"]["key"] == "url"
    for name in ("bus-0", "bus-1"):
        environment = COMPOSE["services"][name]["environment"]
        assert set(environment) <= VARIABLES
        assert "${POSTGRES_PASSWORD:?" in environment["TOOLBUS_STORAGE"]


def configuration(folder: Path, environment: dict[str, str]) -> Any:
    file = folder / "toolbus.toml"
    file.write_text(manifest(FILE, "ConfigMap")["data"]["toolbus.toml"], "utf-8")
    return settle({}, environment, file).config


async def test_buses_that_are_started_as_the_pods_are_share_what_is_set(postgres: Server, tmp_path: Path) -> None:
    secret = tmp_path / "made"
    made = toolbus("keys", "init", "--name=localhost", "--address=mtls:localhost:48931", TOOLBUS_DATA_DIR=str(secret))
    assert made.returncode == 0, made.stderr
    secret /= "keys"
    (secret / "ca.key").unlink()  # it stays with the operator
    for each in secret.iterdir():
        each.chmod(0o440)  # as those of a Secret
    url = postgres.schema()
    async with AsyncExitStack() as stack:
        buses = []
        for name in ("toolbus-0", "toolbus-1"):
            folder = tmp_path / name
            folder.mkdir(mode=0o700)
            script = POD["initContainers"][0]["command"][-1].replace(" /keys/", f" {folder}/")
            words = ["sh", "-c", script.replace(" /secret/", f" {secret}/")]
            await asyncio.to_thread(subprocess.run, words, check=True, timeout=HANG_SECONDS)
            variables = {"TOOLBUS_STORAGE": url, "TOOLBUS_KEYS": f"{folder}/own", "TOOLBUS_DATA_DIR": f"{folder}/data"}
            assert set(variables) == {each["name"] for each in BUS["env"]}
            config = configuration(folder, variables)
            free = {"grpc": (f"unix:{folder}/s", "mtls:127.0.0.1:0"), "http": "off", "https": "127.0.0.1:0"}
            settings = {each: getattr(config, each) for each in settings_of(Config)} | free
            buses.append(await stack.enter_async_context(Bus(Config(parts=config.parts, **settings))))
        first, second = buses
        first.add_role("chef")
        await until(lambda: "chef" in second.registry.roles)
        _, *words = argument("HEALTHCHECK")
        ran = await asyncio.to_thread(toolbus, *words, "--bus", second.grpc_addresses[0])
        assert (ran.returncode, "toolbus.source.toolbus.settings" in ran.stdout) == (0, True), ran.stdout


# -- compose -----------------------------------------------------------------------------------------------------------


def test_the_buses_of_compose_differ_by_name_port_and_volume_and_share_database_and_keys() -> None:
    services = COMPOSE["services"]
    first, second = services["bus-0"], services["bus-1"]
    for name in ("hostname", "ports", "volumes"):
        assert first[name] != second[name]
    assert first["environment"] == second["environment"]
    assert first["volumes"][0] == second["volumes"][0] == "keys:/keys"
    assert {each.partition(":")[0] for one in services.values() for each in one.get("volumes", ())} == set(
        COMPOSE["volumes"]
    )
    url = first["environment"]["TOOLBUS_STORAGE"].replace("${POSTGRES_PASSWORD:?give the database a password}", "x")
    assert (
        Config(storage=url).storage
        == f"postgresql://{services['postgres']['environment']['POSTGRES_USER']}:x@postgres/toolbus"
    )
    for name in ("bus-0", "bus-1"):
        assert services[name]["depends_on"] == {
            "postgres": {"condition": "service_healthy"},
            "keys": {"condition": "service_completed_successfully"},
        }
        assert f"--name={name}" in services["keys"]["command"]
        check_command(services[name]["command"])
    check_command(services["keys"]["command"])
    assert (DEPLOY / services["keys"]["build"]["context"] / services["keys"]["build"]["dockerfile"]).is_file()


def test_the_image_has_what_a_shared_database_needs() -> None:
    assert "postgres" in (DEPLOY / "Dockerfile").read_text("utf-8").partition("'/src[")[2].partition("]")[0].split(",")


# -- systemd -----------------------------------------------------------------------------------------------------------


def test_the_units_of_a_pair_are_confined_as_that_of_one_bus_is() -> None:
    single, pair = unit(UNIT), unit(PAIR)
    own = {"Description", "After", "StateDirectory", "Environment", "EnvironmentFile", "ExecStart"}
    assert {name: value for name, value in pair.items() if name not in own} == {
        name: value for name, value in single.items() if name not in own
    }
    assert pair["StateDirectory"] == ["toolbus toolbus/%i"]


def test_the_buses_of_a_pair_have_addresses_and_directories_of_their_own_and_the_same_keys(
    tmp_path: Path,
) -> None:
    seen = []
    for number in "01":
        (command,) = unit(PAIR)["ExecStart"]
        _, *words = shlex.split(command.replace("%i", number))
        check_command(words)
        grpc = [words[at + 1] for at, word in enumerate(words) if word == "--grpc"]
        options = {"grpc": tuple(grpc), "https": words[words.index("--https") + 1]}
        (variables,) = unit(PAIR)["Environment"]
        environment = dict(each.split("=", 1) for each in variables.replace("%i", number).split())
        config = settle(options, environment, own_copy(SETTINGS, tmp_path)).config
        seen.append((config.grpc, config.https, config.data_dir, config.bus_id))
        assert config.keys_dir == Path("/var/lib/toolbus/keys")
        assert float(unit(PAIR)["TimeoutStopSec"][0]) > config.drain_seconds
    assert not set(seen[0]) & set(seen[1])
