"""`python -m choreo`: the same as the command `choreo`."""

import sys

from choreo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
