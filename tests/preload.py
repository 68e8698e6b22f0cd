"""Loaded once into the fork server: imports that every rank would otherwise pay for."""

from __future__ import annotations

__all__: list[str] = []
