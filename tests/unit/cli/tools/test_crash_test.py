import pytest

from understudy.cli.main import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--directory", "nowhere"], "error: nowhere: no such directory; create it, or choose another"),
        (
            ["--chain", "--damage"],
            "error: expected one of --chain and --damage, got both; run them one after the other",
        ),
    ],
)
def test_a_wrong_option_is_one_sentence(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    assert main(["crash-test", *words]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == said
