# syntax=docker/dockerfile:1
#
#   docker build --target cpu -t p2q:cpu .      the whole tool on a CPU
#   docker build --target gpu -t p2q:gpu .      serving on NVIDIA GPUs
#
#   docker run --rm p2q:cpu demo --out /tmp/demo
#   docker run --rm --gpus all -p 8000:8000 -v /models:/models:ro p2q:gpu serve /models/converted --host 0.0.0.0

ARG PYTHON_VERSION=3.11
ARG VLLM_VERSION=0.24.0

FROM python:${PYTHON_VERSION}-slim AS wheel
WORKDIR /src
RUN pip install --no-cache-dir build
COPY . .
RUN python -m build --wheel --outdir /dist

FROM python:${PYTHON_VERSION}-slim AS cpu
# vLLM compiles small C++ helpers at start and looks for NUMA nodes and a fast allocator.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*
# An index with CPU builds of torch keeps the image small: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
COPY requirements/cpu.txt requirements/nodeps.txt /tmp/requirements/
RUN pip install --no-cache-dir -r /tmp/requirements/cpu.txt \
    && pip install --no-cache-dir --no-deps -r /tmp/requirements/nodeps.txt
COPY --from=wheel /dist/*.whl /tmp/
RUN pip install --no-cache-dir --no-deps /tmp/*.whl && useradd --create-home p2q
USER p2q
WORKDIR /home/p2q
ENTRYPOINT ["p2q"]
CMD ["--help"]

FROM vllm/vllm-openai:v${VLLM_VERSION} AS gpu
COPY --from=wheel /dist/*.whl /tmp/
# vLLM and torch of the image stay as they are: p2q's bounds are met by them.
RUN python3 -m pip install --no-cache-dir "vllm==$(python3 -c 'import importlib.metadata as m; print(m.version("vllm"))')" /tmp/*.whl
EXPOSE 8000
ENTRYPOINT ["p2q"]
CMD ["--help"]
