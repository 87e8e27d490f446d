# mypy: ignore-errors
"""What the Python drivers share: one URL for each case, the texts, and a loop that runs all cases.

A driver runs in the environment of its client, with the server's URL as its argument.
"""

import asyncio
import importlib.metadata
import inspect
import sys
import traceback

MODEL = "tiny"
QUESTION = "When is the tide high at Oslo? Answer in one sentence, without any greeting."
SYSTEM = "You are the clerk of a harbour. Your answers are short, and they name their source."
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "tide_table", "description": "The tides of a city.", "parameters": CITY},
}
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQV"
    "R42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
IMAGE = f"data:image/png;base64,{PIXEL}"


def run(client, cases, package=None):
    """Call each case with its own base URL, without `/v1`; exit with 1 if one has failed."""
    version = importlib.metadata.version(package or client)
    failed = False
    for case in cases:
        try:
            name = case.__name__.replace("_", "-")
            result = case(f"{sys.argv[1]}/{client}@{version}/{name}")
            if inspect.isawaitable(result):
                asyncio.run(_wait(result))
        except Exception:
            failed = True
            print(f"{client}, {case.__name__}:", file=sys.stderr)
            traceback.print_exc(limit=-3)
    sys.exit(failed)


async def _wait(result):
    return await result
