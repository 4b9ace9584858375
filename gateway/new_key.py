"""`headstart key`: an API key for a tenant, and the hash of it that a keys file stores.

Owns: how keys are made. Must never: take a key on the command line, which every user of the machine can read.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence

from gateway.admission.keys_file import KEY_MIN_CHARS, tenant_problem
from gateway.admission.tenants import KEY_MAX_CHARS, hash_key
from worker.protocol.command_line import EXIT_OK, CommandParser

PROG = "headstart key"
KEY_PREFIX = "hs-"
KEY_BYTES = 32


def main(argv: Sequence[str] | None = None) -> int:
    """Print a new key and its hash, or with --stdin the hash of a key that exists; the exit status."""
    parser = CommandParser(PROG, summary="Make an API key for a tenant. Give the key to the tenant; store the hash.",
                           example="headstart key --tenant acme >> keys.toml   (the key itself goes to stderr)\n"
                                   "  headstart key --stdin < existing-key")
    parser.add_argument("--tenant", metavar="ID", help="print the lines of a keys file for this tenant")
    parser.add_argument("--stdin", action="store_true", help="hash the key on standard input instead of making one")
    parser.add_argument("--json", action="store_true", help="print key and hash as JSON")
    options = parser.parse_args(argv)
    if options.tenant is not None and (problem := tenant_problem(options.tenant)) is not None:
        parser.error(f"--tenant: {problem}")
    key = sys.stdin.readline().strip() if options.stdin else KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    if not KEY_MIN_CHARS <= len(key) <= KEY_MAX_CHARS:
        parser.error(f"a key should have {KEY_MIN_CHARS} to {KEY_MAX_CHARS} characters")
    made = {} if options.stdin else {"key": key}
    if options.json:
        print(json.dumps({**made, "hash": hash_key(key)}))
        return EXIT_OK
    if made:
        print(f"key (shown once, not stored): {key}", file=sys.stderr)
    print(hash_key(key) if options.tenant is None else
          f"[[tenants]]\nid = {json.dumps(options.tenant)}\nkeys = [\"{hash_key(key)}\"]")
    return EXIT_OK
