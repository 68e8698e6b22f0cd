"""The checks that run inside a step. Each leaves its result in a device-side slot; the host reads nothing.

`forward` looks at inputs and outputs of modules, `backward` at their gradients, `gradient` at those of parameters,
`state` at parameters, buffers and optimizer state; `slots` holds the results and `severity` judges them.
"""

__frame_role__ = "probe"  # see `hooks.frames`
