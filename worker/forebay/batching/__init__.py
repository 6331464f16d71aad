"""The batching room."""
