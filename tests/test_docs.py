"""The docs table of drafters says what the table in the code says."""

from __future__ import annotations

from pathlib import Path

from outrider.drafters import TABLE

DOCS = Path(__file__).parent.parent / "docs" / "drafters.md"


def rows() -> list[str]:
    head = "| drafter | drafts | needs | a draft costs | output | shapes | from |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name, e in TABLE.items():
        output = "exact" if e.exact else "**lossy**"
        lines.append(
            f"| `{name}` | {e.summary} | {e.needs} | {e.cost} | {output} | {', '.join(e.shapes)} | {e.source or 'here'} |"
        )
    return lines


def test_the_table_of_drafters_is_in_the_docs() -> None:
    found = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert found == rows(), "docs/drafters.md should have:\n" + "\n".join(rows())
