"""``python -m ddp_nanguard``."""

from __future__ import annotations

from .cli.main import run

run()
