"""Makes pi0 and pi0.5 small in an interpreter that has this directory on its PYTHONPATH."""

from make_policies import small_pi

small_pi()
