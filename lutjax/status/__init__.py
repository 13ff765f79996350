"""State of every op, direction, implementation and dtype, from checks and not from what is registered.

`lutjax status` shows it. Modules: `_matrix` has the cells and decides what each says, `_checks` runs, lowers and compiles one,
`_records` keeps what was checked on other machines, `_report` writes text, JSON and Markdown.
"""
