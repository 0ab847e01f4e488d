"""`python -m pretraining.supervise -- COMMAND`."""

import sys

from pretraining.errors import one_line_errors
from pretraining.supervise.supervisor import main

if __name__ == "__main__":
    with one_line_errors():
        code = main()
    sys.exit(code)
