# The trainbox image (docs/guides/image.md). `make build` sets REVISION, VERSION and CREATED.
# Needs BuildKit 0.13 (Docker 26): mounts, here-documents, ${name%pattern}.

# The -base image is enough, because the wheels contain CUDA. With 13.0, NVIDIA_REQUIRE_CUDA accepts
# the most drivers. Debian 12 works as well.
ARG BASE_IMAGE=nvidia/cuda:13.0.3-base-ubuntu24.04@sha256:7c7413a56200486f71f181cad9310f6fd31b6bb21816ade15fc9c1e1e927a5c1

# uv installs the lock in seconds, pip in minutes. The final image does not contain uv.
FROM ${BASE_IMAGE} AS uv
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements-dev.lock /tmp/
RUN awk '/^[^ #]/ { keep = /^uv==/ } keep' /tmp/requirements-dev.lock > /tmp/uv.lock \
    && python3 -P -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-cache-dir --require-hashes -r /tmp/uv.lock

# REQUIREMENTS=my.txt adds packages: their hashes are in my.lock. A build context with the name
# `requirements` replaces the empty stage. A pattern may match no file.
FROM scratch AS requirements
FROM scratch AS extra
ARG REQUIREMENTS
ARG NAME=${REQUIREMENTS##*/}
COPY --from=requirements ${NAME:-none}* ${NAME%.*}.loc[k] /

FROM ${BASE_IMAGE}
# The default user has a name, which some programs look up. tini is a subreaper (-s) for containers
# in which it is not process 1, such as with --pid=host.
# No program needs another user's rights, so none has a setuid or setgid bit. Some bases let apt
# keep the packages that it has downloaded. Without libibverbs1 and ibverbs-providers, NCCL uses TCP
# between nodes with InfiniBand, without a message.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates ibverbs-providers libibverbs1 python3 tini \
    && apt-get clean && rm -rf /var/lib/apt/lists/* \
    && find / -xdev -type f -perm /6000 -exec chmod ug-s {} + \
    && { getent passwd 1000 || echo trainbox:x:1000:0::/tmp:/usr/sbin/nologin >> /etc/passwd; }

# --compile needs triton on a GPU, a C++ compiler, and the headers of Python: COMPILE=1 adds them.
# See docs/decisions/0021-triton-is-an-option-of-the-image.md.
ARG COMPILE=0
RUN case "$COMPILE" in \
    0 | '') ;; \
    1) apt-get update \
        && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
            g++ python3-dev \
        && apt-get clean && rm -rf /var/lib/apt/lists/* \
        && find / -xdev -type f -perm /6000 -exec chmod ug-s {} + ;; \
    *) echo "COMPILE=$COMPILE is not a choice: set it to 1 or 0" >&2; exit 2 ;; \
    esac

# The locked packages are 99.9 % of the image and are rebuilt only with requirements.lock. The lock
# is complete, so --no-deps only leaves out triton. The .pth file adds the source.
RUN --mount=type=bind,from=uv,source=/opt/uv/bin/uv,target=/mnt/uv \
    --mount=type=bind,source=requirements.lock,target=/mnt/requirements.lock \
    --mount=type=bind,source=deploy/image,target=/mnt/image \
    awk -v compile="$COMPILE" '/^[^ #]/ { keep = compile || !/^triton==/ } keep' \
        /mnt/requirements.lock > /tmp/requirements.lock \
    && /mnt/uv venv --quiet --python /usr/bin/python3 /opt/venv \
    && /mnt/uv pip install --quiet --no-cache --python /opt/venv --compile-bytecode \
        --require-hashes --no-deps -r /tmp/requirements.lock \
    && rm /tmp/requirements.lock \
    && for site in /opt/venv/lib/python3.*/site-packages; do \
        sh /mnt/image/remove-unneeded.sh "$site" \
        && echo /opt/trainbox > "$site/trainbox.pth" || exit 1; \
    done

# See docs/decisions/0024-extra-packages-keep-the-lock.md.
ARG REQUIREMENTS
RUN --mount=type=bind,from=uv,source=/opt/uv/bin/uv,target=/mnt/uv \
    --mount=type=bind,from=extra,target=/mnt/extra \
    --mount=type=bind,source=requirements.lock,target=/mnt/requirements.lock \
    --mount=type=bind,source=deploy/extra/requirements.py,target=/mnt/requirements.py \
    [ -z "$REQUIREMENTS" ] || env --chdir /mnt/extra UV_NO_CACHE=1 \
        python3 -P /mnt/requirements.py install \
        --locked /mnt/requirements.lock --uv /mnt/uv --into /opt/venv -- "${REQUIREMENTS##*/}"

# uv leaves lock files that all users may write.
RUN printf '%s\n' '#!/opt/venv/bin/python' 'import sys' \
        'from trainbox_start import main' 'sys.exit(main())' > /opt/venv/bin/trainbox \
    && chmod 755 /opt/venv/bin/trainbox \
    && rm -rf /opt/venv/.lock /root/.cache

# The image must work with any --user, so all users can write to these folders. A new named volume
# copies their modes.
RUN mkdir -p /workspace/runs /workspace/data \
    && chmod 1777 /workspace /workspace/runs /workspace/data
WORKDIR /workspace

# The root may be read-only, and the user may have no passwd entry. HOME and all caches are
# therefore in /tmp, and getpass gets a name. Each cache is set by itself, because some launchers
# (Apptainer, Slurm) set HOME to the caller's.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp USER=trainbox LOGNAME=trainbox \
    XDG_CACHE_HOME=/tmp/cache \
    TORCH_HOME=/tmp/cache/torch \
    TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor \
    TRITON_CACHE_DIR=/tmp/cache/triton \
    CUDA_CACHE_PATH=/tmp/cache/cuda \
    MPLCONFIGDIR=/tmp/cache/matplotlib \
    TRAINBOX_HEARTBEAT=/tmp/trainbox-heartbeat \
    TRAINBOX_BUILD_INFO=/opt/trainbox/build-info.json

COPY entrypoint /opt/trainbox/entrypoint
COPY trainbox /opt/trainbox/trainbox
COPY trainbox_start.py /opt/trainbox/
COPY trainer /opt/trainbox/trainer

ARG BASE_IMAGE
ARG BASE_NAME=${BASE_IMAGE%@*}
ARG BASE_DIGEST=${BASE_IMAGE#${BASE_NAME}}
ARG REVISION=unknown
ARG VERSION=0+unknown
ARG CREATED=1970-01-01T00:00:00Z
# `trainbox --version` reads the metadata. chmod is needed if the checkout was created under a
# strict umask.
RUN --mount=type=bind,source=requirements.lock,target=/mnt/requirements.lock \
    lock=$(sha256sum < /mnt/requirements.lock) \
    && printf '{"revision": "%s", "version": "%s", "lock_sha256": "%s"}\n' \
        "$REVISION" "$VERSION" "${lock%% *}" > "$TRAINBOX_BUILD_INFO" \
    && metadata="/opt/trainbox/trainbox-$VERSION.dist-info" \
    && mkdir "$metadata" \
    && printf 'Metadata-Version: 2.4\nName: trainbox\nVersion: %s\n' "$VERSION" \
        > "$metadata/METADATA" \
    && chmod -R a+rX /opt/trainbox \
    && python -P -m compileall -q /opt/trainbox
LABEL org.opencontainers.image.title="trainbox" \
    org.opencontainers.image.description="Trains PyTorch models, and can prove what it did" \
    org.opencontainers.image.authors="The Trainbox developers" \
    org.opencontainers.image.vendor="The Trainbox developers" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.source="https://github.com/trainbox/trainbox" \
    org.opencontainers.image.url="https://github.com/trainbox/trainbox" \
    org.opencontainers.image.documentation="https://github.com/trainbox/trainbox/tree/main/docs" \
    org.opencontainers.image.created="${CREATED}" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="${BASE_NAME}" \
    org.opencontainers.image.base.digest="${BASE_DIGEST#@}"

# The container is unhealthy if a training has not touched its file for five minutes. Without a
# file, it is healthy.
HEALTHCHECK --interval=30s --timeout=5s \
    CMD ["sh", "-c", \
        "test ! -e \"$TRAINBOX_HEARTBEAT\" || test -n \"$(find \"$TRAINBOX_HEARTBEAT\" -mmin -5)\""]

USER 1000:0
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "-s", "--", "trainbox"]
CMD ["--help"]
