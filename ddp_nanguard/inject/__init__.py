"""Fault injection: models, tensors and a step counter."""
