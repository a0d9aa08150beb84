from __future__ import annotations

from eagle3_serve.drafting.verify.table import table


def test_columns_are_as_wide_as_their_widest_cell_and_numbers_align_right() -> None:
    assert table(("arm", "n"), [("one", "5"), ("eleven", "12345")]) == "\n".join(
        ["arm         n", "------  -----", "one         5", "eleven  12345"]
    )


def test_a_table_without_rows_is_its_head() -> None:
    assert table(("arm", "n"), []).splitlines() == ["arm  n", "---  -"]
