"""`python -m gateway` is `headstart gateway`."""

from __future__ import annotations

import sys

from gateway.serve import main

if __name__ == "__main__":
    sys.exit(main())
