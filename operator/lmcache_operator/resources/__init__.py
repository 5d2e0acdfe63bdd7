"""What a server owns in the cluster: one pure builder for each kind."""
