# The proxy and its tools, simulated engines included; real engines run in their own images.
#
#   docker build -t pdproxy .
#   docker run --rm -p 127.0.0.1:8000:8000 pdproxy serve --prefill http://10.0.0.1:8200 --decode http://10.0.0.2:8300
#
# A proxy that makes token ids itself (`tokenize`) needs transformers, 220 MB more:
#
#   docker build --target tokenizer -t pdproxy:tokenizer .
#
# Without arguments the container runs `pdproxy serve`, which then needs a file: -v ./my.yaml:/etc/pdproxy.yaml:ro -e PDPROXY_CONFIG=/etc/pdproxy.yaml
# SIGTERM drains, up to 280 s with the default deadlines: docker stop --time 300.

# Python's minor version and Debian's release are fixed; the next build brings fixes of both.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml hatch_build.py requirements-build.lock requirements-image.lock README.md LICENSE ./
COPY proxy proxy
# The package has a link to it.
COPY configs/reference.yaml configs/
# Each file that is installed has a hash in a lock, also those of the builder, which pip would else fetch by itself. The wheel comes
# from a folder, not by its path, which pip would write down. Nobody runs the packages' own tests here.
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_DEPS=1 \
    && pip install --require-hashes -r requirements-build.lock \
    && pip wheel --no-build-isolation -w /tmp/wheel . \
    && python -m venv --without-pip /opt/pdproxy \
    && pip --python /opt/pdproxy/bin/python install --require-hashes -r requirements-image.lock \
    && pip --python /opt/pdproxy/bin/python install --no-index --find-links /tmp/wheel pdproxy \
    && find /opt/pdproxy -type d -name tests -prune -exec rm -r {} +

FROM build AS build-tokenizer
COPY requirements-image-tokenizer.lock ./
RUN --mount=type=cache,target=/root/.cache/pip \
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_DEPS=1 \
    && pip --python /opt/pdproxy/bin/python install --require-hashes -r requirements-image-tokenizer.lock \
    && find /opt/pdproxy -type d -name tests -prune -exec rm -r {} +

# What both images are.
FROM python:3.11-slim-bookworm AS runtime
# Nothing is installed in a container, and nobody becomes another user there. Python comes without bytecode, and a read-only file
# system keeps none: without the last line each command would compile what it imports, 0.15 s of CPU time.
RUN export PYTHONDONTWRITEBYTECODE=1 \
    && pip uninstall --yes --root-user-action=ignore setuptools wheel pip \
    && library=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))') \
    && rm -rf "$library/ensurepip" \
    && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
    && python -m compileall -q -x '/(idlelib|lib2to3|tkinter|turtledemo)/' "$library"
# In a container nobody reaches the loopback. This overrides listen.host of a file; --host overrides this.
ENV PATH=/opt/pdproxy/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PDPROXY_LISTEN__HOST=0.0.0.0
# A number, so that Kubernetes can check that it isn't root (runAsNonRoot). Nothing is written: a read-only file system works.
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# The first half asks without Python, in a hundredth of the time. It is sure of the place only where variables alone say it; all else,
# and each other answer than 200, `pdproxy health` judges: it reads the same variables and the same file (PDPROXY_CONFIG) as the proxy,
# so it knows port and TLS; options of `serve` it does not know. If clients need certificates, override it and add --cert and --key.
# Simulated engines have the same route: their port is 8000, or what PDPROXY_LISTEN__PORT says.
# Bash is named here, since Podman runs a health check without an exec form by sh, whatever the image's shell is.
HEALTHCHECK --interval=5s --timeout=3s --start-period=15s --retries=3 CMD ["/bin/bash", "-c", "\
    test -z \"$PDPROXY_CONFIG$PDPROXY_LISTEN__UDS${!PDPROXY_LISTEN__TLS*}\" \
    && { printf 'GET /health HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 \
        && read -r -t 1 _ status _ <&3 && test \"$status\" = 200; } 2>/dev/null 3<>\"/dev/tcp/127.0.0.1/${PDPROXY_LISTEN__PORT:-8000}\" \
    || exec pdproxy health --timeout 1.5"]
ENTRYPOINT ["pdproxy"]
CMD ["serve"]

FROM runtime AS tokenizer
COPY --from=build-tokenizer /opt/pdproxy /opt/pdproxy

# The last one is what a build without --target makes.
FROM runtime
COPY --from=build /opt/pdproxy /opt/pdproxy
