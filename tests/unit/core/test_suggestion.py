"""What an error proposes for a name that is not known."""

from understudy.core.suggestion import did_you_mean


def test_a_name_that_is_like_the_given_one_is_proposed() -> None:
    assert did_you_mean("libero_gaol", ["libero_goal", "libero_object"], "there are two") == (
        "did you mean 'libero_goal'?"
    )
    assert did_you_mean("metaworld", ["libero_goal", "libero_object"], "there are two") == "there are two"
    assert did_you_mean(7, ["70"], "none") == "did you mean '70'?"
    assert did_you_mean("success", ["succeeded"], "none", cutoff=0.9) == "none"
