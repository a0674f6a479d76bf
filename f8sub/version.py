"""The version, which the ranks of a job compare, and what tells two versions of the code apart."""

import functools
import hashlib
from pathlib import Path

__version__ = "0.2.0"


@functools.cache
def source_digest() -> str:
    """32 hexadecimal digits that follow from the version and from every source file of the library."""
    digest = hashlib.blake2b(__version__.encode(), digest_size=16)
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
