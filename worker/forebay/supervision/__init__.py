"""One worker process per device (`forebay run --devices`), kept running by a supervisor that does no work itself.

The supervisor imports neither torch nor the Kafka client and reads no record: its workers are ordinary members of the
consumer group, and Kafka divides the work among them.
"""
