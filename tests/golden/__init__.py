"""A dump as it lies on disk in the present version of its form: ``python -m tests.golden.make`` makes it again."""

from pathlib import Path

GOLDEN = Path(__file__).parent / "step-00000002"
