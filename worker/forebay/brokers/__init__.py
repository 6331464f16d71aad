"""How Forebay gets a broker for demos and tests; `forebay.broker` is the public module. Never part of a worker."""
