from __future__ import annotations

from tests.conftest import KafkaProbe, Send, Topics


def test_records_come_back_as_they_were_sent(kafka: KafkaProbe, topics: Topics, group_id: str) -> None:
    [topic] = topics("round-trip", partitions=3)
    sent = [Send(b"v%d" % n, b"k%d" % n, [("h", b"x")]) for n in range(1000)]

    assert kafka.produce(topic, sent) == 1000

    found = kafka.read_all(topic)
    assert sorted(record.value for record in found) == sorted(record.value for record in sent)
    assert all(record.header("h") == b"x" for record in found)
    assert sum(kafka.end_offsets(topic).values()) == 1000
    assert kafka.committed_offsets(group_id, topic) == {}
    assert kafka.lag(group_id, topic) == 1000
