"""L1: cached chunks in shared memory."""
