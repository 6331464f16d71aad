"""`forebay config`: the settings as they are, where each comes from, no secret shown."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from forebay.cli.app import app
from forebay.cli.config import schema_document
from forebay.cli.origins import MASK, masked
from forebay.settings import known_keys, load

SECRET = "hush-hush"
YAML = f"""
kafka:
  bootstrap_servers: kafka:9092
  security: {{protocol: sasl_ssl, mechanism: PLAIN, username: u}}
  client: {{ssl.key.pem: {SECRET}, statistics.interval.ms: 5000}}
model: {{name: m, factory: "a.b:C", options: {{api_token: {SECRET}, nested: {{password: {SECRET}}}, layers: 3}}}}
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FOREBAY_KAFKA__BOOTSTRAP_SERVERS", "FOREBAY_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "worker.yaml").write_text(YAML)
    (tmp_path / "password").write_text(SECRET)
    monkeypatch.setenv("FOREBAY_KAFKA__SECURITY__PASSWORD_FILE", str(tmp_path / "password"))
    monkeypatch.setenv("FOREBAY_BATCH__MAX_BATCH_SIZE", "64")
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["config", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_show_prints_yaml_that_is_a_worker_yaml(tmp_path: Path) -> None:
    shown = yaml.safe_load(run("show", "-c", "worker.yaml"))
    assert shown["kafka"]["bootstrap_servers"] == "kafka:9092"
    assert shown["batch"]["max_batch_size"] == 64
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(shown))
    assert load(tmp_path / "again.yaml").kafka.security.username == "u"


@pytest.mark.parametrize("options", [[], ["--json"], ["--explain"], ["--explain", "--json"]])
def test_no_form_of_it_shows_a_secret(options: list[str]) -> None:
    output = run("show", "-c", "worker.yaml", *options)
    assert SECRET not in output.replace("\n", "")
    assert "***" in output


def test_explain_says_where_every_setting_comes_from() -> None:
    told = json.loads(run("show", "-c", "worker.yaml", "-s", "batch.max_wait_ms=7", "--explain", "--json"))
    origins = {key: one["origin"] for key, one in told.items()}
    assert origins["kafka.group_id"] == "default"
    assert origins["kafka.security.username"] == "worker.yaml"
    assert origins["kafka.security.password"] == "secret file"
    assert origins["batch.max_batch_size"] == "FOREBAY_BATCH__MAX_BATCH_SIZE"
    assert origins["batch.max_wait_ms"] == "command line"
    assert told["batch.max_wait_ms"]["value"] == 7
    assert set(told) >= {key for key in known_keys() if not key.startswith("models.")}


def test_masking_reaches_into_options_and_client_properties() -> None:
    settings = load(Path("worker.yaml"))
    assert masked("model.options", settings.model.options) == {
        "api_token": MASK,
        "nested": {"password": MASK},
        "layers": 3,
    }
    assert masked("kafka.client", settings.kafka.client) == {"ssl.key.pem": MASK, "statistics.interval.ms": 5000}


def test_the_schema_accepts_the_contracts_example_and_refuses_a_misspelt_key() -> None:
    schema = json.loads(run("schema"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(YAML), schema)
    with pytest.raises(jsonschema.ValidationError, match="max_batchsize"):
        jsonschema.validate({"batch": {"max_batchsize": 3}}, schema)
    assert schema == json.loads(json.dumps(schema_document()))
