"""Why it happened: the traced step, experiments and rules."""
