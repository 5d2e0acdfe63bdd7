"""Worker pods: what they are, and when their end is proven."""
