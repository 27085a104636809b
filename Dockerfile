# grpo-ext with the pinned versions of constraints.txt.
#
#   docker build -t grpo-ext .                                   # for a CPU
#   docker build -t grpo-ext-cuda --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#       --build-arg TORCH_INDEX=https://pypi.org/simple --build-arg "EXTRAS=[vllm,deepspeed]" .
#
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/workspace" grpo-ext train --config quickstart/grpo
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/workspace" --gpus all --shm-size 16g grpo-ext-cuda train --config RECIPE
#
# BASE: an image of Debian or Ubuntu; its CUDA is that of TORCH, 13.0. TORCH_INDEX: where torch comes from; PyPI has the CUDA build.
# It runs without root's rights, as whichever user docker names: each may write the home folder, which holds caches only.

ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=

# torch and DeepSpeed compile small parts when they first run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && (command -v python3 || apt-get install --yes --no-install-recommends python3 python3-dev python3-venv) \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/venv PATH=/venv/bin:$PATH
RUN python3 -m venv /venv && pip install --no-cache-dir --index-url "${TORCH_INDEX}" "${TORCH}"

COPY pyproject.toml constraints.txt README.md LICENSE /grpo-ext/
COPY src /grpo-ext/src
COPY recipes /grpo-ext/recipes
COPY examples/project /grpo-ext/examples/project
RUN pip install --no-cache-dir "/grpo-ext${EXTRAS}" --constraint /grpo-ext/constraints.txt

# PyTorch asks for the user's name, and an id that docker names has none.
ENV HOME=/var/lib/trainer USER=trainer
RUN useradd --create-home --home-dir "$HOME" trainer && chmod 1777 "$HOME" && install --directory --mode 1777 /workspace
USER trainer
WORKDIR /workspace
ENTRYPOINT ["grpo-ext"]
CMD ["--help"]
