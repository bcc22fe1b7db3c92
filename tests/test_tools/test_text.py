import pytest

from bigscl.tools.shared.terminal import print_result, size, utc_time


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 KB"),
        (5_900_000, "5.9 MB"),
        (508e9, "508 GB"),
        (1.525e12, "1.52 TB"),
    ],
)
def test_sizes_have_three_digits_and_a_unit(num_bytes, text):
    assert size(num_bytes) == text


def test_people_get_no_control_characters_and_machines_get_facts(capsys):
    print_result({"key": "a\x1b[2J"}, "a\x1b[2J\n\tb\u202e", as_json=False)
    print_result({"key": "a\x1b[2J"}, "", as_json=True)
    assert capsys.readouterr().out == 'a\\x1b[2J\n\tb\\u202e\n{"key": "a\\u001b[2J"}\n'


def test_moments_beyond_all_years_are_seconds():
    assert utc_time(86_400) == "1970-01-02 00:00:00"
    assert (utc_time(1e30), utc_time(float("inf"))) == ("1e+30 s", "inf s")
