"""A test stays in quarantine with a reason and until a date, and not longer."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
CONFTEST = f"""
import datetime, sys
sys.path.insert(0, {str(ROOT)!r})
import pytest
from tests.quarantine import skip_quarantined

def pytest_configure(config):
    config.addinivalue_line("markers", "quarantine: for the test of it")

def pytest_collection_modifyitems(items):
    skip_quarantined(items, datetime.date(2026, 11, 16))
"""


def run(pytester: pytest.Pytester, *marks: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    tests = [
        f"@pytest.mark.quarantine({mark})\ndef test_{number}():\n    assert False\n"
        for number, mark in enumerate(marks)
    ]
    pytester.makepyfile("import pytest\n" + "\n".join(tests))
    return pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")


def test_it_is_skipped_with_its_reason_until_its_date(pytester: pytest.Pytester) -> None:
    result = run(pytester, 'reason="a port is taken", until="2026-11-16"')
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*quarantine until 2026-11-16: a port is taken*"])


@pytest.mark.parametrize(
    ("mark", "sentence"),
    [
        (
            'reason="a port is taken", until="2026-11-15"',
            "*ended on 2026-11-15; mend the test (a port is taken)*",
        ),
        ('reason="a port is taken", until="2027-11-15"', "*more than 30 days ahead*"),
        ('reason="a port is taken"', "*quarantine needs until='YYYY-MM-DD', got None*"),
        ('until="2026-11-20"', "*quarantine needs a reason*"),
    ],
)
def test_a_quarantine_in_disorder_ends_the_run(pytester: pytest.Pytester, mark: str, sentence: str) -> None:
    result = run(pytester, mark)
    assert result.ret != 0
    result.stderr.fnmatch_lines([sentence])


def test_it_does_not_grow_silently(pytester: pytest.Pytester) -> None:
    result = run(pytester, *['reason="busy", until="2026-11-20"'] * 4)
    assert result.ret != 0
    result.stderr.fnmatch_lines(["*4 tests are in quarantine, at most 3 may be*"])
