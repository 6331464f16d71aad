"""MiniLM turns texts into vectors: texts of any length in, 384 numbers each out, alike texts close together."""
