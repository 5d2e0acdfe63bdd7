# One image for both programs of lmcache-kube:
#
#   lmcache-nodeagent   the cache server of a node
#   lmcache-operator    what runs the agents and tells them who died
#
# Neither is the entry point: a pod names the one it runs. Any base with a Python of at least 3.11,
# `venv` included, and glibc will do:
#
#   docker build --tag lmcache-kube .
#   buildah bud --tag lmcache-kube --build-arg BASE_IMAGE=localhost/python-base .

ARG BASE_IMAGE=docker.io/library/python:3.12-slim-bookworm

# What builds stays in this stage; the environment made here has not even pip.
FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY requirements/build.txt requirements/runtime.txt requirements/
RUN python3 -m venv /build \
 && python3 -m venv --without-pip /opt/lmcache-kube \
 && /build/bin/python -m pip install --no-cache-dir --quiet \
      --require-hashes --only-binary :all: --requirement requirements/build.txt \
 && /build/bin/python -m pip --python /opt/lmcache-kube/bin/python install --no-cache-dir --quiet \
      --require-hashes --only-binary :all: --requirement requirements/runtime.txt
COPY pyproject.toml README.md LICENSE ./
COPY nodeagent nodeagent
COPY operator operator
RUN /build/bin/python -m pip wheel --quiet \
      --no-deps --no-index --no-build-isolation --wheel-dir /wheel . \
 && /build/bin/python -m pip --python /opt/lmcache-kube/bin/python install --quiet \
      --no-deps --no-index /wheel/*.whl

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0.dev0
LABEL org.opencontainers.image.title="lmcache-kube" \
      org.opencontainers.image.description="LMCache's multiprocess KV cache server for Kubernetes: node agent and operator" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /opt/lmcache-kube /opt/lmcache-kube
# The byte code came with the copy, and the root may be read-only.
ENV PATH=/opt/lmcache-kube/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
RUN groupadd --gid 65532 lmcache \
 && useradd --key UID_MAX=65535 --uid 65532 --gid 65532 --no-create-home --home-dir /nonexistent \
      --shell /usr/sbin/nologin lmcache
# By number: a kubelet can only tell that a number is not root.
USER 65532:65532
WORKDIR /
STOPSIGNAL SIGTERM
CMD ["lmcache-nodeagent", "--help"]
