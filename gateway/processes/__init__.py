"""`--processes N`: the supervisor, and what makes its child a member of the group."""
