# Made by docker_build.sh. The base brings torch; `smp` is the SMP v2 image, `native` any image with torch 2.6 or newer.
ARG BASE=public.ecr.aws/deep-learning-containers/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-ec2

FROM ${BASE} AS common
WORKDIR /opt/smp-train
COPY pyproject.toml README.md ./
COPY smp_train ./smp_train

# transformers is pinned by the SMP image to the release its patches are made for: install nothing over it.
FROM common AS smp
ARG EXTRA_PACKAGES=
RUN python -m pip install --no-cache-dir --no-deps . && \
    python -m pip install --no-cache-dir 'pyyaml>=6' packaging tqdm 'orjson>=3.9' 'isal>=1.5' safetensors ${EXTRA_PACKAGES}

FROM common AS native
ARG EXTRA_PACKAGES=
RUN python -m pip install --no-cache-dir '.[train,report]' ${EXTRA_PACKAGES}
