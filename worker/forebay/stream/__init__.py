"""The stream room: everything that speaks Kafka, and the wire format. It knows no model and no batch."""
