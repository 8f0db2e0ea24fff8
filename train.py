"""`python train.py key=value …` is `blockdiff train key=value …`."""

import sys

from blockdiff.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
