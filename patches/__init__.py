"""Repairs of vLLM defects, one module a defect."""
