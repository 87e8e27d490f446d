# The proxy and its tools, simulated engines included; real engines run in images of their own.
#
#   docker build -t pdproxy .
#   docker run --rm -p 127.0.0.1:8000:8000 pdproxy serve --prefill http://10.0.0.1:8200 --decode http://10.0.0.2:8300
#
# Without arguments it is `pdproxy serve`, which then needs a file: -v ./my.yaml:/etc/pdproxy.yaml:ro -e PDPROXY_CONFIG=/etc/pdproxy.yaml
# SIGTERM drains: give the container longer to stop than deadlines.drain (docker stop --time 70).

# Python's minor version and Debian's release are fixed; repairs of both arrive with the next build.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml requirements.lock README.md ./
COPY proxy proxy
# pip would be a quarter of the environment, so it stays outside. The lock holds the tests' packages, too: as constraints it pins
# those that the package itself asks for.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/pdproxy \
    && pip --python /opt/pdproxy/bin/python install --disable-pip-version-check --constraint requirements.lock .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/pdproxy /opt/pdproxy
# In a container the loopback reaches nobody. This is stronger than listen.host of a file, and weaker than --host.
ENV PATH=/opt/pdproxy/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PDPROXY_LISTEN__HOST=0.0.0.0
# A number, so that Kubernetes can see that it isn't root (runAsNonRoot). Nothing is written: a read-only file system will do.
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# The proxy and simulated engines have the same route. Their port is told by PDPROXY_LISTEN__PORT where it is not 8000: the proxy
# takes it from there, too. http.client, because urllib would ask a proxy that the environment names.
HEALTHCHECK --interval=5s --timeout=3s --start-period=15s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('localhost', int(os.environ.get('PDPROXY_LISTEN__PORT', '8000')), timeout=2); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["pdproxy"]
CMD ["serve"]
