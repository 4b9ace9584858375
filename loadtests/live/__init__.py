"""`headstart replay`: a trace sent to a live stack, and what came of it."""
