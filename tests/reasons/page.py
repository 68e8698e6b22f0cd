"""Writes `docs/reasons.md` from the operator table: ``python -m tests.reasons.page``."""

from __future__ import annotations

from pathlib import Path

from ddp_nanguard.diagnosis.rules.table import LEFT_OUT, ROWS, Direction

PAGE = Path(__file__).parents[2] / "docs" / "reasons.md"

HEAD = """# Operators and reasons

In which ways an operator makes a NaN or an infinity of finite numbers, and what `ddp-nanguard explain`, `replay
--trace` and the error itself then say. The page is written from the operator table,
`ddp_nanguard/diagnosis/rules/table.py`, by `python -m tests.reasons.page`; each row is run by a test.

`{name}` stands for the operator. The sentence goes on with the line of code, and with the index, row, sample or matrix
where it holds. A row answers only where it holds for every element that is hit; where no row does, the reason is
"unknown". Other reasons, such as bad input or growth, are on the [page on reports](report.md#the-reason).
"""


def page() -> str:
    """The page's text."""
    text = HEAD
    titles = {Direction.FORWARD: "The value is not finite", Direction.BACKWARD: "The derivative is not finite"}
    for direction, title in titles.items():
        text += f"\n## {title}\n\n| operator | said | kind | remedy |\n|---|---|---|---|\n"
        text += "".join(
            f"| {', '.join(f'`{name}`' for name in row.operators)} | {row.said} | {row.kind} | {row.remedy} |\n"
            for row in ROWS
            if row.direction is direction
        )
    text += "\n## Left out\n\n| operator | why |\n|---|---|\n"
    return text + "".join(f"| {each.operators} | {each.why} |\n" for each in LEFT_OUT)


if __name__ == "__main__":
    PAGE.write_text(page())
