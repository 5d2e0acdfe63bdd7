"""The node agent of lmcache-kube: the LMCache multiprocess server of one node."""
