"""`python -m blockdiff VERB …` is `blockdiff VERB …`."""

import sys

from blockdiff.cli import main

sys.exit(main())
