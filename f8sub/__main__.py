"""The command line: ``python -m f8sub COMMAND``, or ``f8sub COMMAND``."""

from f8sub.cli import main as main
from f8sub.cli import run as run

if __name__ == "__main__":
    run()
