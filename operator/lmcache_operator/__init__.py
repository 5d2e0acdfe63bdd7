"""The Kubernetes operator of lmcache-kube; opened by a later issue."""
