"""Tests. A package, so that the bodies that ranks run can be imported by name."""
