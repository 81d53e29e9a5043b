"""Formats by their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from understudy.formats import FORMATS, FormatError, find_format, parse_dataset_path
from understudy.formats.registry import check_options


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rdls:data", "format 'rdls': is unknown; did you mean 'rlds'?"),
        ("zip:data", "there are rlds, lerobot"),
        ("data", "expected FORMAT:PATH, such as rlds:data"),
        ("data", "there is no such file or directory"),
        ("rlds:", "expected FORMAT:PATH, such as rlds:DIR"),
        ("rlds:data?split=a&split=b", "an option is given twice"),
    ],
)
def test_a_name_that_is_not_understood(name: str, text: str) -> None:
    with pytest.raises(FormatError) as raised:
        parse_dataset_path(name)
    assert text in str(raised.value)


def test_without_a_format_the_files_show_it(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"expected FORMAT:PATH, such as rlds:\S+; formats: "):
        parse_dataset_path(str(tmp_path))
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text("{}")
    found = parse_dataset_path(f"{tmp_path}?video=png")
    assert (found.format.name, found.path, found.options) == ("lerobot", tmp_path, {"video": "png"})


def test_a_home_directory_is_found() -> None:
    assert parse_dataset_path("rlds:~/data").path.is_absolute()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_its_name(name: str) -> None:
    try:
        found = find_format(name)
    except FormatError as error:
        pytest.skip(str(error))
    assert found.name == name


def test_a_format_whose_library_is_not_there_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "understudy.formats.rlds", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Without("understudy.formats.rlds"), *sys.meta_path])
    with pytest.raises(FormatError, match=r"rlds: needs h6py; run `pip install 'understudy-robotics\[rlds\]'`"):
        find_format("rlds")


class Without:
    """An importer under which a module cannot be loaded for want of another."""

    def __init__(self, module: str):
        self._module = module

    def find_spec(self, name: str, *_: object) -> None:
        if name == self._module:
            raise ModuleNotFoundError("No module named 'h6py'", name="h6py")


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    check_options({"split": "x"}, ("split", "last"), "rlds")
    with pytest.raises(FormatError, match=r"rlds: has no option 'spilt'; did you mean 'split'\?"):
        check_options({"spilt": "x"}, ("split", "last"), "rlds")
    with pytest.raises(FormatError, match="rlds: has no option 'colour'; it has last, split"):
        check_options({"colour": "x"}, ("split", "last"), "rlds")
    with pytest.raises(FormatError, match="rlds: has no option 'colour'; it has none"):
        check_options({"colour": "x"}, (), "rlds")
