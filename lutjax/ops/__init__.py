"""The ops: a file each, with what it computes, what it accepts, and the shapes it is tested and measured at."""
