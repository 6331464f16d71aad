"""The files of the local stack agree with one another and with the worker; no engine is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay.metrics import Metrics
from forebay.settings import load

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SUFFIXES = re.compile(r"_(bucket|sum|count)$")
METRIC = re.compile(r"\b(?:forebay|process)_[a-z_]+\b")
VARIABLE = re.compile(r"\$\{(STACK_[A-Z_]+)(?::?-([^}]*))?\}")


def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def _services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = _compose()["services"]
    return services


def _dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/forebay.json").read_text())
    return board


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in _dashboard()["panels"] if panel["type"] != "row"]


def _panel_queries() -> Iterator[str]:
    for panel in _panels():
        yield from (target["expr"] for target in panel["targets"])


def _alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _seconds(duration: str) -> int:
    assert re.fullmatch(r"\d+s", duration), f"write {duration!r} in seconds"
    return int(duration[:-1])


def _declared_metrics() -> set[str]:
    families = list(Metrics().registry.collect())
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


def test_every_published_port_is_bound_to_loopback() -> None:
    ports = [(name, port) for name, service in _services().items() for port in service.get("ports", ())]
    assert ports
    assert [port for port in ports if not port[1].startswith("127.0.0.1:")] == []


@pytest.mark.parametrize("name", ["worker", "worker-gpu"])
def test_a_worker_scales_because_it_has_neither_a_name_nor_a_port_of_its_own(name: str) -> None:
    service = _services()[name]
    assert "container_name" not in service
    assert service["ports"] == ["127.0.0.1::8080"]


def test_the_compose_file_has_no_key_that_one_of_the_two_versions_refuses() -> None:
    """docker-compose 1.29 refuses `name` and the short form of its conditions; version 2 warns of `version`."""
    assert _compose().keys() == {"x-worker", "services", "volumes"}
    conditions = [set(needed) for service in _services().values() for needed in service.get("depends_on", {}).values()]
    assert conditions == [{"condition"}] * len(conditions)


@pytest.mark.parametrize("name", ["worker", "worker-gpu"])
def test_a_worker_has_time_to_drain_and_writes_nowhere(name: str) -> None:
    service = _services()[name]
    settings = load(DEPLOY / "worker.yaml")
    assert _seconds(service["stop_grace_period"]) * 1000 > settings.delivery.drain_timeout_ms
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["init"] is True
    assert all(str(volume).endswith(":ro") for volume in service["volumes"])


def test_only_the_gpu_profile_asks_for_a_device() -> None:
    reserving = {name: service.get("profiles") for name, service in _services().items() if "deploy" in service}
    assert reserving == {"worker-gpu": ["gpu"]}


def test_the_images_settings_are_valid_and_name_the_topics_that_the_stack_creates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FOREBAY_KAFKA__BOOTSTRAP_SERVERS", raising=False)
    kafka = load(DEPLOY / "worker.yaml").kafka
    created = re.findall(r"^create (\S+)", (DEPLOY / "kafka/create-topics.sh").read_text(), re.MULTILINE)
    assert {*kafka.input_topics, kafka.output_topic, kafka.dead_letter_topic} == set(created)
    advertised = _services()["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert f"INTERNAL://{kafka.bootstrap_servers}" in advertised


def test_a_misspelt_topic_is_not_created_in_silence() -> None:
    assert _services()["kafka"]["environment"]["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"


def test_the_example_environment_lists_every_variable_with_the_default_that_the_compose_file_has() -> None:
    used = dict(VARIABLE.findall((ROOT / "docker-compose.yml").read_text()))
    lines = (ROOT / ".env.example").read_text().splitlines()
    assert dict(line.split("=", 1) for line in lines if line and not line.startswith("#")) == used


def test_prometheus_looks_for_the_workers_under_the_name_that_the_network_gives_them() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    found = next(job for job in jobs if job["job_name"] == "forebay")["dns_sd_configs"][0]
    for name in ("worker", "worker-gpu"):
        service = _services()[name]
        assert found["names"] == service["networks"]["default"]["aliases"]
        assert str(found["port"]) == service["environment"]["FOREBAY_OPS__PORT"]


def test_the_final_stage_of_the_image_runs_as_a_numbered_user_without_a_shell_in_between() -> None:
    final = (DEPLOY / "Dockerfile").read_text().rsplit("\nFROM ", 1)[1]
    user = re.search(r"^USER (\S+)$", final, re.MULTILINE)
    assert user is not None
    assert all(part.isdecimal() and int(part) >= 1000 for part in user[1].split(":"))
    assert re.search(r'^ENTRYPOINT \["forebay"\]$', final, re.MULTILINE)
    assert not re.search(r"^(RUN|ARG)\b", final, re.MULTILINE)


def _pip_lists(torch: str) -> tuple[list[str], list[str]]:
    script = [sys.executable, str(DEPLOY / "requirements.py")]
    runs = [
        subprocess.run([*script, name, torch], cwd=ROOT, capture_output=True, check=True) for name in ("wants", "pins")
    ]
    wants, pins = (run.stdout.decode().splitlines() for run in runs)
    return wants, pins


def test_the_image_gets_the_pinned_versions_of_what_the_worker_depends_on() -> None:
    wants, pins = _pip_lists("torch")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(wants) > {*project["dependencies"], *project["optional-dependencies"]["torch"]}
    names = {re.split(r"[=<>\[ ;]", line)[0].lower() for line in wants}
    assert names - {pin.split("==")[0] for pin in pins} == set()
    assert not [pin for pin in pins if "--hash" in pin or "\\" in pin]


def test_a_torch_of_ones_own_choice_lifts_the_pins_of_torch_and_cuda_only() -> None:
    wants, pins = _pip_lists("torch==2.11.0+cpu")
    assert "torch==2.11.0+cpu" in wants
    assert not [pin for pin in pins if pin.startswith(("torch", "nvidia-", "cuda-", "triton"))]
    assert [pin for pin in pins if pin.startswith("numpy==")]


def test_every_metric_of_the_dashboard_and_the_alerts_is_one_that_the_worker_declares() -> None:
    queries = [*_panel_queries(), *(rule["expr"] for rule in _alert_rules())]
    named = {SUFFIXES.sub("", name) for query in queries for name in METRIC.findall(query)}
    assert len(named) > 15
    assert named - _declared_metrics() == set()


def test_every_panel_has_a_description_and_asks_the_provisioned_datasource() -> None:
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    wanted = {source["uid"] for source in sources}
    assert {panel["datasource"]["uid"] for panel in _panels()} == wanted
    assert {target["datasource"]["uid"] for panel in _panels() for target in panel["targets"]} == wanted
    assert [panel["title"] for panel in _panels() if not panel["description"]] == []


def test_the_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    everything = _dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    cells = [cell for panel in everything for cell in _cells(panel["gridPos"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def _cells(position: Mapping[str, int]) -> list[tuple[int, int]]:
    columns = range(position["x"], position["x"] + position["w"])
    return [(x, y) for x in columns for y in range(position["y"], position["y"] + position["h"])]


def test_every_alert_says_what_is_wrong_and_has_a_case_in_its_test_file() -> None:
    cases = yaml.safe_load((DEPLOY / "prometheus/alerts.test.yml").read_text())["tests"]
    raised = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert raised == {rule["alert"] for rule in _alert_rules()}
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in _alert_rules())
