"""Hooks on the user's loop and modules."""
