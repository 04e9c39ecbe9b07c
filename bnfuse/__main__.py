"""`python -m bnfuse` is the command line too."""

import sys

from bnfuse.cli import main

sys.exit(main())
