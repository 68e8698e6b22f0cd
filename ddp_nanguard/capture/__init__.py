"""What is kept of a step: micro-batches, buffers, random states."""
