"""Measuring the ops: device times beside the bytes that have to move. The command is ``lutjax bench``."""
