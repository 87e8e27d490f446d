"""One OpenAI server in front of vLLM engines with prefill and decode split apart."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("pdproxy")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"
