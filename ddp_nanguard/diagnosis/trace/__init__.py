"""Traces every operator of one step, forward and backward."""
