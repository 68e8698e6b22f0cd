"""Every operator of one step, forward and backward."""
