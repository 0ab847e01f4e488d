# One image for every launcher: CUDA's compiler, the pinned libraries, the wheel of this repository; no root.
#
#   docker build --tag pretraining:0.1.0 .
#   docker run --rm --gpus all --shm-size=16g --volume pretraining-home:/home/pretraining --volume "$PWD":/workspace \
#     pretraining:0.1.0 deepspeed --num_gpus=8 --module pretraining.train --recipe 30b
#
# What follows the image's name is a command of it; without one, the doctor examines the machine. data/ and runs/ are in
# /workspace: if the folder is not for everybody to write, add --user "$(id -u):$(id -g)".
#
# --shm-size: NCCL and data workers need more than the 64 MB that a container has in /dev/shm; in Kubernetes, an emptyDir of
# medium Memory (launch/kubernetes/jobset.yaml).
#
# /home/pretraining keeps what is compiled or fetched at its first use: DeepSpeed's operators, kernels, shards, tokenizers.
# Operators are for the very processor and GPU they are compiled on, therefore not part of the image.

# The CUDA of the pinned torch, whose compiler must be of the same release. For another tag:
#   docker buildx imagetools inspect nvidia/cuda:TAG      (prints the digest)
ARG BASE=nvidia/cuda:13.2.1-devel-ubuntu24.04@sha256:44a9504c6dfb50b1241464241b02a93871928f373de6f5a644cf5fe9f080aa63

FROM ${BASE} AS system
ARG DEBIAN_FRONTEND=noninteractive
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# g++ and libaio for DeepSpeed's operators, Python's headers for triton; pdsh starts the hosts of `deepspeed --hostfile`
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ libaio-dev openssh-client pdsh python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/pretraining
ENV PATH=/opt/pretraining/bin:${PATH}

FROM system AS wheel
COPY . /source
RUN pip wheel --quiet --no-deps --wheel-dir /wheel /source

FROM system
# requirements-NAME.txt, in one word each: `--build-arg EXTRAS="gpu remote flows"` for Flyte
ARG EXTRAS="gpu remote"
COPY requirements*.txt requirements.lock /requirements/
RUN cd /requirements \
    && set -- --requirement requirements.txt --constraint requirements.lock \
    && for extra in ${EXTRAS}; do set -- "$@" --requirement "requirements-${extra}.txt"; done \
    && pip install "$@"
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps --no-index /wheel/*.whl
RUN python -c "import torch; from pretraining.upstream.toolchain import nvcc_release; \
    found = (torch.version.cuda, nvcc_release()); \
    assert found[0] == found[1], f'CUDA of torch and of the base image: {found}; take another BASE'"

# Any user may write to its home: `--user` takes any number.
RUN useradd --uid 10001 --create-home pretraining \
    && install --directory --owner pretraining --mode 1777 /home/pretraining /workspace
ENV HOME=/home/pretraining USER=pretraining TORCHINDUCTOR_CACHE_DIR=/home/pretraining/.cache/torchinductor
WORKDIR /workspace
# a number, so that Kubernetes can see that it is not root
USER 10001:10001

ARG REVISION=""
LABEL org.opencontainers.image.title="pretraining-recipes" \
    org.opencontainers.image.description="Pretraining recipes for DeepSpeed and the Hugging Face Trainer" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="docker.io/nvidia/cuda:13.2.1-devel-ubuntu24.04"

# takes on what a launcher leaves behind, and passes signals on
ENTRYPOINT ["tini", "--"]
CMD ["pretraining-doctor"]
