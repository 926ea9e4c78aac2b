"""``python -m narrowcast`` is the command ``narrowcast``."""

import sys

from narrowcast.cli import main

sys.exit(main())
