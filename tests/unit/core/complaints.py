import pytest

from understudy.core import SpecError


def complaint(function, *args, **kwargs):
    """The text of the SpecError of a call."""
    with pytest.raises(SpecError) as caught:
        function(*args, **kwargs)
    return str(caught.value)
