"""`python -m hf_dspark`: the same as `hf-dspark`, also for launchers such as `accelerate launch -m hf_dspark`."""

import sys

from .cli.main import PROGRAM, main

if __name__ == "__main__":
    sys.argv[0] = PROGRAM  # what provenance notes
    sys.exit(main())
