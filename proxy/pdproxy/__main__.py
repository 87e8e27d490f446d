"""`python -m pdproxy`: the command line where no script directory is on the path."""

import sys

from pdproxy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
