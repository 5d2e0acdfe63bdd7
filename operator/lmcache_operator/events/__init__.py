"""What happened to workers, as Kubernetes Events on their pods and on their server."""
