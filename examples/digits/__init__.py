"""A small network reads handwritten digits: 64 grey values in, the digit out. Trained at load, for tests."""
