"""One OpenAI server in front of vLLM engines with prefill and decode split apart."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        # Read when it is asked for: the search through the installed packages takes longer than all
        # else that some commands do.
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("pdproxy")
        except PackageNotFoundError:  # run from a source tree that was never installed
            return "0+source"
