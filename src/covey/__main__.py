"""`python -m covey` is the `covey` command."""

import sys


def start() -> None:
    """The command; Ctrl-C while its libraries are loaded is one line."""
    try:
        from covey.cli.app import main
    except KeyboardInterrupt:
        print("covey: interrupted from the keyboard", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    start()
