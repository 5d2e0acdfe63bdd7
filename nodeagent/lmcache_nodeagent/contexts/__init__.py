"""L0: the workers' paged KV memory, mapped."""
