"""The command line: one verb per job, one file per verb.

Exit status: 0 good, 1 the thing checked is not, 2 unusable input, 3 the run failed. What a user
can mend is told in one line on standard error, without a traceback.
"""

from stretto.cli.main import main

__all__ = ["main"]
