"""Prints the flags of `vllm serve` and vLLM's variables, one per line, with the Python of an
engine's environment.

    .engines/venv/bin/python tests/reference/vllm_names.py > tests/reference/vllm_names.txt

The documents may name only these. Not part of the tests: these need no vLLM.
"""

import sys

import vllm
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.envs import environment_variables
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    actions = make_arg_parser(FlexibleArgumentParser())._actions
    flags = {name for action in actions for name in action.option_strings if name.startswith("--")}
    names = sorted(flags) + sorted(
        name for name in environment_variables if name.startswith("VLLM_")
    )
    sys.stdout.write(f"# vLLM {vllm.__version__}\n" + "".join(f"{name}\n" for name in names))
