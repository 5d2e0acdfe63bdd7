"""Who is alive, who is dead, and why."""
