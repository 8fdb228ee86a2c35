"""p2q: INT8 language-model serving, reproducible to the byte."""

__version__ = "0.1.0"
