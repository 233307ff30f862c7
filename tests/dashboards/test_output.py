"""Tables on stdout, as narrow as their cells are."""

import pytest

from ridgeplan.dashboards.cli.output import print_table


def test_columns_are_two_blanks_apart(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Plans", ("plan", "ms", "verdict"), [("int8", "4.19", "fits"), ("autoregressive", "12", "fits")])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "Plans",
        "plan              ms  verdict",
        "int8            4.19  fits",
        "autoregressive    12  fits",
    ]


@pytest.mark.parametrize(("verdicts", "shown"), [(("", ""), False), (("", "does not fit"), True)])
def test_a_last_column_without_words_is_left_out(
    capsys: pytest.CaptureFixture[str], verdicts: tuple[str, str], shown: bool
) -> None:
    print_table("Plans", ("plan", "ms", "verdict"), [("a", "1", verdicts[0]), ("b", "2", verdicts[1])])
    assert ("verdict" in capsys.readouterr().out) is shown


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Plans", ("plan", "source"), [("int8", "[prior]")])
    assert "[prior]" in capsys.readouterr().out
