# The proxy alone; engines run in images of their own.  docker build -t pdproxy .
#   docker run --rm -p 8000:8000 pdproxy --prefill http://10.0.0.1:8200 --decode http://10.0.0.2:8300
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml requirements.lock README.md CHANGELOG.md ./
COPY proxy proxy
# The lock holds the tests' packages, too: as constraints it pins what the package itself asks for.
RUN python -m venv /opt/pdproxy \
    && /opt/pdproxy/bin/pip install --no-cache-dir --constraint requirements.lock .

FROM python:3.11-slim
COPY --from=build /opt/pdproxy /opt/pdproxy
RUN useradd --system --no-create-home pdproxy
USER pdproxy
EXPOSE 8000
# SIGTERM drains: give the container longer than deadlines.drain to stop (docker stop --time 90).
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s \
    CMD ["/opt/pdproxy/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["/opt/pdproxy/bin/pdproxy", "serve", "--host", "0.0.0.0"]
