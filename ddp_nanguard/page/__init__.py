"""The report page of a dump, and the index of all dumps below a directory: one HTML file each, which needs no network.

`content` gathers what a page says; `history_parts`, `magnitudes`, `timeline`, `batch`, `ranks` and `source` have its
parts. `render` makes HTML of it by the templates beside it, `picture` a PNG; only these two need packages of the extra
``[report]``.
"""

__frame_role__ = "passes on"  # see `hooks.frames`
