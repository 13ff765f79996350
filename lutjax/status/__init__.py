"""Support matrix: validation state by op, direction, implementation and dtype.

`matrix` defines the cells, `checks` runs, lowers and compiles kernels, `results` stores device
validation results, and `report` writes text, JSON and Markdown. The command is `lutjax status`.
"""
