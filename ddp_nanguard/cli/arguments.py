"""What all commands share."""

from __future__ import annotations

import argparse
from typing import TypeAlias

WRONG_USAGE = 2


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
