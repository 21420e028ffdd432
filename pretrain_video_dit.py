"""Pretrains a video diffusion transformer; see README.md and `--help`."""

import sys

from megatron_dsv.training.main import main

if __name__ == "__main__":
    main(sys.argv[1:])
