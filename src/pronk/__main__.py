"""The `pronk` program, and `python -m pronk`.

The first that it does is to let Ctrl-C end it as a signal does, in silence: importing what reads the command line takes
40 ms, in which Python would show a traceback.
"""

import _signal  # type: ignore[import-not-found]  # of `signal`, which imports for milliseconds itself


def main() -> None:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from pronk.cli import main

    main()


if __name__ == "__main__":
    main()
