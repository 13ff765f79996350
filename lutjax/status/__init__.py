"""Support matrix: the state of every op, direction, implementation and dtype.

`matrix` defines the cells, `checks` runs, lowers and compiles kernels, `results` stores validation results of
devices, and `report` writes text, JSON and Markdown. The command is `lutjax status`.
"""
