"""Checks that compare token streams, perplexity and kernels, and the reports on them."""
