"""The kubelet's side of a worker's connection; opened by a later issue."""
