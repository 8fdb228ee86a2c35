"""Deterministic OpenAI-compatible server on top of vLLM."""
