"""`python -m reference_engine`."""

import os
import sys

# torch's OpenMP threads otherwise spin for milliseconds after each product, on the very cores that the ops'
# own threads (and everybody else's) wait for. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from reference_engine.cli import main

sys.exit(main())
