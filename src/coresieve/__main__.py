"""`python -m coresieve`: the same commands as `coresieve`."""

import sys


def run() -> int:
    """The commands; Ctrl-C while they are still being imported is no traceback either."""
    try:
        from coresieve.cli import main
    except KeyboardInterrupt:
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
