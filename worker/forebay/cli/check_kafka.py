"""The questions of `forebay check` about Kafka: reachable, logged in, topics, sizes, permissions, the group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from forebay.cli.findings import Finding, failed, ok, skipped, warning
from forebay.errors import ForebayError, KafkaUnavailableError
from forebay.wording import counted

if TYPE_CHECKING:
    from forebay.settings import Kafka, Settings
    from forebay.stream.cluster import Cluster, TopicState

LETTER_OVERHEAD_BYTES = 4096
"""What a dead letter's headers add to its request."""


def check_kafka(settings: Settings, topics_command: str = "forebay topics") -> Iterator[Finding]:
    """Ask everything about Kafka, from the address upwards. `topics_command` makes the missing topics."""
    from forebay.cli.progress import waiting_for_kafka
    from forebay.stream.client_config import consumer_config, producer_config
    from forebay.stream.cluster import Cluster
    from forebay.stream.reaching import RefusedError

    kafka = settings.kafka
    try:
        consumer_config(kafka, settings.batch)
        producer_config(kafka, settings.delivery)
    except ForebayError as error:
        yield failed("Kafka properties", str(error), "change kafka.client or kafka.security.tls")
        return
    addresses = list(_addresses(kafka))
    yield from addresses
    if all(finding.unavailable for finding in addresses):
        yield skipped("topics", "without a connection")
        return
    cluster = Cluster(kafka)
    try:
        with waiting_for_kafka(kafka.bootstrap_servers, cluster.timeout):
            cluster.open()
    except RefusedError as error:
        yield failed("Kafka login", str(error), _login_fix(kafka))
        yield skipped("topics", "without a connection")
        return
    except KafkaUnavailableError as error:
        yield failed("Kafka answers", str(error), _answer_fix(kafka), unavailable=True)
        yield skipped("topics", "without a connection")
        return
    who = f" as {kafka.security.username}" if kafka.security.username else ""
    yield ok("Kafka answers", f"{counted(len(cluster.brokers), 'broker')}, {kafka.security.protocol}{who}")
    yield from _advertised(cluster)
    yield from _topics(settings, cluster, topics_command)
    yield from (_share_group(settings) if settings.delivery.share_group else _group(kafka, cluster))
    if settings.delivery.guarantee == "exactly_once":
        yield skipped("transactional id", "the WRITE right on it is not probed: that would fence a running worker")


def _addresses(kafka: Kafka) -> Iterator[Finding]:
    from forebay.stream.addresses import connect_to

    found = connect_to(kafka.bootstrap_servers)
    dead = [address for address in found if address.error]
    for address in dead:
        told = f"{address}: {address.error}"
        if len(dead) == len(found):
            yield failed("bootstrap address", told, _answer_fix(kafka), unavailable=True)
        else:
            yield warning("bootstrap address", told, "remove it from kafka.bootstrap_servers, or start that broker")
    if not dead:
        yield ok("bootstrap address", ", ".join(str(address) for address in found))


def _answer_fix(kafka: Kafka) -> str:
    from forebay.stream.troubles import mend

    return mend(kafka.bootstrap_servers)


def _login_fix(kafka: Kafka) -> str:
    security = kafka.security
    if security.protocol.endswith("ssl") and security.tls.ca_file is None:
        return "check kafka.security; a private certificate authority goes into kafka.security.tls.ca_file"
    return f"check kafka.security: protocol {security.protocol}, mechanism {security.mechanism}, username and password"


def _advertised(cluster: Cluster) -> Iterator[Finding]:
    """A broker that advertises a name which only its own network knows lets clients connect once and never again."""
    from forebay.stream.addresses import probe

    tried = [probe(broker.host, broker.port) for broker in cluster.brokers]
    dead = [address for address in tried if address.error]
    for address in dead:
        yield failed(
            "advertised address",
            f"a broker advertises {address}, which this machine cannot reach: {address.error}",
            "set advertised.listeners of that broker to an address that this machine reaches",
            unavailable=True,
        )
    if not dead:
        yield ok("advertised addresses", ", ".join(str(address) for address in tried))


def _topics(settings: Settings, cluster: Cluster, topics_command: str) -> Iterator[Finding]:
    kafka = settings.kafka
    wanted = [(name, "READ") for name in kafka.input_topics]
    wanted += [(kafka.output_topic, "WRITE"), (kafka.dead_letter_topic, "WRITE")]
    found = []
    for name, right in wanted:
        state = cluster.describe(name)
        found.append(state)
        yield _topic(kafka, state, right, topics_command)
    if all(state.error is None for state in found):
        yield _partitions(settings, found[: len(kafka.input_topics)])
        yield from _sizes(kafka)


def _topic(kafka: Kafka, state: TopicState, right: str, topics_command: str) -> Finding:
    from forebay.stream.troubles import kafka_topics

    question = f"topic {state.name}"
    if state.error == "UNKNOWN_TOPIC_OR_PART":
        by_hand = kafka_topics(state.name, kafka.bootstrap_servers)
        return failed(question, "does not exist", f"{topics_command}\n{by_hand}")
    acls = f"forebay acls --principal User:{kafka.security.username or 'NAME'}"
    if state.error is not None:
        return failed(question, f"cannot be seen: {state.error}", f"grant the rights that {acls} lists")
    if state.rights is not None and right not in state.rights:
        held = ", ".join(sorted(state.rights)) or "none"
        return failed(question, f"no {right} right (held: {held})", f"grant the rights that {acls} lists")
    may = f", {right} allowed" if state.rights is not None else f", {right} right not told by the broker"
    return ok(question, f"{counted(state.partitions, 'partition')}, {counted(state.replication, 'replica')}{may}")


def _partitions(settings: Settings, inputs: list[TopicState]) -> Finding:
    total = sum(state.partitions for state in inputs)
    if total == 1:
        fix = (
            f"kafka-topics.sh --bootstrap-server {settings.kafka.bootstrap_servers} --alter --topic {inputs[0].name} "
            "--partitions 6 (keys then move between partitions)"
        )
        return warning("partitions", "1 input partition: a second worker would get nothing to do", fix)
    return ok("partitions", f"{total} input partitions: up to {total} workers share the work")


def _sizes(kafka: Kafka) -> Iterator[Finding]:
    from forebay.stream import admin
    from forebay.stream.client_config import client_config

    sizes: dict[str, int] = {}
    config = client_config(kafka)
    try:
        for name in (*kafka.input_topics, kafka.output_topic, kafka.dead_letter_topic):
            found = admin.topic_settings(config, name)
            sizes[name] = int(found["max.message.bytes"])
            if name in kafka.input_topics and "compact" in found.get("cleanup.policy", ""):
                fix = f"{_alter(kafka, name)} --add-config cleanup.policy=delete"
                yield warning(f"topic {name}", "is compacted: of requests with one key only the last is kept", fix)
    except (ForebayError, KeyError, ValueError):
        yield skipped("message sizes", "no DESCRIBE_CONFIGS right on the topics, which a worker does not need")
        return
    largest = max(sizes[name] for name in kafka.input_topics)
    yield ok("message sizes", f"requests up to {largest:,} bytes, results up to {sizes[kafka.output_topic]:,}")
    needed = largest + LETTER_OVERHEAD_BYTES
    if sizes[kafka.dead_letter_topic] < largest:
        yield warning(
            f"topic {kafka.dead_letter_topic}",
            f"takes {sizes[kafka.dead_letter_topic]:,} bytes, less than a request: large ones leave no dead letter",
            f"{_alter(kafka, kafka.dead_letter_topic)} --add-config max.message.bytes={needed}",
        )


def _alter(kafka: Kafka, topic: str) -> str:
    return f"kafka-configs.sh --bootstrap-server {kafka.bootstrap_servers} --alter --topic {topic}"


def _share_group(settings: Settings) -> Iterator[Finding]:
    from forebay.stream import share_group
    from forebay.stream.client_config import client_config

    kafka = settings.kafka
    question = f"share group {kafka.group_id}"
    try:
        found, changes = share_group.look(client_config(kafka), settings)
    except ForebayError as error:
        yield failed(question, str(error), "see delivery.share_group in docs/guarantees.md")
        return
    if not changes:
        yield ok(question, f"locks of {int(found[share_group.LOCK]) / 1000:.0f} s, begins {found[share_group.START]}")
        return
    fix = "let the worker do it (AlterConfigs on the group, see forebay acls), or run: "
    fix += share_group.command(kafka.bootstrap_servers, kafka.group_id, changes)
    told = ", ".join(f"{key} to {value}" for key, value in changes.items())
    yield warning(question, f"the worker will set {told}", fix)


def _group(kafka: Kafka, cluster: Cluster) -> Iterator[Finding]:
    from forebay.stream import admin
    from forebay.stream.client_config import client_config
    from forebay.stream.reaching import RefusedError

    question = f"group {kafka.group_id}"
    fix = f"grant the rights that forebay acls --principal User:{kafka.security.username or 'NAME'} lists"
    try:
        rights = cluster.group_rights()
    except RefusedError as error:
        yield failed(question, str(error), fix)
        return
    if rights is not None and "READ" not in rights:
        yield failed(question, "no READ right", fix)
        return
    present = [name for name in kafka.input_topics if name in cluster.topics]
    try:  # in this order: workers that go on meanwhile look neither behind what is there nor beyond it
        begins = admin.begin_offsets(client_config(kafka), present)
        committed = admin.committed_offsets(client_config(kafka), kafka.group_id, present)
        ends = admin.end_offsets(client_config(kafka), present)
    except ForebayError as error:
        yield warning(question, f"its offsets cannot be read: {error}")
        return
    if not committed:
        start = {"earliest": "at the first record kept", "latest": "at the end", "error": "not at all"}
        yield ok(question, f"new: it will start {start[kafka.auto_offset_reset]} (kafka.auto_offset_reset)")
        return
    yield from _out_of_range(kafka, committed, begins, ends)
    behind = sum(max(end - max(committed.get(place, 0), begins.get(place, 0)), 0) for place, end in ends.items())
    yield ok(question, f"{counted(behind, 'record')} behind the end")


def _out_of_range(
    kafka: Kafka,
    committed: dict[tuple[str, int], int],
    begins: dict[tuple[str, int], int],
    ends: dict[tuple[str, int], int],
) -> Iterator[Finding]:
    """Find offsets of the group that their partitions do not have."""
    from forebay.stream.troubles import reset_offsets

    gone = {place: begins[place] - mark for place, mark in committed.items() if mark < begins.get(place, mark)}
    if gone:
        told = f"up to {counted(sum(gone.values()), 'request')} deleted before an answer, in {_named(gone)}"
        if kafka.offset_out_of_range == "skip":
            yield warning("offsets", f"{told}: the worker will skip and count them")
        else:
            by_hand = reset_offsets(kafka.group_id, kafka.bootstrap_servers, gone)
            fix = f"set kafka.offset_out_of_range to skip, or {by_hand}"
            yield failed("offsets", f"{told}: the worker would stop", fix)
    beyond = [place for place, mark in committed.items() if mark > ends.get(place, mark)]
    if beyond:
        told = f"the group stands behind the end of {_named(beyond)}, which was made again, or cut"
        yield warning("offsets", f"{told}: the worker will start there as kafka.auto_offset_reset says")


def _named(places: Iterable[tuple[str, int]]) -> str:
    """Name the first three partitions."""
    names = [f"{topic} [{number}]" for topic, number in sorted(places)]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
