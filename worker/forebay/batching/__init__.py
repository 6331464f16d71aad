"""The batching room: pure code that decides which requests run together, and when. It knows no clock, no Kafka,
no torch: time comes in as `now`, in seconds of a monotonic clock."""
