"""Settings: who wins, what is refused, and that each refusal is one sentence with its mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay.errors import ConfigError
from forebay.settings import Settings, known_keys, load

FACTORY = {"model.factory": "a:B"}


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)


def in_yaml(folder: Path, content: Any) -> Path:
    path = folder / "worker.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def refused(path: Path | None = None, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load(path, {key.replace("__", "."): value for key, value in overrides.items()})
    message = str(raised.value)
    assert len(message.split("\n")) == 1 or message.split("\n")[0].endswith("settings are wrong:")
    assert "pydantic" not in message
    return message


# ---------------------------------------------------------------------- precedence


def test_the_command_line_wins_over_environment_secrets_yaml_and_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(**overrides: str) -> str:
        return load(path, overrides).kafka.group_id

    path: Path | None = None
    assert group() == "forebay"
    path = in_yaml(tmp_path, {"kafka": {"group_id": "from-yaml"}})
    assert group() == "from-yaml"
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "kafka__group_id").write_text("from-secret\n")
    monkeypatch.setenv("FOREBAY_SECRETS_DIR", str(secrets))
    assert group() == "from-secret"
    monkeypatch.setenv("FOREBAY_KAFKA__GROUP_ID", "from-environment")
    assert group() == "from-environment"
    assert group(**{"kafka.group_id": "from-command-line"}) == "from-command-line"


def test_layers_are_merged_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = in_yaml(tmp_path, {"kafka": {"group_id": "y", "output_topic": "y.results"}, "batch": {"max_batch_size": 7}})
    monkeypatch.setenv("FOREBAY_KAFKA__GROUP_ID", "e")
    monkeypatch.setenv("FOREBAY_BATCH__MAX_WAIT_MS", "2.5")
    found = load(path, {"kafka.output_topic": "c.results"})
    assert (found.kafka.group_id, found.kafka.output_topic) == ("e", "c.results")
    assert (found.batch.max_batch_size, found.batch.max_wait_ms) == (7, 2.5)


def test_a_secret_comes_from_the_file_that_a_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("geheim\n")
    monkeypatch.setenv("FOREBAY_KAFKA__SECURITY__PASSWORD_FILE", str(tmp_path / "password"))
    found = load(None, {"kafka.security.username": "me", "kafka.security.mechanism": "PLAIN"})
    assert found.kafka.security.password is not None
    assert found.kafka.security.password.get_secret_value() == "geheim"
    assert "geheim" not in repr(found)


def test_a_setting_whose_own_name_ends_in_file_is_no_secret_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KAFKA__SECURITY__TLS__CA_FILE", "/etc/ca.pem")
    assert load().kafka.security.tls.ca_file == Path("/etc/ca.pem")


def test_an_empty_yaml_section_changes_nothing(tmp_path: Path) -> None:
    for content in ("", "kafka:\n", "kafka:\nbatch:\n  max_batch_size: 3\n"):
        assert load(in_yaml(tmp_path, content)).kafka.group_id == "forebay"


def test_an_empty_section_does_not_undo_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KAFKA__GROUP_ID", "kept")
    assert load(in_yaml(tmp_path, "kafka:\n")).kafka.group_id == "kept"


# ---------------------------------------------------------------------- lists, maps, numbers


@pytest.mark.parametrize("text", ["a,b", "a, b", "[a, b]", '["a","b"]'])
def test_a_list_in_a_variable_needs_no_json(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KAFKA__INPUT_TOPICS", text)
    assert load().kafka.input_topics == ("a", "b")
    monkeypatch.delenv("FOREBAY_KAFKA__INPUT_TOPICS")
    assert load(None, {"kafka.input_topics": text}).kafka.input_topics == ("a", "b")


def test_a_map_in_a_variable_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KAFKA__CLIENT", '{"socket.keepalive.enable": true}')
    assert load().kafka.client == {"socket.keepalive.enable": True}


def test_names_of_variables_may_be_written_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_kafka__group_id", "lower")
    assert load().kafka.group_id == "lower"


def test_settings_cannot_be_changed_afterwards() -> None:
    found = load()
    with pytest.raises(ValueError, match="frozen"):
        found.kafka.group_id = "other"  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        found.batch = None  # type: ignore[misc, assignment]


def test_the_queue_holds_eight_batches_unless_it_is_said() -> None:
    assert load(None, {"batch.max_batch_size": 5}).batch.queue_size == 40
    assert load(None, {"batch.max_queue_size": 3}).batch.queue_size == 3


# ---------------------------------------------------------------------- models


def test_one_model_or_a_list_of_models_is_served() -> None:
    assert [model.name for model in load(None, FACTORY).served] == ["model"]
    models = [{"name": "a", "factory": "m:A"}, {"name": "b", "factory": "m:B"}]
    assert [model.name for model in load(None, {"models": models}).served] == ["a", "b"]
    assert load().served == ()


def test_the_same_model_twice_is_refused() -> None:
    models = [{"name": "a", "factory": "m:A"}, {"name": "a", "factory": "m:B", "version": "2"}]
    assert "two entries have the name 'a'" in refused(models=models)


def test_model_and_models_together_are_refused() -> None:
    assert "not both" in refused(model__factory="a:B", models=[{"factory": "a:B"}])


@pytest.mark.parametrize(
    ("model", "mentions"),
    [({"name": "m"}, "set factory"), ({"factory": "no_colon"}, "package.module:Class"),
     ({"factory": "a:B", "path": "m.pt"}, "remove one")],
)  # fmt: skip
def test_a_model_needs_one_source(model: dict[str, str], mentions: str) -> None:
    assert mentions in refused(**{f"model__{key}": value for key, value in model.items()})


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("kafka.group", "kafka.group_id"), ("kafka.bootstrap", "kafka.bootstrap_servers"),
     ("batch.batch_size", "max_batch_size"),
     ("kafk.group_id", "kafka"), ("inference.devices", "inference.device"), ("kafka.security.user", "username")],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    key: str, nearest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nearest in refused(**{key.replace(".", "__"): "x"})
    section: Any = "x"
    for part in reversed(key.split(".")):
        section = {part: section}
    message = refused(in_yaml(tmp_path, section))
    assert "unknown key" in message
    assert nearest in message
    monkeypatch.setenv("FOREBAY_" + key.upper().replace(".", "__"), "x")
    assert nearest in refused().lower()


@pytest.mark.parametrize(
    ("key", "told"),
    [("observe", "the sections are kafka, delivery, batch"), ("output_topic", "did you mean kafka.output_topic?"),
     ("batch.x", "batch has max_batch_size, max_wait_ms"), ("inference.group_id", "did you mean kafka.group_id?")],
)  # fmt: skip
def test_an_unknown_key_that_resembles_none_is_told_where_it_belongs_or_what_there_is(
    key: str, told: str, tmp_path: Path
) -> None:
    section, _, name = key.rpartition(".")
    assert told in refused(in_yaml(tmp_path, {section: {name: 1}} if section else {name: 1}))


def test_an_unknown_variable_is_refused_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_GROUP_ID", "x")
    message = refused()
    assert "FOREBAY_GROUP_ID" in message
    assert "FOREBAY_KAFKA__GROUP_ID" in message


def test_variables_that_are_no_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOREBAY_FAILPOINTS", "FOREBAY_CONFIG"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("KAFKA__GROUP_ID", "x")
    assert load().kafka.group_id == "forebay"


@pytest.mark.parametrize(
    ("key", "value"),
    [("batch.max_batch_size", 0), ("batch.max_batch_size", "many"), ("batch.max_wait_ms", -1),
     ("batch.dispatch", "lazy"),
     ("kafka.auto_offset_reset", "never"), ("kafka.group_protocol", "new"), ("delivery.guarantee", "at_most_once"),
     ("delivery.max_attempts", 0), ("inference.replicas", 0), ("inference.executor", "gpu"), ("ops.port", 70_000),
     ("inference.precision", "int2"), ("inference.device", "tpu"), ("inference.device", "cuda:x"),
     ("limits.max_request_bytes", 1), ("ops.log_level", "loud")],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_with_its_key(key: str, value: Any) -> None:
    assert key in refused(**{key.replace(".", "__"): value})


def test_every_mistake_is_named_at_once() -> None:
    message = refused(batch__max_batch_size=0, kafka__nope=1, ops__port=-1)
    for key in ("batch.max_batch_size", "kafka.nope", "ops.port"):
        assert key in message


@pytest.mark.parametrize("name", ["output_topic", "dead_letter_topic"])
def test_a_topic_that_would_feed_the_worker_itself_is_refused(name: str) -> None:
    assert name in refused(kafka__input_topics="a,b", **{f"kafka__{name}": "b"})


@pytest.mark.parametrize("topics", ["", "a,,b", []])
def test_input_topics_without_a_name_are_refused(topics: Any) -> None:
    assert "input_topics" in refused(kafka__input_topics=topics)


def test_lingering_without_a_wait_is_refused() -> None:
    assert "max_wait_ms" in refused(batch__dispatch="linger", batch__max_wait_ms=0)


@pytest.mark.parametrize("pattern", ["*", "replies.(", "[a"])
def test_a_reply_pattern_that_is_none_is_refused_before_the_start(pattern: str) -> None:
    """It got as far as re.compile, in the middle of the start, and ended it with a traceback."""
    assert "reply_topics" in refused(kafka__reply_topics=[pattern])


@pytest.mark.parametrize(
    ("values", "mentions"),
    [({"protocol": "sasl_ssl"}, "mechanism"), ({"mechanism": "PLAIN"}, "username and password"),
     ({"mechanism": "SCRAM-SHA-512", "username": "me"}, "username and password"), ({"protocol": "tls"}, "protocol")],
)  # fmt: skip
def test_security_that_is_not_complete_is_refused(values: dict[str, str], mentions: str) -> None:
    assert mentions in refused(**{f"kafka__security__{key}": value for key, value in values.items()})


def test_a_refusal_never_shows_a_secret() -> None:
    message = refused(kafka__security__password="hunter2", kafka__security__mechanism="PLAIN", kafka__nope="x")
    assert "hunter2" not in message


@pytest.mark.parametrize("content", ["a: [", "- a\n- b\n", "just text", "5", "\t- x: ["])
def test_a_file_that_is_no_mapping_is_refused(content: str, tmp_path: Path) -> None:
    assert "worker.yaml" in refused(in_yaml(tmp_path, content))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "nowhere.yaml" in refused(tmp_path / "nowhere.yaml")
    assert str(tmp_path.name) in refused(tmp_path)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "worker.yaml"
    path.write_bytes(b"\xff\xfe\x00k")
    assert "worker.yaml" in refused(path)


def test_a_section_that_is_no_section_is_refused(tmp_path: Path) -> None:
    assert "kafka" in refused(in_yaml(tmp_path, {"kafka": 5}))
    assert "kafka" in refused(in_yaml(tmp_path, {"kafka": ["a"]}))


def test_secret_files_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_SECRETS_DIR", str(tmp_path / "nowhere"))
    assert "FOREBAY_SECRETS_DIR" in refused()
    monkeypatch.delenv("FOREBAY_SECRETS_DIR")
    monkeypatch.setenv("FOREBAY_KAFKA__SECURITY__PASSWORD_FILE", str(tmp_path / "nowhere"))
    assert "FOREBAY_KAFKA__SECURITY__PASSWORD_FILE" in refused()


def test_a_variable_that_is_no_json_where_json_is_wanted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KAFKA__CLIENT", "{not json")
    assert "client" in refused().lower()


def test_every_key_of_the_contract_exists() -> None:
    keys = set(known_keys())
    for key in (
        "kafka.bootstrap_servers", "kafka.input_topics", "kafka.output_topic", "kafka.dead_letter_topic",
        "kafka.group_id", "kafka.reply_topics", "kafka.auto_offset_reset", "kafka.group_protocol", "kafka.client",
        "delivery.guarantee", "delivery.ordering", "delivery.max_attempts", "delivery.drain_timeout_ms",
        "batch.max_batch_size", "batch.max_wait_ms", "batch.dispatch", "batch.cost", "batch.max_batch_cost",
        "batch.max_batch_bytes", "model.name", "model.version", "model.factory", "model.path", "model.options",
        "inference.device", "inference.replicas", "inference.executor", "inference.precision", "inference.compile",
        "inference.execution_timeout_ms", "ops.host", "ops.port", "ops.log_format",
    ):  # fmt: skip
        assert key in keys


def test_the_defaults_are_those_of_the_contract() -> None:
    found = Settings()
    assert (found.kafka.bootstrap_servers, found.kafka.group_id) == ("localhost:9092", "forebay")
    assert (found.batch.max_batch_size, found.batch.max_wait_ms, found.batch.dispatch) == (32, 5, "eager")
    assert (found.delivery.guarantee, found.delivery.max_attempts) == ("at_least_once", 3)
    assert (found.delivery.drain_timeout_ms, found.inference.execution_timeout_ms) == (25_000, 30_000)
    assert (found.inference.executor, found.ops.port) == ("process", 8080)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"delivery.guarantee": "exactly_once"}, "share_group has no transactions"),
        ({"delivery.ordering": "key"}, "share_group keeps no order"),
        ({"delivery.deduplicate_ms": 1000}, "share_group delivers two records of one id to different workers"),
        ({"kafka.group_protocol": "consumer"}, "kafka.group_protocol consumer does not go with delivery.share_group"),
        ({"kafka.auto_offset_reset": "error"}, "kafka.auto_offset_reset error does not go with delivery.share_group"),
        (
            {"batch.dispatch": "linger", "batch.linger_for": "backlog"},
            "batch.linger_for backlog does not go with delivery.share_group",
        ),
    ],
)
def test_queue_mode_refuses_what_does_not_go_with_it(change: dict[str, object], sentence: str) -> None:
    load(None, {"delivery.share_group": True})
    load(None, change)
    with pytest.raises(ConfigError, match=sentence):
        load(None, {"delivery.share_group": True, **change})
