"""`python -m hf_dspark`: the same as `hf-dspark`, for launchers such as `torchrun -m hf_dspark train ...`."""

import sys

from hf_dspark_cli import PROGRAM, main

if __name__ == "__main__":
    sys.argv[0] = PROGRAM  # what provenance notes
    sys.exit(main())
