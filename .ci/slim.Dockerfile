# README's two commands in an image that has Python, make and nothing else: no compiler, no git, not root, no home folder.
#
#   docker build --file .ci/slim.Dockerfile --tag grpo-ext-slim . && docker run --rm grpo-ext-slim
#
# TORCH_INDEX: where torch comes from; PyPI has the CUDA build.

FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
RUN ! command -v gcc && ! command -v cc

WORKDIR /checkout
RUN chown 1234:1234 .
COPY --chown=1234:1234 . .
USER 1234:1234
ENV TORCH="torch==2.13.0 --index-url ${TORCH_INDEX}"

RUN make demo
CMD ["make", "test"]
