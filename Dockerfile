# Made by docker_build.sh. The base brings torch; `smp` is the SMP v2 image, `native` any image with torch 2.8 or newer.
# A tag may be another image tomorrow: BASE=NAME@sha256:DIGEST pins it (docker buildx imagetools inspect NAME prints the digest).
ARG BASE=public.ecr.aws/deep-learning-containers/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-ec2

FROM ${BASE} AS common
WORKDIR /opt/smp-train
COPY pyproject.toml README.md LICENSE ./
COPY smp_train ./smp_train
# Nothing in training needs root. The id is fixed, so that folders on shared file systems can be given to it.
RUN id trainer >/dev/null 2>&1 || useradd --create-home --uid 10001 trainer; chown trainer .

# transformers is pinned by the SMP image to the release its patches are made for: install nothing over it.
FROM common AS smp
ARG EXTRA_PACKAGES=
RUN python -m pip install --no-cache-dir --no-deps . && \
    python -m pip install --no-cache-dir 'pyyaml>=6' packaging tqdm 'orjson>=3.9' 'pysimdjson>=6' 'isal>=1.5' safetensors ${EXTRA_PACKAGES}
ARG IMAGE_USER=trainer
USER ${IMAGE_USER}

FROM common AS native
ARG EXTRA_PACKAGES=
RUN python -m pip install --no-cache-dir '.[train]' ${EXTRA_PACKAGES}
ARG IMAGE_USER=trainer
USER ${IMAGE_USER}
