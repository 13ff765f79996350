"""Training with a growing edge list, killed and resumed: the final bits match.

As a program, ``test_training_edges.py FOLDER KILL_AT`` trains or resumes, and kills itself by SIGKILL after KILL_AT steps.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
