"""The command line: ``python -m f8sub COMMAND``, or ``f8sub COMMAND``."""

from f8sub.features.command_line.command_line import main as main
from f8sub.features.command_line.command_line import run as run

if __name__ == "__main__":
    run()
