"""The dashboard and the alerts of deploy/ are what Grafana and Prometheus read, and ask for metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.deploy.files import DEPLOY, ROOT
from tests.docs.pages import listed

PROMETHEUS = DEPLOY / "prometheus"
RULES = PROMETHEUS / "toolbus.rules.yml"
DASHBOARD = json.loads((DEPLOY / "grafana/toolbus.json").read_text("utf-8"))
PAGE = (ROOT / "docs/start/metrics.md").read_text("utf-8")
ALERTS = [rule for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OF_PROMETHEUS = {"instance", "job"}  # labels that it adds
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$instance": "a", "$source": "a"}


def documented() -> dict[str, set[str]]:
    """Returns the labels of each series that the page names; a test holds the page to the code."""
    series: dict[str, set[str]] = {"up": set()}
    for metric, details, _ in listed(PAGE, "## The metrics"):
        name = metric.strip("`")
        kind, _, labels = details.partition("; ")
        found = set(re.findall(r"`(\w+)`", labels))
        parts = ("_count", "_sum") if kind in ("histogram", "summary") else ("",)
        series |= {name + part: found for part in parts}
        if kind == "histogram":
            series[f"{name}_bucket"] = found | {"le"}
    return series


SERIES = documented()


def expressions() -> Iterator[tuple[str, str]]:
    """Yields every expression with where it stands."""
    for alert in ALERTS:
        yield f"alert {alert['alert']}", alert["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            yield f"panel {panel['title']} {target['refId']}", text


def nodes(expression: str) -> list[Any]:
    """Returns all parts of an expression of PromQL."""
    found: list[Any] = []
    promql.walk(promql.parse(expression), lambda node: found.append(node))
    return found


@pytest.mark.parametrize(("where", "expression"), list(expressions()), ids=lambda value: value[:40])
def test_every_expression_asks_for_series_and_labels_that_the_bus_has(where: str, expression: str) -> None:
    parts = nodes(expression)
    asked = [each for each in parts if isinstance(each, promql.VectorSelector)]
    assert asked, where
    for selector in asked:
        name = selector.name or ""
        assert name in SERIES, f"{where}: {name!r} is not in docs/start/metrics.md"
        known = SERIES[name] | OF_PROMETHEUS
        assert {matcher.name for matcher in selector.matchers.matchers} <= known, where
    all_known = set().union(*(SERIES[selector.name or ""] for selector in asked)) | OF_PROMETHEUS
    for part in parts:
        if isinstance(part, promql.AggregateExpr) and part.modifier is not None:
            assert set(part.modifier.labels) <= all_known, where


def test_counters_are_read_as_rates_only() -> None:
    for where, expression in expressions():
        plain = re.sub(r"(rate|increase)\((?:[^()]|\([^()]*\))*\)", "", expression)
        assert not re.search(r"_total\b|_bucket\b|_sum\b", plain), where


def test_every_alert_is_complete_and_explained() -> None:
    for alert in ALERTS:
        assert set(alert) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", alert.get("for", "1m"))
        assert alert["labels"] in ({"severity": each} for each in ("info", "warning", "critical"))
        assert set(alert["annotations"]) == {"summary"}
        used = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
        for selector in nodes(alert["expr"]):
            if isinstance(selector, promql.AggregateExpr) and selector.modifier is not None:
                assert used <= {"instance", *selector.modifier.labels}, alert["alert"]
    names = [alert["alert"] for alert in ALERTS]
    assert len(set(names)) == len(names)
    assert re.findall(r"^- `(Toolbus\w+)`:", PAGE, re.MULTILINE) == [
        *("ToolbusDown", "ToolbusSourceDown", "ToolbusToolFails", "ToolbusToolSlow", "ToolbusOverloaded"),
        *("ToolbusCallsStuck", "ToolbusLoopLags", "ToolbusKeyExpires", "ToolbusAuditLost", "ToolbusFileDescriptors"),
    ]
    assert set(re.findall(r"^- `(Toolbus\w+)`:", PAGE, re.MULTILINE)) == set(names)


def test_the_scrape_configuration_keeps_our_labels_and_loads_the_rules() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text("utf-8"))
    assert set(config) == {"global", "rule_files", "scrape_configs"}
    assert [(PROMETHEUS / name).name for name in config["rule_files"]] == [RULES.name]
    assert all(
        job["honor_labels"] is True and job["job_name"].startswith("toolbus") for job in config["scrape_configs"]
    )
    text = (PROMETHEUS / "prometheus.yml").read_text("utf-8")
    remote = yaml.safe_load("\n".join(re.findall(r"^  # (- job_name.*|  .*)$", text, re.MULTILINE)))
    assert remote[0]["scheme"] == "https"
    assert remote[0]["honor_labels"] is True


def test_only_failures_of_a_tool_itself_count_as_its_failures() -> None:
    """What no tool has is counted as `unknown`, where each call fails."""
    (alert,) = (each for each in ALERTS if each["alert"] == "ToolbusToolFails")
    (callers,) = re.findall(r'outcome!~"([^"]+)"', alert["expr"])
    assert set(callers.split("|")) == {"OK", "INPUT_REQUIRED", "CANCELLED", "INVALID_ARGUMENTS", "NOT_FOUND"}


@pytest.mark.parametrize(
    "words", [("check", "rules", str(RULES)), ("check", "config", str(PROMETHEUS / "prometheus.yml"))]
)
def test_promtool_accepts_the_files_where_it_is_installed(words: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run([promtool, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    assert _lost(DASHBOARD, known) == []


def _lost(given: Any, known: Any, path: str = "") -> list[str]:
    """Returns the places of what a reader of the dashboard did not take over."""
    if isinstance(given, dict) and isinstance(known, dict):
        inner = ((given[key], known.get(key), f"{path}/{key}") for key in given)
    elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        inner = ((one, other, f"{path}/{index}") for index, (one, other) in enumerate(zip(given, known, strict=True)))
    else:
        return [] if given == known else [path]
    return [lost for one, other, place in inner for lost in _lost(one, other, place)]


def test_panels_have_places_and_ids_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["title"] and panel["targets"] for panel in PANELS)
