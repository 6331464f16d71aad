"""`forebay demo`: the whole of Forebay on this machine in less than a minute, with a real model and real inputs.

Starts a broker, a worker as a process of its own, sends an example's inputs and prints each result as it arrives.
Whatever way it ends, it takes the worker and the broker with it.
"""

from __future__ import annotations

import signal
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.options import AsJson
from forebay.errors import ForebayError

if TYPE_CHECKING:
    from forebay.broker import Broker
    from forebay.cli.demo_examples import Example, Sample
    from forebay.cli.demo_report import Arrival
    from forebay.cli.demo_traffic import Traffic
    from forebay.cli.demo_view import View
    from forebay.cli.demo_worker import DemoWorker
    from forebay.settings import Kafka

DEFAULT_EXAMPLE = "image_classifier"
PARTITIONS = 3
EXIT_NOT_ALL_RIGHT = 1
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The first of them unwinds what was started; further ones do not disturb the unwinding."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="demo")(demo)


def demo(
    example: Annotated[
        str, typer.Option("--example", "-e", help="image_classifier, text_embedder, text_generator or digits.")
    ] = DEFAULT_EXAMPLE,
    requests: Annotated[
        int | None,
        typer.Option("--requests", "-n", min=1, help="How many; by default each input once.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start Kafka and a worker, send real inputs, print each result as it arrives."""
    from forebay.cli.demo_examples import open_example
    from forebay.cli.demo_json import JsonView
    from forebay.cli.demo_view import ConsoleView
    from forebay.cli.interrupts import unwinding_at

    chosen = open_example(example)
    view: View = JsonView() if as_json else ConsoleView(chosen)
    try:
        with unwinding_at(ENDINGS, once=True):
            all_right = _run(chosen, requests, view)
    except KeyboardInterrupt:
        view.note("stopped; worker and broker are gone")
        raise
    if not all_right:
        raise typer.Exit(EXIT_NOT_ALL_RIGHT)


def _run(example: Example, count: int | None, view: View) -> bool:
    from forebay.cli.demo_worker import DemoWorker
    from forebay.settings import load

    chosen = load().kafka  # what is wrong in the environment is said before a broker starts
    view.opening()
    with ExitStack() as stack:
        broker, kafka = _start_broker(stack, chosen, view)
        worker = stack.enter_context(DemoWorker(example, kafka))
        try:
            return _serve(example, count, worker, broker, kafka, view)
        except ForebayError:
            view.log_of_worker(worker.last_lines())
            raise


def _serve(example: Example, count: int | None, worker: DemoWorker, broker: Broker, kafka: Kafka, view: View) -> bool:
    from forebay.cli.demo_report import summarise
    from forebay.cli.demo_traffic import Traffic

    with view.step("preparing the requests") as step:
        samples = example.samples(count)
        step.result = f"{len(samples)} requests, {sum(sample.original for sample in samples)} of them unmodified"
    # Opened before the worker is ready: a new producer takes half a second to get its id from the broker.
    with Traffic(kafka, example.reader(), worker.insist_it_runs) as traffic:
        with view.step("starting the worker: it loads the model and warms it up") as step:
            worker.await_ready()
            step.result = f"a worker serves {example.name}, with its metrics at {worker.ops_url}/metrics"
        arrivals = _ask(traffic, samples, view)
        duplicates = traffic.count_duplicates()
    summary = summarise(samples, arrivals, duplicates, worker.cuts(), broker.kind)
    if not summary.all_right:
        view.log_of_worker(worker.last_lines())
    view.summary(summary)
    return summary.all_right


def _ask(traffic: Traffic, samples: Sequence[Sample], view: View) -> list[Arrival]:
    """Send the unmodified inputs one at a time, the others all at once, and show what arrives."""
    alone = [sample for sample in samples if sample.original]
    together = [sample for sample in samples if not sample.original]
    arrivals: list[Arrival] = []
    for part, one_by_one in ((alone, True), (together, False)):
        view.act("alone" if one_by_one else "together", len(part))
        for arrival in traffic.ask(part, one_by_one=one_by_one):
            arrivals.append(arrival)
            view.arrival(arrival)
    return arrivals


def _start_broker(stack: ExitStack, chosen: Kafka, view: View) -> tuple[Broker, Kafka]:
    """Start the broker and make topics that nobody else uses; on a cluster of yours they are deleted at the end."""
    from forebay.broker import find_broker
    from forebay.stream import admin
    from forebay.stream.client_config import client_config

    with view.step("starting a broker") as step:
        broker = find_broker(stack, view.note)
        name = f"forebay-demo-{uuid.uuid4().hex[:8]}"
        kafka = chosen.model_copy(
            update={
                "bootstrap_servers": broker.bootstrap_servers,
                "input_topics": (f"{name}.requests",),
                "output_topic": f"{name}.results",
                "dead_letter_topic": f"{name}.dead-letters",
                "group_id": name,
            }
        )
        topics = [*kafka.input_topics, kafka.output_topic, kafka.dead_letter_topic]
        admin.create_topics(client_config(kafka), dict.fromkeys(topics, PARTITIONS))
        if broker.kind == "configured":
            stack.callback(admin.delete_topics, client_config(kafka), topics)
        # A cluster's first group waits 3 s for the topic of committed offsets; asked for now, it is there in time.
        admin.committed_offsets(client_config(kafka), kafka.group_id, kafka.input_topics)
        step.result = view.describe(broker)
    if not broker.is_real:
        view.warn_of_stand_in()
    return broker, kafka
