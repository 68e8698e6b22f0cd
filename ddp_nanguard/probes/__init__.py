"""What is looked at in a step: module outputs and inputs, gradients, state. Every probe ends in a slot of the board."""

__frame_role__ = "probe"  # see `hooks.frames`
