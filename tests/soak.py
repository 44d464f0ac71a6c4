"""Length of random series: `make test` runs short ones, `make soak` long ones with other seeds every time."""

from __future__ import annotations

import os

# Factor on the number of random examples and kills.
SOAK = int(os.environ.get("MIDFLIGHT_SOAK", "1"))
