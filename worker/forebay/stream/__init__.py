"""The stream room."""
