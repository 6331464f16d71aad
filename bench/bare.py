"""The loops that Forebay is compared with, each a process of its own: `python bare.py KIND ADDRESS IN OUT COUNT`.

`loop` is what a careful person writes by hand: consume 32, parse, run the model, produce, flush, commit. `copy` has no
model at all: consume, produce the value, see it delivered, commit. `echo` answers single records as they come.
"""

from __future__ import annotations

import sys
import uuid

import confluent_kafka as ck


def _clients(address: str, topic: str) -> tuple[ck.Consumer, ck.Producer]:
    consumer = ck.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": uuid.uuid4().hex,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    return consumer, ck.Producer({"bootstrap.servers": address, "acks": "all"})


def loop(address: str, source: str, target: str, count: int) -> None:
    """Run the perceptron on 32 records at a time."""
    import orjson
    import torch
    from models import make_perceptron

    net = make_perceptron()
    consumer, producer = _clients(address, source)
    done = 0
    with torch.inference_mode():
        while done < count:
            messages = consumer.consume(32, 0.05)
            if not messages:
                continue
            bodies = [orjson.loads(message.value()) for message in messages]
            rows = torch.tensor([body["inputs"][0]["data"] for body in bodies])
            answers = net(rows).tolist()
            for body, answer in zip(bodies, answers, strict=True):
                output = {"name": "y", "shape": [1, len(answer)], "datatype": "FP32", "data": answer}
                producer.produce(target, orjson.dumps({"id": body["id"], "outputs": [output]}), body["id"])
            producer.flush()
            consumer.commit(asynchronous=False)
            done += len(messages)
    consumer.close()


def copy(address: str, source: str, target: str, count: int) -> None:
    """Copy records, 512 at a time: every delivery is checked, then the offsets are committed."""
    consumer, producer = _clients(address, source)
    failed: list[ck.KafkaError] = []

    def delivered(error: ck.KafkaError | None, _: ck.Message) -> None:
        if error is not None:
            failed.append(error)

    done = 0
    while done < count:
        messages = consumer.consume(512, 0.05)
        for message in messages:
            producer.produce(target, message.value(), message.key(), on_delivery=delivered)
        producer.flush()
        if failed:
            raise SystemExit(f"not delivered: {failed[0]}")
        if messages:
            consumer.commit(asynchronous=False)
        done += len(messages)
    consumer.close()


def echo(address: str, source: str, target: str, count: int) -> None:
    """Answer each record at once, until the process is ended."""
    consumer, producer = _clients(address, source)
    while True:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            producer.produce(target, message.value(), message.key())
            producer.flush()
            consumer.commit(asynchronous=True)


if __name__ == "__main__":
    kind, address, source, target, count = sys.argv[1:6]
    {"loop": loop, "copy": copy, "echo": echo}[kind](address, source, target, int(count))
