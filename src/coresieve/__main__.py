"""`python -m coresieve`: the same commands as `coresieve`."""

import sys

from coresieve.cli import main

if __name__ == "__main__":
    sys.exit(main())
