"""The API `lmcache-kube.dev/v1alpha1`: its types, its rules and the CRD made of both."""
