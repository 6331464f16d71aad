"""A worker whose group stands where its log begins no more: it stops and counts, or skips and counts."""

from __future__ import annotations

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient  # type: ignore[attr-defined]

from tests.integration.job import Job, ask, check_answers, check_once


def test_deleted_requests_stop_a_worker_until_it_is_told_to_skip_them(job: Job) -> None:
    job.send(ask(n, partition=n % 3) for n in range(300))
    client = Consumer({**job.kafka.config, "group.id": job.group})
    client.commit(offsets=[TopicPartition(job.requests, number, 10) for number in range(3)], asynchronous=False)
    client.close()
    admin = AdminClient(job.kafka.config)
    deleted = [TopicPartition(job.requests, 0, 60), TopicPartition(job.requests, 1, 100)]
    for future in admin.delete_records(deleted).values():
        future.result(30)

    careful = job.launch()
    assert careful.wait() == 78, careful.text()
    [sentence] = [line for line in careful.text().splitlines() if not line.startswith("{")]
    assert sentence.startswith(f"forebay: {job.requests} [0]: the group stands at offset 10, the first that is still ")
    assert "there is 60: up to 50 requests deleted before an answer" in sentence
    assert (
        f"{job.requests} [1]: the group stands at offset 10, the first that is still there is 100: up to 90" in sentence
    )
    assert "set kafka.offset_out_of_range to skip" in sentence
    assert job.kafka.committed_offsets(job.group, job.requests)[job.requests, 0] == 10

    worker = job.start(kafka__offset_out_of_range="skip")
    outcomes = job.await_settled()
    left = [*range(180, 300, 3), *range(32, 300, 3)]
    assert {int(outcome.key or b"") for outcome in outcomes} >= set(left)
    check_once([one for one in outcomes if int(one.key or b"") in left], map(str, left))
    check_answers(outcomes)
    for number, count in ((0, 50), (1, 90)):
        assert worker.metric("forebay_skipped_requests_total", partition=str(number)) == count
    assert sorted(event["requests"] for event in worker.events("requests_skipped")) == [50, 90]
    assert worker.stop() == 0
