"""`python -m understudy`, for an interpreter whose scripts are not on the PATH."""

import sys

from understudy.cli import main

sys.exit(main())
