"""Trainers of other libraries, run for real, with the guard's callback in them."""
