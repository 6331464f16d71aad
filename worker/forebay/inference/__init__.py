"""The inference room: models, replicas and the pool. The only room that knows torch, and only where it runs."""
