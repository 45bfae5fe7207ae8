"""The manifests: the published schemas, the rules of restricted pods, and a bus that is started as they say."""

from __future__ import annotations

import asyncio
import os
import ssl
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest

from tests.deploy.files import argument, check_command, manifest, manifests
from tests.support.other_user import CAN_BE_NOBODY, NOBODY, run_program
from tests.support.processes import toolbus
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.bus.keys.doorman import split_secure
from toolbus.bus.serve_settings import settle
from toolbus.sdk.credential import Credential

_VERSIONS = ("1.30", kubernetes_validate.latest_version())
_FILES = ("bus.yaml", "plugin.yaml")
_BUS = manifest("bus.yaml", "StatefulSet")["spec"]["template"]["spec"]
_PLUGIN = manifest("plugin.yaml", "Deployment")["spec"]["template"]["spec"]
_SETTINGS = manifest("bus.yaml", "ConfigMap")["data"]["toolbus.toml"]


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["initContainers"], *pod["containers"]]


@pytest.mark.parametrize("version", _VERSIONS)
@pytest.mark.parametrize("file", _FILES)
def test_every_object_fits_the_published_schema(file: str, version: str) -> None:
    for each in manifests(file):
        kubernetes_validate.validate(each, version, strict=True)


def test_the_schema_would_refuse_a_field_that_does_not_exist() -> None:
    wrong = manifest("bus.yaml", "StatefulSet")
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, _VERSIONS[-1], strict=True)


@pytest.mark.parametrize("pod", [_BUS, _PLUGIN])
def test_the_pods_are_restricted(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"]
    for container in _containers(pod):
        context = container["securityContext"]
        assert not context["allowPrivilegeEscalation"]
        assert context["readOnlyRootFilesystem"]
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_one_bus_uses_the_volume_and_its_keys_stay_its_own() -> None:
    assert manifest("bus.yaml", "StatefulSet")["spec"]["replicas"] == 1
    assert _BUS["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    (uid,) = {pod["securityContext"]["runAsUser"] for pod in (_BUS, _PLUGIN)}
    assert f"{uid}:{uid}" == "10001:10001"  # of the image
    for container in _containers(_BUS):
        (data_dir,) = (each["value"] for each in container["env"] if each["name"] == "TOOLBUS_DATA_DIR")
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert data_dir.startswith(f"{mounts['data']}/")  # the volume's own root belongs to root


def test_every_volume_that_is_mounted_is_declared() -> None:
    claims = manifest("bus.yaml", "StatefulSet")["spec"]["volumeClaimTemplates"]
    for pod, more in ((_BUS, [claim["metadata"]["name"] for claim in claims]), (_PLUGIN, [])):
        declared = {*more, *(volume["name"] for volume in pod["volumes"])}
        assert {mount["name"] for container in _containers(pod) for mount in container["volumeMounts"]} == declared


def test_the_ports_are_those_that_the_bus_listens_on(tmp_path: Path) -> None:
    config = _config(tmp_path)
    listening = {int(address.rpartition(":")[2]) for address in (config.grpc[1], str(config.https))}
    (bus,) = _BUS["containers"]
    ports = {port["name"]: port["containerPort"] for port in bus["ports"]}
    assert set(ports.values()) == listening
    service = manifest("bus.yaml", "Service")["spec"]
    assert {port["port"]: ports[port["targetPort"]] for port in service["ports"]} == {each: each for each in listening}
    (rule,) = manifest("bus.yaml", "NetworkPolicy")["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} == set(ports)
    labels = manifest("plugin.yaml", "Deployment")["spec"]["template"]["metadata"]["labels"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_a_drain_ends_before_the_pod_is_killed(tmp_path: Path) -> None:
    assert _BUS["terminationGracePeriodSeconds"] > _config(tmp_path).drain_seconds


def test_the_commands_are_those_of_toolbus() -> None:
    for container in _containers(_BUS):
        check_command(container["args"])
    credential = {each["name"]: each["value"] for each in _PLUGIN["containers"][0]["env"]}["TOOLBUS_CREDENTIAL"]
    assert _PLUGIN["initContainers"][0]["command"][-1] == credential
    assert "--mode=0600" in _PLUGIN["initContainers"][0]["command"]


async def test_keys_can_be_made_in_a_volume_whose_root_the_kubelet_gave_to_the_group_of_the_pod() -> None:
    """Needs root to be another user; elsewhere the volume is the test's own."""
    (data_dir,) = {each["value"] for each in _BUS["containers"][0]["env"] if each["name"] == "TOOLBUS_DATA_DIR"}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        volume = Path(folder) / "volume"
        volume.mkdir()
        if CAN_BE_NOBODY:
            os.chown(volume, 0, NOBODY)
            volume.chmod(0o2775)
        as_whom = ("--as-nobody",) if CAN_BE_NOBODY else ()
        data = str(volume / Path(data_dir).relative_to("/var/lib/toolbus"))
        printed = await run_program(Path(__file__).with_name("fresh_volume.py"), *as_whom, data)
    assert printed.splitlines() == [f"0 {NOBODY if CAN_BE_NOBODY else os.geteuid()}"] * 2


# -- a bus that is started as the manifests say ----------------------------------------------------------------------


def _config(folder: Path) -> Any:
    file = folder / "toolbus.toml"
    file.write_text(_SETTINGS, "utf-8")
    return settle({}, {"TOOLBUS_DATA_DIR": str(folder / "data")}, file).config


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    """Starts a bus with the settings of the manifest, on free ports, after the container that makes its keys."""
    for _ in range(2):  # also when the pod starts again
        (keys,) = _BUS["initContainers"]
        assert toolbus(*keys["args"], TOOLBUS_DATA_DIR=str(tmp_path / "data")).returncode == 0
    config = _config(tmp_path)
    free = tuple(f"{':'.join((*filter(None, split_secure(each)[:1]), '127.0.0.1'))}:0" for each in config.grpc)
    async with Bus(replace(config, grpc=free, http="off", https="127.0.0.1:0")) as running:
        yield running


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
async def test_a_probe_of_the_kubelet_is_answered_without_a_key(bus: Bus, probe: str) -> None:
    (container,) = _BUS["containers"]
    request = container[probe]["httpGet"]
    assert request["scheme"] == "HTTPS"
    unchecked = ssl.create_default_context()  # the kubelet does not check the certificate, and names the pod's IP
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    headers = {"Host": "10.1.2.3:48912", "User-Agent": "kube-probe/1.33"}
    async with httpx.AsyncClient(verify=unchecked, trust_env=False, headers=headers, timeout=WAIT_SECONDS) as client:
        assert (await client.get(f"https://{bus.https_address}{request['path']}")).status_code == 200
        bus.core.sessions.presence.drain(30)
        answer = await client.get(f"https://{bus.https_address}{request['path']}")
        assert answer.status_code == (503 if request["path"] == "/readyz" else 200)


async def test_the_health_check_of_the_image_needs_no_key(bus: Bus) -> None:
    _, *words = argument("HEALTHCHECK")
    address = bus.grpc_addresses[0]
    assert (await asyncio.to_thread(toolbus, *words, "--bus", address)).returncode == 0


async def test_the_address_of_new_credentials_is_the_service(bus: Bus, tmp_path: Path) -> None:
    file = tmp_path / "weather.toolbus"
    words = ["keys", "add", "weather", "--plugin", "weather*", "-o", str(file)]
    assert toolbus(*words, TOOLBUS_DATA_DIR=str(tmp_path / "data")).returncode == 0
    service = manifest("bus.yaml", "Service")
    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc.cluster.local"
    port = next(each["port"] for each in service["spec"]["ports"] if each["name"] == "mtls")
    assert Credential.read(file).address == f"mtls:{name}:{port}"
