"""Files that are whole or not there, and texts that anybody may have written: read within bounds, and shown in one line."""
