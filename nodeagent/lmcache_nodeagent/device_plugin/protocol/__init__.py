"""The published protocol of the kubelet, and what `make generate` makes of it."""
